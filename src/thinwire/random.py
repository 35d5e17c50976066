"""Counter-based randomness: Philox-4x32-10, so that no bit depends on threads, message cuts, buckets or devices.

Every element of every parameter has its own 16-bit uniform for every (seed, parameter name, step, stream). The
element's index in its *parameter* picks it, never its place in a bucket or message. The global generators of the
user's program are never touched.

References:
    John K. Salmon, Mark A. Moraes, Ron O. Dror, David E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of the two halves
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key

_LANES = 16  # counters a chunk is made of
CHUNK = 8 * _LANES  # elements that one chunk of 16 counters serves: 8 halfwords each

OWNER_STREAM = 0x8000_0000  # the second hop's stream: one for all, whoever owns the partition
SHARED_STREAM = 0x8000_0001  # of kinds whose decoders draw too: one for all ranks and both hops
MERGE_STREAM = 0x4000_0000  # plus the number of a merge in its tree: where two encoded blocks are reduced to one


@dataclass(frozen=True, slots=True)
class Key:
    """Names one stream of uniforms.

    Attributes:
        key: 64 bits from `parameter_key(seed, name)`.
        step: the training step, 32 bits.
        stream: who draws: a rank (private dither), `OWNER_STREAM` or `SHARED_STREAM`; 32 bits.
        offset: index, in its parameter, of the block's first element.
    """

    key: int
    step: int = 0
    stream: int = 0
    offset: int = 0


def parameter_key(seed: int, name: str) -> int:
    """Return the 64-bit Philox key of a parameter. Every bit depends on the seed and on the whole name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def philox_4x32_10(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox-4x32-10 for every counter.

    Args:
        counter: four int64 tensors of one shape, each value in [0, 2**32).
        key: two 32-bit words.

    Returns:
        Four int64 tensors, each value in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, so both halves are right after masking.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(key: Key, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 uniforms (m + 1/2) / 2**16, m an integer in [0, 2**16), for `numel` elements from `key.offset` on.

    Element i of the parameter lies in chunk i // 128; within it, e = i % 128 takes halfword (e // 16) % 2 of word
    e // 32 of the Philox output for counter (16 * (i // 128) + e % 16, high word, step, stream). Sixteen counters side
    by side is what vector units like.

    Example:
        >>> whole = uniform(Key(7), 300)
        >>> torch.equal(whole[100:], uniform(Key(7, offset=100), 200))
        True
    """
    first = key.offset // CHUNK
    num_chunks = -(-(key.offset + numel) // CHUNK) - first
    index = torch.arange(first * _LANES, (first + num_chunks) * _LANES, dtype=torch.int64, device=device)
    step, stream = torch.full_like(index, key.step & _MASK), torch.full_like(index, key.stream & _MASK)
    words = philox_4x32_10((index & _MASK, index >> 32, step, stream), (key.key & _MASK, key.key >> 32))
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])  # (8, chunks * 16)
    flat = halves.view(8, num_chunks, _LANES).transpose(0, 1).reshape(-1)
    start = key.offset - first * CHUNK
    return (flat[start : start + numel].to(torch.float32) + 0.5) * 2.0**-16


def words(key: Key, start: int, count: int) -> list[int]:
    """Return 32-bit words `start` to `start + count` of a stream that is drawn from in sequence, not by element.

    Word d is word d % 4 of the Philox output for the counter whose low 64 bits are `key.offset` + d // 4. A key must be
    used either here or for `uniform`: their numbers are not independent.

    Example:
        >>> words(Key(7), 3, 2) == words(Key(7), 0, 5)[3:]
        True
    """
    first = start // 4
    index = torch.arange(first, -(-(start + count) // 4), dtype=torch.int64) + key.offset
    step, stream = torch.full_like(index, key.step & _MASK), torch.full_like(index, key.stream & _MASK)
    four = philox_4x32_10((index & _MASK, index >> 32, step, stream), (key.key & _MASK, key.key >> 32))
    return torch.stack(four, dim=1).view(-1)[start - 4 * first :][:count].tolist()
