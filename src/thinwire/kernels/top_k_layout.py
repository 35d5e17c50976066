"""Where the values and indices of top-k lie: one layout for compressors, checks and kernels."""

import functools

import torch

from thinwire.wire import Layout, align

MAX_NUMEL = 65536  # what a 16-bit index can address
CHUNK = 4096  # what a 12-bit index can address
NATURAL = torch.uint8  # stands for natural codes where a kernel is told the dtype of its values
VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, NATURAL)

_Part = tuple[torch.dtype, tuple[int, ...]]


def _forms(n: int, k: int) -> list[dict[str, _Part]]:
    """Return the forms that indices may take, the preferred first."""
    forms: list[dict[str, _Part]] = [{"indices": (torch.int16, (k,))}]
    if n <= CHUNK:
        forms.append({"packed": (torch.uint8, (_packed_nbytes(k),))})
    forms.append({"bitmap": (torch.uint8, (-(-n // 8),))})
    return forms


def _packed_nbytes(k: int) -> int:
    return -(-12 * k // 8)


@functools.lru_cache(maxsize=4096)
def top_k_layout(n: int, k: int, dtype: torch.dtype, chunked: bool = False) -> Layout:
    """Lay out k values of `dtype`, kept of n, and their indices; wider numbers first, values before indices.

    Indices are one of
        indices: k of 16 bits, ascending;
        packed: k of 12 bits, ascending, two in three bytes, for n <= 4096;
        bitmap: a bit for each of the n elements,
    whichever makes the block smallest, the first of equals. `chunked` makes them
        counts: how many are kept of each 4096 elements, 16 bits; packed: their places in there, 12 bits.
    """
    if chunked:
        counts = (torch.int16, (-(-n // CHUNK),))
        forms = [{"counts": counts, "packed": (torch.uint8, (_packed_nbytes(k),))}]
    else:
        forms = _forms(n, k)
    layouts = [_lay_out({"values": (dtype, (k,)), **form}) for form in forms]
    return min(layouts, key=lambda layout: layout.nbytes)  # the first of equals


def _lay_out(parts: dict[str, _Part]) -> Layout:
    return Layout.of(**dict(sorted(parts.items(), key=lambda part: -part[1][0].itemsize)))


def payload_nbytes(layout: Layout) -> int:
    """Return the bytes of a layout without its padding."""
    last = layout.parts[-1]
    nbytes = last.offset + last.nbytes
    assert align(nbytes) == layout.nbytes
    return nbytes
