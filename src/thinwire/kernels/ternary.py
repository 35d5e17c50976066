"""Codes -1, 0 and 1 in base 3, five to a byte.

The digit of a code is the code modulo 3. Of the m codes of a block, with h = ceil(m / 5), byte j holds the digits of
codes j, j + h, ..., j + 4h, the first of them worth 1 and the last one 81: at most 242. Digits of codes that there are
none of are 0.
"""

from typing import NoReturn

import torch
from torch import Tensor

from thinwire.errors import WireError

PER_BYTE = 5
NUM_BYTES = 3**PER_BYTE  # bytes from here on stand for nothing


def ternary_nbytes(numel: int, block: int) -> int:
    """Return the bytes of `numel` codes whose blocks are packed one after another."""
    return numel // block * -(-block // PER_BYTE) + -(-(numel % block) // PER_BYTE)


def _places(like: Tensor) -> Tensor:
    return torch.tensor([[1], [3], [9], [27], [81]], dtype=torch.uint8, device=like.device)


def _pack_rows(rows: Tensor) -> Tensor:
    h = -(-rows.shape[1] // PER_BYTE)
    padded = rows.new_zeros(len(rows), PER_BYTE * h)
    padded[:, : rows.shape[1]] = rows
    return (padded.view(len(rows), PER_BYTE, h) * _places(rows)).sum(dim=1, dtype=torch.uint8)


def _unpack_rows(packed: Tensor, m: int) -> Tensor:
    digits = packed[:, None, :] // _places(packed) % 3
    return digits.reshape(len(packed), PER_BYTE * packed.shape[1])[:, :m]


def pack_ternary(codes: Tensor, block: int) -> Tensor:
    """Pack a 1-D int8 tensor of codes, block by block, into uint8."""
    full, digits = codes.numel() // block, (codes % 3).to(torch.uint8)
    body, tail = digits[: full * block].view(full, block), digits[full * block :].view(1, -1)
    return torch.cat([_pack_rows(body).view(-1), _pack_rows(tail).view(-1)])


def unpack_ternary(packed: Tensor, numel: int, block: int) -> Tensor:
    """Return the `numel` codes of `packed`, int8."""
    full, end = numel // block, ternary_nbytes(numel // block * block, block)
    body = packed[:end].view(full, -(-block // PER_BYTE))
    tail = packed[end : ternary_nbytes(numel, block)].view(1, -1)
    digits = torch.cat([_unpack_rows(body, block).reshape(-1), _unpack_rows(tail, numel % block).reshape(-1)])
    return (digits + 1).to(torch.int8) % 3 - 1


def refuse(job: int, place: int, byte: int) -> NoReturn:
    """Raise for a byte that no five codes give."""
    raise WireError(
        f"ternary codes: expected bytes below {NUM_BYTES}, five codes each, got {byte} at byte {place} of the codes of "
        f"job {job}; was it encoded with other settings or corrupted?"
    )
