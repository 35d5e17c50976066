"""Low-rank factors of matrices, in plain torch on every device: M is about P Q^T, with P orthonormal.

Names and shapes, with m the rows and n the columns of a matrix M, r the rank, and any number of batch dimensions:

    M (..., m, n)    P (..., m, r)    Q (..., n, r)

What several ranks must compute alike is exact to the bit on every machine: `orthogonalise_` and `reconstruct` sum in a
fixed order and never fuse a product with a sum. What one rank computes from its own matrix, `factor_p` and `factor_q`,
is torch's matrix product, whose last bits depend on the machine and on torch's threads, as those of a gradient do.

References:
    Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", 2019.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.reference_steps import deliver, sqrt, tree_sum
from thinwire.random import Key, uniform

ErrorForm = Literal["local", "aggregated"]

DEPENDENT = 1e-10  # what is left of a column that its predecessors span, in float64, is below this part of it
_CHUNK = 1 << 16  # elements rebuilt at a time, so that they stay in the cache


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (m, n) of the matrix that a tensor is seen as: its first dimension by all the others.

    Dimensions of 1 do not count, so that a vector is one row, which rank 1 holds exactly.

    Example:
        >>> matrix_shape((64, 3, 7, 7)), matrix_shape((1, 196, 768)), matrix_shape((10,)), matrix_shape(())
        ((64, 147), (196, 768), (1, 10), (1, 1))
    """
    dims = [size for size in shape if size != 1]
    rows = dims[0] if len(dims) > 1 else 1
    return rows, math.prod(dims) // max(rows, 1)


def effective_rank(shape: Sequence[int], rank: int) -> int:
    """Return r' = min(m, n, rank): no matrix has a higher one."""
    return min(*matrix_shape(shape), rank)


