"""The Triton kernels give the bytes, the residuals and the flags of the reference ones.

With `TRITON_INTERPRET=1` they run on the CPU, one program after the other; without, on a GPU where there is one.
"""

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import cases
import numpy as np
import pytest
import torch
from cases import (
    KEY,
    LENGTHS,
    VALUES,
    Kind,
    assert_same,
    bits,
    block_cast,
    block_quant,
    dither,
    misaligned,
    round_trip,
    ternary,
)

from thinwire.errors import ThinwireError, WireError
from thinwire.kernels import reference
from thinwire.kernels.float_formats import FORMATS, FloatFormat
from thinwire.kernels.jobs import DecodeBatch, DecodeJob, EncodeBatch, EncodeJob, VoteJob
from thinwire.kernels.reference_top_k import sample_places
from thinwire.kernels.top_k_layout import top_k_layout
from thinwire.random import Key
from thinwire.wire import align

KINDS = [kind for kind in cases.KINDS if kind.on_cuda]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter is slow.
LONGEST = 2100 if INTERPRETED else 65536
NON_FINITE = (float("inf"), float("nan"), float("-inf"))[: 2 if INTERPRETED else 3]
FEW = {
    *("int8-33-nearest", "int8-512-stochastic", "int4-33-nearest", "int4-512-stochastic"),
    *("int7-33-nearest", "int3-512-stochastic", "linear5-512-l2", "natural7-partition-max", "natural8-2000-l2"),
    *("e4m3-33", "e5m2-512", "e3m0-33", "e3m0-512", "sign"),
    *("one_bit-l1", "one_bit-rms", "top_k-float32-half", "top_k-float16-percent", "top_k-natural-half-bisect-chunked"),
    *("top_k-float32-half-sampled", "random_k-float32-0.3-7-scaled", "random_k-float16-1/10-1"),
    *("top_chunks-float16-0.3-64", "global_linear4-3-10-squared", "global_exponential8-126-10-squared"),
    *("min_max4-33-affine-stochastic", "min_max8-512-affine", "min_max2-33-bagua"),
    *("fixed_point4-512", "fixed_point3-33", "fixed_point8-partition"),
    *("cnat8", "cnat9", "int4-512-stochastic-rotation32", "ternary-33-clip2.5"),
}
SOME = [kind for kind in KINDS if not INTERPRETED or kind.name == "cast" or kind.label in FEW]
STOCHASTIC = [kind for kind in (SOME if INTERPRETED else KINDS) if kind.stochastic or kind.name == "random_k"]

pytestmark = pytest.mark.triton_interpreter if INTERPRETED else pytest.mark.gpu
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 and Triton", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    with np.errstate(all="ignore"):  # the interpreter computes in NumPy, which warns of inf and nan
        yield importlib.import_module("thinwire.kernels.triton_backend")


def both(kernels: ModuleType, kind: Kind, x: torch.Tensor, residual: torch.Tensor | None, **more: object) -> None:
    want = round_trip(reference, kind, x, residual, **{**more, "shift": 0})  # type: ignore[arg-type]
    assert_same(round_trip(kernels, kind, x, residual, device=DEVICE, **more), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_every_length(kernels: ModuleType, kind: Kind) -> None:
    for i, n in enumerate(LENGTHS):
        if n <= LONGEST:
            both(kernels, kind, torch.randn(n), torch.randn(n) * 0.1, scale=(1.0, 0.5, 3.0)[i % 3])
            if i % 3 == 0 or not INTERPRETED:
                both(kernels, kind, torch.randn(n), None)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.label)
def test_every_class_of_values(kernels: ModuleType, kind: Kind, values: str) -> None:
    n = 1500
    if not INTERPRETED:
        both(kernels, kind, VALUES[values](n), None)
    both(kernels, kind, VALUES[values](n), VALUES[values](n), scale=0.5)


@pytest.mark.parametrize("bits_", [8, 4])
@pytest.mark.parametrize("stochastic", [False, True])
def test_one_block_longer_than_the_partition(kernels: ModuleType, bits_: int, stochastic: bool) -> None:
    n = min(LONGEST, 65535)
    both(kernels, block_quant(bits_, 70_000, stochastic), torch.randn(n), torch.randn(n))


