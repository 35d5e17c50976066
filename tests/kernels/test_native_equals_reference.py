"""The compiled kernels give the bytes, the residuals and the flags of the reference ones."""

from types import ModuleType

import pytest
import torch
from cases import KEY, KINDS, LENGTHS, VALUES, Kind, assert_same, bits, block_quant, misaligned, round_trip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.kernels import reference
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.random import Key
from thinwire.wire import align

STOCHASTIC = [kind for kind in KINDS if kind.stochastic or kind.name == "random_k"]


def both(native: ModuleType, kind: Kind, x: torch.Tensor, residual: torch.Tensor | None, **more: object) -> None:
    want = round_trip(reference, kind, x, residual, **{**more, "shift": 0})  # type: ignore[arg-type]
    assert_same(round_trip(native, kind, x, residual, **more), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_every_length(native: ModuleType, kind: Kind) -> None:
    for i, n in enumerate(LENGTHS):
        both(native, kind, torch.randn(n), torch.randn(n) * 0.1, scale=(1.0, 0.5, 3.0)[i % 3])
        both(native, kind, torch.randn(n), None)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_every_class_of_values(native: ModuleType, kind: Kind, values: str) -> None:
    n = 1500
    both(native, kind, VALUES[values](n), None)
    both(native, kind, VALUES[values](n), torch.zeros(n))
    both(native, kind, VALUES[values](n), VALUES[values](n), scale=0.5)


@pytest.mark.parametrize("values", VALUES)
def test_q_where_the_residual_was(native: ModuleType, values: str) -> None:
    for n in (0, 1, 17, 1500):
        x, residual, out = VALUES[values](n), torch.randn(n), torch.full((8,), 7, dtype=torch.uint8)
        left = residual.clone()
        flags = native.add_residual([EncodeJob(x, out, left, 0.3), EncodeJob(x, out)])
        want = residual.clone()
        assert flags == reference.add_residual([EncodeJob(x, out, want, 0.3), EncodeJob(x, out)])
        assert torch.equal(bits(left), bits(want))
        assert torch.equal(bits(left), bits(x + residual * 0.3))
        assert bool((out == 7).all())


@pytest.mark.parametrize("bits_", [8, 7, 4, 3, 2])
@pytest.mark.parametrize("stochastic", [False, True])
def test_one_block_longer_than_the_partition(native: ModuleType, bits_: int, stochastic: bool) -> None:
    both(native, block_quant(bits_, 100_000, stochastic), torch.randn(65535), torch.randn(65535))


@pytest.mark.parametrize("values", ["heavy_tailed", "zeros", "signed_zeros_and_few", "ties", "mixed_scale", "constant"])
def test_top_k_of_long_blocks(native: ModuleType, values: str) -> None:
    for kind in KINDS:
        if kind.name == "top_k":
            both(native, kind, VALUES[values](20_000), None)
            if kind.settings["selection"] != "exact":
                both(native, kind, VALUES[values](65536), torch.zeros(65536))


@pytest.mark.parametrize("period", [64, 1024])
def test_top_k_where_the_large_values_hide_between_samples(native: ModuleType, period: int) -> None:
    x = torch.randn(65536) * 1e-3
    x[5::period] = torch.randn(x[5::period].numel())
    x[-700:] += 5.0
    for kind in KINDS:
        if kind.label.startswith(("top_k-float32-percent", "top_k-float32-half")):
            both(native, kind, x, torch.zeros(65536))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_any_address(native: ModuleType, kind: Kind, shift: int) -> None:
    both(native, kind, torch.randn(777), torch.randn(777), shift=shift)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_data_and_out_at_odd_byte_addresses(native: ModuleType, kind: Kind) -> None:
    x, n = torch.randn(777), 777
    nbytes = align(kind.nbytes(n))
    plain, odd = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes + 1, dtype=torch.uint8)[1:]
    kind.encode(native, [EncodeJob(x, plain, key=KEY)])
    kind.encode(native, [EncodeJob(x, odd, key=KEY)])
    assert torch.equal(plain, odd)
    want, got = torch.zeros(n), torch.zeros(n)
    kind.decode(native, [DecodeJob(plain, want, key=KEY)])
    kind.decode(native, [DecodeJob(odd, got, key=KEY)])
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("kind", STOCHASTIC, ids=lambda kind: kind.label)
@pytest.mark.parametrize(
    "key",
    [
        Key(0),
        Key(2**64 - 1, 2**32 - 1, 2**32 - 1, 1),
        Key(5, 1, 2, 127),
        Key(5, 1, 2, 65536),
        Key(5, 1, 2, 2**35 + 77),
        Key(5, 1, 2, 2**39 - 40),
    ],
)
def test_every_key_and_offset(native: ModuleType, kind: Kind, key: Key) -> None:
    both(native, kind, torch.randn(900), torch.randn(900), key=key)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("values", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_are_flagged(native: ModuleType, kind: Kind, values: float) -> None:
    for n, place in ((1, 0), (600, 0), (600, 599), (600, 300)):
        x, zeros = torch.randn(n), torch.zeros(n)
        x[place] = values
        both(native, kind, x, None)
        both(native, kind, x, zeros)
        both(native, kind, zeros, x.clone())


def test_overflow_of_a_half_is_flagged(native: ModuleType) -> None:
    for largest, finite in ((65519.99, True), (65520.0, False), (1e30, False)):
        x = torch.tensor([1.0, largest, -2.0])
        for kind in KINDS:
            if kind.settings.get("dtype") is torch.float16 and kind.num_kept is None:
                assert round_trip(native, kind, x, None).finite is finite
                both(native, kind, x, None)


def test_every_half_and_every_boundary_between_halves(native: ModuleType) -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    up, down = torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)
    x = torch.cat([halves, middles, up, down])
    kind = next(kind for kind in KINDS if kind.label == "cast-float16")
    both(native, kind, torch.cat([x, -x]), torch.zeros(2 * x.numel()))


