"""The bytes of every kind, worked out by hand."""

import struct

import pytest
import torch
from torch import Tensor

from thinwire import (
    BlockCast,
    BlockQuant,
    BlockSpec,
    Cast,
    Compose,
    FixedPoint,
    GlobalExponential,
    GlobalLinear,
    Identity,
    LinearDithering,
    LowRank,
    MinMax,
    NaturalCompression,
    NaturalDithering,
    OneBit,
    RandomK,
    Scaled,
    Sign,
    TernGrad,
    TopK,
    TopKC,
)
from thinwire.compressors import NoContract
from thinwire.errors import RecipeError, WireError
from thinwire.kernels.codes import unpack
from thinwire.random import Key, philox_4x32_10, uniform, words


def raw(data: Tensor) -> bytes:
    return data.numpy().tobytes()


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# --- casts ----------------------------------------------------------------------------------------------------------


def test_identity_sends_the_values() -> None:
    assert raw(Identity().encode(torch.tensor([1.0, -2.5, -0.0]))) == floats(1.0, -2.5, -0.0)
    assert raw(Identity().encode(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float16))) == bytes.fromhex(
        "003c00c000380000"
    )
    assert raw(Identity().encode(torch.tensor([1.0], dtype=torch.bfloat16))) == bytes.fromhex("803f0000")


def test_cast_rounds_to_nearest_even() -> None:
    # Between 2048 and 4096 float16 has steps of 2; ties go to the even fraction.
    x = torch.tensor([2049.0, 2051.0, 2050.9, -2049.0, 65504.0, 2.0**-25, 2.0**-25 * 1.001])
    assert Cast().decode(Cast().encode(x), BlockSpec(shape=(7,))).tolist() == [
        2048.0, 2052.0, 2050.0, -2048.0, 65504.0, 0.0, 2.0**-24,
    ]  # fmt: skip
    # bfloat16 has steps of 2 between 256 and 512.
    bf16 = Cast(dtype=torch.bfloat16)
    x = torch.tensor([257.0, 259.0, 257.5, -257.0])
    assert bf16.decode(bf16.encode(x), BlockSpec(shape=(4,))).tolist() == [256.0, 260.0, 258.0, -256.0]
    assert raw(bf16.encode(torch.tensor([1.0, -1.0]))) == bytes.fromhex("803f80bf")


def test_float16_overflows_where_rounding_reaches_infinity() -> None:
    assert Cast().decode(Cast().encode(torch.tensor([65519.0])), BlockSpec(shape=(1,))).item() == 65504.0
    with pytest.raises(ValueError, match="overflow"):
        Cast().encode(torch.tensor([65520.0]))


# --- one bit --------------------------------------------------------------------------------------------------------


def test_one_bit_sets_bits_of_negatives_from_the_least_significant() -> None:
    x = torch.tensor([-1.0, 2.0, 3.0, -4.0, 0.0, -0.0, 1.0, -1.0, -6.0, 0.0])
    assert raw(OneBit().encode(x)) == floats(1.8) + bytes([0b10001001, 0b00000001, 0, 0])
    assert OneBit().decode(OneBit().encode(x), BlockSpec(shape=(10,))).sign().tolist() == [
        -1, 1, 1, -1, 1, 1, 1, -1, -1, 1,
    ]  # fmt: skip


def test_one_bit_scales() -> None:
    x = torch.tensor([3.0, -4.0, 0.0, 0.0])
    assert raw(OneBit().encode(x))[:4] == floats(7 / 4)
    assert raw(OneBit(scale="rms").encode(x))[:4] == floats(2.5)


def test_one_bit_scale_is_over_the_true_length() -> None:
    for n in (1, 5, 9, 63, 65, 1023, 1025):
        assert raw(OneBit().encode(torch.full((n,), -0.75)))[:4] == floats(0.75)
        assert raw(OneBit(scale="rms").encode(torch.full((n,), -0.75)))[:4] == floats(0.75)


@pytest.mark.parametrize(("scale", "expected"), [("l1", 0.363), ("rms", 0.404)])
def test_one_bit_errs_on_gaussian_values_as_computed(scale, expected: float) -> None:
    """1 - 2 / pi, and 2 (1 - sqrt(2 / pi)): of the squared norm."""
    x, q = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)), OneBit(scale=scale)
    error = (q.decode(q.encode(x), BlockSpec(shape=(1 << 18,))) - x).square().sum() / x.square().sum()
    assert float(error) == pytest.approx(expected, abs=0.003)


def test_one_bit_sums_in_float64() -> None:
    x = torch.tensor([2.0**24] + [1.0] * 4095)  # float32 would lose every 1
    assert raw(OneBit().encode(x))[:4] == floats((2.0**24 + 4095) / 4096)


# --- signs and votes ------------------------------------------------------------------------------------------------


def test_signs_are_bits_of_negatives() -> None:
    x = torch.tensor([-1.0, 2.0, 3.0, -4.0, 0.0, -0.0, 1.0, -1e-45, -6.0, 0.0])
    assert raw(Sign().encode(x)) == bytes([0b10001001, 0b00000001, 0, 0])
    assert Sign().decode(Sign().encode(x), BlockSpec(shape=(10,))).tolist() == [-1, 1, 1, -1, 1, 1, 1, -1, -1, 1]


def test_a_vote_is_the_sign_of_the_sum_of_signs() -> None:
    spec = BlockSpec(shape=(1000,))
    for num_voters in (1, 2, 3, 4, 9):
        votes = [torch.randn(1000) for _ in range(num_voters)]
        total = torch.stack(votes).sign().sum(dim=0)
        got = Sign().decode(Sign().vote([Sign().encode(x) for x in votes], spec), spec)
        assert torch.equal(got, torch.where(total < 0, -1.0, 1.0)), "ties are +1"
        drawn = Sign(ties="random")
        got = drawn.decode(drawn.vote([drawn.encode(x) for x in votes], spec, Key(5, step=2)), spec)
        want = torch.where(total == 0, (uniform(Key(5, step=2), 1000) - 0.5).sign(), total.sign())
        assert torch.equal(got, want), "ties are what the key draws"


def test_what_is_not_a_vote_is_refused() -> None:
    spec, data = BlockSpec(shape=(100,)), Sign().encode(torch.randn(100))
    with pytest.raises(WireError, match="at least one voter, got none"):
        Sign().vote([], spec)
    for bad in (data[:-4], torch.cat([data, data]), data.float()):
        with pytest.raises(WireError, match="vote: expected a 1-D uint8 tensor of 16 bytes"):
            Sign().vote([data, bad], spec)
    with pytest.raises(WireError, match="vote, out: expected"):
        Sign().vote([data], spec, out=data[:-4])
    with pytest.raises(RecipeError, match="sign:random draws ties: pass key="):
        Sign(ties="random").vote([data], spec)


