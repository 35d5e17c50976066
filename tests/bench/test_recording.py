"""Recorded gradients: what is written comes back, bad files are explained, and recipes are measured on them."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.bench.fidelity import Fidelity
from thinwire.bench.recording import Recording, RecordingWriter, record
from thinwire.bench.workloads import Workload
from thinwire.catalogue import catalogue
from thinwire.errors import ThinwireError
from thinwire.recipes import parse_recipe

SHAPES = {"layer.weight": (160, 150), "layer.bias": (5,)}
STEPS = (3, 4, 5)


class Line(Workload):
    """Fits a line to noise; every rank has noise of its own."""

    learning_rates = {"adamw": 0.1}  # noqa: RUF012

    def __init__(self, rank: int):
        self.rank, self.generator = rank, torch.Generator()

    def model(self, seed: int) -> nn.Module:
        model = nn.Linear(3, 2)
        for param in model.parameters():
            nn.init.constant_(param, seed / 10)
        return model

    def start(self, seed: int) -> None:
        self.generator.manual_seed(seed + self.rank)

    def loss(self, model: nn.Module) -> torch.Tensor:
        return model(torch.randn(4, 3, generator=self.generator)).square().mean()

    def evaluate(self, model: nn.Module) -> None:
        return None

    def facts(self) -> dict[str, object]:
        return {"model": "a line"}


def gradients(step: int, name: str, num_ranks: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    common = torch.randn(SHAPES[name], generator=generator)
    return common + torch.randn(num_ranks, *SHAPES[name], generator=generator)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    path = tmp_path / "some.npz"
    with RecordingWriter(path, steps=STEPS, num_ranks=3, shapes=SHAPES, conditions={"model": "noise"}) as writer:
        for step in STEPS:
            for name in SHAPES:
                writer.write(step, name, gradients(step, name))
    return Recording(path)


def test_what_is_written_comes_back(recording: Recording) -> None:
    assert (recording.steps, recording.num_ranks, recording.shapes) == ([3, 4, 5], 3, SHAPES)
    assert recording.conditions == {"model": "noise"}
    for step in STEPS:
        for name in SHAPES:
            assert torch.equal(recording.read(step, name), gradients(step, name))


def test_recorded_gradients_are_those_of_data_parallel_training(tmp_path: Path) -> None:
    path, losses = tmp_path / "line.npz", []
    workloads = [Line(rank) for rank in range(2)]
    record(path, workloads, steps=(1, 3), seed=5, on_step=lambda step, loss: losses.append((step, loss)))
    recording = Recording(path)
    assert recording.conditions == {"model": "a line", "seed": 5}
    assert [step for step, _ in losses] == [1, 2, 3]

    # The same training by hand: step 3 sees the model after two updates with the mean over ranks.
    ranks = [Line(rank) for rank in range(2)]
    model = ranks[0].model(5)
    optimizer = ranks[0].optimizer(model.parameters())
    assert optimizer is not None
    for rank in ranks:
        rank.start(5)
    for step in (1, 2, 3):
        own = [torch.autograd.grad(rank.loss(model), list(model.parameters())) for rank in ranks]
        if step in recording.steps:
            for i, name in enumerate(recording.shapes):
                assert torch.allclose(recording.read(step, name), torch.stack([grads[i] for grads in own]))
        for param, *grads in zip(model.parameters(), *own, strict=True):
            param.grad = torch.stack(grads).mean(dim=0)
        optimizer.step()
    assert not path.with_name("line.npz.part").exists()


def test_an_interrupted_recording_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "half.npz"
    with (
        pytest.raises(KeyboardInterrupt),
        RecordingWriter(path, steps=(1,), num_ranks=1, shapes={"a": (2,)}, conditions={}),
    ):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused(tmp_path: Path) -> None:
    missing, text, other = (tmp_path / name for name in ("missing.npz", "text.npz", "other.npz"))
    text.write_text("hello")
    np.savez(other, a=np.zeros(3))
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, meta=np.array([{"schema": 1}], dtype=object))
    newer = tmp_path / "newer.npz"
    np.savez(newer, meta=np.frombuffer(b'{"schema": 2}', dtype=np.uint8))
    for path in (missing, text, other, pickled, newer):
        with pytest.raises(ThinwireError, match=r"expected a recording|no such file"):
            Recording(path)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 5), dtype=np.float64), "float64"),
        (np.zeros((3, 4), dtype=np.float32), r"\(3, 4\)"),
        (np.full((3, 5), np.inf, dtype=np.float32), "not finite"),
        (None, "layer.bias"),
    ],
)
def test_bad_gradients_are_refused(tmp_path: Path, array, said: str) -> None:
    path = tmp_path / "bad.npz"
    with RecordingWriter(path, steps=STEPS, num_ranks=3, shapes=SHAPES, conditions={}) as writer:
        if array is not None:
            writer._put("3/layer.bias", array)
    with pytest.raises(ThinwireError, match=said):
        Recording(path).read(3, "layer.bias")


def test_a_cut_file_is_refused(tmp_path: Path, recording: Recording) -> None:
    whole = (tmp_path / "some.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole[: len(whole) // 2])
    assert not zipfile.is_zipfile(cut)
    with pytest.raises(ThinwireError, match="expected a recording"):
        Recording(cut)


# --- what recipes make of them --------------------------------------------------------------------------------------


def test_small_and_flat_parameters_are_left_out(recording: Recording) -> None:
    fidelity = Fidelity(recording)
    assert list(fidelity.shapes) == ["layer.weight"]
    assert fidelity.numel == 160 * 150


def test_exact_recipes_have_no_error(recording: Recording) -> None:
    fidelity = Fidelity(recording)
    dense, identity = (fidelity.measure(parse_recipe(recipe)) for recipe in ("dense", "identity"))
    assert dense["encode_error"] is None
    assert identity["encode_error"] == 0
    for row in (dense, identity):
        assert row["bits_per_element"] == 32
        assert row["mean_error"] < 1e-12
        assert row["sum_error"] < 1e-12
        assert row["cosine"] == pytest.approx(1)


@pytest.mark.parametrize(
    "recipe", [*(entry.recipe for entry in catalogue() if entry.aggregators), "topk:0.1@dgc", "int4@ef21"]
)
def test_every_recipe_can_be_replayed(recording: Recording, recipe: str) -> None:
    aggregator = parse_recipe(recipe)
    row = Fidelity(recording).measure(aggregator)
    assert row["recipe"] == recipe
    assert row["feedback"] == (aggregator.feedback is not None)
    assert 0 < row["bits_per_element"] <= 32
    assert row["mean_error"] >= 0
    assert -1 <= row["cosine"] <= 1 + 1e-6


def test_errors_are_what_they_say(recording: Recording) -> None:
    """Top-k of one rank by hand: it drops all but the largest, and feedback owes what was dropped."""
    row = Fidelity(recording).measure(parse_recipe("topk:0.1:fp32"))
    errors = []
    for step in STEPS:
        for x in gradients(step, "layer.weight").view(3, -1):
            kept = x.abs().topk(int(0.1 * x.numel())).values.square().sum()
            errors.append(1 - float(kept / x.square().sum()))
    assert row["encode_error"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert row["encode_s"] > 0
    assert row["decode_s"] > 0


def test_feedback_brings_the_sum_nearer(recording: Recording) -> None:
    row = Fidelity(recording).measure(parse_recipe("int3"))
    assert row["feedback"]
    assert row["sum_error"] < row["mean_error"] / 2
