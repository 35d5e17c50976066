"""Compiled factors beside those in plain torch: the same bits, whatever the matrix."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import low_rank
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.random import Key

SPECIAL = [0.0, -0.0, 1e-45, -1e-38, 1e30, -3e38, float("inf"), float("nan")]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def columns(m: int, rank: int, seed: int, *, batch: tuple[int, ...] = ()) -> Tensor:
    """Columns of very different sizes, some of which depend on others, one after another in memory."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(*batch, rank, m, generator=generator) * 10.0 ** torch.randint(
        -20, 20, (rank, 1), generator=generator
    )
    if rank > 2:
        p[..., 2, :] = p[..., 0, :] * 3
    if rank > 4:
        p[..., 4, :] = 0
    return p.mT


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 7, 63, 64, 65, 1023, 1024, 1025, 3000])
def test_orthonormal_columns_have_the_same_bits(native: ModuleType, m: int, rank: int) -> None:
    for seed in range(3):
        p = columns(m, rank, seed)
        expected = low_rank.orthogonalise_(p.clone())
        assert bits(native.orthogonalise_(p.clone())) == bits(expected)
        assert bits(native.orthogonalise_(p.contiguous())) == bits(expected)  # row after row in memory
        assert bits(native.orthogonalise_(p.clone(), threads=2)) == bits(expected)


def test_more_than_a_chunk_of_chunks(native: ModuleType) -> None:
    """The tree of sums has a third level then."""
    p = columns(1024 * 1024 + 5, 1, 0)
    assert bits(native.orthogonalise_(p.clone())) == bits(low_rank.orthogonalise_(p.clone()))


def test_batches(native: ModuleType) -> None:
    p = columns(70, 4, 0, batch=(3, 2))
    for threads in (1, 3):
        got = native.orthogonalise_(p.clone(), threads=threads)
        assert bits(got) == bits(low_rank.orthogonalise_(p.clone()))
    assert native.orthogonalise_(torch.zeros(0, 3)).shape == (0, 3)
    assert native.orthogonalise_(torch.zeros(3, 0)).shape == (3, 0)


@given(
    st.integers(1, 4).flatmap(
        lambda rank: st.lists(
            st.lists(st.floats(width=32) | st.sampled_from(SPECIAL), min_size=rank, max_size=rank),
            min_size=1,
            max_size=6,
        )
    )
)
def test_any_numbers_leave_the_same_finite_bits(native: ModuleType, rows: list[list[float]]) -> None:
    p = torch.tensor(rows, dtype=torch.float32)
    got = native.orthogonalise_(p.clone())
    assert bits(got) == bits(low_rank.orthogonalise_(p.clone()))
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("rank", [1, 2, 4, 9])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (7, 64), (5, 65), (256, 256), (2, 200_000), (70_000, 3)])
def test_products_have_the_same_bits(native: ModuleType, m: int, n: int, rank: int) -> None:
    p, q = columns(m, rank, 0) * 1e-10, columns(n, rank, 1) * 1e-10
    expected = low_rank.reconstruct(p, q)
    for threads in (1, 2):
        assert bits(native.reconstruct(p, q, threads=threads)) == bits(expected)
    turned = torch.empty(n, m).mT
    assert native.reconstruct(p.contiguous(), q.contiguous(), out=turned) is turned
    assert bits(turned) == bits(expected)


def test_starts_are_the_same(native: ModuleType) -> None:
    for n, rank in ((1, 1), (5, 3), (256, 4), (1000, 2)):
        for key in (Key(3), Key(2**64 - 1, 7, 0x8000_0001), Key(5, 2**31, 4)):
            assert bits(native.draw_q(key, n, rank)) == bits(low_rank.draw_q(key, n, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 20), (256, 256), (3, 40, 2), (30,)])
def test_blocks_have_the_same_bytes(native: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Encoded, with what stays behind, and decoded; the products between are torch's on either side."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).view(-1)
    (m, n), r = low_rank.matrix_shape(shape), low_rank.effective_rank(shape, 4)
    found = []
    for kernels in (native, low_rank):
        out, left = torch.zeros(4 + r * (m + n) * dtype.itemsize, dtype=torch.uint8), torch.ones_like(x)
        kwargs = {"shapes": [shape], "rank": 4, "dtype": dtype}
        assert kernels.encode_low_rank([EncodeJob(x, out, left, 0.5, Key(1))], num_iterations=2, **kwargs) == [True]
        kernels.decode_low_rank([DecodeJob(out, value := torch.empty_like(x))], **kwargs)
        kernels.decode_low_rank([DecodeJob(out, added := x.clone(), 0.5)], **kwargs)
        found.append([bits(tensor) for tensor in (out, left, value, added)])
    assert found[0] == found[1]


def test_what_is_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"p: expected .*float32.* got torch\.float64"):
        native.orthogonalise_(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="threads: expected at least 1, got 0"):
        native.orthogonalise_(torch.zeros(3, 2), threads=0)
    with pytest.raises(ValueError, match=r"expected P, Q and out of shapes"):
        native.reconstruct(torch.zeros(3, 2), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"expected P, Q and out of shapes"):
        native.reconstruct(torch.zeros(3, 2), torch.zeros(4, 2), out=torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"out: expected .*float32.* got torch\.float64"):
        native.reconstruct(torch.zeros(3, 2), torch.zeros(4, 2), out=torch.zeros(3, 4, dtype=torch.float64))