# --- top-k ----------------------------------------------------------------------------------------------------------


def few(n: int, **values: float) -> Tensor:
    """Return n zeros but for `i12=3.0`, which sets element 12."""
    x = torch.zeros(n)
    for place, value in values.items():
        x[int(place.removeprefix("i"))] = value
    return x


def test_top_k_sends_values_then_indices_in_order_of_index() -> None:
    x = few(5000, i1=-3.0, i3=2.0, i4999=9.0)
    fp32 = TopK(k=3, value_dtype=torch.float32)
    assert raw(fp32.encode(x)) == floats(-3.0, 2.0, 9.0) + struct.pack("<3H", 1, 3, 4999) + b"\0\0"
    assert raw(TopK(density=0.0007).encode(x)) == struct.pack("<3e3H", -3.0, 2.0, 9.0, 1, 3, 4999)
    bf16 = TopK(k=3, value_dtype=torch.bfloat16)
    assert raw(bf16.encode(x)) == bytes.fromhex("40c0 0040 1041") + struct.pack("<3H", 1, 3, 4999)


def test_top_k_sends_indices_first_where_values_are_narrower() -> None:
    x = few(5000, i1=-3.0, i3=2.0, i4999=9.0)
    natural = TopK(k=3, value_dtype="natural")
    codes = bytes([128 + 93, 92, 94])  # -4, 2, 8
    assert raw(natural.encode(x)) == struct.pack("<3H", 1, 3, 4999) + codes + b"\0\0\0"


def test_top_k_packs_indices_below_4096_two_in_three_bytes() -> None:
    x = few(4096, i1=1.0, i2=2.0, i3=3.0, i9=4.0)
    x[0x123], x[0xFED], x[0xFFF] = 5.0, 6.0, 7.0
    packed = bytes.fromhex("01 20 00 03 90 00 23 d1 fe ff 0f")
    expected = floats(1, 2, 3, 4, 5, 6, 7) + packed + b"\0"
    assert raw(TopK(k=7, value_dtype=torch.float32).encode(x)) == expected


def test_top_k_sends_a_bitmap_where_it_is_smaller() -> None:
    x = torch.tensor([0.5, -3.0, 1.0, 2.0, 0.0, 9.0])
    assert raw(TopK(density=0.5, value_dtype=torch.float32).encode(x)) == floats(-3.0, 2.0, 9.0) + bytes(
        [0b101010, 0, 0, 0]
    )
    assert raw(TopK(density=0.5).encode(x)) == struct.pack("<3e", -3.0, 2.0, 9.0) + bytes([0b101010, 0])


def test_chunked_top_k_counts_per_4096() -> None:
    x = few(9000, i5=1.0, i4095=-2.0, i8192=3.0, i8999=-4.0)
    expected = floats(1.0, -2.0, 3.0, -4.0) + struct.pack("<3H", 2, 0, 2) + bytes.fromhex("05 f0 ff 00 70 32")
    assert raw(TopK(k=4, value_dtype=torch.float32, chunked=True).encode(x)) == expected
    codes = bytes([91, 128 + 92, 93, 128 + 93])
    expected = struct.pack("<3H", 2, 0, 2) + codes + bytes.fromhex("05 f0 ff 00 70 32")
    assert raw(TopK(k=4, value_dtype="natural", chunked=True).encode(x)) == expected


def test_top_k_breaks_ties_to_the_lowest_index() -> None:
    q = TopK(density=0.4, value_dtype=torch.float32)
    x = torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0])
    assert raw(q.encode(x)) == floats(-2.0, 2.0) + struct.pack("<2H", 1, 2)
    assert raw(q.encode(torch.zeros(5))) == floats(0.0, 0.0) + struct.pack("<2H", 0, 1)


def test_top_k_indices_are_unsigned() -> None:
    x = torch.zeros(65536)
    x[65535] = 1.0
    x[40000] = -1.0
    q = TopK(density=2 / 65536)
    assert raw(q.encode(x)) == struct.pack("<2e2H", -1.0, 1.0, 40000, 65535)
    assert torch.equal(q.decode(q.encode(x), BlockSpec(shape=(65536,))), x)


@pytest.mark.parametrize(
    ("density", "n", "k"), [(0.01, 1, 1), (0.01, 99, 1), (0.01, 199, 1), (0.01, 200, 2), (1.0, 7, 7), (0.5, 0, 0)]
)
def test_top_k_keeps_at_least_one(density: float, n: int, k: int) -> None:
    assert TopK(density=density).num_kept(n) == k


@pytest.mark.parametrize(("k", "n", "kept"), [(1, 5, 1), (5, 5, 5), (6, 5, 5), (6, 0, 0)])
def test_top_k_by_number_keeps_at_most_all(k: int, n: int, kept: int) -> None:
    assert TopK(k=k).num_kept(n) == kept


def test_top_k_residual_is_what_was_not_sent_and_the_rounding_of_what_was() -> None:
    x, residual = torch.tensor([1.0, 2049.0, -3.0]), torch.zeros(3)
    TopK(density=0.5).encode(x, residual=residual)
    assert residual.tolist() == [1.0, 1.0, -3.0]
    residual = torch.zeros(3)
    TopK(k=2, value_dtype="natural").encode(x, residual=residual)
    assert residual.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("indices", [(5, 6000), (3, 1), (2, 2), (0, 65535)], ids=str)
def test_top_k_refuses_indices_out_of_range_or_order(indices: tuple[int, int]) -> None:
    spec = BlockSpec(shape=(6000,))
    data = torch.frombuffer(bytearray(struct.pack("<2e2H", 1.0, 2.0, *indices)), dtype=torch.uint8)
    out = torch.full((6000,), 7.0)
    with pytest.raises(WireError, match="ascending indices below 6000"):
        TopK(k=2).decode(data, spec, out=out)
    with pytest.raises(WireError, match="ascending indices below 6000"):
        TopK(k=2).accumulate_(out, data, spec)
    assert (out == 7).all()


# --- compositions ---------------------------------------------------------------------------------------------------