def test_every_bit_pattern_of_16_bits_decodes(native: ModuleType) -> None:
    data = torch.arange(65536).to(torch.int16).view(torch.uint8)
    for kind in KINDS:
        if kind.label in ("cast-float16", "cast-bfloat16"):
            want, got = torch.zeros(65536), torch.zeros(65536)
            kind.decode(reference, [DecodeJob(data, want)])
            kind.decode(native, [DecodeJob(data, got)])
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(bits(got.nan_to_num(0.5)), bits(want.nan_to_num(0.5)))


def test_every_code_decodes(native: ModuleType) -> None:
    """Also -128 and -8, which no encoder writes."""
    for kind, codes in ((8, 256), (7, 256), (6, 256), (5, 256), (4, 512), (3, 512), (2, 512)):
        data = torch.cat([torch.tensor([-0.3]).view(torch.uint8), torch.arange(256).to(torch.uint8)])
        got, want = torch.zeros(codes), torch.zeros(codes)
        native.decode_block_quant([DecodeJob(data, got)], bits=kind, block=512)
        reference.decode_block_quant([DecodeJob(data, want)], bits=kind, block=512)
        assert torch.equal(bits(got), bits(want))


def test_every_natural_code_decodes(native: ModuleType) -> None:
    """Also a sign without a value, and 2^128, which no encoder writes."""
    for kind, data in (
        (8, torch.arange(256).to(torch.uint8)),
        (9, torch.cat([torch.arange(256).repeat(2), torch.tensor([0xF0]).repeat(64)]).to(torch.uint8)),
    ):
        got, want = torch.zeros(256 * (kind - 7)), torch.zeros(256 * (kind - 7))
        native.decode_natural([DecodeJob(data, got)], bits=kind)
        reference.decode_natural([DecodeJob(data, want)], bits=kind)
        assert torch.equal(bits(got), bits(want))


def test_every_exponent_and_the_edges_of_its_range(native: ModuleType) -> None:
    """Each power of two, what lies just beside it, and a third of the way up, for all uniforms in turn."""
    powers = torch.arange(255).to(torch.int32) << 23
    x = torch.cat([powers, powers + 1, powers[1:] - 1, powers + 2796203]).view(torch.float32)
    for kind in KINDS:
        if kind.name == "natural":
            largest = 2.0**18 if kind.settings["bits"] == 8 else 2.0**127
            x = x[x <= largest]
            for step in range(50):
                both(native, kind, x, torch.zeros_like(x), key=Key(1, step))
                both(native, kind, -x, None, key=Key(1, step))
            for beyond in (largest, -largest):
                above = torch.tensor([1.0, beyond]) * (1 + 2.0**-23)
                assert not round_trip(native, kind, above, None).finite
                both(native, kind, above, None)


