"""What the compiled kernels refuse, before memory is touched."""

from types import ModuleType

import pytest
import torch
from cases import KINDS, Kind

from thinwire.errors import WireError
from thinwire.kernels.jobs import DecodeBatch, DecodeJob, EncodeBatch, EncodeJob
from thinwire.random import Key
from thinwire.wire import align

KEY = Key(1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_wrong_tensors(native: ModuleType, kind: Kind) -> None:
    n = 64
    x, nbytes = torch.randn(n), align(kind.nbytes(n))
    out = torch.zeros(nbytes, dtype=torch.uint8)
    bad = [
        EncodeJob(x.double(), out, key=KEY),
        EncodeJob(torch.randn(2 * n)[::2], out, key=KEY),
        EncodeJob(x.to("meta"), out, key=KEY),
        EncodeJob(x, out.view(torch.int8), key=KEY),
        EncodeJob(x, out, torch.zeros(n - 1), key=KEY),
        EncodeJob(x, out, torch.zeros(n, dtype=torch.float64), key=KEY),
    ]
    if kind.nbytes(n):
        bad.append(EncodeJob(x, out[: kind.nbytes(n) - 1], key=KEY))
    for job in bad:
        with pytest.raises(ValueError, match=r"expected .*, got"):
            kind.encode(native, [job])
    with pytest.raises(ValueError, match="threads: expected at least 1, got 0"):
        kind.encode(native, [EncodeJob(x, out, key=KEY)], threads=0)
    with pytest.raises(ValueError, match=r"out: expected a contiguous torch\.float32"):
        kind.decode(native, [DecodeJob(out, x.double(), key=KEY)])
    with pytest.raises(ValueError, match=r"data: expected a contiguous torch\.uint8"):
        kind.decode(native, [DecodeJob(out.view(torch.int8), x, key=KEY)])


def test_stochastic_needs_a_key(native: ModuleType) -> None:
    job = EncodeJob(torch.randn(4), torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="needs a key"):
        native.encode_block_quant([job], bits=8, block=512, stochastic=True)


def test_drawing_needs_keys(native: ModuleType) -> None:
    x, out = torch.randn(4), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="needs a key"):
        native.encode_random_k([EncodeJob(x, out)], k=[2], dtype=torch.float32)
    with pytest.raises(AssertionError, match="needs a key"):
        native.decode_random_k([DecodeJob(out, x)], k=[2], dtype=torch.float32)


def test_units_out_of_range(native: ModuleType) -> None:
    encode, decode = (
        EncodeJob(torch.randn(8), torch.zeros(100, dtype=torch.uint8), key=KEY),
        DecodeJob(torch.zeros(100, dtype=torch.uint8), torch.zeros(8), key=KEY),
    )
    for k, settings, least, most in ((9, {}, 0, 8), (-1, {}, 0, 8), (3, {"block": 4}, 0, 2), (3, {"period": 2}, 4, 8)):
        with pytest.raises(ValueError, match=f"k between {least} and {most}, got {k}"):
            native.encode_random_k([encode], k=[k], dtype=torch.float32, **settings)
        with pytest.raises(ValueError, match=f"k between {least} and {most}, got {k}"):
            native.decode_random_k([decode], k=[k], dtype=torch.float32, **settings)
    with pytest.raises(ValueError, match="block from 1 to 65536"):
        native.encode_random_k([encode], k=[1], dtype=torch.float32, block=0)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        native.decode_random_k([decode], k=[1], dtype=torch.uint8)