def test_composed_values_come_first_then_the_places() -> None:
    x = few(5000, i1=-127.0, i3=2.4, i4999=63.0)
    q = Compose(first=TopK(k=3, value_dtype=torch.float32), then=BlockQuant(bits=8))
    codes, places = struct.pack("<3bx", -127, 2, 63), struct.pack("<3H2x", 1, 3, 4999)
    assert raw(q.encode(x)) == floats(1.0) + codes + places
    residual = torch.zeros(5000)
    data = q.encode(x, residual=residual)
    assert torch.equal(q.decode(data, BlockSpec(shape=(5000,))) + residual, x)
    assert residual.nonzero().tolist() == [[3]]


def test_composed_contracts_multiply() -> None:
    spec, first = BlockSpec(shape=(1000,)), TopK(density=0.1, value_dtype=torch.float32)
    kept = BlockSpec(shape=(100,))

    def delta(then) -> float:
        return Compose(first=first, then=then).contract(spec).delta  # type: ignore[union-attr]

    assert delta(BlockQuant(bits=4)) == 0.1 * BlockQuant(bits=4).contract(kept).delta  # type: ignore[union-attr]
    natural = NaturalDithering(bits=5)
    assert delta(natural) == 0.1 * (1 - 1 / 8)
    coarse = LinearDithering(bits=2)  # omega = 4.5
    assert isinstance(Compose(first=first, then=coarse).contract(spec), NoContract)
    omega = coarse.contract(kept).omega  # type: ignore[union-attr]
    assert delta(Scaled(inner=coarse)) == 0.1 / (1 + omega)


def test_composed_places_are_checked_before_anything_is_written() -> None:
    q, spec = Compose(first=TopK(k=2, value_dtype=torch.float32), then=OneBit()), BlockSpec(shape=(6000,))
    for places in ((5, 6000), (3, 1), (2, 2)):
        bad = floats(1.0) + bytes(4) + struct.pack("<2H", *places)
        out = torch.full((6000,), 7.0)
        with pytest.raises(WireError, match="ascending indices below 6000"):
            q.decode(torch.frombuffer(bytearray(bad), dtype=torch.uint8), spec, out=out)
        assert (out == 7).all()


def test_scaled_sends_the_same_bytes_and_decodes_to_less() -> None:
    inner, spec, key = LinearDithering(bits=3), BlockSpec(shape=(1000,)), Key(1)
    x, q = torch.randn(1000), Scaled(inner=inner)
    data = q.encode(x, key)
    assert torch.equal(data, inner.encode(x, key))
    omega = inner.contract(spec).omega  # type: ignore[union-attr]
    assert torch.equal(q.decode(data, spec), inner.decode(data, spec) * (1 / (1 + omega)))
    residual = torch.zeros(1000)
    q.encode(x, key, residual=residual)
    assert torch.equal(residual, x - q.decode(data, spec))


def test_scaling_keeps_feedback_from_diverging() -> None:
    """Two levels and an L2 norm have an omega of 15: over 300 steps unscaled residuals blow up, scaled ones do not."""
    inner = LinearDithering(bits=2, norm="l2")
    sizes: list[float] = []
    for compressor in (inner, Scaled(inner=inner)):
        residual = torch.zeros(256)
        for step in range(300):
            x = torch.randn(256, generator=torch.Generator().manual_seed(step))
            compressor.encode(x, Key(1, step=step), residual=residual)
            if not residual.abs().max() < 1e15:
                break
        sizes.append(float(residual.norm()))
    assert sizes[0] > 1e6
    assert sizes[1] < 200  # near sqrt(omega) times the norm of a gradient, 16


# --- random-k -------------------------------------------------------------------------------------------------------


def test_random_k_draws_words_times_units() -> None:
    """The first k different ones of floor(word * d / 2^32); where k is more than half, those are left out."""
    key, x = Key(77, step=5, stream=2, offset=300), torch.arange(20).float()
    drawn = list(dict.fromkeys(word * 20 >> 32 for word in words(key, 0, 1000)))
    assert sorted(drawn) == list(range(20))
    sent = [float(i) for i in sorted(drawn[:6])]
    assert raw(RandomK(density=0.3, value_dtype=torch.float32).encode(x, key)) == floats(*sent)
    sent = [float(i) for i in sorted(drawn[6:])]
    assert raw(RandomK(density=0.7, value_dtype=torch.float32).encode(x, key)) == floats(*sent)


def test_words_are_those_of_philox() -> None:
    key = Key(0x0123_4567_89AB_CDEF, step=7, stream=9, offset=2**33 + 5)
    counter = tuple(torch.tensor([value]) for value in (8, 2, 7, 9))  # 2**33 + 5 + 3
    expected = [int(word) for word in philox_4x32_10(counter, (0x89AB_CDEF, 0x0123_4567))]
    assert words(key, 12, 4) == expected
    assert words(key, 13, 2) == expected[1:3]


def test_random_k_by_blocks_pads_the_last() -> None:
    q = RandomK(density=1.0, block=4, value_dtype=torch.float32)
    assert raw(q.encode(torch.arange(1, 7).float(), Key(1))) == floats(1, 2, 3, 4, 5, 6, 0, 0)


def test_rotating_takes_units_in_turn() -> None:
    q, x = RandomK(density=0.25, rotating=True, value_dtype=torch.float32), torch.arange(10).float()
    assert raw(q.encode(x, Key(1, step=5))) == floats(1, 5, 9)
    assert raw(q.encode(x, Key(2, step=6))) == floats(2, 6, 0)  # k = 3; no more of these
    q = RandomK(density=0.5, rotating=True, block=4, value_dtype=torch.float32)
    assert raw(q.encode(x, Key(1, step=2))) == floats(0, 1, 2, 3, 8, 9, 0, 0)


def test_scaled_values_are_multiplied() -> None:
    q, x = RandomK(density=0.3, scaled=True), torch.full((10,), 3.0)
    assert raw(q.encode(x, Key(1))) == raw(torch.full((3,), 3.0) * (torch.tensor(10.0) / 3))


# --- low rank -------------------------------------------------------------------------------------------------------


def test_low_rank_sends_the_scale_and_two_factors() -> None:
    """M = [[6, 0], [8, 0]] is 8 times [[.75, 0], [1, 0]]: s = 8, P = (.6, .8), Q = (1.25, 0), or both negative."""
    x = torch.tensor([[6.0, 0.0], [8.0, 0.0]])
    data = raw(LowRank(rank=1, value_dtype=torch.float32).encode(x, Key(1)))
    expected, negative = [0.6, 0.8, 1.25, 0.0], [-0.6, -0.8, -1.25, 0.0]
    scale, *factors = struct.unpack("<5f", data)
    assert scale == 8.0
    assert factors == pytest.approx(expected) or factors == pytest.approx(negative)
    halves = raw(LowRank(rank=1).encode(x, Key(1)))
    assert halves in (struct.pack("<f4e", 8.0, *expected), struct.pack("<f4e", 8.0, *negative))