def test_every_ternary_byte_decodes(native: ModuleType) -> None:
    data = torch.cat([torch.tensor([-0.3]).view(torch.uint8), torch.arange(243).to(torch.uint8)])
    for n in (5 * 243, 5 * 243 - 1, 5 * 243 - 4):
        got, want = torch.zeros(n), torch.zeros(n)
        native.decode_ternary([DecodeJob(data, got)], block=0)
        reference.decode_ternary([DecodeJob(data, want)], block=0)
        assert torch.equal(bits(got), bits(want))
        shared = torch.tensor([0.7])
        native.decode_ternary([DecodeJob(data[4:], got, -1.5, None, shared)], block=0, shared=True)
        reference.decode_ternary([DecodeJob(data[4:], want, -1.5, None, shared)], block=0, shared=True)
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_threads_change_nothing(native: ModuleType, kind: Kind) -> None:
    lengths = [5000, 1, 0, 700, 3000, 129, 2048]
    xs, residuals = [torch.randn(n) for n in lengths], [torch.randn(n) for n in lengths]
    xs[3][5:6] = float("nan")
    results = []
    for threads in (1, 2, 3, 20):
        outs = [torch.zeros(align(kind.nbytes(n)), dtype=torch.uint8) for n in lengths]
        left = [r.clone() for r in residuals]
        decoded = [torch.ones(n) for n in lengths]
        jobs = [EncodeJob(x, out, r, 0.5, KEY) for x, out, r in zip(xs, outs, left, strict=True)]
        finite = kind.encode(native, jobs, threads)
        assert finite == [i != 3 for i in range(len(lengths))]
        good = [i for i in range(len(lengths)) if finite[i]]
        kind.decode(native, [DecodeJob(outs[i], decoded[i], 0.7, KEY) for i in good], threads)
        results.append(torch.cat([bits(t) for i in good for t in (left[i], decoded[i])]))
        results[-1] = torch.cat([results[-1], *(outs[i].to(torch.int32) for i in good)])
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("rms", [False, True])
def test_one_bit_above_two_levels_of_the_sum_tree(native: ModuleType, rms: bool) -> None:
    n = 1024 * 1024 + 1025
    kind = next(kind for kind in KINDS if kind.settings.get("rms") is rms)
    both(native, kind, torch.randn(n), None)


def test_all_finite(native: ModuleType) -> None:
    tensors = [torch.randn(n) for n in (0, 1, 5, 1000, 65537)]
    assert native.all_finite(tensors) == reference.all_finite(tensors) == [True] * 5
    for value in (float("inf"), float("-inf"), float("nan")):
        for place in (0, 999):
            bad = misaligned(torch.randn(1000), 1)
            bad[place] = value
            assert native.all_finite([tensors[3], bad], threads=2) == [True, False]
    assert native.all_finite([torch.full((100,), torch.finfo(torch.float32).max)]) == [True]
    assert native.all_finite([]) == []


ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    values=st.lists(ANY_FLOAT, max_size=70),
    residual=st.lists(ANY_FLOAT, min_size=70, max_size=70) | st.none(),
    scale=st.floats(width=32, allow_nan=False, min_value=-4, max_value=4),
    key=st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.just(1), st.integers(0, 2**40)),
    shift=st.integers(0, 3),
)
def test_any_values(
    native: ModuleType,
    kind: Kind,
    values: list[float],
    residual: list[float] | None,
    scale: float,
    key: Key,
    shift: int,
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    r = None if residual is None else torch.tensor(residual[: len(values)], dtype=torch.float32)
    both(native, kind, x, r, scale=scale, key=key, shift=shift)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits_=st.integers(2, 8),
    block=st.integers(1, 300),
    n=st.integers(0, 700),
    stochastic=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_block_size(native: ModuleType, bits_: int, block: int, n: int, stochastic: bool, seed: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    both(native, block_quant(bits_, block, stochastic), x, None)
