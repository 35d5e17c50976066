"""Jobs that recur in a batch give the bytes, the residuals and the values of the same jobs one by one."""

import itertools

import pytest
import torch
from table import TABLE
from torch import Tensor

from thinwire import BlockSpec, Compressor
from thinwire.kernels import DecodeBatch, DecodeJob, EncodeBatch, EncodeJob
from thinwire.random import Key
from thinwire.wire import split

SIZES = [256, 77, 1000, 1, 300]
GAP = 8  # bytes between blocks, which are others'
KINDS = [kind for kind in TABLE if kind.statistic_reduction is None and kind.unit == "slice"]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("feedback", ["all", "none", "some"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.recipe())
def test_a_batch_does_what_its_jobs_do(kind: Compressor, feedback: str) -> None:
    specs = [BlockSpec(shape=(size,)) for size in SIZES]
    nbytes = [kind.nbytes(spec) for spec in specs]
    starts = list(itertools.accumulate((size + GAP for size in nbytes), initial=0))[:-1]
    xs, keys = split(torch.randn(sum(SIZES)), SIZES), [Key(7 + i, offset=64 * i) for i in range(len(SIZES))]
    residuals = torch.randn(2, sum(SIZES))
    residuals[1] = residuals[0]
    owed = [
        [r if feedback == "all" or (feedback == "some" and i % 2) else None for i, r in enumerate(split(row, SIZES))]
        for row in residuals
    ]
    data = torch.full((2, starts[-1] + nbytes[-1] + GAP), 77, dtype=torch.uint8)
    outs = torch.randn(2, sum(SIZES))
    outs[1] = outs[0]
    encode = EncodeBatch(xs, owed[0], keys, starts, nbytes)
    decode = DecodeBatch(split(outs[0], SIZES), starts, nbytes, keys)
    for step, scale in ((0, 1.0), (3, 0.5)):
        now = [Key(key.key, step, key.stream, key.offset) for key in keys]
        blocks = [data[1, start : start + size] for start, size in zip(starts, nbytes, strict=True)]
        encode.at(data[0], step=step, residual_scales=[scale] * len(SIZES))
        sources = zip(xs, blocks, owed[1], now, strict=True)
        jobs = [EncodeJob(x, block, left, scale, key) for x, block, left, key in sources]
        assert kind.encode_jobs(encode, specs) == kind.encode_jobs(jobs, specs) == [True] * len(SIZES)
        assert torch.equal(data[0], data[1])
        assert torch.equal(bits(residuals[0]), bits(residuals[1]))
        for alpha in (None, 0.5, 1.0):
            decode.at(data[0], step=step, alpha=alpha)
            kind.decode_jobs(decode, specs)
            targets = zip(blocks, split(outs[1], SIZES), now, strict=True)
            kind.decode_jobs([DecodeJob(block, out, alpha, key) for block, out, key in targets], specs)
            assert torch.equal(bits(outs[0]), bits(outs[1]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.recipe())
def test_a_batch_flags_what_is_not_finite(kind: Compressor) -> None:
    specs = [BlockSpec(shape=(size,)) for size in SIZES]
    nbytes = [kind.nbytes(spec) for spec in specs]
    starts = list(itertools.accumulate(nbytes, initial=0))
    xs = split(torch.randn(sum(SIZES)), SIZES)
    xs[2][40] = torch.inf
    residuals = split(torch.zeros(sum(SIZES)), SIZES)
    residuals[4][299] = torch.nan
    batch = EncodeBatch(xs, residuals, [Key(7)] * len(SIZES), starts[:-1], nbytes)
    batch.at(torch.zeros(starts[-1], dtype=torch.uint8), step=0, residual_scales=[1.0] * len(SIZES))
    assert kind.encode_jobs(batch, specs) == [True, True, False, True, False]