def test_low_rank_sends_columns_one_after_another() -> None:
    p, q = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[0.5, -1.0], [0.25, 8.0]]
    columns = [1.0, 3.0, 5.0, 2.0, 4.0, 6.0, 0.5, 0.25, -1.0, 8.0]
    data = torch.frombuffer(bytearray(floats(2.0, *columns)), dtype=torch.uint8)
    decoded = LowRank(rank=2, value_dtype=torch.float32).decode(data, BlockSpec(shape=(3, 2)))
    assert torch.equal(decoded, 2 * torch.tensor(p) @ torch.tensor(q).T)


def test_a_vector_is_a_row_and_sent_as_it_is_but_for_rounding() -> None:
    x = torch.tensor([3.0, -1.5, 0.0, 100.0])
    for shape in ((4,), (4, 1), (1, 1, 4)):
        data = LowRank(rank=3, value_dtype=torch.float32).encode(x.view(shape), Key(1))
        assert raw(data) in (floats(64, 1, *(x / 64)), floats(64, -1, *(-x / 64)))


# --- block quantisation ---------------------------------------------------------------------------------------------


def test_int8_scales_come_first_then_codes() -> None:
    x = torch.zeros(35)
    x[:3] = torch.tensor([127.0, -1.0, 2.4])
    x[32:] = torch.tensor([-254.0, 2.0, 100.0])
    codes = [127, -1, 2] + [0] * 29 + [-127, 1, 50]
    assert raw(BlockQuant(bits=8, block=32).encode(x)) == floats(1.0, 2.0) + struct.pack("35b", *codes) + b"\0"


def test_int4_nibbles_are_planar_within_each_block() -> None:
    # Two blocks, of 32 and of 5 values. Byte j: code j in the low half, code j + ceil(m/2) in the high half.
    first = [
        7,
        -7,
        1,
        2,
        3,
        4,
        5,
        6,
        0,
        -1,
        -2,
        -3,
        -4,
        -5,
        -6,
        7,
        1,
        1,
        1,
        1,
        -1,
        -1,
        -1,
        -1,
        2,
        2,
        2,
        2,
        -2,
        -2,
        -2,
        -2,
    ]
    second = [7, -3, 0, 5, -7]
    x = torch.cat([torch.tensor(first, dtype=torch.float32), torch.tensor(second, dtype=torch.float32) * 0.5])
    packed = [(first[j] & 15) | ((first[j + 16] & 15) << 4) for j in range(16)]
    packed += [0x7 | (5 << 4), (-3 & 15) | ((-7 & 15) << 4), 0x0]
    quant = BlockQuant(bits=4, block=32)
    assert raw(quant.encode(x)) == floats(1.0, 0.5) + bytes(packed) + b"\0"
    assert torch.equal(quant.decode(quant.encode(x), BlockSpec(shape=(37,))), x)


def test_narrow_codes_are_planar_by_limbs() -> None:
    """Five values of 3 bits: two bits of each in two bytes, four to a byte, then one bit of each in one byte."""
    codes = [3, -3, 1, 0, -2]
    x = torch.tensor(codes, dtype=torch.float32)
    twos = [code & 3 for code in codes] + [0, 0, 0]
    ones = sum((code & 7) >> 2 << place for place, code in enumerate(codes))
    packed = [twos[0] | twos[2] << 2 | twos[4] << 4 | twos[6] << 6, twos[1] | twos[3] << 2 | twos[5] << 4, ones]
    assert raw(BlockQuant(bits=3).encode(x)) == floats(1.0) + bytes(packed) + b"\0"


def test_block_quant_rounds_to_nearest_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5])
    decoded = BlockQuant().decode(BlockQuant().encode(x), BlockSpec(shape=(8,)))
    assert decoded.tolist() == [127, 0, 2, 2, 0, -2, 126, -126]


def test_stochastic_rounding_is_floor_of_value_plus_uniform() -> None:
    quant, key = BlockQuant(bits=8, rounding="stochastic"), Key(77, step=5, stream=2, offset=300)
    x = torch.linspace(-127, 127, 512)
    expected = torch.floor(x + uniform(key, 512)).clamp(-127, 127)
    assert torch.equal(quant.decode(quant.encode(x, key), BlockSpec(shape=(512,))), expected)
    assert not torch.equal(expected, x.round())


def test_rotation_spreads_each_value_over_its_group() -> None:
    x = torch.zeros(2 * 32 + 3)
    x[0], x[32 + 5] = 32 * 127.0, 32 * 64.0
    x[64:] = torch.tensor([100.0, -50.0, 0.0])  # the rest of the last group: only divided by sqrt(32)
    row = [64 * (-1) ** (i & 5).bit_count() for i in range(32)]  # of the Hadamard matrix
    quant = BlockQuant(bits=8, rotation=32)
    data = quant.encode(x)
    assert raw(data) == floats(1.0) + struct.pack("67b", *[127] * 32, *row, 18, -9, 0) + b"\0"
    decoded = quant.decode(data, BlockSpec(shape=(67,)))
    assert torch.equal(decoded[:64], x[:64])
    assert decoded[64:].tolist() == pytest.approx([18 * 32**0.5, -9 * 32**0.5, 0], rel=1e-6)


@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3, 2])
@pytest.mark.parametrize("peak", [0.1, 1.0, 3.0, 1e-38, 1e-44, 3e38, torch.finfo(torch.float32).max])
def test_the_peak_of_a_block_is_never_clipped(bits: int, peak: float) -> None:
    quant = BlockQuant(bits=bits)  # type: ignore[arg-type]
    x = torch.tensor([peak, -peak, 0.0])
    decoded = quant.decode(quant.encode(x), BlockSpec(shape=(3,)))
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, x, rtol=2.0**-22, atol=2.0**-149 * quant.levels)


# --- block casts ----------------------------------------------------------------------------------------------------


def test_e4m3_is_sign_exponent_mantissa_of_bias_7() -> None:
    # Steps of 2 between 16 and 32; below 2^-6 steps of 2^-9. Ties go to the even code.
    x = torch.tensor([448.0, 1.0, -17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-6, -0.0])
    codes = bytes([0x7E, 0x38, 0xD8, 0x5A, 0x01, 0x00, 0x02, 0x08, 0x80])
    assert raw(BlockCast().encode(x)) == floats(1.0) + codes + b"\0\0\0"
    assert raw(BlockCast().encode(x * 0.5)) == floats(0.5) + codes + b"\0\0\0"


