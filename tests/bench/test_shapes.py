"""Shape tables against the known parameter counts, and the arithmetic that rests on them."""

import pytest

from thinwire.bench.arithmetic import dense_nbytes, ideal_step_s, with_headers
from thinwire.shapes import model_layers, num_parameters

COUNTS = {
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameter_count_is_the_published_one(name: str, count: int):
    assert num_parameters(model_layers(name)) == count


@pytest.mark.parametrize("name", COUNTS)
def test_scale_divides_matrices_by_its_square(name: str):
    whole, half = model_layers(name), model_layers(name, 2)
    assert [layer.name for layer in half] == [layer.name for layer in whole]
    inner = len(whole) // 2
    while len(whole[inner].parameters[0][1]) < 2:
        inner += 1
    # A layer with widths on both sides; its bias is the only part that halves once.
    ratio = whole[inner].flops / half[inner].flops
    assert ratio == 4


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_names_are_unique(name: str):
    names = [parameter for layer in model_layers(name) for parameter, _ in layer.parameters]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("name", "scale"), [("resnet50", 3), ("bert-base", 1000), ("vgg16", 0), ("alexnet", 1)])
def test_a_scale_or_name_that_does_not_fit_is_refused(name: str, scale: int):
    with pytest.raises(ValueError, match=rf"{scale}|{name}"):
        model_layers(name, scale)


def test_dense_all_reduce_sends_twice_all_but_one_share():
    assert dense_nbytes(1000, 2) == 4000
    assert dense_nbytes(1000, 4) == 6000


@pytest.mark.parametrize(("sent_nbytes", "step_s"), [(0, 4.0), (30, 4.5), (300, 31.5)])
def test_ideal_step_is_bound_by_cores_or_by_wire(sent_nbytes: int, step_s: float):
    ideal = ideal_step_s(
        forward_s=1, backward_s=2, optimizer_s=0.5, codec_s=0.5, sent_nbytes=sent_nbytes, rate_nbytes_per_s=10
    )
    assert ideal == step_s


def test_headers_cost_a_few_percent():
    assert 1.04 < with_headers(1e6, 1e6) / 1e6 < 1.08
