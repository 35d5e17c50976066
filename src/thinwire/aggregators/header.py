"""Headers of messages: which parameters a rank used, and which contributions are not finite.

Two bitmaps over the parameters of a message, each in whole bytes, padded to 4 bytes; bit i % 8 (from the least) of byte
i // 8 is parameter i.
"""

from collections.abc import Sequence, Set

import numpy as np
from torch import Tensor

from thinwire.wire import align


def header_nbytes(num_names: int) -> int:
    """Return the size of a header over `num_names` parameters."""
    return align(2 * (-(-num_names // 8)))


def bitmap(names: Sequence[str], members: Set[str]) -> int:
    """Return the number whose bit i, from the least, says whether `names[i]` is a member."""
    return sum(1 << i for i, name in enumerate(names) if name in members)


def names_in(bits: int, names: Sequence[str]) -> set[str]:
    """Return the members of a bitmap."""
    return {name for i, name in enumerate(names) if bits >> i & 1} if bits else set()


def write_header(out: Tensor, num_names: int, used: int, nonfinite: int) -> None:
    """Write a header: both bitmaps in whole little-endian bytes, then zeros."""
    width = -(-num_names // 8)
    header = used.to_bytes(width, "little") + nonfinite.to_bytes(width, "little")
    out.numpy()[:] = np.frombuffer(header.ljust(out.numel(), b"\0"), np.uint8)


def read_header(data: Tensor, num_names: int) -> tuple[int, int]:
    """Return the bitmaps "used" and "not finite" of a header."""
    width = -(-num_names // 8)
    header = data[: 2 * width].numpy().tobytes()
    return int.from_bytes(header[:width], "little"), int.from_bytes(header[width:], "little")