def test_e5m2_is_the_upper_half_of_float16() -> None:
    x = torch.tensor([-57344.0, 1.0, 1.125, 1.375, 2.0**-16, 2.0**-17, 0.0])
    codes = bytes([0xFB, 0x3C, 0x3C, 0x3E, 0x01, 0x00, 0x00])
    assert raw(BlockCast(format="e5m2").encode(x)) == floats(1.0) + codes + b"\0"


def test_e3m0_is_a_power_of_two_two_to_a_byte() -> None:
    # Half-way between powers of two, and between 0 and 2^-6, the even code.
    x = torch.tensor([1.0, -0.5, 2.0**-6, 0.75, 0.375, -0.01, 2.0**-7, -0.0])
    codes = [7, 8 | 6, 1, 6, 6, 8 | 1, 0, 8]
    packed = bytes([codes[j] | codes[j + 4] << 4 for j in range(4)])
    assert raw(BlockCast(format="e3m0").encode(x)) == floats(1.0) + packed
    assert raw(BlockCast(format="e3m0").encode(x * 3)) == floats(3.0) + packed


def test_e3m0_codes_are_those_of_natural_dithering() -> None:
    x, key, spec = torch.randn(999), Key(1), BlockSpec(shape=(999,))
    natural = NaturalDithering(bits=4, block=512)
    data = natural.encode(x, key)
    assert torch.equal(BlockCast(format="e3m0").decode(data, spec), natural.decode(data, spec))


# --- dithering ------------------------------------------------------------------------------------------------------


def test_linear_dithering_sends_one_scale_and_steps_of_it() -> None:
    x = torch.tensor([6.0, -4.0, 0.0, 2.0, -6.0])  # on levels: nothing is left to chance
    twos, ones = [3, 2, 0, 1, 1], 0b10010  # 3, -2, 0, 1 and -3 in two's complement of 3 bits
    packed = [twos[0] | twos[2] << 2 | twos[4] << 4, twos[1] | twos[3] << 2, ones]
    assert raw(LinearDithering(bits=3).encode(x, Key(1))) == floats(2.0) + bytes(packed) + b"\0"
    # The L2 norm of (3, 4) is 5; with 127 levels 5/127 is a step.
    l2 = LinearDithering(bits=8, norm="l2")
    x, key = torch.tensor([3.0, -4.0]), Key(5)
    codes = torch.floor(x / (torch.tensor(5.0) / 127) + uniform(key, 2)).to(torch.int8).tolist()
    assert raw(l2.encode(x, key)) == raw(torch.tensor([5.0]) / 127) + struct.pack("<2b", *codes) + b"\0\0"


def test_natural_dithering_sends_exponents_below_the_scale() -> None:
    x = torch.tensor([8.0, -4.0, 2.0, -0.0, -8.0])  # the levels of 3 bits: 8, 4, 2 and 0
    codes = [3, 2 | 4, 1, 0, 3 | 4]
    twos, ones = [code & 3 for code in codes], 0b10010
    packed = [twos[0] | twos[2] << 2 | twos[4] << 4, twos[1] | twos[3] << 2, ones]
    assert raw(NaturalDithering(bits=3).encode(x, Key(1))) == floats(8.0) + bytes(packed) + b"\0"
    eight = NaturalDithering(bits=8)
    assert raw(eight.encode(torch.tensor([1.0, -(2.0**-126)]), Key(1))) == floats(1.0) + bytes([127, 129]) + b"\0\0"


def test_natural_dithering_rounds_up_with_the_probability_of_the_fraction() -> None:
    key, n = Key(77, step=5, stream=2, offset=300), 4096
    x = torch.full((n,), 1.25)
    x[0] = 2.0
    decoded = NaturalDithering(bits=4).decode(NaturalDithering(bits=4).encode(x, key), BlockSpec(shape=(n,)))
    up = uniform(key, n) + 0.25 >= 1  # 1.25 lies a quarter of the way from 1 to 2
    assert torch.equal(decoded[1:], torch.where(up, 2.0, 1.0)[1:])


def test_a_norm_beyond_float32_is_the_largest_float32() -> None:
    top = torch.finfo(torch.float32).max
    for kind in (LinearDithering(bits=8, norm="l2"), NaturalDithering(bits=8, norm="l2")):
        decoded = kind.decode(kind.encode(torch.full((64,), top), Key(1)), BlockSpec(shape=(64,)))
        torch.testing.assert_close(decoded, torch.full((64,), top), rtol=1e-6, atol=0)


# --- natural compression, TernGrad ----------------------------------------------------------------------------------


def test_natural_compression_sends_exponents_and_signs() -> None:
    """Of powers of two nothing is left to chance."""
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0**18, -(2.0**-108), 0.25])
    codes = [109, 128 + 109, 0, 0, 127, 128 + 1, 107]  # c stands for 2^(c - 109)
    assert raw(NaturalCompression(bits=8).encode(x, Key(1))) == bytes(codes) + b"\0"
    # 9 bits: the exponent fields of float32, then the signs: of codes 0, 2, ... in one byte and 1, 3, ... in another.
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0**127, -(2.0**-126), 0.25, -2.0, 4.0, -4.0])
    exponents = [127, 127, 0, 0, 254, 1, 125, 128, 129, 129]
    signs = [0, 0b11101]  # of codes 1, 5, 7 and 9, in the second
    nine = NaturalCompression(bits=9)
    assert raw(nine.encode(x, Key(1))) == bytes(exponents + signs)
    assert torch.equal(nine.decode(nine.encode(x, Key(1)), BlockSpec(shape=(10,))), x)


@pytest.mark.parametrize("bits", [8, 9])
def test_natural_compression_rounds_up_with_the_probability_of_the_fraction(bits) -> None:
    kind, key, n = NaturalCompression(bits=bits), Key(77, step=5, stream=2, offset=300), 4096
    u = uniform(key, n)
    for value, low, high, fraction in (
        (1.25, 1.0, 2.0, 0.25),
        (-7.5, -4.0, -8.0, 0.875),
        (kind.smallest * 0.375, 0.0, kind.smallest, 0.375),  # with 9 bits a denormal value
        (2.0**-149, 0.0, kind.smallest, 2.0**-149 / kind.smallest),
    ):
        decoded = kind.decode(kind.encode(torch.full((n,), value), key), BlockSpec(shape=(n,)))
        assert torch.equal(decoded, torch.where(u + fraction >= 1, high, low)), value


