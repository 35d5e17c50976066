"""Compiled factors, with the functions and the bytes of low_rank.py; products with a matrix are torch's, as there."""

import functools
import struct

import torch
from torch import Tensor

from thinwire import _native
from thinwire.kernels import low_rank, packing
from thinwire.random import Key

FACTOR = struct.Struct("<3Q")
PRODUCT = struct.Struct("<6Q")


def draw_q(key: Key, n: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (n, rank) independent normal values, float32, on the CPU."""
    uniforms = torch.empty(n * rank, dtype=torch.float32)
    _native.draw_uniforms(packing.pack_stream(key), uniforms.data_ptr(), uniforms.numel())
    return low_rank.to_normal(uniforms).view(rank, n).mT


def orthogonalise_(p: Tensor, *, threads: int = 1) -> Tensor:
    """Make the columns of P (..., m, r), float32, orthonormal, in place, and return it."""
    packing.check_threads(threads)
    columns = p.mT.contiguous()  # itself where columns lie one after another
    packing.check_tensor(columns, torch.float32, "p")
    rank, length = columns.shape[-2:]
    first, step = columns.data_ptr(), 4 * rank * length
    num = columns.numel() // max(rank * length, 1)
    jobs = b"".join(FACTOR.pack(first + i * step, rank, length) for i in range(num))
    _native.orthogonalise(jobs, low_rank.DEPENDENT**2, threads)
    return p if columns.data_ptr() == p.data_ptr() else p.copy_(columns.mT)


def reconstruct(p: Tensor, q: Tensor, *, out: Tensor | None = None, threads: int = 1) -> Tensor:
    """Return P Q^T for P (m, r) and Q (n, r), float32."""
    packing.check_threads(threads)
    (m, rank), n = p.shape, q.shape[0]
    out = p.new_empty(m, n) if out is None else out
    if q.shape[1] != rank or out.shape != (m, n):
        raise ValueError(
            f"expected P, Q and out of shapes (m, r), (n, r) and (m, n), got {p.shape}, {q.shape}, {out.shape}"
        )
    if not rank:
        return out.zero_()
    if not out.is_contiguous():  # products commute: the transpose of Q P^T
        reconstruct(q, p, out=out.mT, threads=threads)
        return out
    rows, columns = p.mT.contiguous(), q.mT.contiguous()
    for name, tensor in (("p", rows), ("q", columns), ("out", out)):
        packing.check_tensor(tensor, torch.float32, name)
    _native.reconstruct(PRODUCT.pack(rows.data_ptr(), columns.data_ptr(), out.data_ptr(), rank, m, n), threads)
    return out


_STEPS = low_rank.Steps(draw_q, orthogonalise_, reconstruct)
encode_low_rank = functools.partial(low_rank.encode_low_rank, steps=_STEPS)
decode_low_rank = functools.partial(low_rank.decode_low_rank, steps=_STEPS)
