"""DDP's buckets, by arithmetic: which gradients travel together, and when they are all there."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.advisor.profile import Computation, TimedParameter
from thinwire.errors import ProfileError

FIRST_BUCKET_NBYTES = 1 << 20
BUCKET_NBYTES = 25 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that DDP hands over at once.

    Attributes:
        names: of its parameters, in the order in which their gradients become ready.
        ready_s: when the last of them is, from the start of the backward pass.
        nbytes: of all of them.
    """

    names: tuple[str, ...]
    ready_s: float
    nbytes: int


def ddp_buckets(computation: Computation, cap_nbytes: float | None = None) -> list[Bucket]:
    """Return DDP's buckets as they are from the second step on, in the order in which they are ready.

    Gradients in the order in which they become ready; a bucket is closed by the parameter that fills it. Parameters of
    other dtypes have buckets of their own.

    Args:
        computation: parameters, and when each is ready.
        cap_nbytes: `bucket_cap_mb` in bytes; None is DDP's default, 25 MiB after a first bucket of 1 MiB.

    Raises:
        ProfileError: a cap that is not positive.

    Example:
        >>> from thinwire.advisor.profile import TimedParameter
        >>> parameters = (
        ...     TimedParameter(name="first", shape=(100, 100), ready_s=0.2),
        ...     TimedParameter(name="last", shape=(100, 100), ready_s=0.1),
        ... )
        >>> computation = Computation(forward_s=0.1, backward_s=0.2, optimizer_s=0.0, parameters=parameters)
        >>> [(bucket.names, bucket.ready_s) for bucket in ddp_buckets(computation, 40_000)]
        [(('last',), 0.1), (('first',), 0.2)]
    """
    if cap_nbytes is not None and not cap_nbytes > 0:
        raise ProfileError(f"bucket cap: expected a number of bytes above 0, got {cap_nbytes!r}")
    # Gradients of one layer are ready at once; backward then runs from the last registered to the first.
    order = list(computation.parameters[::-1])
    order.sort(key=lambda parameter: parameter.ready_s)
    buckets: list[Bucket] = []
    filling: dict[str, list[TimedParameter]] = {}
    closed = dict[str, int]()
    for parameter in order:
        pending = filling.setdefault(parameter.dtype, [])
        pending.append(parameter)
        first = cap_nbytes is None and not closed.get(parameter.dtype)
        cap = cap_nbytes if cap_nbytes is not None else FIRST_BUCKET_NBYTES if first else BUCKET_NBYTES
        if sum(p.spec.raw_nbytes for p in pending) >= cap:
            buckets.append(_bucket(filling.pop(parameter.dtype)))
            closed[parameter.dtype] = closed.get(parameter.dtype, 0) + 1
    buckets += [_bucket(pending) for pending in filling.values()]
    return sorted(buckets, key=lambda bucket: bucket.ready_s)


def _bucket(parameters: Sequence[TimedParameter]) -> Bucket:
    return Bucket(
        names=tuple(p.name for p in parameters),
        ready_s=max(p.ready_s for p in parameters),
        nbytes=sum(p.spec.raw_nbytes for p in parameters),
    )