@pytest.mark.parametrize("block", [0, 1500])
def test_norms_of_long_blocks(kernels: ModuleType, block: int) -> None:
    for kind in (dither(5, block, False, True), dither(5, block, True, True), ternary(block, 1.3)):
        both(kernels, kind, torch.randn(5000), torch.randn(5000))


@pytest.mark.parametrize("values", ["heavy_tailed", "zeros", "signed_zeros_and_few", "ties", "mixed_scale", "constant"])
def test_top_k_of_long_blocks(kernels: ModuleType, values: str) -> None:
    for kind in KINDS:
        if kind.name == "top_k" and (kind in SOME or kind.settings["selection"] != "exact" or "one" in kind.label):
            both(kernels, kind, VALUES[values](9_000), None)


@pytest.mark.parametrize("skewed", [1.0, 0.0])
def test_sampled_top_k_where_the_sample_misleads(kernels: ModuleType, skewed: float) -> None:
    """More reach the upper bound than are wanted, or fewer the lower one."""
    n, x = 2100, torch.rand(2100) + 2.0
    x[sample_places(n, 1024)] = torch.rand(1024) + 3.0 * (1.0 - skewed)
    kind = next(kind for kind in KINDS if kind.label == "top_k-float32-half-sampled")
    both(kernels, kind, x, torch.zeros(n))


@pytest.mark.parametrize("large", [700] if INTERPRETED else [700, 30_000])
@pytest.mark.parametrize("period", [1024] if INTERPRETED else [64, 1024])
def test_top_k_where_the_sample_misleads(kernels: ModuleType, period: int, large: int) -> None:
    """Too few elements reach the bound, or more than there is room for."""
    x = torch.randn(65536) * 1e-3
    x[5::period] = torch.randn(x[5::period].numel())
    x[-large:] += 5.0
    sampled = (torch.arange(1024) * 2654435769 % 2**32 * 65536) >> 32  # those that triton_top_k.py looks at
    blind = x.clone()
    blind[sampled] = 0.0  # a bound of zero lets everything through
    giant = blind.clone()
    giant[sampled[:300]] = 100.0  # and one that only the sample reaches
    for kind in KINDS:
        if kind.label in ("top_k-float32-one", "top_k-float16-percent"):
            for values in (x, blind, giant):
                both(kernels, kind, values, torch.zeros(65536))


@pytest.mark.parametrize("bits_", [8, 4, 5])
@pytest.mark.parametrize("block", [128, 256, 384, 4096])
def test_random_numbers_by_the_chunk(kernels: ModuleType, bits_: int, block: int) -> None:
    for n in (3 * block, 1000):
        for offset in (0, 128, 2**39, 5):
            x, residual = torch.randn(n), torch.randn(n)
            both(kernels, block_quant(bits_, block, True), x, residual, key=Key(77, 3, 9, offset))


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.label)
@pytest.mark.parametrize("shift", [1] if INTERPRETED else [1, 2, 5])
def test_any_multiple_of_four_bytes(kernels: ModuleType, kind: Kind, shift: int) -> None:
    both(kernels, kind, torch.randn(592), torch.randn(592), shift=shift)


def test_other_addresses_are_refused(kernels: ModuleType) -> None:
    odd = torch.zeros(9, dtype=torch.uint8, device=DEVICE)[1:]
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match="out: expected addresses that are multiples of 4"):
        kernels.encode_cast([EncodeJob(x, odd)], dtype=torch.float32)
    with pytest.raises(ValueError, match="data: expected addresses that are multiples of 4"):
        kernels.decode_cast([DecodeJob(odd, x)], dtype=torch.float32)


