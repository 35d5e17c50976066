"""Headers of what workers push to a server, and of what they pull from it.

A push begins with the step (uint32), flags (uint32), a header as in aggregators/header.py over all parameters of the
message, a bitmap of the ranks whose contribution is not finite, and, where feedback asks for them, the learning rates
of the server's partitions (float64 each). A pull begins with flags (uint32), the number of ranks in the mean (uint32),
the headers of all workers combined, a bitmap of the parameters whose mean is not finite, and one of the ranks whose
contribution is not.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.aggregators.header import header_nbytes, read_header, write_header
from thinwire.errors import WireError
from thinwire.wire import align

_START = struct.Struct("<II")

MIXED = 1  # flag of a push: ranks that it stands for had different loss scales
SCALES_DIFFER = 1  # flag of a pull: ranks had different loss scales, so that there is no mean


@dataclass(frozen=True, slots=True)
class PushHeader:
    """What a worker says of the bytes that follow.

    Attributes:
        step: the training step, which keys random streams.
        flags: `MIXED` or 0.
        used, nonfinite: bitmaps over the parameters of the message.
        who: bitmap over ranks: in whose contribution something is not finite; 0 where it is in their sum alone.
        loss_scale: the factor that this worker's gradients came with.
        rates: learning rates, one per partition of the server, or none.
    """

    step: int
    flags: int
    used: int
    nonfinite: int
    who: int
    loss_scale: float
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PullHeader:
    """What a server says of the bytes that follow.

    Attributes:
        flags: `SCALES_DIFFER` or 0.
        num_present: how many ranks the mean is over.
        used, nonfinite: bitmaps over parameters: whether any rank used it, or was not finite in it.
        mean_nonfinite: bitmap over parameters: whether the mean, or a node's sum, is not finite where all ranks were.
        who: bitmap over ranks: whose contribution was not finite.
        loss_scale: that of the first worker.
    """

    flags: int
    num_present: int
    used: int
    nonfinite: int
    mean_nonfinite: int
    who: int
    loss_scale: float = 1.0


def push_header_nbytes(num_names: int, num_rates: int, world_size: int) -> int:
    """Return the size of a push's header."""
    return _START.size + header_nbytes(num_names) + bitmap_nbytes(world_size) + 8 * num_rates


def pull_header_nbytes(num_names: int, world_size: int) -> int:
    """Return the size of a pull's header."""
    return _START.size + header_nbytes(num_names) + bitmap_nbytes(num_names) + bitmap_nbytes(world_size)


def bitmap_nbytes(num: int) -> int:
    """Return the size of a bitmap over so many."""
    return align(-(-num // 8))


def write_push_header(out: Tensor, num_names: int, world_size: int, header: PushHeader) -> None:
    """Write into `out`, which has the header's size."""
    middle = _START.size + header_nbytes(num_names)
    start = middle + bitmap_nbytes(world_size)
    out[: _START.size].numpy()[:] = np.frombuffer(_START.pack(header.step & 0xFFFFFFFF, header.flags), np.uint8)
    write_header(out[_START.size : middle], num_names, header.used, header.nonfinite, header.loss_scale)
    out[middle:start].numpy()[:] = np.frombuffer(header.who.to_bytes(start - middle, "little"), np.uint8)
    out[start:].numpy()[:] = np.frombuffer(np.array(header.rates, "<f8").tobytes(), np.uint8)


def read_push_header(data: Tensor, num_names: int, num_rates: int, world_size: int) -> PushHeader:
    """Return what `write_push_header` wrote.

    Raises:
        WireError: bits beyond the last parameter or rank, unknown flags, or a loss scale or rate that is no such
            number.
    """
    step, flags = _START.unpack(data[: _START.size].numpy().tobytes())
    middle = _START.size + header_nbytes(num_names)
    start = middle + bitmap_nbytes(world_size)
    used, nonfinite, scale = read_header(data[_START.size : middle], num_names)
    who = int.from_bytes(data[middle:start].numpy().tobytes(), "little")
    rates = np.frombuffer(data[start : start + 8 * num_rates].numpy().tobytes(), "<f8")
    loss_scale = float(np.frombuffer(scale, "<f4")[0])
    if (used | nonfinite) >> num_names or who >> world_size or flags & ~MIXED:
        raise WireError(
            f"push: expected bits of {num_names} parameters and {world_size} ranks, and known flags, got others"
        )
    if not (0 < loss_scale < float("inf") and np.isfinite(rates).all()):
        raise WireError(f"push: expected a positive loss scale and finite rates, got {loss_scale} and {rates.tolist()}")
    return PushHeader(step, flags, used, nonfinite, who, loss_scale, tuple(map(float, rates)))


def write_pull_header(out: Tensor, num_names: int, header: PullHeader) -> None:
    """Write into `out`, which has the header's size."""
    middle = _START.size + header_nbytes(num_names)
    out[: _START.size].numpy()[:] = np.frombuffer(_START.pack(header.flags, header.num_present), np.uint8)
    write_header(out[_START.size : middle], num_names, header.used, header.nonfinite, header.loss_scale)
    end = middle + bitmap_nbytes(num_names)
    for bits, place in ((header.mean_nonfinite, out[middle:end]), (header.who, out[end:])):
        place.numpy()[:] = np.frombuffer(bits.to_bytes(place.numel(), "little"), np.uint8)


def read_pull_header(data: Tensor, num_names: int) -> PullHeader:
    """Return what `write_pull_header` wrote."""
    flags, num_present = _START.unpack(data[: _START.size].numpy().tobytes())
    middle = _START.size + header_nbytes(num_names)
    used, nonfinite, scale = read_header(data[_START.size : middle], num_names)
    end = middle + bitmap_nbytes(num_names)
    mean_nonfinite, who = (int.from_bytes(part.numpy().tobytes(), "little") for part in (data[middle:end], data[end:]))
    loss_scale = float(np.frombuffer(scale, "<f4")[0])
    return PullHeader(flags, num_present, used, nonfinite, mean_nonfinite, who, loss_scale)


def ranks_in(bits: int) -> Sequence[int]:
    """Return the members of a bitmap over ranks."""
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