@pytest.mark.parametrize(("bits", "largest"), [(8, 2.0**18), (9, 2.0**127)])
def test_natural_compression_refuses_what_it_has_no_room_for(bits, largest: float) -> None:
    """Never clipped, whatever chance would make of it."""
    kind = NaturalCompression(bits=bits)
    assert kind.decode(kind.encode(torch.tensor([-largest]), Key(1)), BlockSpec(shape=(1,))).item() == -largest
    for step in range(20):
        with pytest.raises(ValueError, match="overflow"):
            kind.encode(torch.tensor([1.0, -largest * (1 + 2.0**-23)]), Key(1, step))


def test_terngrad_sends_five_codes_a_byte() -> None:
    x = torch.tensor([2.0, -2.0, 0.0, 2.0, 2.0, -2.0, 0.0])  # on levels: nothing is left to chance
    digits = [1, 2, 0, 1, 1, 2, 0, 0, 0, 0]  # each code modulo 3; h = 2
    packed = [digits[j] + 3 * digits[j + 2] + 9 * digits[j + 4] + 27 * digits[j + 6] for j in range(2)]
    assert packed == [1 + 0 + 9 + 0, 2 + 3 + 18 + 0]
    assert raw(TernGrad().encode(x, Key(1))) == floats(2.0) + bytes([10, 23, 0, 0])
    assert raw(TernGrad().encode(torch.full((5,), -3.0), Key(1))) == floats(3.0) + bytes([242, 0, 0, 0])
    # Two blocks, of 32 and of 1 values: 7 bytes and 1.
    x = torch.cat([torch.full((32,), 1.0), torch.tensor([-4.0])])
    ones = [1 + 3 + 9 + 27 + 81] * 4 + [1 + 3 + 9 + 27] * 3
    assert raw(TernGrad(block=32).encode(x, Key(1))) == floats(1.0, 4.0) + bytes([*ones, 2])


def test_terngrad_sends_values_with_the_probability_of_their_size() -> None:
    key, n = Key(77, step=5, stream=2, offset=300), 512
    x = torch.linspace(-4, 4, n)
    expected = torch.floor(x / 4 + uniform(key, n)) * 4
    assert torch.equal(TernGrad().decode(TernGrad().encode(x, key), BlockSpec(shape=(n,))), expected)


def test_terngrad_clips_at_sigmas() -> None:
    x = torch.zeros(64)
    x[7] = -16.0  # the root of the mean square is 2
    assert raw(TernGrad(clip=2.5).encode(x, Key(1)))[:4] == floats(5.0)
    residual = torch.zeros(64)
    kind = TernGrad(clip=2.5)
    decoded = kind.decode(kind.encode(x, Key(1), residual=residual), BlockSpec(shape=(64,)))
    assert (decoded[7].item(), residual[7].item()) == (-5.0, -11.0)
    assert raw(TernGrad(clip=9.0).encode(x, Key(1)))[:4] == floats(16.0)
    # Over the true length of the last block, never over padding.
    assert raw(TernGrad(block=64, clip=1.0).encode(torch.full((65,), -0.75), Key(1)))[:8] == floats(0.75, 0.75)


def test_terngrad_refuses_bytes_of_no_five_codes() -> None:
    data, spec = TernGrad().encode(torch.ones(50), Key(1)), BlockSpec(shape=(50,))
    data[4 + 3] = 243
    out = torch.full((50,), 7.0)
    with pytest.raises(WireError, match="below 243, five codes each, got 243 at byte 3"):
        TernGrad().decode(data, spec, out=out)
    with pytest.raises(WireError, match="below 243"):
        TernGrad().accumulate_(out, data, spec)
    assert (out == 7).all()


# --- one scale for all ranks ----------------------------------------------------------------------------------------


def test_global_linear_sends_codes_alone() -> None:
    x, shared = (
        torch.tensor([84.0, -42.0, 0.0, 2.0, -84.0]),
        torch.tensor([84.0]),
    )  # on levels: nothing is left to chance
    assert raw(GlobalLinear(summands=3).encode(x, Key(1), shared=shared)) == struct.pack("<5b3x", 42, -21, 0, 1, -42)
    four = GlobalLinear(bits=4, summands=2)  # 3 levels, 28 each
    x = torch.tensor([84.0, -28.0, 0.0, -84.0, 56.0])
    numbers = [3 + 16 * -3, -1 + 16 * 2, 0]
    assert raw(four.encode(x, Key(1), shared=shared)) == struct.pack("<3bx", *numbers)
    added = torch.tensor([2 * number for number in numbers] + [0], dtype=torch.int8).view(torch.uint8)
    assert torch.equal(four.decode(added, BlockSpec(shape=(5,)), shared=shared), 2 * x)


def test_global_linear_rounds_as_floor_of_value_plus_uniform() -> None:
    key, x = Key(77, step=5, stream=2, offset=300), torch.linspace(-63, 63, 500)
    codes = torch.floor(x + uniform(key, 500)).clamp(-63, 63)
    data = GlobalLinear(summands=2).encode(x, key, shared=torch.tensor([63.0]))
    assert torch.equal(data.view(torch.int8).float(), codes)


@pytest.mark.parametrize(
    ("kind", "statistics", "norm"),
    [
        (GlobalExponential(), (4.0, 12.0), 12.0),
        (GlobalExponential(norm="l2"), (5.0, 12.0), 12.0),
        (GlobalExponential(norm="l2", across="l2"), (25.0, 144.0), 13.0),
        (GlobalExponential(across="l2"), (16.0, 144.0), 160.0**0.5),
    ],
    ids=str,
)
def test_global_norms_across_ranks(kind: GlobalExponential, statistics: tuple[float, float], norm: float) -> None:
    found = [kind.statistic(x) for x in (torch.tensor([3.0, -4.0]), torch.tensor([0.0, 12.0]))]
    assert [x.tolist() for x in found if x is not None] == [[statistic] for statistic in statistics]
    shared = torch.tensor([sum(statistics) if kind.statistic_reduction == "sum" else max(statistics)])
    top = torch.tensor([kind.levels] * 4, dtype=torch.uint8)
    assert kind.decode(top, BlockSpec(shape=(4,)), shared=shared).tolist() == pytest.approx([norm] * 4)


