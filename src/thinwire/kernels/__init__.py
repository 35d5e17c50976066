"""One surface for every kernel; `backend()` names who answers it.

`THINWIRE_KERNELS=reference|native` chooses; otherwise the compiled kernels where they import, else the reference ones
with a single warning. Both give the same bytes.
"""

import functools
import importlib
import os
import types
import warnings

from thinwire.errors import ThinwireError
from thinwire.kernels.jobs import DecodeBatch as DecodeBatch
from thinwire.kernels.jobs import DecodeJob as DecodeJob
from thinwire.kernels.jobs import EncodeBatch as EncodeBatch
from thinwire.kernels.jobs import EncodeJob as EncodeJob


@functools.cache
def active() -> types.ModuleType:
    """Return the module that holds the kernels in use."""
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


def backend() -> str:
    """Return "native" or "reference"."""
    return active().__name__.rpartition(".")[2]
