"""Random-k has no kernels for GPUs yet."""

from typing import NoReturn

from thinwire.errors import ThinwireError


def encode_random_k(*jobs: object, **settings: object) -> NoReturn:
    """Raise: there is no such kernel."""
    raise ThinwireError("random-k has no CUDA kernels yet; set THINWIRE_KERNELS=reference")


decode_random_k = encode_random_k
