"""The compiled kernels, with the functions and the bytes of reference.py.

What could corrupt memory is checked here; the rest happens in one native call for all jobs of a call, the GIL
released, on `threads` threads that end with the call. The result does not depend on their number.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from thinwire import _native
from thinwire.errors import WireError
from thinwire.kernels.jobs import DecodeBatch, DecodeJob, EncodeBatch, EncodeJob

# The structs of csrc/jobs.h.
_ENCODE_JOB = struct.Struct("<7Q2IfI")
_DECODE_JOB = struct.Struct("<3Qf3I")
_FINITE_JOB = struct.Struct("<2Q")
# The same as arrays, for batches: names for the fields that move.
_ENCODE_TABLE = np.dtype(
    [
        ("", "<u8", 2),
        ("out", "<u8"),
        ("", "<u8", 4),
        ("step", "<u4"),
        ("", "<u4"),
        ("residual_scale", "<f4"),
        ("", "<u4"),
    ]
)
_DECODE_TABLE = np.dtype([("data", "<u8"), ("", "<u8", 2), ("alpha", "<f4"), ("accumulate", "<u4"), ("", "<u4", 2)])
assert _ENCODE_TABLE.itemsize == _ENCODE_JOB.size
assert _DECODE_TABLE.itemsize == _DECODE_JOB.size

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_TOP_K_MAX = 65536  # 16-bit indices


def _bad_tensor(name: str, expected: str, got: Tensor) -> NoReturn:
    contiguous = "contiguous" if got.is_contiguous() else f"strides {got.stride()}"
    raise ValueError(
        f"{name}: expected {expected}, got {got.dtype} of shape {tuple(got.shape)} on {got.device}, {contiguous}"
    )


def _check(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    if tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        _bad_tensor(name, f"a contiguous {dtype} tensor on the CPU", tensor)


def _check_threads(threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")


def _number(dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> int:
    if dtype not in allowed:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, allowed))}, got {dtype}")
    return _NUMBERS[dtype]


def _check_block_quant(bits: int, block: int) -> None:
    if bits not in (4, 8) or block < 1:
        raise ValueError(f"block quantisation: expected 4 or 8 bits and a block of at least 1, got {bits} and {block}")


def _pack_encode(
    jobs: Sequence[EncodeJob], payload_nbytes: Callable[[int, int], int], k: Sequence[int] | None = None
) -> bytes:
    """Check the jobs and pack them. `payload_nbytes(n, k)` is how many bytes the kernel will write."""
    if isinstance(jobs, EncodeBatch):
        table = jobs.places.packed
        if table is None:
            table = jobs.places.packed = _table(_pack_encode(list(jobs), payload_nbytes, k), _ENCODE_TABLE)
        assert jobs.out is not None
        _check(jobs.out, torch.uint8, "out")
        table["out"] = jobs.places.starts + np.uint64(jobs.out.data_ptr())
        table["step"] = jobs.step & _MASK32
        table["residual_scale"] = jobs.residual_scales
        return table.tobytes()
    packed: list[bytes] = []
    pairs = zip(jobs, repeat(0)) if k is None else zip(jobs, k, strict=True)
    for (x, out, residual, residual_scale, key), num_kept in pairs:
        n = x.numel()
        _check(x, torch.float32, "x")
        _check(out, torch.uint8, "out")
        if out.numel() < payload_nbytes(n, num_kept):
            _bad_tensor("out", f"at least {payload_nbytes(n, num_kept)} bytes", out)
        residual_address = 0
        if residual is not None:
            _check(residual, torch.float32, "residual")
            if residual.numel() != n:
                _bad_tensor("residual", f"{n} elements, as x has", residual)
            residual_address = residual.data_ptr()
        bits, step, stream, offset = (key.key, key.step, key.stream, key.offset) if key is not None else (0, 0, 0, 0)
        packed.append(
            _ENCODE_JOB.pack(
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


def _pack_decode(
    jobs: Sequence[DecodeJob], payload_nbytes: Callable[[int, int], int], k: Sequence[int] | None = None
) -> bytes:
    if isinstance(jobs, DecodeBatch):
        table = jobs.places.packed
        if table is None:
            table = jobs.places.packed = _table(_pack_decode(list(jobs), payload_nbytes, k), _DECODE_TABLE)
        assert jobs.data is not None
        _check(jobs.data, torch.uint8, "data")
        table["data"] = jobs.places.starts + np.uint64(jobs.data.data_ptr())
        table["alpha"] = 0.0 if jobs.alpha is None else jobs.alpha
        table["accumulate"] = jobs.alpha is not None
        return table.tobytes()
    packed: list[bytes] = []
    pairs = zip(jobs, repeat(0)) if k is None else zip(jobs, k, strict=True)
    for (data, out, alpha), num_kept in pairs:
        n = out.numel()
        _check(data, torch.uint8, "data")
        _check(out, torch.float32, "out")
        if data.numel() < payload_nbytes(n, num_kept):
            raise WireError(
                f"data: expected at least {payload_nbytes(n, num_kept)} bytes for {n} elements, got {data.numel()}; "
                "was it encoded with other settings or cut short?"
            )
        replace = alpha is None
        packed.append(
            _DECODE_JOB.pack(data.data_ptr(), out.data_ptr(), n, 0.0 if replace else alpha, not replace, num_kept, 0)
        )
    return b"".join(packed)


def _table(packed: bytes, dtype: np.dtype[Any]) -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytearray(packed), dtype=dtype)


def _is_packed(jobs: Sequence[EncodeJob] | Sequence[DecodeJob]) -> bool:
    """Whether these jobs were checked and packed before, so that only what moved is new."""
    return isinstance(jobs, EncodeBatch | DecodeBatch) and jobs.places.packed is not None


def _flags(finite: bytes) -> list[bool]:
    return [flag != 0 for flag in finite]


def all_finite(tensors: Sequence[Tensor], *, threads: int = 1) -> list[bool]:
    """Return, per tensor, whether every value is finite."""
    _check_threads(threads)
    packed: list[bytes] = []
    for x in tensors:
        _check(x, torch.float32, "tensor")
        packed.append(_FINITE_JOB.pack(x.data_ptr(), x.numel()))
    return _flags(_native.all_finite(b"".join(packed), threads))


# --- casts ----------------------------------------------------------------------------------------------------------


def encode_cast(jobs: Sequence[EncodeJob], *, dtype: torch.dtype, threads: int = 1) -> list[bool]:
    """Write n values of `dtype`, rounded to nearest even."""
    _check_threads(threads)
    number = _number(dtype, (torch.float32, torch.float16, torch.bfloat16))
    packed = _pack_encode(jobs, lambda n, _: n * dtype.itemsize)
    return _flags(_native.encode_cast(packed, number, threads))


def decode_cast(jobs: Sequence[DecodeJob], *, dtype: torch.dtype, threads: int = 1) -> None:
    """Read n values of `dtype`."""
    _check_threads(threads)
    number = _number(dtype, (torch.float32, torch.float16, torch.bfloat16))
    _native.decode_cast(_pack_decode(jobs, lambda n, _: n * dtype.itemsize), number, threads)


# --- block quantisation ---------------------------------------------------------------------------------------------


def _block_quant_nbytes(bits: int, block: int) -> Callable[[int, int], int]:
    def nbytes(n: int, _: int) -> int:
        scales = 4 * -(-n // block)
        return scales + (n if bits == 8 else n // block * -(-block // 2) + -(-(n % block) // 2))

    return nbytes


def encode_block_quant(
    jobs: Sequence[EncodeJob], *, bits: int, block: int, stochastic: bool, threads: int = 1
) -> list[bool]:
    """Write ceil(n/block) float32 scales, then the codes: int8 (8 bits) or planar nibbles (4 bits)."""
    _check_threads(threads)
    _check_block_quant(bits, block)
    if stochastic and not _is_packed(jobs):
        assert all(job.key is not None for job in jobs), "stochastic rounding needs a key"
    packed = _pack_encode(jobs, _block_quant_nbytes(bits, block))
    return _flags(_native.encode_block_quant(packed, bits, block, stochastic, threads))


def decode_block_quant(jobs: Sequence[DecodeJob], *, bits: int, block: int, threads: int = 1) -> None:
    """Set value = code * scale of its block."""
    _check_threads(threads)
    _check_block_quant(bits, block)
    _native.decode_block_quant(_pack_decode(jobs, _block_quant_nbytes(bits, block)), bits, block, threads)


# --- one bit --------------------------------------------------------------------------------------------------------


def _one_bit_nbytes(n: int, _: int) -> int:
    return 4 + -(-n // 8)


def encode_one_bit(jobs: Sequence[EncodeJob], *, rms: bool, threads: int = 1) -> list[bool]:
    """Write the scale, then ceil(n/8) bytes of signs, least bit first."""
    _check_threads(threads)
    return _flags(_native.encode_one_bit(_pack_encode(jobs, _one_bit_nbytes), rms, threads))


def decode_one_bit(jobs: Sequence[DecodeJob], *, threads: int = 1) -> None:
    """Set value = +scale where the bit is 0, -scale where it is 1."""
    _check_threads(threads)
    _native.decode_one_bit(_pack_decode(jobs, _one_bit_nbytes), threads)


# --- top-k ----------------------------------------------------------------------------------------------------------


def _check_top_k(k: Sequence[int], lengths: Sequence[int]) -> None:
    longest = max(lengths, default=0)
    if longest > _TOP_K_MAX:
        raise ValueError(f"top-k: expected at most {_TOP_K_MAX} elements (16-bit indices), got {longest}")
    for num_kept, length in zip(k, lengths, strict=True):
        if not 0 <= num_kept <= length:
            raise ValueError(f"top-k: expected k between 0 and {length}, got {num_kept}")


def encode_top_k(jobs: Sequence[EncodeJob], *, k: Sequence[int], dtype: torch.dtype, threads: int = 1) -> list[bool]:
    """Write the k largest |q| (ties to the lowest index), values of `dtype` first, then indices, both by index."""
    _check_threads(threads)
    number = _number(dtype, (torch.float32, torch.float16))
    if not _is_packed(jobs):
        _check_top_k(k, [job.x.numel() for job in jobs])
    packed = _pack_encode(jobs, lambda _, kept: kept * (dtype.itemsize + 2), k)
    return _flags(_native.encode_top_k(packed, number, threads))


def decode_top_k(jobs: Sequence[DecodeJob], *, k: Sequence[int], dtype: torch.dtype, threads: int = 1) -> None:
    """Scatter the values; every other element is zero.

    Raises:
        WireError: an index is out of range or out of order, in any job. Nothing was written.
    """
    _check_threads(threads)
    number = _number(dtype, (torch.float32, torch.float16))
    if not _is_packed(jobs):
        _check_top_k(k, [job.out.numel() for job in jobs])
    packed = _pack_decode(jobs, lambda _, kept: kept * (dtype.itemsize + 2), k)
    bad = _native.decode_top_k(packed, number, threads)
    if bad is not None:
        which, place = bad
        start = k[which] * dtype.itemsize
        indices = jobs[which].data[start : start + 2 * k[which]].view(torch.int16).to(torch.int32) & 0xFFFF
        before = f" after {int(indices[place - 1])}" if place else ""
        raise WireError(
            f"top-k: expected {k[which]} ascending indices below {jobs[which].out.numel()}; index number {place} of "
            f"job {which} is {int(indices[place])}{before}"
        )