def test_global_exponential_sends_a_sign_and_an_exponent() -> None:
    x, shared = torch.tensor([8.0, -4.0, 2.0, -0.0, -8.0]), torch.tensor([8.0])
    kind = GlobalExponential(summands=5)  # three doublings are kept free
    assert kind.levels == 124
    assert raw(kind.encode(x, Key(1), shared=shared)) == bytes([124, 128 + 123, 122, 0, 128 + 124, 0, 0, 0])


def test_chunks_send_their_values() -> None:
    x, shared = torch.arange(1, 21).float(), torch.tensor([1.0, 5.0, 5.0])
    q = TopKC(density=0.4, chunk=8)
    statistic = q.statistic(x)
    assert statistic is not None
    assert statistic.tolist() == [204.0, 1292.0, 1374.0]
    assert raw(q.encode(x, shared=shared)) == struct.pack("<8e", *range(9, 17))
    q = TopKC(density=0.7, chunk=8, value_dtype=torch.float32)
    assert raw(q.encode(x, shared=shared)) == floats(*range(9, 21), 0, 0, 0, 0)


def test_terngrad_sends_codes_alone_where_the_scale_is_shared() -> None:
    x = torch.tensor([2.0, -2.0, 0.0, 2.0, 2.0, -2.0, 0.0])
    kind, shared = TernGrad(shared=True), torch.tensor([2.0])
    assert raw(kind.encode(x, Key(1), shared=shared)) == bytes([10, 23, 0, 0])  # h = 2, as without
    assert torch.equal(kind.decode(kind.encode(x, Key(1), shared=shared), BlockSpec(shape=(7,)), shared=shared), x)
    # A scale of another sender, 4: the codes are of that, by the uniform; two blocks, of 32 and of 1 values.
    kind, shared, key = TernGrad(shared=True, block=32), torch.tensor([4.0, 8.0]), Key(77, step=5, stream=2, offset=300)
    x, scales = torch.linspace(-3, 3, 33), torch.tensor([4.0] * 32 + [8.0])
    data = kind.encode(x, key, shared=shared)
    expected = torch.floor(x / scales + uniform(key, 33)) * scales
    assert data.numel() == 7 + 1
    assert torch.equal(kind.decode(data, BlockSpec(shape=(33,)), shared=shared), expected)


def test_global_reductions_are_by_the_uniform() -> None:
    key = Key(9, step=1, offset=40)
    u, spec, shared = uniform(key, 64), BlockSpec(shape=(64,)), torch.tensor([127.0])
    kind = GlobalLinear(halving=True)
    a, b = torch.full((64,), 9.0), torch.full((64,), 4.0)
    one, two = (kind.encode(x, Key(1), shared=shared) for x in (a, b))
    assert torch.equal(kind.decode(kind.reduce_(one, two, spec, key), spec, shared=shared), torch.floor(6.5 + u))
    kind = GlobalExponential()
    a, b, shared = torch.full((64,), 8.0), torch.full((64,), 2.0), torch.tensor([8.0])
    one, two = (kind.encode(x, Key(1), shared=shared) for x in (a, b))
    summed = kind.decode(kind.reduce_(two, one, spec, key), spec, shared=shared)
    assert bool((summed == 8.0).all()), "settings for one sender keep no code free for a sum"
    kind = GlobalExponential(summands=2)
    one, two = (kind.encode(x, Key(1), shared=shared) for x in (a, b))
    summed = kind.decode(kind.reduce_(two, one, spec, key), spec, shared=shared)
    assert torch.equal(summed, torch.where(u < 0.25, 16.0, 8.0))


# --- min-max --------------------------------------------------------------------------------------------------------


def test_min_max_sends_both_ends_of_every_block_then_codes() -> None:
    x = torch.zeros(35)
    x[:32] = torch.linspace(-1, 30, 32)
    x[32:] = torch.tensor([5.0, 20.0, 6.0])
    expected = floats(-1, 30, 5, 20) + bytes([round(255 * i / 31) for i in range(32)]) + bytes([0, 255, 17])
    assert raw(MinMax(bits=8, block=32).encode(x)) == expected + b"\0"
    x = torch.tensor([5.0, 12.0, 6.0, 10.0, 9.0])  # codes 0, 7, 1, 5, 4 of 3 bits
    twos, ones = [0, 3, 1, 1, 0], 0b11010
    packed = [twos[0] | twos[2] << 2 | twos[4] << 4, twos[1] | twos[3] << 2, ones]
    assert raw(MinMax(bits=3).encode(x)) == floats(5, 12) + bytes(packed) + b"\0"
    assert raw(MinMax(bits=1).encode(torch.tensor([1.0, -1.0, 0.5]))) == floats(-1, 1) + bytes([0b101, 0, 0, 0])


PAPER = torch.tensor([-1.0, -0.2, 0.1, 0.45, 2.0])  # the papers' rules worked out for these


@pytest.mark.parametrize(
    ("bits", "codes", "values"),
    [
        (2, [0, 1, 1, 1, 3], [-1, 0, 0, 0, 2]),
        (4, [0, 4, 6, 7, 15], [-1, -0.2, 0.2, 0.4, 2]),
        (8, [0, 68, 94, 123, 255], [-1, -0.2, 0.105882, 0.447059, 2]),
    ],
)
def test_the_affine_rule(bits: int, codes: list[int], values: list[float]) -> None:
    data = MinMax(bits=bits).encode(PAPER)  # type: ignore[arg-type]
    assert raw(data[:8]) == floats(-1, 2)
    assert unpack(data[8:], 5, bits, 5).tolist() == codes
    decoded = MinMax(bits=bits).decode(data, BlockSpec(shape=(5,)))  # type: ignore[arg-type]
    assert decoded.tolist() == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(
    ("bits", "codes", "values"),
    [
        (2, [1, 2, 2, 2, 3], [-1, 0, 0, 0, 1]),
        (3, [2, 4, 4, 5, 7], [-1, 0, 0, 0.5, 1.5]),
        (4, [4, 7, 8, 10, 15], [-1, -0.25, 0, 0.5, 1.75]),
        (8, [64, 115, 134, 157, 255], [-1, -0.203125, 0.09375, 0.453125, 1.984375]),
    ],
)
def test_the_quantiser_of_aq_sgd(bits: int, codes: list[int], values: list[float]) -> None:
    data = FixedPoint(bits=bits).encode(PAPER)  # type: ignore[arg-type]
    assert raw(data[:2]) == torch.tensor([2.0], dtype=torch.float16).numpy().tobytes()
    assert unpack(data[2:], 5, bits, 5).tolist() == codes
    assert FixedPoint(bits=bits).decode(data, BlockSpec(shape=(5,))).tolist() == values  # type: ignore[arg-type]