def test_settings_out_of_range(native: ModuleType) -> None:
    x, out = torch.randn(8), torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected 2 to 8 bits"):
        native.encode_block_quant([EncodeJob(x, out)], bits=9, block=512, stochastic=False)
    with pytest.raises(ValueError, match="block of at least 1"):
        native.decode_block_quant([DecodeJob(out, x)], bits=8, block=0)
    with pytest.raises(ValueError, match="rotation: expected 32 or 128"):
        native.decode_block_quant([DecodeJob(out, x)], bits=8, block=512, rotation=64)
    with pytest.raises(ValueError, match="a block that it divides, got 128 and 64"):
        native.encode_block_quant([EncodeJob(x, out)], bits=8, block=64, stochastic=False, rotation=128)
    with pytest.raises(ValueError, match="expected a format of e4m3, e5m2, e3m0"):
        native.encode_block_cast([EncodeJob(x, out)], format="e2m1", block=512)
    with pytest.raises(ValueError, match="block of at least 1"):
        native.decode_block_cast([DecodeJob(out, x)], format="e4m3", block=0)
    with pytest.raises(ValueError, match="dithering: expected 2 to 8 bits"):
        native.encode_dither([EncodeJob(x, out, key=KEY)], bits=1, block=0, natural=False, l2=False)
    with pytest.raises(ValueError, match="block of at least 0"):
        native.decode_dither([DecodeJob(out, x)], bits=8, block=-1, natural=True)
    with pytest.raises(ValueError, match="min-max: expected 1 to 8 bits"):
        native.encode_min_max([EncodeJob(x, out)], bits=0, block=0, bagua=False, stochastic=False)
    with pytest.raises(ValueError, match="rounds to nearest"):
        native.encode_min_max([EncodeJob(x, out)], bits=8, block=0, bagua=True, stochastic=True)
    with pytest.raises(ValueError, match="block of at least 0"):
        native.decode_min_max([DecodeJob(out, x)], bits=8, block=-1, bagua=True)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        native.encode_cast([EncodeJob(x, out)], dtype=torch.float64)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        native.encode_top_k([EncodeJob(x, out)], k=[1], dtype=torch.int8)
    with pytest.raises(ValueError, match="selection: expected one of exact, sampled, bisect, got 'random'"):
        native.encode_top_k([EncodeJob(x, out)], k=[1], dtype=torch.float32, selection="random")
    for k in (-1, 9):
        with pytest.raises(ValueError, match=f"expected k between 0 and 8, got {k}"):
            native.encode_top_k([EncodeJob(x, out)], k=[k], dtype=torch.float32)
    with pytest.raises(ValueError, match="expected k of at least 0, got -1"):
        native.decode_top_k([DecodeJob(out, x)], k=[-1], dtype=torch.float32)
    long = torch.zeros(65537)
    with pytest.raises(ValueError, match="at most 65536 elements"):
        native.encode_top_k([EncodeJob(long, out)], k=[1], dtype=torch.float32)
    with pytest.raises(ValueError, match="at most 65536 elements"):
        native.decode_top_k([DecodeJob(out, long)], k=[1], dtype=torch.float32)


def test_a_bad_index_is_named_and_no_job_is_written(native: ModuleType) -> None:
    def data(indices: list[int]) -> torch.Tensor:
        values = torch.ones(len(indices)).view(torch.uint8)
        return torch.cat([values, torch.tensor(indices).to(torch.int16).view(torch.uint8)])

    for threads in (1, 2):
        outs = [torch.full((5000,), 7.0), torch.full((5000,), 7.0)]
        jobs = [DecodeJob(data([1, 2, 3, 4]), outs[0]), DecodeJob(data([1, 9, 8, 60]), outs[1])]
        with pytest.raises(WireError, match="index number 2 of job 1 is 8 after 9"):
            native.decode_top_k(jobs, k=[4, 4], dtype=torch.float32, threads=threads)
        assert all(bool((out == 7.0).all()) for out in outs)


def test_a_bitmap_or_counts_of_too_many_are_named(native: ModuleType) -> None:
    values, out = torch.ones(4).view(torch.uint8), torch.full((8,), 7.0)
    bitmap = torch.cat([values, torch.tensor([0b11111, 0, 0, 0], dtype=torch.uint8)])
    with pytest.raises(WireError, match="expected 4 ascending indices below 8; job 0 has 5"):
        native.decode_top_k([DecodeJob(bitmap, out)], k=[4], dtype=torch.float32)
    counts = torch.cat([values, torch.tensor([3, 0, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)])
    with pytest.raises(WireError, match="expected 4 ascending indices below 8; job 0 has 3"):
        native.decode_top_k([DecodeJob(counts, out)], k=[4], dtype=torch.float32, chunked=True)
    assert bool((out == 7.0).all())


def test_a_batch_is_checked_again_for_another_kernel(native: ModuleType) -> None:
    """Its packed addresses are trusted for the payloads they were checked for, and for no others."""
    buffer = torch.zeros(8, dtype=torch.uint8)
    batch = EncodeBatch([torch.randn(4096)], [None], [KEY], [0], [8])
    batch.at(buffer, step=0, residual_scales=[1.0])
    native.encode_top_k(batch, k=[1], dtype=torch.float32)
    native.encode_top_k(batch, k=[1], dtype=torch.float32)
    with pytest.raises(ValueError, match="out: expected at least 16384 bytes"):
        native.encode_cast(batch, dtype=torch.float32)
    with pytest.raises(ValueError, match="expected at least 12 bytes"):
        native.encode_top_k(batch, k=[2], dtype=torch.float32)
    with pytest.raises(ValueError, match="expected k between 0 and 4096"):
        native.encode_top_k(batch, k=[5000], dtype=torch.float32)
    with pytest.raises(ValueError, match="expected 1 residual scales, got 2"):
        batch.at(buffer, step=0, residual_scales=[1.0, 1.0])
    with pytest.raises(ValueError, match="buffer of at least 8 bytes"):
        batch.at(buffer[:7], step=0, residual_scales=[1.0])

    decode = DecodeBatch([torch.zeros(4096)], [0], [8])
    decode.at(buffer)
    native.decode_top_k(decode, k=[1], dtype=torch.float32)
    with pytest.raises(WireError, match="expected at least 16384 bytes"):
        native.decode_cast(decode, dtype=torch.float32)