def draw_q(key: Key, n: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (n, rank) independent normal values, float32: the start of a power iteration.

    Normal, so that no direction is preferred, whatever the matrix.
    """
    return to_normal(uniform(key, n * rank, device)).view(rank, n).mT


def to_normal(uniforms: Tensor) -> Tensor:
    """Return the normal values of which such parts are below, float32."""
    return torch.special.ndtri(uniforms.to(torch.float64)).to(torch.float32)


def factor_p(matrices: Tensor, q: Tensor) -> Tensor:
    """Return P = M Q, to be orthogonalised. Column after column in memory, which is what makes thin products fast."""
    return (q.mT @ matrices.mT).mT


def factor_q(matrices: Tensor, p: Tensor) -> Tensor:
    """Return Q = M^T P, column after column in memory. For an orthonormal P, P Q^T is the projection of M on its span.

    So ||M - P Q^T||^2 = ||M||^2 - ||Q||^2: it never adds error.
    """
    return (p.mT @ matrices).mT


def orthogonalise_(p: Tensor, *, threads: int = 1) -> Tensor:
    """Make the columns of P orthonormal, in place, and return it; columns that the ones before them span become zero.

    Modified Gram-Schmidt in float64, twice, with the project's fixed summation tree: the same bits on every machine.
    Zero, repeated, tiny and huge columns, more columns than rows, inf and nan all leave finite numbers.

    Example:
        >>> orthogonalise_(torch.tensor([[3.0, 6.0, 0.0], [4.0, 8.0, 1e-30]]))
        tensor([[ 0.6000,  0.0000, -0.8000],
                [ 0.8000,  0.0000,  0.6000]])
    """
    columns = p.mT.to(torch.float64).contiguous()  # (..., r, m); squares of float32 neither overflow nor vanish here
    for _ in range(2):  # once leaves what rounding brought back of earlier columns; twice is enough
        before = tree_sum(columns * columns)
        for k in range(columns.shape[-2]):
            column, rest = columns[..., k : k + 1, :], columns[..., k + 1 :, :]
            square = tree_sum(column * column)[..., None]  # (..., 1, 1)
            new = square > before[..., k : k + 1, None] * DEPENDENT**2  # false for nan
            unit = torch.where(new, column / sqrt(torch.where(new, square, 1.0)), 0.0)
            column.copy_(unit)
            rest -= tree_sum(rest * unit)[..., None] * unit
    return p.copy_(columns.mT)


def reconstruct(p: Tensor, q: Tensor, *, out: Tensor | None = None, threads: int = 1) -> Tensor:
    """Return P Q^T, float32, summed from the first column to the last: the same bits on every machine."""
    rows, columns = p.to(torch.float32), q.to(torch.float32).mT.contiguous()  # (..., r, n)
    (m, rank), n = p.shape[-2:], q.shape[-2]
    batch = torch.broadcast_shapes(p.shape[:-2], q.shape[:-2])
    out = columns.new_empty(*batch, m, n) if out is None else out
    if not rank:
        return out.zero_()
    step = max(1, _CHUNK // max(n, 1))
    for first in range(0, m, step):
        part, some = out[..., first : first + step, :], rows[..., first : first + step, :]
        torch.mul(some[..., :1], columns[..., :1, :], out=part)
        for k in range(1, rank):
            part += some[..., k : k + 1] * columns[..., k : k + 1, :]
    return out


def leave_error_(matrices: Tensor, p: Tensor, own_q: Tensor, mean_q: Tensor, *, error: ErrorForm = "local") -> Tensor:
    """Turn what a rank wanted to send into what it still owes, in place, where ranks share P and average their Q.

    "local": M - P own_q^T, what of its own matrix lies outside the span. "aggregated", the form of the paper:
    M - P mean_q^T. Both leave the same mean over ranks, which is all that training sees. But the aggregated form also
    keeps each rank's difference from the mean, inside the span too, and these differences add up as a random walk.
    """
    assert error in ("local", "aggregated")
    return matrices.sub_(reconstruct(p, own_q if error == "local" else mean_q))


# --- encoded blocks: a scale, P, Q ----------------------------------------------------------------------------------


class Steps(NamedTuple):
    """The functions above, or compiled ones that give the same bits."""

    draw_q: Callable[..., Tensor]
    orthogonalise_: Callable[..., Tensor]
    reconstruct: Callable[..., Tensor]


_STEPS = Steps(draw_q, orthogonalise_, reconstruct)


def encode_low_rank(
    jobs: Sequence[EncodeJob],
    *,
    shapes: Sequence[Sequence[int]],
    rank: int,
    num_iterations: int,
    dtype: torch.dtype,
    threads: int = 1,
    steps: Steps = _STEPS,
) -> list[bool]:
    """Write a float32 scale s, P as (r', m) and Q as (r', n), for M / s; s is the power of two below max|q|.

    So no product overflows, and 16 bits are room enough for Q whatever the units of M are. Every matrix is worked on
    alone: in batches its last bits would depend on its company.
    """
    finite: list[bool] = []
    for job, shape in zip(jobs, shapes, strict=True):
        # In place: a matrix may be large, and fresh memory costs more in page faults than the products with it.
        values = job.x if job.residual is None else job.residual.mul_(job.residual_scale).add_(job.x)
        (m, n), r = matrix_shape(shape), effective_rank(shape, rank)
        peak = _peak(values)
        scale = _power_of_two_below(peak)
        matrix = (values / scale).view(m, n)
        assert job.key is not None, "low rank needs a key"
        q = steps.draw_q(job.key, n, r, values.device)
        p = q.new_zeros(r, m).mT
        for _ in range(num_iterations):
            p = steps.orthogonalise_(factor_p(matrix, q), threads=threads)
            q = factor_q(matrix, p)
        job.out[:4].view(torch.float32).copy_(scale)
        payload = torch.cat([p.mT.reshape(-1), q.mT.reshape(-1)]).to(dtype)
        end = 4 + payload.numel() * dtype.itemsize
        job.out[4:end].view(dtype).copy_(payload)
        job.out[end:].zero_()
        decoded = _decoded(job.out, shape, rank, dtype, steps, threads, out=matrix)
        finite.append(bool((peak.isfinite() & _peak(decoded).isfinite()).item()))
        if job.residual is not None:
            job.residual.sub_(decoded)
    return finite


def decode_low_rank(
    jobs: Sequence[DecodeJob],
    *,
    shapes: Sequence[Sequence[int]],
    rank: int,
    dtype: torch.dtype,
    threads: int = 1,
    steps: Steps = _STEPS,
) -> None:
    """Set M = (P Q^T) s."""
    for job, shape in zip(jobs, shapes, strict=True):
        deliver(job, _decoded(job.data, shape, rank, dtype, steps, threads))


def _decoded(
    data: Tensor,
    shape: Sequence[int],
    rank: int,
    dtype: torch.dtype,
    steps: Steps,
    threads: int,
    out: Tensor | None = None,
) -> Tensor:
    (m, n), r = matrix_shape(shape), effective_rank(shape, rank)
    payload = data[4 : 4 + r * (m + n) * dtype.itemsize].view(dtype)
    payload = payload.to(torch.float32)
    p, q = payload[: r * m].view(r, m).mT, payload[r * m :].view(r, n).mT
    return steps.reconstruct(p, q, out=out, threads=threads).mul_(data[:4].view(torch.float32)).view(-1)


def _peak(values: Tensor) -> Tensor:
    """Return max|values|, (1,), nan where any value is."""
    if not values.numel():
        return values.new_zeros(1)
    low, high = values.aminmax()
    return torch.maximum(-low, high).abs().view(1)


def _power_of_two_below(peak: Tensor) -> Tensor:
    """Return the largest power of two that is at most `peak`, and at least the smallest normal one."""
    exponent = peak.view(torch.int32) & 0x7F800000  # without the fraction
    return exponent.clamp(min=0x00800000).view(torch.float32)
