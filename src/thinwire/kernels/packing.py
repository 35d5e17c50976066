"""Jobs, checked and packed into the structs that compiled kernels read: those of csrc/jobs.h.

What could corrupt memory is checked here, once for every backend that works on addresses.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels.codes import blocks_nbytes, packed_nbytes
from thinwire.kernels.jobs import Batch, DecodeBatch, DecodeJob, EncodeBatch, EncodeJob
from thinwire.kernels.ternary import ternary_nbytes
from thinwire.kernels.top_k_layout import MAX_NUMEL, payload_nbytes, top_k_layout
from thinwire.random import Key

ENCODE_JOB = struct.Struct("<7Q2IfI")
DECODE_JOB = struct.Struct("<3Qf3I")
FINITE_JOB = struct.Struct("<2Q")
STREAM = struct.Struct("<2Q2I")

# The same structs as arrays, for batches; named are the fields that change from step to step.
_ENCODE_ROW = np.dtype(
    [
        ("inputs", "<u8", 2),
        ("out", "<u8"),
        ("sizes_and_key", "<u8", 4),
        ("step", "<u4"),
        ("stream", "<u4"),
        ("residual_scale", "<f4"),
        ("num_kept", "<u4"),
    ]
)
_DECODE_ROW = np.dtype(
    [("data", "<u8"), ("out_and_n", "<u8", 2), ("alpha", "<f4"), ("accumulate", "<u4"), ("num_kept", "<u4", 2)]
)
assert (_ENCODE_ROW.itemsize, _DECODE_ROW.itemsize) == (ENCODE_JOB.size, DECODE_JOB.size)

MAX_BLOCK = 65536
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1

PayloadNbytes = Callable[[int, int], int]  # (n, k) -> bytes that a kernel writes or reads


def _bad_tensor(name: str, expected: str, got: Tensor) -> NoReturn:
    contiguous = "contiguous" if got.is_contiguous() else f"strides {got.stride()}"
    raise ValueError(
        f"{name}: expected {expected}, got {got.dtype} of shape {tuple(got.shape)} on {got.device}, {contiguous}"
    )


def check_tensor(tensor: Tensor, dtype: torch.dtype, name: str, device: torch.device | None = None) -> None:
    """Raise unless a kernel can work on the memory of `tensor`."""
    here = tensor.is_cpu if device is None else tensor.device == device
    if tensor.dtype is not dtype or not tensor.is_contiguous() or not here:
        _bad_tensor(name, f"a contiguous {dtype} tensor on {device or 'the CPU'}", tensor)


def check_bytes(data: Tensor, nbytes: int, name: str, device: torch.device | None = None) -> None:
    """Raise unless `data` holds that many bytes, on `device` (None: the CPU)."""
    check_tensor(data, torch.uint8, name, device)
    if data.numel() < nbytes:
        raise WireError(f"{name}: expected at least {nbytes} bytes, got {data.numel()}")


def flags(finite: bytes) -> list[bool]:
    """Return what an encoder says of each job: whether all was finite."""
    return [flag != 0 for flag in finite]


# --- settings -------------------------------------------------------------------------------------------------------


def check_threads(threads: int) -> None:
    """Raise unless there is a thread to work with."""
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")


def check_dtype(dtype: torch.dtype, *allowed: torch.dtype) -> None:
    """Raise unless `dtype` is one of `allowed`."""
    if dtype not in allowed:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, allowed))}, got {dtype}")


def check_block_quant(bits: int, block: int, rotation: int = 0) -> None:
    """Raise unless there is such a quantisation."""
    if not 2 <= bits <= 8 or block < 1:
        raise ValueError(f"block quantisation: expected 2 to 8 bits and a block of at least 1, got {bits} and {block}")
    if rotation and (rotation not in (32, 128) or block % rotation):
        raise ValueError(f"rotation: expected 32 or 128 and a block that it divides, got {rotation} and {block}")


def check_dither(bits: int, block: int) -> None:
    """Raise unless there is such a dithering."""
    if not 2 <= bits <= 8 or block < 0:
        raise ValueError(f"dithering: expected 2 to 8 bits and a block of at least 0, got {bits} and {block}")


def check_natural(bits: int) -> None:
    """Raise unless there is such a natural compression."""
    if bits not in (8, 9):
        raise ValueError(f"natural compression: expected 8 or 9 bits, got {bits}")


def check_ternary(block: int) -> None:
    """Raise unless there are such ternary codes."""
    if block < 0:
        raise ValueError(f"ternary codes: expected a block of at least 0, got {block}")


def check_min_max(bits: int, block: int, bagua: bool, stochastic: bool) -> None:
    """Raise unless there is such a quantisation."""
    if not 1 <= bits <= 8 or block < 0:
        raise ValueError(f"min-max: expected 1 to 8 bits and a block of at least 0, got {bits} and {block}")
    if bagua and stochastic:
        raise ValueError("min-max: BAGUA's rule rounds to nearest, got stochastic=True")


def check_fixed_point(bits: int, block: int) -> None:
    """Raise unless there are such codes."""
    if not 2 <= bits <= 8 or block < 0:
        raise ValueError(f"fixed-point codes: expected 2 to 8 bits and a block of at least 0, got {bits} and {block}")


def check_keys(jobs: Sequence[EncodeJob]) -> None:
    """Raise where there is no key to draw random numbers with."""
    # A batch always has keys.
    assert isinstance(jobs, EncodeBatch) or all(job.key is not None for job in jobs), "stochastic rounding needs a key"


def check_top_k(
    dtype: torch.dtype,
    jobs: Sequence[EncodeJob] | Sequence[DecodeJob],
    k: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    chunked: bool,
    encode: bool,
) -> None:
    """Raise where values have no such dtype, where indices have no room in 16 bits, or where k is none of n."""
    check_dtype(dtype, *dtypes)
    if isinstance(jobs, Batch) and jobs.packed_for == purpose(top_k_nbytes(dtype, chunked), k):
        return  # checked when it was packed
    lengths = [(job.x if isinstance(job, EncodeJob) else job.out).numel() for job in jobs]
    longest = max(lengths, default=0)
    if longest > MAX_NUMEL:
        raise ValueError(f"top-k: expected at most {MAX_NUMEL} elements (16-bit indices), got {longest}")
    for n, num_kept in zip(lengths, k, strict=True):
        if encode and not 0 <= num_kept <= n:
            raise ValueError(f"top-k: expected k between 0 and {n}, got {num_kept}")
        if num_kept < 0:
            raise ValueError(f"top-k: expected k of at least 0, got {num_kept}")


def check_random_k(
    jobs: Sequence[EncodeJob] | Sequence[DecodeJob], k: Sequence[int], dtype: torch.dtype, block: int, period: int
) -> None:
    """Raise where there are no such units, or where k is not how many of them are sent."""
    if not 1 <= block <= MAX_BLOCK or period < 0:
        raise ValueError(
            f"random-k: expected a block from 1 to {MAX_BLOCK} and a period of at least 0, got {block} and {period}"
        )
    if isinstance(jobs, Batch) and jobs.packed_for == purpose(random_k_nbytes(dtype, block, period), k):
        return  # checked when it was packed
    for job, num_kept in zip(jobs, k, strict=True):
        num_units = -(-(job.x if isinstance(job, EncodeJob) else job.out).numel() // block)
        least = -(-num_units // period) if period else 0
        if not least <= num_kept <= num_units:
            raise ValueError(f"random-k: expected k between {least} and {num_units}, got {num_kept}")


# --- payloads -------------------------------------------------------------------------------------------------------


def no_bytes(n: int, _: int) -> int:
    """Return the payload of `add_residual`."""
    return 0


@functools.cache
def cast_nbytes(dtype: torch.dtype) -> PayloadNbytes:
    """Return the payload of `encode_cast`."""
    return lambda n, _: n * dtype.itemsize


@functools.cache
def block_quant_nbytes(bits: int, block: int) -> PayloadNbytes:
    """Return the payload of `encode_block_quant`."""
    return lambda n, _: 4 * -(-n // block) + blocks_nbytes(n, bits, block)


@functools.cache
def dither_nbytes(bits: int, block: int) -> PayloadNbytes:
    """Return the payload of `encode_dither`."""
    return lambda n, _: 4 * -(-n // (block or max(n, 1))) + blocks_nbytes(n, bits, block or max(n, 1))


@functools.cache
def natural_nbytes(bits: int) -> PayloadNbytes:
    """Return the payload of `encode_natural`."""
    return lambda n, _: packed_nbytes(n, bits)


@functools.cache
def ternary_code_nbytes(block: int, shared: bool) -> PayloadNbytes:
    """Return the payload of `encode_ternary`."""

    def nbytes(n: int, _: int) -> int:
        width = block or max(n, 1)
        return (0 if shared else 4 * -(-n // width)) + ternary_nbytes(n, width)

    return nbytes


@functools.cache
def min_max_nbytes(bits: int, block: int) -> PayloadNbytes:
    """Return the payload of `encode_min_max`."""
    return lambda n, _: 8 * -(-n // (block or max(n, 1))) + blocks_nbytes(n, bits, block or max(n, 1))


@functools.cache
def fixed_point_nbytes(bits: int, block: int) -> PayloadNbytes:
    """Return the payload of `encode_fixed_point`."""
    return lambda n, _: 2 * -(-n // (block or max(n, 1))) + blocks_nbytes(n, bits, block or max(n, 1))


def one_bit_nbytes(n: int, _: int) -> int:
    """Return the payload of `encode_one_bit`."""
    return 4 + -(-n // 8)


def bitmap_nbytes(n: int, _: int) -> int:
    """Return the payload of `encode_sign`."""
    return -(-n // 8)


@functools.cache
def top_k_nbytes(dtype: torch.dtype, chunked: bool) -> PayloadNbytes:
    """Return the payload of `encode_top_k`."""
    return lambda n, num_kept: payload_nbytes(top_k_layout(n, num_kept, dtype, chunked))


@functools.cache
def random_k_nbytes(dtype: torch.dtype, block: int, period: int) -> PayloadNbytes:
    """Return the payload of `encode_random_k`; another function for another `period`, for which k was checked."""
    return lambda _, num_kept: num_kept * block * dtype.itemsize


# --- jobs -----------------------------------------------------------------------------------------------------------


def pack_encode(
    jobs: Sequence[EncodeJob],
    payload_nbytes: PayloadNbytes,
    k: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> bytes:
    """Check the jobs, whose tensors must lie on `device` (None: the CPU), and pack them; of a batch, what moved."""
    if isinstance(jobs, EncodeBatch):
        if jobs.packed_for != purpose(payload_nbytes, k):  # else only what moved is new
            jobs.packed = _rows(pack_encode(list(jobs), payload_nbytes, k, device), _ENCODE_ROW)
            jobs.packed_for = purpose(payload_nbytes, k)
        check_tensor(jobs.buffer, torch.uint8, "out", device)
        jobs.packed["out"] = jobs.starts + np.uint64(jobs.buffer.data_ptr())
        jobs.packed["step"] = jobs.step & _MASK32
        jobs.packed["residual_scale"] = jobs.residual_scales
        return jobs.packed.tobytes()
    packed: list[bytes] = []
    pairs = zip(jobs, repeat(0)) if k is None else zip(jobs, k, strict=True)
    for (x, out, residual, residual_scale, key, _), num_kept in pairs:
        n = x.numel()
        check_tensor(x, torch.float32, "x", device)
        check_tensor(out, torch.uint8, "out", device)
        if out.numel() < payload_nbytes(n, num_kept):
            _bad_tensor("out", f"at least {payload_nbytes(n, num_kept)} bytes", out)
        residual_address = 0
        if residual is not None:
            check_tensor(residual, torch.float32, "residual", device)
            if residual.numel() != n:
                _bad_tensor("residual", f"{n} elements, as x has", residual)
            residual_address = residual.data_ptr()
        bits, step, stream, offset = (key.key, key.step, key.stream, key.offset) if key is not None else (0, 0, 0, 0)
        packed.append(
            ENCODE_JOB.pack(
                x.data_ptr(),
                residual_address,
                out.data_ptr(),
                n,
                out.numel(),
                bits & _MASK64,
                offset,
                step & _MASK32,
                stream & _MASK32,
                residual_scale,
                num_kept,
            )
        )
    return b"".join(packed)


def pack_decode(
    jobs: Sequence[DecodeJob],
    payload_nbytes: PayloadNbytes,
    k: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> bytes:
    """Check the jobs, whose tensors must lie on `device` (None: the CPU), and pack them; of a batch, what moved."""
    if isinstance(jobs, DecodeBatch):
        if jobs.packed_for != purpose(payload_nbytes, k):  # else only what moved is new
            jobs.packed = _rows(pack_decode(list(jobs), payload_nbytes, k, device), _DECODE_ROW)
            jobs.packed_for = purpose(payload_nbytes, k)
        check_tensor(jobs.buffer, torch.uint8, "data", device)
        jobs.packed["data"] = jobs.starts + np.uint64(jobs.buffer.data_ptr())
        jobs.packed["alpha"] = 0.0 if jobs.alpha is None else jobs.alpha * jobs.factors
        jobs.packed["accumulate"] = jobs.alpha is not None
        return jobs.packed.tobytes()
    packed: list[bytes] = []
    pairs = zip(jobs, repeat(0)) if k is None else zip(jobs, k, strict=True)
    for (data, out, alpha, *_), num_kept in pairs:
        n = out.numel()
        check_tensor(data, torch.uint8, "data", device)
        check_tensor(out, torch.float32, "out", device)
        if data.numel() < payload_nbytes(n, num_kept):
            raise WireError(
                f"data: expected at least {payload_nbytes(n, num_kept)} bytes for {n} elements, got {data.numel()}; "
                "was it encoded with other settings or cut short?"
            )
        replace = alpha is None
        packed.append(
            DECODE_JOB.pack(data.data_ptr(), out.data_ptr(), n, 0.0 if replace else alpha, not replace, num_kept, 0)
        )
    return b"".join(packed)


def pack_streams(jobs: Sequence[DecodeJob]) -> bytes:
    """Pack the streams that decoders of kinds with a shared key draw from."""
    keys = jobs.keys() if isinstance(jobs, DecodeBatch) else [job.key for job in jobs]
    packed: list[bytes] = []
    for key in keys:
        assert key is not None, "decoding draws random numbers: it needs a key"
        packed.append(pack_stream(key))
    return b"".join(packed)


def pack_stream(key: Key) -> bytes:
    """Pack one stream."""
    return STREAM.pack(key.key & _MASK64, key.offset, key.step & _MASK32, key.stream & _MASK32)


def _rows(packed: bytes, row: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytearray(packed), dtype=row)


def purpose(payload_nbytes: PayloadNbytes, k: Sequence[int] | None) -> tuple[PayloadNbytes, tuple[int, ...] | None]:
    """Return what jobs are checked for. The caches above make equal settings the same function."""
    return payload_nbytes, None if k is None else tuple(k)


def pack_finite(tensors: Sequence[Tensor], device: torch.device | None = None) -> bytes:
    """Check the tensors and pack where they lie and how long they are."""
    packed: list[bytes] = []
    for x in tensors:
        check_tensor(x, torch.float32, "tensor", device)
        packed.append(FINITE_JOB.pack(x.data_ptr(), x.numel()))
    return b"".join(packed)
