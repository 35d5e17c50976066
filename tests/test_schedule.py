"""Schedules and ramps: the recipe at every boundary, and texts that say them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import BlockQuant, Dense, MomentumCorrection, Ramp, Schedule, TopK, TwoShot, parse_recipe
from thinwire.errors import RecipeError
from thinwire.schedule import parse_schedule


def densities(schedule: Schedule) -> list[tuple[int, float]]:
    return [(start, phase.up.density) for start, phase in schedule.phases]


def test_the_papers_ramp() -> None:
    """Sparsities of 75, 93.75, 98.4 and 99.6 %, then 99.9 %."""
    found = densities(Schedule([(0, Ramp(recipe="topk:0.001@dgc", steps=400))]))
    assert [start for start, _ in found] == [0, 100, 200, 300, 400]
    paper = [0.25, 0.0625, 0.016, 0.004, 0.001]
    assert [density for _, density in found] == pytest.approx(paper, rel=0.02)
    assert found[-1][1] == 0.001  # exactly


@given(start=st.integers(0, 1000), stages=st.integers(1, 9), more=st.integers(0, 100), density=st.floats(1e-6, 0.5))
def test_a_ramp_counts_from_its_first_step_and_ends_on_its_recipe(
    start: int, stages: int, more: int, density: float
) -> None:
    recipe = TwoShot(up=TopK(density=density), down=TopK(density=density), feedback=MomentumCorrection())
    phases = Ramp(recipe=recipe, steps=stages + more, stages=stages).phases(start)
    starts, found = [at for at, _ in phases], [phase.up.density for _, phase in phases]
    assert starts[0] == start
    assert starts[-1] == start + stages + more
    assert len(set(starts)) == len(phases) == stages + 1
    assert phases[-1][1] == recipe
    assert found == sorted(found, reverse=True)


def test_both_ways_ramp_and_what_has_no_density_stays() -> None:
    first = Ramp(recipe="topk:0.01+randomk:0.0001", steps=1, stages=1).phases(0)[0][1]
    assert first.up.density == pytest.approx(0.1)
    assert first.down.density == pytest.approx(0.01)
    first = Ramp(recipe="topk:0.01+int8", steps=1, stages=1).phases(0)[0][1]
    assert first.down == BlockQuant(bits=8)
    assert Ramp(recipe="gather/topk:0.01", steps=1, stages=1).phases(0)[0][1].up.density == pytest.approx(0.1)
    first = Ramp(recipe="topk:0.01~int8+topk:k=9~int8", steps=1, stages=1).phases(0)[0][1]
    assert (first.up.first.density, first.up.then) == (pytest.approx(0.1), BlockQuant(bits=8))
    assert first.down == parse_recipe("topk:k=9~int8").up


@pytest.mark.parametrize(
    ("recipe", "stages", "bits"),
    [("int4", 4, [8, 7, 6, 5, 4]), ("linear:2:block=64", 3, [8, 6, 4, 2]), ("scaled:natural:6", 4, [8, 8, 7, 7, 6])],
)
def test_bits_ramp(recipe: str, stages: int, bits: list[int]) -> None:
    phases = [phase for _, phase in Ramp(recipe=recipe, steps=20, stages=stages).phases(0)]
    assert [getattr(phase.up, "inner", phase.up).bits for phase in phases] == bits
    assert phases[-1] == parse_recipe(recipe)
    assert {phase.feedback for phase in phases} == {phases[-1].feedback}
    assert all(phase.up == phase.down for phase in phases)


@pytest.mark.parametrize("recipe", ["int8", "dense", "topk:k=5", "topk:k=5~int8", "gather/onebit"])
def test_a_ramp_needs_something_to_lower(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"Ramp: expected a recipe with a density.*got"):
        Ramp(recipe=recipe, steps=10)


@pytest.mark.parametrize(("steps", "stages"), [(3, 4), (0, 1), (10, 0)])
def test_a_ramp_of_no_length(steps: int, stages: int) -> None:
    with pytest.raises(RecipeError, match="1 <= stages <= steps"):
        Ramp(recipe="topk:0.01", steps=steps, stages=stages)


def test_a_short_ramp_is_told_what_to_write() -> None:
    with pytest.raises(RecipeError, match="write 'ramp 4' or more"):
        parse_schedule("dense until 5 then topk:0.01 ramp 3")


def test_the_recipe_at_every_boundary() -> None:
    schedule = parse_schedule("dense until 2 then int8 until 5 then int4")
    assert schedule == Schedule([(0, "dense"), (2, "int8"), (5, parse_recipe("int4"))])
    assert [schedule.at(step).recipe() for step in range(7)] == ["dense"] * 2 + ["int8"] * 3 + ["int4"] * 2
    assert schedule.at(10**9) == parse_recipe("int4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", [(0, "int8")]),
        (" topk:0.01@ef21\n", [(0, "topk:0.01@ef21")]),
        ("dense  until 500   then topk:0.01", [(0, "dense"), (500, "topk:0.01")]),
        ("topk:0.5 ramp 8", [(0, Ramp(recipe="topk:0.5", steps=8))]),
        (
            "dense until 10 then topk:0.5@dgc ramp 8 until 20 then int4@dgc",
            [(0, "dense"), (10, Ramp(recipe="topk:0.5@dgc", steps=8)), (20, "int4@dgc")],
        ),
    ],
)
def test_texts(text: str, expected) -> None:
    assert parse_schedule(text) == Schedule(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "recipe 'int9': expected a kind of compressor"),
        ("", "recipe '': expected a kind of compressor"),
        ("dense until 5", "expected 'RECIPE until STEP then RECIPE'.*got 'dense until 5'"),
        ("dense then int8", "got 'dense'"),
        ("dense until 5 int8", "got 'dense until 5 int8'"),
        ("dense until x then int8", "got 'dense until x'"),
        ("dense until -5 then int8", "got 'dense until -5'"),
        ("dense until 5 then int9", "recipe 'int9'"),
        ("dense until 0 then int8", "ascend from 0, got 0, 0"),
        ("dense until 9 then int8 until 5 then int4", "ascend from 0, got 0, 9, 5"),
        ("int8 ramp 9", "fewer than 8 bits"),
        ("topk:0.1 ramp 9 until 5 then int4", r"ascend from 0, got 0 \(ramp of 9\), 5"),
    ],
)
def test_bad_texts_say_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_schedule(text)


def test_a_schedule_of_nothing_or_from_later_on() -> None:
    with pytest.raises(RecipeError, match="at least one phase"):
        Schedule([])
    with pytest.raises(RecipeError, match="ascend from 0"):
        Schedule([(3, "int8")])


@given(st.text("abcdefghilnoprtuy0123456789.:@ ", max_size=30))
def test_any_text_is_a_schedule_or_a_recipe_error(text: str) -> None:
    try:
        found = parse_schedule(text)
    except RecipeError:
        return
    assert found.phases[0][0] == 0


def test_phases_may_be_all_that_attach_takes() -> None:
    schedule = Schedule([(0, Dense()), (2, {"*": "int8"}), (3, lambda info: None)])
    assert schedule.at(1) == Dense()
    assert schedule.at(2).resolve("x") == TwoShot(up=BlockQuant(bits=8), down=BlockQuant(bits=8))
    assert callable(schedule.at(3))
