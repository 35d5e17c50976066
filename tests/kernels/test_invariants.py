"""What both kinds of kernels promise, whatever their bytes."""

import importlib
from types import ModuleType

import pytest
import torch
from cases import KINDS, LENGTHS, VALUES, Kind, round_trip

from thinwire.errors import WireError
from thinwire.kernels import reference
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.random import Key
from thinwire.wire import align


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "native":
        return request.getfixturevalue("native")
    return importlib.import_module("thinwire.kernels.reference")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_the_residual_is_what_was_not_sent(kernels: ModuleType, kind: Kind) -> None:
    for n in LENGTHS:
        if n <= 4096:
            x, residual = torch.randn(n), torch.randn(n)
            q = x + residual * 0.5
            encoded = round_trip(kernels, kind, x, residual, scale=0.5)
            assert encoded.finite
            assert encoded.residual is not None
            assert torch.equal(encoded.residual, q - encoded.replaced)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_zeros_decode_to_zeros(kernels: ModuleType, kind: Kind) -> None:
    encoded = round_trip(kernels, kind, torch.zeros(600), torch.zeros(600))
    assert not encoded.replaced.any()
    assert encoded.residual is not None
    assert not encoded.residual.any()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_padding_is_zero(kernels: ModuleType, kind: Kind) -> None:
    for n in (1, 2, 3, 5, 9, 513):
        encoded = round_trip(kernels, kind, torch.randn(n), None)
        assert not encoded.out[kind.nbytes(n) :].any()


@pytest.mark.parametrize("bits_per_code", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("values", ["normal", "heavy_tailed", "denormal", "huge", "largest", "mixed_scale"])
def test_block_quant_is_within_half_a_step_or_one(kernels: ModuleType, bits_per_code: int, values: str) -> None:
    for kind in KINDS:
        if kind.name == "block_quant" and kind.settings["bits"] == bits_per_code and kind.settings["block"] == 512:
            x = VALUES[values](1500)
            encoded = round_trip(kernels, kind, x, None)
            scale = encoded.out[:12].view(torch.float32).repeat_interleave(512)[:1500].double()
            error = (encoded.replaced.double() - x.double()).abs()
            step = 1.0 if kind.settings["stochastic"] else 0.5
            assert bool((error <= scale * step * (1 + 1e-5)).all())


def test_stochastic_rounding_is_unbiased(kernels: ModuleType) -> None:
    # 64 values a quarter of a step above a code, drawn 400 times: the mean's standard error is 0.0027 of a step.
    x = torch.cat([torch.tensor([127.0]), torch.full((64,), 20.25)])
    total = torch.zeros(65, dtype=torch.float64)
    for step in range(400):
        out, decoded = torch.zeros(align(4 + 65), dtype=torch.uint8), torch.zeros(65)
        kernels.encode_block_quant([EncodeJob(x, out, key=Key(3, step))], bits=8, block=512, stochastic=True)
        kernels.decode_block_quant([DecodeJob(out, decoded)], bits=8, block=512)
        total += decoded
    assert abs(float(total[1:].mean()) / 400 - 20.25) < 0.014


def test_top_k_takes_the_lowest_index_of_equals(kernels: ModuleType) -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0, 2.0, 3.0])
    out, decoded = torch.zeros(18 + 2, dtype=torch.uint8), torch.zeros(7)
    kernels.encode_top_k([EncodeJob(x, out)], k=[3], dtype=torch.float32)
    kernels.decode_top_k([DecodeJob(out, decoded)], k=[3], dtype=torch.float32)
    assert decoded.tolist() == [0.0, -2.0, 2.0, 0.0, 0.0, 0.0, 3.0]


def test_one_bit_of_zeros_is_positive(kernels: ModuleType) -> None:
    kind = next(kind for kind in KINDS if kind.label == "one_bit-l1")
    encoded = round_trip(kernels, kind, torch.tensor([0.0, -0.0, -1.0, 3.0]), None)
    assert encoded.replaced.tolist() == [1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    "indices",
    [[5, 4, 6], [4, 4, 6], [1, 2, 100], [1, 2, 65535], [100, 5, 6], [65535, 0, 1], [1, 40000, 2]],
)
def test_corrupt_indices_raise_and_write_nothing(kernels: ModuleType, indices: list[int]) -> None:
    values = torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8)
    data = torch.cat([values, torch.tensor(indices).to(torch.int16).view(torch.uint8), values[:2]])
    for alpha in (None, 0.5):
        out = torch.full((100,), 7.0)
        with pytest.raises(WireError, match="ascending indices below 100"):
            kernels.decode_top_k([DecodeJob(data, out, alpha)], k=[3], dtype=torch.float32)
        assert bool((out == 7.0).all())


def test_the_reference_sums_in_its_tree() -> None:
    """Spelt out once more, one addition at a time."""
    x = torch.randn(2500, dtype=torch.float64).mul(torch.exp(torch.randn(2500, dtype=torch.float64) * 10)).tolist()

    def level(values: list[float]) -> float:
        chunk = values + [0.0] * (1024 - len(values))
        for half in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            chunk = [chunk[i] + chunk[i + half] for i in range(half)]
        return chunk[0]

    want = level([level(x[:1024]), level(x[1024:2048]), level(x[2048:])])
    assert float(reference.tree_sum(torch.tensor(x, dtype=torch.float64))) == want
