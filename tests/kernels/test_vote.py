"""Majority votes on bitmaps: every count, ties, and what must not be believed."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels import reference
from thinwire.kernels.jobs import VoteJob
from thinwire.random import Key
from thinwire.wire import align

KEY = Key(0x0123_4567_89AB_CDEF, step=17, stream=3, offset=300)


def bitmap(negative: Tensor) -> Tensor:
    data = torch.zeros(align(-(-negative.numel() // 8)), dtype=torch.uint8)
    for i in negative.nonzero().view(-1).tolist():
        data[i // 8] |= 1 << i % 8
    return data


def vote(kernels: ModuleType, rows: list[Tensor], n: int, key: Key | None = None, shift: int = 0) -> Tensor:
    nbytes = align(-(-n // 8))
    buffer = torch.full((nbytes + shift + 8,), 0xAB, dtype=torch.uint8)
    out = buffer[shift : shift + nbytes]
    kernels.majority_vote([VoteJob(rows, out, n, key)])
    assert bool((buffer[:shift] == 0xAB).all())
    assert bool((buffer[shift + nbytes :] == 0xAB).all())
    return out


@pytest.mark.parametrize("num_rows", [*range(1, 10), 15, 16, 17, 31, 32, 33, 64, 100, 255, 256])
def test_native_equals_reference(native: ModuleType, num_rows: int) -> None:
    for n in (0, 1, 7, 8, 9, 63, 64, 65, 1000, 1023, 1024, 1025, 5003):
        # Random bytes, so also bits beyond n; rows at odd addresses.
        rows = [torch.randint(0, 256, (align(-(-n // 8)) + 1,), dtype=torch.uint8)[1:] for _ in range(num_rows)]
        for key in (None, KEY):
            want = vote(reference, rows, n, key)
            assert torch.equal(vote(native, rows, n, key, shift=n % 4), want)
            assert not want[-(-n // 8) :].any(), "padding is zero"
            assert n % 8 == 0 or int(want[n // 8]) >> n % 8 == 0, "so are the bits beyond the end"


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8])
def test_every_count(native: ModuleType, num_rows: int) -> None:
    """Element i has i negative votes."""
    n = num_rows + 1
    rows = [bitmap(torch.arange(n) > j) for j in range(num_rows)]
    want = bitmap(torch.arange(n) * 2 > num_rows)
    for kernels in (reference, native):
        assert torch.equal(vote(kernels, rows, n), want)


def test_ties_are_fair_and_drawn_from_the_key(native: ModuleType) -> None:
    n = 20_000
    rows = [bitmap(torch.ones(n)), bitmap(torch.zeros(n))]
    drawn = vote(native, rows, n, KEY)
    ones = sum(int(byte).bit_count() for byte in drawn)
    assert abs(ones - n / 2) <= 4 * math.sqrt(n) / 2
    assert not vote(native, rows, n).any()
    for other in (Key(1, 17, 3, 300), Key(KEY.key, 18, 3, 300), Key(KEY.key, 17, 4, 300), Key(KEY.key, 17, 3, 301)):
        assert not torch.equal(vote(native, rows, n, other), drawn)
    # By place in the parameter, not in the partition.
    later = Key(KEY.key, KEY.step, KEY.stream, KEY.offset + 4096)
    assert torch.equal(vote(native, [row[512:] for row in rows], n - 4096, later), drawn[512:])


def test_threads_change_nothing(native: ModuleType) -> None:
    rows = [[torch.randint(0, 256, (64,), dtype=torch.uint8) for _ in range(4)] for _ in range(9)]
    results = []
    for threads in (1, 2, 20):
        outs = [torch.zeros(64, dtype=torch.uint8) for _ in rows]
        native.majority_vote([VoteJob(r, out, 510, KEY) for r, out in zip(rows, outs, strict=True)], threads=threads)
        results.append(torch.cat(outs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    native.majority_vote([])


def test_what_could_corrupt_memory_is_refused(native: ModuleType) -> None:
    row, out = torch.zeros(8, dtype=torch.uint8), torch.full((8,), 7, dtype=torch.uint8)
    with pytest.raises(WireError, match="row: expected at least 8 bytes, got 7"):
        native.majority_vote([VoteJob([row, row[:7]], out, 64)])
    with pytest.raises(WireError, match="out: expected at least 9 bytes, got 8"):
        native.majority_vote([VoteJob([torch.zeros(9, dtype=torch.uint8)], out, 65)])
    with pytest.raises(ValueError, match="row: expected a contiguous"):
        native.majority_vote([VoteJob([torch.zeros(16, dtype=torch.uint8)[::2]], out, 64)])
    with pytest.raises(ValueError, match=r"equally many rows, at least 1, in every job, got \[0\]"):
        native.majority_vote([VoteJob([], out, 64)])
    with pytest.raises(ValueError, match=r"got \[1, 2\]"):
        native.majority_vote([VoteJob([row], out, 64), VoteJob([row, row], out, 64)])
    assert bool((out == 7).all())
