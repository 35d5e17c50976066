"""One surface for every kernel; `backend()` names who answers it on the CPU.

`THINWIRE_KERNELS=reference|native` chooses; otherwise the compiled kernels where they import, else the reference ones
with a single warning. CUDA tensors are served by the Triton kernels, unless the reference ones are asked for. All give
the same bytes.
"""

import functools
import importlib
import os
import types
import warnings
from collections.abc import Sequence

from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.kernels.jobs import Batch as Batch
from thinwire.kernels.jobs import DecodeBatch as DecodeBatch
from thinwire.kernels.jobs import DecodeJob as DecodeJob
from thinwire.kernels.jobs import EncodeBatch as EncodeBatch
from thinwire.kernels.jobs import EncodeJob as EncodeJob
from thinwire.kernels.jobs import ReduceJob as ReduceJob
from thinwire.kernels.jobs import VoteJob as VoteJob


@functools.cache
def active() -> types.ModuleType:
    """Return the module that holds the kernels in use on the CPU."""
    wanted = os.environ.get("THINWIRE_KERNELS", "")
    if wanted not in ("", "reference", "native"):
        raise ThinwireError(f"THINWIRE_KERNELS: expected 'reference' or 'native', got {wanted!r}")
    if wanted != "reference":
        try:
            return importlib.import_module("thinwire.kernels.native")
        except ImportError as error:
            if wanted == "native":
                raise
            warnings.warn(
                f"thinwire: the compiled kernels cannot be imported ({error}); the reference kernels give the same "
                "bytes, many times slower. Reinstall with a C++ compiler, or set THINWIRE_KERNELS=reference.",
                RuntimeWarning,
                stacklevel=2,
            )
    return importlib.import_module("thinwire.kernels.reference")


@functools.cache
def _on_cuda() -> types.ModuleType:
    if os.environ.get("THINWIRE_KERNELS") == "reference":
        return active()
    try:
        return importlib.import_module("thinwire.kernels.triton_backend")
    except ImportError as error:
        raise ThinwireError(
            f"CUDA tensors: expected Triton, which compiles the kernels for them, got {error}; run  pip install "
            "'.[gpu]' in thinwire's folder, or set THINWIRE_KERNELS=reference for the same bytes, many times slower"
        ) from error


def serving(
    jobs: Sequence[EncodeJob] | Sequence[DecodeJob] | Sequence[ReduceJob] | Sequence[VoteJob],
) -> types.ModuleType:
    """Return the module that holds the kernels for the device of the jobs' tensors."""
    if not jobs:
        return active()
    where = jobs.buffer if isinstance(jobs, Batch) else jobs[0].acc if isinstance(jobs[0], ReduceJob) else jobs[0].out
    return serving_device(where)


def serving_device(where: Tensor) -> types.ModuleType:
    """Return the module that holds the kernels for the device of a tensor."""
    return _on_cuda() if where.is_cuda else active()


def backend() -> str:
    """Return "native" or "reference"."""
    return active().__name__.rpartition(".")[2]
