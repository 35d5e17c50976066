"""How a list of jobs becomes one launch: a table on the device says where every job lies.

A table holds one flag a job, then the structs of csrc/jobs.h as rows of 64-bit words. It crosses to the device in one
copy from pinned memory, without waiting for it; the flags come back in one copy, for which the host waits.
"""

import contextlib
from typing import Any

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # an extra
from torch import Tensor

from thinwire.kernels import packing, packing_shared

# The words of a row.
X, RESIDUAL, OUT, ENCODE_N, OFFSET, RESIDUAL_SCALE = 0, 1, 2, 3, 6, 8
ENCODE_STREAM = slice(5, 8)
DATA, DECODE_OUT, DECODE_N, DECODE_ACCUMULATE = 0, 1, 2, 3
FINITE_N = 1
REDUCE_N, REDUCE_OFFSET = 2, 4

# One text for every grid: nothing is compiled again because a message has one tile more or a table starts elsewhere.
jobs_kernel = triton.jit(
    do_not_specialize=["num_tiles", "num_sums", "num_above", "most_blocks", "room", "most"],
    do_not_specialize_on_alignment=["flags", "table"],
)


class Table:
    """The jobs of one call, on the host and on the device."""

    def __init__(self, packed: bytes, row_nbytes: int, device: torch.device) -> None:
        self.words = np.frombuffer(packed, dtype=np.int64).reshape(-1, row_nbytes // 8)
        self.num_jobs = len(self.words)
        self._device = device
        host = torch.zeros(self.num_jobs + self.words.size, dtype=torch.int64, pin_memory=device.type == "cuda")
        host.numpy()[self.num_jobs :] = self.words.reshape(-1)
        self._all = host.to(device, non_blocking=True)

    @classmethod
    def of_encode(cls, packed: bytes, device: torch.device) -> "Table":
        """Return the table of `packing.pack_encode`."""
        return cls(packed, packing.ENCODE_JOB.size, device)._check_addresses("out", OUT)

    @classmethod
    def of_decode(cls, packed: bytes, device: torch.device) -> "Table":
        """Return the table of `packing.pack_decode`."""
        return cls(packed, packing.DECODE_JOB.size, device)._check_addresses("data", DATA)

    @classmethod
    def of_statistics(cls, packed: bytes, device: torch.device) -> "Table":
        """Return the table of `packing_shared.pack_statistics`: rows of encoding, where `out` is `shared`."""
        statistics = np.frombuffer(packed, dtype=np.int64).reshape(-1, packing_shared.STATISTIC_JOB.size // 8)
        rows = np.zeros((len(statistics), packing.ENCODE_JOB.size // 8), dtype=np.int64)
        rows[:, [X, RESIDUAL, OUT, ENCODE_N, RESIDUAL_SCALE]] = statistics
        return cls(rows.tobytes(), packing.ENCODE_JOB.size, device)

    @classmethod
    def of_reduce(cls, packed: bytes, device: torch.device) -> "Table":
        """Return the table of `packing_shared.pack_reduce`."""
        return cls(packed, packing_shared.REDUCE_JOB.size, device)

    @classmethod
    def of_finite(cls, packed: bytes, device: torch.device) -> "Table":
        """Return the table of `packing.pack_finite`."""
        return cls(packed, packing.FINITE_JOB.size, device)

    def _check_addresses(self, name: str, column: int) -> "Table":
        if rest := self.any_bits(column) % 4:
            raise ValueError(
                f"{name}: expected addresses that are multiples of 4, as in every message, got {rest} more"
            )
        return self

    def any_bits(self, *columns: int) -> int:
        """Return the bitwise or of all words in `columns`: its low zeros say what divides them all."""
        return int(np.bitwise_or.reduce(self.words[:, columns], axis=None))

    def most(self, column: int) -> int:
        """Return the largest word in `column`."""
        return int(self.words[:, column].max())

    def launch(self, kernel: Any, num_tiles: int, *arguments: Any, **constants: Any) -> None:
        """Run `num_tiles` programs of `kernel` for every job.

        A product and a sum are two roundings in every kernel, so their fusion is off.
        """
        flags, table = self._all[: self.num_jobs], self._all[self.num_jobs :]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            kernel[(self.num_jobs * num_tiles,)](
                flags, table, num_tiles, *arguments, **constants, enable_fp_fusion=False
            )

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return fresh memory for `numel` numbers a job."""
        return torch.empty(self.num_jobs * numel, dtype=dtype, device=self._device)

    def send(self, words: "np.ndarray[Any, Any]") -> Tensor:
        """Return int64 words on the device, without waiting for them."""
        host = torch.from_numpy(np.ascontiguousarray(words, dtype=np.int64))
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def flags(self) -> list[int]:
        """Wait for what was launched; return one flag a job."""
        return self._all[: self.num_jobs].tolist()

    def finite(self) -> list[bool]:
        """Wait for what was launched; return, per job, that its flag was left 0."""
        return [flag == 0 for flag in self.flags()]