@pytest.mark.parametrize("kind", STOCHASTIC, ids=lambda kind: kind.label)
@pytest.mark.parametrize(
    "key",
    [
        Key(0),
        Key(2**64 - 1, 2**32 - 1, 2**32 - 1, 1),
        Key(5, 1, 2, 127),
        Key(5, 1, 2, 2**35 + 77),
        Key(5, 1, 2, 2**39 - 40),
    ],
)
def test_every_key_and_offset(kernels: ModuleType, kind: Kind, key: Key) -> None:
    both(kernels, kind, torch.randn(900), torch.randn(900), key=key)


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.label)
def test_non_finite_values_are_flagged(kernels: ModuleType, kind: Kind) -> None:
    for value in NON_FINITE:
        for n, place in ((1, 0), (600, 599)):
            x, zeros = torch.randn(n), torch.zeros(n)
            x[place] = value
            both(kernels, kind, x, None)
            both(kernels, kind, zeros, x.clone())


def test_overflow_of_a_half_is_flagged(kernels: ModuleType) -> None:
    for largest in (65519.99, 65520.0, 1e30):
        for kind in KINDS:
            if kind.settings.get("dtype") is torch.float16:
                both(kernels, kind, torch.tensor([1.0, largest, -2.0]), None)


def test_every_half_and_every_boundary_between_halves(kernels: ModuleType) -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    up, down = torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)
    x = torch.cat([halves, middles, up, down])
    kind = next(kind for kind in KINDS if kind.label == "cast-float16")
    both(kernels, kind, torch.cat([x, -x]), torch.zeros(2 * x.numel()))


def test_every_bit_pattern_of_16_bits_decodes(kernels: ModuleType) -> None:
    data = torch.arange(65536).to(torch.int16).view(torch.uint8)
    for kind in KINDS:
        if kind.label in ("cast-float16", "cast-bfloat16"):
            want, got = torch.zeros(65536), torch.zeros(65536, device=DEVICE)
            kind.decode(reference, [DecodeJob(data, want)])
            kind.decode(kernels, [DecodeJob(data.to(DEVICE), got)])
            assert torch.equal(got.cpu().isnan(), want.isnan())
            assert torch.equal(bits(got.cpu().nan_to_num(0.5)), bits(want.nan_to_num(0.5)))


def test_every_code_decodes(kernels: ModuleType) -> None:
    """Also the lowest, which no encoder writes."""
    for kind, codes in ((8, 256), (4, 512), (7, 128), (6, 128), (5, 128), (3, 128), (2, 128)):
        data = torch.cat([torch.tensor([-0.3]).view(torch.uint8), torch.arange(256).to(torch.uint8)])
        got, want = torch.zeros(codes, device=DEVICE), torch.zeros(codes)
        kernels.decode_block_quant([DecodeJob(data.to(DEVICE), got)], bits=kind, block=512)
        reference.decode_block_quant([DecodeJob(data, want)], bits=kind, block=512)
        assert torch.equal(bits(got.cpu()), bits(want))
        kernels.decode_dither([DecodeJob(data.to(DEVICE), got)], bits=kind, block=512, natural=True)
        reference.decode_dither([DecodeJob(data, want)], bits=kind, block=512, natural=True)
        assert torch.equal(bits(got.cpu()), bits(want))
    for kind in (8, 9):
        data, got, want = torch.arange(288).to(torch.uint8), torch.zeros(256, device=DEVICE), torch.zeros(256)
        kernels.decode_natural([DecodeJob(data.to(DEVICE), got)], bits=kind)
        reference.decode_natural([DecodeJob(data, want)], bits=kind)
        assert torch.equal(bits(got.cpu().nan_to_num(0.5)), bits(want.nan_to_num(0.5)))


