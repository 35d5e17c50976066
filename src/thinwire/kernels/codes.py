"""Codes of 1 to 9 bits in bytes, in an order that vector units like.

A code of b bits is cut into *limbs* of 8, 4, 2 and 1 bits, those whose sum is b, the widest from the lowest bits. Each
limb is packed by itself, planar: of m codes and w bits, with h = ceil(m w / 8), byte j holds the limbs of codes j,
j + h, j + 2h, ..., from its lowest bits up. So packing and unpacking are shifts of whole runs of bytes, for every b,
and b = 8 is the codes themselves.
"""

import torch
from torch import Tensor


def limbs(bits: int) -> list[tuple[int, int]]:
    """Return the width and the lowest bit of each limb, widest first."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]


def packed_nbytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` codes packed together."""
    return sum(-(-numel * width // 8) for width, _ in limbs(bits))


def blocks_nbytes(numel: int, bits: int, block: int) -> int:
    """Return the bytes of `numel` codes whose blocks are packed one after another."""
    return numel // block * packed_nbytes(block, bits) + packed_nbytes(numel % block, bits)


def _pack_rows(rows: Tensor, bits: int) -> Tensor:
    m = rows.shape[1]
    packed: list[Tensor] = []
    for width, low in limbs(bits):
        planes, h = 8 // width, -(-m * width // 8)
        padded = rows.new_zeros(len(rows), planes * h)
        padded[:, :m] = (rows >> low) & (2**width - 1)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=rows.device)
        packed.append((padded.view(len(rows), planes, h) << shifts[:, None]).sum(dim=1, dtype=torch.uint8))
    return torch.cat(packed, dim=1)


def _unpack_rows(packed: Tensor, m: int, bits: int) -> Tensor:
    codes = packed.new_zeros(len(packed), m)
    place = 0
    for width, low in limbs(bits):
        h = -(-m * width // 8)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        planes = (packed[:, None, place : place + h] >> shifts[:, None]) & (2**width - 1)
        codes |= planes.reshape(len(packed), planes.shape[1] * h)[:, :m] << low
        place += h
    return codes


def pack(codes: Tensor, bits: int, block: int) -> Tensor:
    """Pack a 1-D uint8 tensor of codes, block by block; bits of a code above the lowest `bits` are ignored."""
    full = codes.numel() // block
    body, tail = codes[: full * block].view(full, block), codes[full * block :].view(1, -1)
    return torch.cat([_pack_rows(body, bits).view(-1), _pack_rows(tail, bits).view(-1)])


def unpack(packed: Tensor, numel: int, bits: int, block: int) -> Tensor:
    """Return the `numel` codes of `packed`, uint8."""
    full, end = numel // block, numel // block * packed_nbytes(block, bits)
    body = packed[:end].view(full, packed_nbytes(block, bits))
    tail = packed[end : blocks_nbytes(numel, bits, block)].view(1, -1)
    return torch.cat([_unpack_rows(body, block, bits).view(-1), _unpack_rows(tail, numel % block, bits).view(-1)])
