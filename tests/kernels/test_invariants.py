"""What both kinds of kernels promise, whatever their bytes."""

import importlib
from types import ModuleType

import pytest
import torch
from cases import KINDS, LENGTHS, VALUES, Kind, round_trip

from thinwire.errors import WireError
from thinwire.kernels import reference
from thinwire.kernels.float_formats import FORMATS, FloatFormat
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.top_k_layout import payload_nbytes, top_k_layout
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
    if kind.name == "sign":
        pytest.skip("they decode to ones")
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
        same = kind.name == "block_quant" and "rotation" not in kind.settings
        if same and kind.settings["bits"] == bits_per_code and kind.settings["block"] == 512:
            x = VALUES[values](1500)
            encoded = round_trip(kernels, kind, x, None)
            scale = encoded.out[:12].view(torch.float32).repeat_interleave(512)[:1500].double()
            error = (encoded.replaced.double() - x.double()).abs()
            step = 1.0 if kind.settings["stochastic"] else 0.5
            assert bool((error <= scale * step * (1 + 1e-5)).all())


def _block_cast(kernels: ModuleType, x: torch.Tensor, format: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, of 8 bits, and the values, of one block."""
    out, decoded = torch.zeros(align(4 + x.numel()), dtype=torch.uint8), torch.zeros(x.numel())
    assert kernels.encode_block_cast([EncodeJob(x, out)], format=format, block=x.numel()) == [True]
    kernels.decode_block_cast([DecodeJob(out, decoded)], format=format, block=x.numel())
    return out[4 : 4 + x.numel()], decoded


def _levels_and_boundaries(format: FloatFormat) -> torch.Tensor:
    levels = torch.tensor(FORMATS[format].levels())
    middles = (levels[1:] + levels[:-1]) / 2
    up, down = torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)
    x = torch.cat([levels, middles, up, down, torch.tensor([2.0**-149, 2.0**-100])])
    return torch.cat([x, -x])


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_rounds_as_torch_does(kernels: ModuleType, format: FloatFormat) -> None:
    """On every level, half-way between any two, beside that, and anywhere: the largest number makes the scale 1."""
    to = FORMATS[format]
    spread = torch.randn(20_000) * torch.exp2(torch.randint(-20, 16, (20_000,)).float())
    x = torch.cat([_levels_and_boundaries(format), spread.clamp(-to.largest, to.largest)])
    codes, decoded = _block_cast(kernels, x, format)
    assert torch.equal(codes, x.to(to.dtype).view(torch.uint8))
    assert torch.equal(decoded, x.to(to.dtype).float())


def test_e3m0_rounds_to_the_nearest_and_to_even_codes(kernels: ModuleType) -> None:
    x = torch.cat([_levels_and_boundaries("e3m0"), torch.rand(5000) * 2 - 1])
    levels = torch.tensor(FORMATS["e3m0"].levels())
    assert levels.tolist() == [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    distance = (x.abs()[:, None] - levels).abs().double()
    distance[:, 1::2] += 1e-12  # ties
    assert torch.equal(_block_cast(kernels, x, "e3m0")[1], levels[distance.argmin(dim=1)] * x.sign())


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_every_code_of_fp8_decodes_as_in_torch(kernels: ModuleType, format: FloatFormat) -> None:
    """Those of infinity and nan too, which no encoder writes."""
    codes, decoded = torch.arange(256).to(torch.uint8), torch.zeros(256)
    data = torch.cat([torch.ones(1).view(torch.uint8), codes])
    kernels.decode_block_cast([DecodeJob(data, decoded)], format=format, block=256)
    want = codes.view(FORMATS[format].dtype).float()
    assert torch.equal(decoded.isnan(), want.isnan())
    assert torch.equal(decoded.nan_to_num(0.5).view(torch.int32), want.nan_to_num(0.5).view(torch.int32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("values", ["normal", "heavy_tailed", "mixed_scale", "huge"])
def test_block_casts_err_as_stated(kernels: ModuleType, format: FloatFormat, values: str) -> None:
    """Relative error of normal numbers, absolute error of the others, nothing where below half the lowest level."""
    to, x = FORMATS[format], VALUES[values](1000).double()
    kind = next(kind for kind in KINDS if kind.label == f"{format}-2000")
    encoded = round_trip(kernels, kind, x.float(), None)
    decoded, scale = encoded.replaced.double(), float(encoded.out[:4].view(torch.float32))
    y, error, exact = x.abs() / scale, (decoded - x).abs(), 1 + 2.0**-20
    normal, lowest = y >= 2.0 ** (1 - to.bias), to.levels()[1]
    assert bool((error <= x.abs() / (2 ** (to.mantissa + 1) + 1) * exact + 2.0**-149)[normal].all())
    assert bool((error <= lowest / 2 * scale * exact + 2.0**-149)[~normal].all())
    assert not decoded[y < lowest / 2 / exact].any()
    largest = x.abs().argmax()
    assert float(error[largest]) <= float(x[largest].abs()) * 2.0**-22, "the largest is sent exactly"


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
    out, decoded = torch.zeros(13 + 3, dtype=torch.uint8), torch.zeros(7)
    kernels.encode_top_k([EncodeJob(x, out)], k=[3], dtype=torch.float32)
    kernels.decode_top_k([DecodeJob(out, decoded)], k=[3], dtype=torch.float32)
    assert decoded.tolist() == [0.0, -2.0, 2.0, 0.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("values", ["normal", "heavy_tailed", "mixed_scale", "ties", "constant", "tiny"])
def test_bisection_only_errs_among_values_that_are_nearly_equal(kernels: ModuleType, values: str) -> None:
    x, k = VALUES[values](20_000), 300
    out, sent = torch.zeros(6 * k, dtype=torch.uint8), torch.zeros(20_000)
    kernels.encode_top_k([EncodeJob(x, out)], k=[k], dtype=torch.float32, selection="bisect")
    kernels.decode_top_k([DecodeJob(out, sent)], k=[k], dtype=torch.float32)
    assert int((sent != 0).sum()) == k
    assert sent.abs()[sent != 0].min() * (1 + 2.0**-8) > (x - sent).abs().max()


def test_a_sample_comes_near_the_largest(kernels: ModuleType) -> None:
    x, k = torch.randn(65536), 655
    out, sent = torch.zeros(6 * k + 2, dtype=torch.uint8), torch.zeros(65536)
    kernels.encode_top_k([EncodeJob(x, out)], k=[k], dtype=torch.float32, selection="sampled")
    kernels.decode_top_k([DecodeJob(out, sent)], k=[k], dtype=torch.float32)
    best = x.abs().sort(descending=True).values[:k]
    assert int((sent != 0).sum()) == k
    assert float(sent.square().sum()) > 0.95 * float(best.square().sum())


def test_natural_codes(kernels: ModuleType) -> None:
    """A sign and an exponent: nearest power of two, half-way up; small values vanish, large ones overflow."""
    x = torch.tensor(
        [1.0, -1.0, 1.4999, 1.5, -2.9, 3.0, 0.0, -0.0, 2.0**-90, 0.75 * 2.0**-90, 0.74 * 2.0**-90, 2.0**36]
    )
    n, out = x.numel(), torch.zeros(16, dtype=torch.uint8)
    assert kernels.encode_top_k([EncodeJob(x, out)], k=[n], dtype=torch.uint8) == [True]
    assert out[:n].tolist() == [91, 128 + 91, 91, 92, 128 + 92, 93, 0, 0, 1, 1, 0, 127]
    decoded = torch.zeros(n)
    kernels.decode_top_k([DecodeJob(out, decoded)], k=[n], dtype=torch.uint8)
    assert decoded.tolist() == [1, -1, 1, 2, -2, 4, 0, 0, 2.0**-90, 2.0**-90, 0, 2.0**36]
    for largest, finite in ((1.4999 * 2.0**36, True), (1.5 * 2.0**36, False)):
        assert kernels.encode_top_k([EncodeJob(torch.tensor([largest]), out)], k=[1], dtype=torch.uint8) == [finite]
    # A sign without a magnitude, which no encoder writes, is 0 too.
    negative_zero = torch.tensor([0, 0, 128, 0], dtype=torch.uint8)
    kernels.decode_top_k([DecodeJob(negative_zero, decoded[:1])], k=[1], dtype=torch.uint8)
    assert decoded[0].item() == 0.0


@pytest.mark.parametrize("place", [0, 1, 15])
def test_ternary_bytes_above_242_raise_and_write_nothing(kernels: ModuleType, place: int) -> None:
    data = torch.tensor([0] * 8 + [242] * 15 + [80], dtype=torch.uint8)  # of 64 values in blocks of 36: 8 bytes and 6
    for alpha in (None, 0.5):
        for byte in (243, 255):
            good, bad = torch.full((72,), 7.0), torch.full((72,), 7.0)
            foreign = data.clone()
            foreign[8 + place] = byte
            with pytest.raises(WireError, match=f"below 243, five codes each, got {byte} at byte {place} .* of job 1"):
                kernels.decode_ternary([DecodeJob(data, good, alpha), DecodeJob(foreign, bad, alpha)], block=36)
            assert bool((good == 7.0).all())
            assert bool((bad == 7.0).all())
            jobs = [DecodeJob(data[8:], good, alpha, None, torch.ones(2)) for data in (data, foreign)]
            with pytest.raises(WireError, match=f"got {byte} at byte {place} .* of job 1"):
                kernels.decode_ternary(jobs, block=36, shared=True)
            assert bool((good == 7.0).all())


@pytest.mark.parametrize(
    ("n", "k", "dtype", "chunked", "parts", "nbytes"),
    [
        (65536, 655, torch.float16, False, ("values", "indices"), 2620),
        (65536, 655, torch.float16, True, ("values", "counts", "packed"), 2328),
        (65536, 4096, torch.float32, False, ("values", "indices"), 24576),  # as small as a bitmap
        (65536, 4097, torch.float32, False, ("values", "bitmap"), 24580),
        (4096, 40, torch.float16, False, ("values", "packed"), 140),
        (4097, 40, torch.float16, False, ("values", "indices"), 160),
        (4096, 1, torch.float16, False, ("values", "indices"), 4),
        (4096, 400, torch.float16, False, ("values", "bitmap"), 1312),
        (65536, 655, torch.uint8, False, ("indices", "values"), 1968),
        (65536, 655, torch.uint8, True, ("counts", "values", "packed"), 1672),
        (0, 0, torch.float16, False, ("values", "indices"), 0),
    ],
)  # fmt: skip
def test_the_smallest_form_of_indices_is_taken(
    n: int, k: int, dtype: torch.dtype, chunked: bool, parts: tuple[str, ...], nbytes: int
) -> None:
    layout = top_k_layout(n, k, dtype, chunked)
    assert tuple(part.name for part in layout.parts) == parts
    assert layout.nbytes == nbytes


def test_one_bit_of_zeros_is_positive(kernels: ModuleType) -> None:
    kind = next(kind for kind in KINDS if kind.label == "one_bit-l1")
    encoded = round_trip(kernels, kind, torch.tensor([0.0, -0.0, -1.0, 3.0]), None)
    assert encoded.replaced.tolist() == [1.0, 1.0, -1.0, 1.0]


def test_signs_have_no_scale(kernels: ModuleType) -> None:
    kind = next(kind for kind in KINDS if kind.name == "sign")
    encoded = round_trip(kernels, kind, torch.tensor([0.0, -0.0, -1e-45, 3.5]), torch.zeros(4))
    assert encoded.out.tolist() == [0b0100, 0, 0, 0]
    assert encoded.replaced.tolist() == [1.0, 1.0, -1.0, 1.0]
    assert encoded.residual is not None
    assert encoded.residual.tolist() == [-1.0, -1.0, 1.0, 2.5]


def _16_bit(indices: list[int]) -> torch.Tensor:
    return torch.tensor(indices).to(torch.int16).view(torch.uint8)


@pytest.mark.parametrize(
    "indices",
    [[5, 4, 6], [4, 4, 6], [1, 2, 5000], [1, 2, 65535], [5000, 5, 6], [65535, 0, 1], [1, 40000, 2]],
)
def test_corrupt_indices_raise_and_write_nothing(kernels: ModuleType, indices: list[int]) -> None:
    values = torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8)
    _refused(kernels, torch.cat([values, _16_bit(indices), values[:2]]), 5000, k=3)


@pytest.mark.parametrize(
    "indices",
    [[0, 1, 2, 4, 3, 5, 6, 7], [0, 1, 2, 3, 3, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 100], [4095, 1, 2, 3, 4, 5, 6, 7]],
    ids=["order", "equal", "range", "both"],
)
def test_corrupt_packed_indices_raise_and_write_nothing(kernels: ModuleType, indices: list[int]) -> None:
    values, pairs = torch.ones(8, dtype=torch.float16).view(torch.uint8), zip(indices[::2], indices[1::2], strict=True)
    packed = b"".join((low | high << 12).to_bytes(3, "little") for low, high in pairs)
    _refused(kernels, torch.cat([values, torch.tensor(list(packed), dtype=torch.uint8)]), 100, k=8, dtype=torch.float16)


@pytest.mark.parametrize(
    "bitmap", [[0b11, 0], [0b1111, 0], [0b11, 0b100], [0, 0]], ids=["few", "many", "range", "none"]
)
def test_corrupt_bitmaps_raise_and_write_nothing(kernels: ModuleType, bitmap: list[int]) -> None:
    values = torch.ones(3).view(torch.uint8)
    _refused(kernels, torch.cat([values, torch.tensor(bitmap, dtype=torch.uint8)]), 10, k=3)


@pytest.mark.parametrize(
    ("counts", "packed"),
    [
        ([3, 1], [1, 0x20, 0, 3, 0]),  # four
        ([2, 0], [1, 0x20, 0, 3, 0]),  # two
        ([65535, 4], [1, 0x20, 0, 3, 0]),
        ([2, 1], [2, 0x10, 0, 3, 0]),  # out of order
        ([2, 1], [1, 0x20, 0, 0xFF, 0xF]),  # beyond the end
        ([0, 3], [1, 0x20, 0, 9, 0]),
    ],
    ids=str,
)  # fmt: skip
def test_corrupt_chunks_raise_and_write_nothing(kernels: ModuleType, counts: list[int], packed: list[int]) -> None:
    values = torch.ones(3).view(torch.uint8)
    data = torch.cat([values, _16_bit(counts), torch.tensor(packed, dtype=torch.uint8)])
    _refused(kernels, data, 4100, k=3, chunked=True)


def _refused(
    kernels: ModuleType,
    data: torch.Tensor,
    n: int,
    *,
    k: int,
    dtype: torch.dtype = torch.float32,
    chunked: bool = False,
) -> None:
    good, bad = torch.full((4 * n,), 7.0), torch.full((n,), 7.0)
    fine = torch.zeros(align(payload_nbytes(top_k_layout(4 * n, k, dtype, chunked))), dtype=torch.uint8)
    kernels.encode_top_k([EncodeJob(torch.randn(4 * n), fine)], k=[k], dtype=dtype, chunked=chunked)
    for alpha in (None, 0.5):
        jobs = [DecodeJob(fine, good, alpha), DecodeJob(data, bad, alpha)]
        with pytest.raises(WireError, match=f"{k} ascending indices below {n}"):
            kernels.decode_top_k(jobs, k=[k, k], dtype=dtype, chunked=chunked)
        assert bool((good == 7.0).all())
        assert bool((bad == 7.0).all())


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
