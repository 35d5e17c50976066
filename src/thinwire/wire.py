"""Byte layouts. One layout is the source for buffers, plans, the cost model and the counters alike.

All numbers on the wire are little-endian.
"""

import hashlib
import itertools
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError

try:
    from thinwire._native import crc32
except ImportError:  # no compiled part, or a processor without carry-less multiplication: the same numbers, slower
    from zlib import crc32

if sys.byteorder != "little":
    raise ImportError("thinwire's wire format is little-endian and this machine is not")

WIRE_FORMAT = 4  # raised whenever the bytes of any compressor or message change
ALIGNMENT = 4  # every encoded block starts and ends on a multiple of this many bytes


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def split(data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a flat tensor into blocks of these sizes, one after another; views."""
    ends = list(itertools.accumulate(sizes))
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Part:
    """A named run of numbers inside an encoded block.

    Attributes:
        name: what it holds, e.g. "scales".
        dtype: dtype of its numbers.
        shape: their shape.
        offset: first byte, from the start of the block.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Named parts of an encoded block, in order, with exact offsets; `nbytes` includes the padding at the end.

    Example:
        >>> layout = Layout.of(scales=(torch.float32, (2,)), codes=(torch.int8, (1000,)))
        >>> layout.nbytes, layout["codes"].offset
        (1008, 8)
    """

    parts: tuple[Part, ...]
    nbytes: int

    @staticmethod
    def of(**parts: tuple[torch.dtype, tuple[int, ...]]) -> "Layout":
        """Lay parts one after another. Wider dtypes must come first, so that each is aligned to its own size."""
        placed: list[Part] = []
        offset = 0
        for name, (dtype, shape) in parts.items():
            assert offset % dtype.itemsize == 0, f"{name}: {dtype} at byte {offset}"
            part = Part(name, dtype, shape, offset)
            placed.append(part)
            offset += part.nbytes
        return Layout(tuple(placed), align(offset))

    def __getitem__(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def view(self, data: Tensor, name: str) -> Tensor:
        """Return one part of an encoded block as a typed view that shares its memory."""
        part = self[name]
        return data[part.offset : part.offset + part.nbytes].view(part.dtype).view(part.shape)

    def check(self, data: Tensor, what: str) -> None:
        """Raise `WireError` unless `data` is a 1-D uint8 tensor of exactly this size, without gaps and aligned."""
        if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != self.nbytes:
            raise WireError(
                f"{what}: expected a 1-D uint8 tensor of {self.nbytes} bytes, got {data.dtype} of shape "
                f"{tuple(data.shape)}; was it encoded with other settings or cut short?"
            )
        if not data.is_contiguous() or data.data_ptr() % ALIGNMENT:
            raise WireError(
                f"{what}: expected a contiguous uint8 tensor of {self.nbytes} bytes at a multiple of {ALIGNMENT}, got "
                f"stride {data.stride(0)} at byte {data.data_ptr() % ALIGNMENT}; pass a clone"
            )


_FRAME = struct.Struct("<4sHBBQQQQIIQII")
_CHECKSUM = struct.Struct("<I4x")  # the last field and padding
FRAME_MAGIC = b"tw\x00\xf5"
FRAME_VERSION = 2
FRAME_NBYTES = _FRAME.size  # of a frame's header
MAX_PAYLOAD_NBYTES = 1 << 30

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on a socket: a header of `FRAME_NBYTES` bytes, and a payload.

    Attributes:
        kind: what it asks or says; its users number these.
        session: drawn at random for every run, so that frames of another one are told apart.
        content: digest of the text that says which partitions the payload holds, of which dtype and shape, encoded by
            which compressors to how many bytes each (see `digest_of`); 0 where it holds none.
        round: how often this content has been exchanged before.
        clock: how many exchanges the sender has begun or, a server, ended.
        sender: rank, or number of the server.
        flags: more about it, by kind.
        payload: the bytes.
    """

    kind: int
    session: int
    content: int = 0
    round: int = 0
    clock: int = 0
    sender: int = 0
    flags: int = 0
    payload: Data = b""

    def header(self) -> bytes:
        """Return the header. Its last number is the CRC-32 of all before it and of the payload."""
        nbytes = memoryview(self.payload).nbytes
        start = _FRAME.pack(
            FRAME_MAGIC,
            FRAME_VERSION,
            self.kind,
            self.flags,
            self.session,
            self.content,
            self.round,
            self.clock,
            self.sender,
            WIRE_FORMAT,
            nbytes,
            0,
            0,
        )[: -_CHECKSUM.size]
        return start + _CHECKSUM.pack(crc32(self.payload, crc32(start)))


def parse_frame(header: Data, payload: Data) -> Frame:
    """Return the frame that these bytes are.

    Raises:
        WireError: they are none: other magic, version, wire format or length, or a checksum that does not fit.

    Example:
        >>> frame = Frame(kind=4, session=7, round=2, payload=b"bytes")
        >>> parse_frame(frame.header(), b"bytes") == frame
        True
    """
    size, nbytes = memoryview(header).nbytes, memoryview(payload).nbytes
    if size != FRAME_NBYTES:
        raise WireError(f"frame: expected a header of {FRAME_NBYTES} bytes, got {size}")
    magic, version, kind, flags, session, content, round_, clock, sender, wire_format, expected, checksum, rest = (
        _FRAME.unpack(header)
    )
    if magic != FRAME_MAGIC:
        raise WireError(f"frame: expected the magic {FRAME_MAGIC.hex()}, got {magic.hex()}: no frame of thinwire")
    if version != FRAME_VERSION or wire_format != WIRE_FORMAT:
        raise WireError(
            f"frame: expected version {FRAME_VERSION} and wire format {WIRE_FORMAT}, got {version} and {wire_format}; "
            "run the same version of thinwire on servers and workers"
        )
    if nbytes != expected or nbytes > MAX_PAYLOAD_NBYTES:
        raise WireError(f"frame: expected a payload of {expected} bytes, at most {MAX_PAYLOAD_NBYTES}, got {nbytes}")
    found = crc32(payload, crc32(memoryview(header)[: -_CHECKSUM.size]))
    if found != checksum or rest:
        raise WireError(f"frame: expected the checksum {checksum:08x}, got {found:08x}: its bytes are not those sent")
    return Frame(kind, session, content, round_, clock, sender, flags, payload)


def digest_of(content: str) -> int:
    """Return the 64 bits by which frames name a content; never 0."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little") or 1