@pytest.mark.parametrize("format", FORMATS)
def test_every_float_of_8_and_4_bits(kernels: ModuleType, format: FloatFormat) -> None:
    """Every code decodes, infinity and nan too; every boundary between two values is rounded rightly."""
    codes = torch.arange(256).to(torch.uint8)
    data = torch.cat([torch.tensor([-0.3]).view(torch.uint8), codes])
    n = 512 if format == "e3m0" else 256
    got, want = torch.zeros(n, device=DEVICE), torch.zeros(n)
    kernels.decode_block_cast([DecodeJob(data.to(DEVICE), got)], format=format, block=512)
    reference.decode_block_cast([DecodeJob(data, want)], format=format, block=512)
    assert torch.equal(got.cpu().isnan(), want.isnan())
    assert torch.equal(bits(got.cpu().nan_to_num(0.5)), bits(want.nan_to_num(0.5)))
    levels = torch.tensor(FORMATS[format].levels())
    middles = (levels[1:] + levels[:-1]) / 2
    x = torch.cat([levels, middles, torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)])
    both(kernels, block_cast(format, 2 * x.numel()), torch.cat([x, -x]), torch.zeros(2 * x.numel()))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 9, 16, 33])
def test_votes(kernels: ModuleType, num_rows: int) -> None:
    """Random bytes, so also bits beyond the end; rows at odd addresses; several jobs, with a key and without."""
    for keys in ((None, None), (KEY, None), (Key(7, 1, 2, 2**35 + 77), KEY)):
        results: list[list[torch.Tensor]] = []
        lengths = (1, 1000) if INTERPRETED else (1, 70_000)
        rows = [[torch.randint(0, 256, (-(-n // 8) + 1,), dtype=torch.uint8) for _ in range(num_rows)] for n in lengths]
        for module, device in ((reference, "cpu"), (kernels, DEVICE)):
            outs = [torch.full((align(-(-n // 8)) + 9,), 0xAB, dtype=torch.uint8, device=device) for n in lengths]
            jobs = [
                VoteJob([row.to(device)[1:] for row in own], out[1:-4], n, key)
                for own, out, n, key in zip(rows, outs, lengths, keys, strict=True)
            ]
            module.majority_vote(jobs)
            module.majority_vote([])
            results.append([out.cpu() for out in outs])
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


def test_bad_votes_are_refused(kernels: ModuleType) -> None:
    row = torch.zeros(8, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(WireError, match="row: expected at least 8 bytes, got 7"):
        kernels.majority_vote([VoteJob([row, row[:7]], row.clone(), 64)])
    with pytest.raises(ValueError, match="equally many rows"):
        kernels.majority_vote([VoteJob([], row, 64)])


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.label)
def test_many_jobs_in_one_call(kernels: ModuleType, kind: Kind) -> None:
    """Of unequal lengths, with and without a residual, replaced and accumulated, and one that is not finite."""
    lengths = [5000, 1, 0, 700, 3000, 129, 2048]
    results: list[list[torch.Tensor]] = []
    xs, residuals = [torch.randn(n) for n in lengths], [torch.randn(n) for n in lengths]
    xs[3][5:6] = float("nan")
    for module, device in ((reference, "cpu"), (kernels, DEVICE)):
        outs = [torch.full((align(kind.nbytes(n)) + 8,), 7, dtype=torch.uint8, device=device) for n in lengths]
        left = [r.to(device, copy=True) for r in residuals]
        decoded = [torch.ones(n, device=device) for n in lengths]
        jobs = [
            EncodeJob(x.to(device), out, None if i % 3 == 0 else r, 0.5, KEY)
            for i, (x, out, r) in enumerate(zip(xs, outs, left, strict=True))
        ]
        assert kind.encode(module, jobs) == [i != 3 for i in range(len(lengths))]
        good = [i for i in range(len(lengths)) if i != 3]
        kind.decode(module, [DecodeJob(outs[i], decoded[i], 0.7 if i % 2 else None, KEY) for i in good])
        results.append([t.cpu() for i in good for t in (outs[i], bits(left[i]), bits(decoded[i]))])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    assert kind.encode(kernels, []) == []
    kind.decode(kernels, [])


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.label)
def test_batches_that_recur(kernels: ModuleType, kind: Kind) -> None:
    """The same jobs step after step, the bytes in another buffer each time."""
    lengths = [700, 1, 129]
    sizes = [align(kind.nbytes(n)) for n in lengths]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    keys = [Key(9, offset=128 * i) for i in range(len(lengths))]
    xs, residuals = [torch.randn(n) for n in lengths], [torch.randn(n) for n in lengths]
    results: list[list[torch.Tensor]] = []
    for module, device in ((reference, "cpu"), (kernels, DEVICE)):
        left = [residual.to(device, copy=True) for residual in residuals[:-1]]
        outs = [torch.zeros(n, device=device) for n in lengths]
        encode = EncodeBatch([x.to(device) for x in xs], [*left, None], keys, starts, sizes)
        decode = DecodeBatch(outs, starts, sizes, keys)
        seen: list[torch.Tensor] = []
        for step in range(2):
            buffer = torch.full((sum(sizes) + 4 * step,), 7, dtype=torch.uint8, device=device)
            encode.at(buffer, step=step, residual_scales=[1.0, 0.5, 1.0 + step])
            assert kind.encode(module, encode) == [True] * len(lengths)
            decode.at(buffer, step=step, alpha=0.5 if step else None)
            kind.decode(module, decode)
            seen += [buffer.clone(), *(bits(t.clone()) for t in (*left, *outs))]
        results.append([t.cpu() for t in seen])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


@pytest.mark.parametrize("rms", [False] if INTERPRETED else [False, True])
def test_one_bit_above_two_levels_of_the_sum_tree(kernels: ModuleType, rms: bool) -> None:
    kind = next(kind for kind in KINDS if kind.settings.get("rms") is rms)
    both(kernels, kind, torch.randn(1024 * 1024 + 1025), None)


def test_all_finite(kernels: ModuleType) -> None:
    tensors = [torch.randn(n, device=DEVICE) for n in (0, 1, 5, 1000, 65537)]
    assert kernels.all_finite(tensors) == [True] * 5
    for value in NON_FINITE:
        for place in (0, 999):
            bad = misaligned(torch.randn(1000, device=DEVICE), 1)
            bad[place] = value
            assert kernels.all_finite([tensors[3], bad]) == [True, False]
    assert kernels.all_finite([torch.full((100,), torch.finfo(torch.float32).max, device=DEVICE)]) == [True]
    assert kernels.all_finite([]) == []


@pytest.mark.parametrize(
    ("indices", "place"),
    [([5, 4, 6], 1), ([4, 4, 6], 1), ([1, 2, 100], 2), ([1, 2, 65535], 2), ([100, 5, 6], 0), ([1, 40000, 2], 1)],
)
def test_corrupt_indices_raise_and_write_nothing(kernels: ModuleType, indices: list[int], place: int) -> None:
    values = torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8)
    data = [torch.cat([values, torch.tensor(i).to(torch.int16).view(torch.uint8)]) for i in ([1, 2, 3], indices)]
    for alpha in (None, 0.5):
        outs = [torch.full((100,), 7.0, device=DEVICE) for _ in data]
        jobs = [DecodeJob(d.to(DEVICE), out, alpha) for d, out in zip(data, outs, strict=True)]
        with pytest.raises(WireError, match=f"ascending indices below 100; index number {place} of job 1 is"):
            kernels.decode_top_k(jobs, k=[3, 3], dtype=torch.float32)
        assert all(bool((out == 7.0).all()) for out in outs)


@pytest.mark.parametrize(
    ("label", "part", "byte", "flipped"),
    [
        ("top_k-float32-percent", "packed", -1, 0xFF),
        ("top_k-float16-half", "bitmap", 0, 1),
        ("top_k-natural-half-chunked", "counts", 0, 1),
        ("top_k-natural-half-chunked", "packed", -2, 0xFF),
    ],
)
def test_corrupt_forms_of_indices_raise_and_write_nothing(
    kernels: ModuleType, label: str, part: str, byte: int, flipped: int
) -> None:
    n, kind = 1000, next(kind for kind in KINDS if kind.label == label)
    assert kind.num_kept is not None
    good = torch.zeros(align(kind.nbytes(n)), dtype=torch.uint8)
    kind.encode(reference, [EncodeJob(torch.ones(n), good)])
    bad = good.clone()
    layout = top_k_layout(n, kind.num_kept(n), kind.settings["dtype"], kind.settings["chunked"])
    layout.view(bad, part).view(torch.uint8)[byte] ^= flipped
    for alpha in (None, 0.5):
        outs = [torch.full((n,), 7.0, device=DEVICE) for _ in range(2)]
        with pytest.raises(WireError, match=rf"expected {kind.num_kept(n)} ascending indices below 1000.* in job 1"):
            kind.decode(
                kernels, [DecodeJob(d.to(DEVICE), out, alpha) for d, out in zip((good, bad), outs, strict=True)]
            )
        assert all(bool((out == 7.0).all()) for out in outs)


@pytest.mark.parametrize("block", [0, 33])
def test_bytes_of_no_five_codes_raise_and_write_nothing(kernels: ModuleType, block: int) -> None:
    kind, n = ternary(block, 0.0), 100
    bad = torch.zeros(align(kind.nbytes(n)), dtype=torch.uint8)
    bad[-5] = 243
    for alpha in (None, 0.5):
        outs = [torch.full((n,), 7.0, device=DEVICE) for _ in range(2)]
        jobs = [DecodeJob(d.to(DEVICE), out, alpha) for d, out in zip((torch.zeros_like(bad), bad), outs, strict=True)]
        with pytest.raises(WireError, match=r"got 243 at byte \d+ of the codes of job 1") as got:
            kind.decode(kernels, jobs)
        with pytest.raises(WireError) as want:
            kind.decode(reference, [job._replace(data=job.data.cpu(), out=job.out.cpu()) for job in jobs])
        assert str(got.value) == str(want.value)
        assert all(bool((out == 7.0).all()) for out in outs)


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.label)
def test_random_bytes_never_write_outside(kernels: ModuleType, kind: Kind) -> None:
    generator = torch.Generator().manual_seed(1)
    for n in (1, 64, 777):
        data = torch.randint(0, 256, (align(kind.nbytes(n)),), generator=generator).to(torch.uint8)
        guarded = torch.full((n + 16,), 7.0, device=DEVICE)
        try:
            kind.decode(kernels, [DecodeJob(data.to(DEVICE), guarded[8 : 8 + n], 0.5, KEY)])
        except WireError:
            assert kind.name in ("top_k", "ternary")
            assert bool((guarded == 7.0).all())
        assert bool((guarded[:8] == 7.0).all())
        assert bool((guarded[8 + n :] == 7.0).all())


def test_kinds_without_kernels_say_what_to_do(kernels: ModuleType) -> None:
    x, out = torch.ones(9, device=DEVICE), torch.zeros(100, dtype=torch.uint8, device=DEVICE)
    for kind in (Kind("", "nothing", lambda n: n), *(kind for kind in cases.KINDS if not kind.on_cuda)):
        with pytest.raises(ThinwireError, match="no CUDA kernels yet; set THINWIRE_KERNELS=reference"):
            kind.encode(kernels, [EncodeJob(x, out, key=KEY)])


@pytest.mark.skipif(INTERPRETED, reason="on the CPU this is no mistake")
def test_tensors_on_another_device_are_refused(kernels: ModuleType) -> None:
    x, out = torch.ones(4, device=DEVICE), torch.zeros(16, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"out: expected a contiguous torch\.uint8 tensor on cuda"):
        kernels.encode_cast([EncodeJob(x, out.cpu())], dtype=torch.float32)
    with pytest.raises(ValueError, match=r"residual: expected a contiguous torch\.float32 tensor on cuda"):
        kernels.encode_cast([EncodeJob(x, out, x.cpu())], dtype=torch.float32)


def test_every_kernel_is_there_or_says_what_to_do(kernels: ModuleType) -> None:
    names = [name for name in vars(reference) if name.startswith(("encode_", "decode_", "reduce_", "shared_"))]
    for name in [*names, "all_finite", "majority_vote"]:
        if name not in vars(kernels):
            with pytest.raises(ThinwireError, match="no CUDA kernels yet; set THINWIRE_KERNELS=reference"):
                getattr(kernels, name)
    assert not hasattr(kernels, "nothing")