def test_fixed_point_scales_have_the_range_of_float16() -> None:
    tiny = torch.tensor([2.9e-8, -1e-9])
    assert FixedPoint(bits=8).decode(FixedPoint(bits=8).encode(tiny), BlockSpec(shape=(2,))).tolist() == [0, 0]
    with pytest.raises(ValueError, match="fit its wire dtype"):
        FixedPoint(bits=8).encode(torch.tensor([65520.0, 1.0]))


def test_the_rule_of_bagua() -> None:
    bagua = MinMax(bits=8, rule="bagua")
    data = bagua.encode(PAPER)
    assert raw(data) == floats(-1, 2) + bytes([0, 68, 93, 123, 255]) + b"\0\0\0"
    decoded = bagua.decode(data, BlockSpec(shape=(5,))).tolist()
    assert decoded == pytest.approx([-1, -0.2, 0.094118, 0.447059, 2], abs=1e-6)


def test_bagua_sends_what_is_small_beside_its_epsilon_as_zeros() -> None:
    bagua = MinMax(bits=8, rule="bagua")
    x = torch.tensor([1e-10, -1e-10, 1e-9])  # a step is 1e-7 / 255
    assert bagua.decode(bagua.encode(x), BlockSpec(shape=(3,))).tolist() == pytest.approx([0, 0, 3e-7 / 255], rel=0.02)


@pytest.mark.parametrize("rule", ["affine", "bagua"])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -1e-9, 1e-44, 3e38, -torch.finfo(torch.float32).max])
def test_constant_blocks_come_back_exactly(rule: str, value: float) -> None:
    for n in (1, 2, 600):
        compressor, x = MinMax(bits=8, rule=rule), torch.full((n,), value)  # type: ignore[arg-type]
        assert torch.equal(compressor.decode(compressor.encode(x), BlockSpec(shape=(n,))), x)


@pytest.mark.parametrize("rule", ["affine", "bagua"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ranges_may_exceed_float32(rule: str, bits: int) -> None:
    top = torch.finfo(torch.float32).max
    compressor, x = MinMax(bits=bits, rule=rule), torch.tensor([top, -top, 0.3 * top, 1.0])  # type: ignore[arg-type]
    error = compressor.decode(compressor.encode(x), BlockSpec(shape=(4,))).double() - x.double()
    assert error.abs().max() <= top / compressor.levels * 1.001


@pytest.mark.parametrize("rule", ["affine", "bagua"])
def test_a_narrow_range_far_from_zero_keeps_its_resolution(rule: str) -> None:
    x = 1000 + torch.arange(1000) * 2.0**-13
    compressor = MinMax(bits=8, rule=rule)  # type: ignore[arg-type]
    error = compressor.decode(compressor.encode(x), BlockSpec(shape=(1000,))) - x
    assert error.abs().max() <= 0.5 * float(x.max() - x.min()) / 255 + 2.0**-14


@pytest.mark.parametrize(
    ("compressor", "numel", "nbytes"),
    [
        (Identity(), 1000, 4000),
        (Cast(), 1001, 2004),
        (BlockQuant(bits=8), 65536, 128 * 4 + 65536),
        (BlockQuant(bits=4), 65536, 128 * 4 + 32768),
        (BlockQuant(bits=4, rotation=128), 513, 2 * 4 + 256 + 1 + 3),
        (BlockQuant(bits=4), 513, 2 * 4 + 256 + 1 + 3),
        (BlockQuant(bits=7), 65536, 128 * 4 + 7 * 8192),
        (BlockQuant(bits=7), 515, 2 * 4 + 448 + (2 + 1 + 1)),
        (BlockCast(), 65536, 128 * 4 + 65536),
        (BlockCast(format="e5m2", block=64), 65, 2 * 4 + 65 + 3),
        (BlockCast(format="e3m0"), 513, 2 * 4 + 256 + 1 + 3),
        (LinearDithering(bits=5), 65536, 4 + 5 * 8192),
        (LinearDithering(bits=4, norm="l2", block=512), 513, 2 * 4 + 256 + 1 + 3),
        (NaturalDithering(bits=3), 1000, 4 + 250 + 125 + 1),
        (NaturalCompression(bits=8), 1001, 1001 + 3),
        (NaturalCompression(bits=9), 65536, 65536 + 8192),
        (NaturalCompression(bits=9), 1001, 1001 + 126 + 1),
        (TernGrad(), 65536, 4 + 13108),
        (TernGrad(block=512), 65536, 128 * (4 + 103)),
        (TernGrad(block=64), 130, 3 * 4 + 13 + 13 + 1 + 1),
        (TernGrad(shared=True), 65536, 13108),
        (TernGrad(shared=True, block=64), 130, 13 + 13 + 1 + 1),
        (MinMax(bits=8), 65536, 8 + 65536),
        (FixedPoint(bits=8), 65536, 4 + 65536),
        (FixedPoint(bits=3, block=512), 513, 2 * 2 + 128 + 64 + 2 + 2),
        (MinMax(bits=1, block=512), 65536, 128 * 8 + 8192),
        (MinMax(bits=4, rule="bagua", block=512), 513, 2 * 8 + 256 + 1 + 3),
        (OneBit(), 65536, 4 + 8192),
        (Sign(), 65, 9 + 3),
        (TopK(density=0.01), 65536, 655 * 4),
        (TopK(density=0.001, value_dtype=torch.float32), 65536, 65 * 6 + 2),
        (LowRank(rank=4), 65536, 4 + 2 * (1 + 65536) + 2),
        (Compose(first=TopK(value_dtype=torch.float32), then=BlockQuant()), 65536, 2 * 4 + 655 + 1 + 655 * 2 + 2),
        (Scaled(inner=NaturalDithering(bits=3)), 1000, 4 + 250 + 125 + 1),
        (RandomK(density=0.01), 65536, 655 * 2 + 2),
        (RandomK(density=0.01, block=64), 65536, 10 * 64 * 2),
        (RandomK(density=0.01, rotating=True), 65536, 656 * 2),
        (GlobalLinear(bits=8), 1001, 1004),
        (GlobalLinear(bits=4, halving=True), 1001, 501 + 3),
        (GlobalExponential(), 65536, 65536),
        (TopKC(density=0.01), 65536, 10 * 64 * 2),
    ],
    ids=lambda value: value.recipe() if hasattr(value, "recipe") else str(value),
)
def test_sizes(compressor, numel: int, nbytes: int) -> None:
    assert compressor.nbytes(BlockSpec(shape=(numel,))) == nbytes
