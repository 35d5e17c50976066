"""Headers of messages: a rank's loss scale, which parameters it used, and which contributions are not finite.

Where blocks travel as bytes, the loss scale as float32, then two bitmaps over the parameters of a message, each in
whole bytes, padded to 4 bytes; bit i % 8 (from the least) of byte i // 8 is parameter i. Where numbers are combined on
the way, *flags*, which survive that: see `write_flags`.
"""

from collections.abc import Sequence, Set
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.wire import align

_SCALE_NBYTES = 4


def header_nbytes(num_names: int) -> int:
    """Return the size of a header over `num_names` parameters."""
    return _SCALE_NBYTES + align(2 * (-(-num_names // 8)))


def bitmap(names: Sequence[str], members: Set[str]) -> int:
    """Return the number whose bit i, from the least, says whether `names[i]` is a member."""
    return sum(1 << i for i, name in enumerate(names) if name in members)


def names_in(bits: int, names: Sequence[str]) -> set[str]:
    """Return the members of a bitmap."""
    return {name for i, name in enumerate(names) if bits >> i & 1} if bits else set()


def write_header(out: Tensor, num_names: int, used: int, nonfinite: int, loss_scale: float = 1.0) -> None:
    """Write a header: the loss scale, both bitmaps in whole little-endian bytes, then zeros."""
    width = -(-num_names // 8)
    header = np.float32(loss_scale).tobytes() + used.to_bytes(width, "little") + nonfinite.to_bytes(width, "little")
    header = header.ljust(out.numel(), b"\0")
    if out.is_cpu:
        out.numpy()[:] = np.frombuffer(header, np.uint8)
    else:
        out.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def read_header(data: Tensor, num_names: int) -> tuple[int, int, bytes]:
    """Return the bitmaps "used" and "not finite" of a header, and the bits of the loss scale."""
    width = -(-num_names // 8)
    data = data[: _SCALE_NBYTES + 2 * width]
    scale, header = (part.numpy().tobytes() for part in data.cpu().tensor_split([_SCALE_NBYTES]))
    return int.from_bytes(header[:width], "little"), int.from_bytes(header[width:], "little"), scale


MANY = -2  # stands for several ranks where a rank is named
_SCALE_BITS = 32


def num_flags(num_names: int, op: Literal["sum", "max"]) -> int:
    """Return how many numbers the flags of `num_names` parameters are."""
    return (2 if op == "max" else 4) * num_names + 2 * _SCALE_BITS


def write_flags(
    out: Tensor,
    names: Sequence[str],
    used: Set[str],
    bad: Set[str],
    rank: int,
    op: Literal["sum", "max"],
    loss_scale: float = 1.0,
) -> None:
    """Write numbers whose sum, or largest, over ranks says who used what, and whose contribution is not finite.

    For every parameter one number for "used" (1 or 0), then for every parameter what names a rank that is not finite:
    rank + 1, of which the largest stays; or where numbers are added 1, rank // 128 and rank % 128, which are exact in
    all dtypes and name the rank if it is the only one. In the end the bits of the loss scale, each as itself and as its
    opposite: where both are there, ranks differ.
    """
    rows = torch.zeros(2 if op == "max" else 4, len(names))
    rows[0] = torch.tensor([float(name in used) for name in names])
    for i in (i for i, name in enumerate(names) if name in bad):
        rows[1:, i] = torch.tensor([rank + 1.0] if op == "max" else [1.0, float(rank // 128), float(rank % 128)])
    scale = int.from_bytes(np.float32(loss_scale).tobytes(), "little")
    bits = torch.tensor([float(scale >> i & 1) for i in range(_SCALE_BITS)])
    out.copy_(torch.cat([rows.view(-1), bits, 1 - bits]))


def read_flags(
    data: Tensor, names: Sequence[str], op: Literal["sum", "max"]
) -> tuple[set[str], set[tuple[int, str]], bool]:
    """Return which parameters no rank used, who (or `MANY`) was not finite in what, and if loss scales differ."""
    flags, scale = data.to("cpu", torch.float32).tensor_split([-2 * _SCALE_BITS])
    used, *who = flags.view(-1, len(names)).numpy()
    bad: set[tuple[int, str]] = set()
    for i in who[0].nonzero()[0]:
        rank = int(who[0][i]) - 1 if op == "max" else MANY if who[0][i] > 1 else int(128 * who[1][i] + who[2][i])
        bad.add((rank, names[int(i)]))
    unused = {name for name, count in zip(names, used, strict=True) if not count}
    return unused, bad, bool(scale.view(2, -1).all(dim=0).any())
