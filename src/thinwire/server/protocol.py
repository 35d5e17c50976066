"""What servers and workers say to each other: kinds of frames, and the texts in those that hold no gradients.

A run, as one worker sees it (w: worker, s: server):

    w HELLO {rank, ...; the plan}      s WELCOME {...}, once all workers have said HELLO with the same plan
    w DECLARE text of a content        (before its first push)
    w PUSH bytes, with AND_PULL        s MEAN bytes, as soon as the round is complete
    w HEARTBEAT                        s HEARTBEAT clocks of all workers
    w GET, or PUT with values          s KEPT residuals of some partitions; between steps
    w BYE                              s ERROR, at any time: the run is over

A PUSH without that flag is answered once its worker sends a PULL.

Texts are JSON, at most `MAX_TEXT_NBYTES` long; nothing is ever unpickled.
"""

import enum
import json
import math
import reprlib
from dataclasses import asdict, dataclass
from typing import Any, Self, cast, get_args

from thinwire.errors import WireError
from thinwire.wire import MAX_PAYLOAD_NBYTES, Data, Frame, align

MAX_TEXT_NBYTES = 1 << 24
AND_PULL = 1  # flag of a PUSH: it is a PULL, too


class Kind(enum.IntEnum):
    """Kinds of frames."""

    HELLO = 1
    WELCOME = 2
    DECLARE = 3
    PUSH = 4
    PULL = 5
    MEAN = 6
    HEARTBEAT = 7
    ERROR = 8
    BYE = 9
    GET = 10
    PUT = 11
    KEPT = 12


def check_request(frame: Frame) -> None:
    """Raise `WireError` where a worker's frame has a flag, or a payload, that its kind has not."""
    known = AND_PULL if frame.kind == Kind.PUSH else 0
    nbytes = memoryview(frame.payload).nbytes
    if frame.flags & ~known:
        raise WireError(f"expected flags of a frame of kind {frame.kind}, at most {known}, got {frame.flags}")
    if nbytes and frame.kind in (Kind.PULL, Kind.HEARTBEAT):
        raise WireError(f"{Kind(frame.kind).name.lower()}: expected no payload, got {nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Text:
    """Base of what travels as JSON."""

    def pack(self) -> bytes:
        """Return the bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: Data) -> Self:
        """Return what `pack` packed. Raises `WireError` for anything else."""
        return cls(
            **read_object(data, cls.__name__, {name: field.type for name, field in cls.__dataclass_fields__.items()})
        )


@dataclass(frozen=True, slots=True)
class Hello(Text):
    """A worker presents itself.

    Attributes:
        rank, world_size: who it is, and of how many.
        server, num_servers: which server it takes the other side for, and of how many.
        plan: all that must agree between workers, one fact a line.
    """

    rank: int
    world_size: int
    server: int
    num_servers: int
    plan: str


@dataclass(frozen=True, slots=True)
class Welcome(Text):
    """A server takes a worker in.

    Attributes:
        on_worker_loss: "fail" or "continue".
    """

    on_worker_loss: str


@dataclass(frozen=True, slots=True)
class Failure(Text):
    """Why the run is over.

    Attributes:
        kind: "plan", "busy" (with another run), "lost" (a worker), "refused" (what this worker sent), "stopped" (the
            server) or "worker" (in a goodbye: it gave up).
        message: for people.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Clocks(Text):
    """How many exchanges every worker had begun when it last said so, by rank; -1 for one that is not there."""

    clocks: list[int]


@dataclass(frozen=True, slots=True)
class Residuals(Text):
    """Which of a server's residuals a GET or a PUT is about; one entry a partition.

    Attributes:
        names, offsets, numels: the partitions.
        rates: learning rates in units of which the residuals are, or are wished for; 0 where feedback asks for none.
        loss_scale: likewise.
        step: steps committed: what servers did in the step of that number, numbered from 0, came to nothing.
    """

    names: list[str]
    offsets: list[int]
    numels: list[int]
    rates: list[float]
    loss_scale: float
    step: int

    def check(self) -> None:
        """Raise `WireError` unless all lists have one length, all numbers are such, and the values fit in a frame."""
        lengths = {len(one) for one in (self.names, self.offsets, self.numels, self.rates)}
        if len(lengths) != 1 or len(set(zip(self.names, self.offsets, strict=True))) < len(self.names):
            raise WireError(f"Residuals: expected partitions, each once, got lists of {sorted(lengths)} entries")
        most = MAX_PAYLOAD_NBYTES // 4
        if min([*self.offsets, *self.numels], default=0) < 0 or sum(self.numels) > most:
            raise WireError(f"Residuals: expected offsets, and sizes of {most} elements at most in all, got others")
        if not (0 < self.loss_scale < math.inf and all(0 <= rate < math.inf for rate in self.rates)):
            raise WireError(
                f"Residuals: expected a positive loss scale and rates, got {self.loss_scale} and "
                f"{reprlib.repr(self.rates)}"
            )


def pack_values(text: Text, values: Data) -> bytes:
    """Return a text and what it is about: its length (uint32), the text, zeros up to a multiple of 4, the values."""
    packed = text.pack()
    return len(packed).to_bytes(4, "little") + packed + bytes(-len(packed) % 4) + bytes(values)


def unpack_values(data: Data) -> tuple[memoryview, memoryview]:
    """Return the text and the values of `pack_values`. Raises `WireError` for other bytes."""
    view = memoryview(data)
    length = int.from_bytes(view[:4], "little")
    start = 4 + align(length)
    if start > view.nbytes:
        raise WireError(f"expected a text of {length} bytes and values, got {view.nbytes} bytes")
    return view[4 : 4 + length], view[start:]


def read_object(data: Data, what: str, types: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with exactly these fields.

    Args:
        data: UTF-8 bytes.
        what: named in errors.
        types: field -> int, float, str or a list of one of these.

    Raises:
        WireError: it is something else.

    Example:
        >>> read_object(b'{"rank": 3}', "Hello", {"rank": int})
        {'rank': 3}
    """
    nbytes = memoryview(data).nbytes
    if nbytes > MAX_TEXT_NBYTES:
        raise WireError(f"{what}: expected at most {MAX_TEXT_NBYTES} bytes, got {nbytes}")
    try:
        found: Any = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise WireError(f"{what}: expected JSON, got {bytes(data)[:40]!r}") from None
    if not isinstance(found, dict) or set(cast(dict[Any, Any], found)) != set(types):
        raise WireError(f"{what}: expected the fields {', '.join(types)}, got {reprlib.repr(found)}")
    fields = cast(dict[str, Any], found)
    for name, expected in types.items():
        value, item = fields[name], get_args(expected)
        if item:
            fits = isinstance(value, list) and all(type(one) is item[0] for one in cast(list[Any], value))
        else:
            fits = type(value) is expected
        if not fits:
            raise WireError(f"{what}: expected {name} of type {expected}, got {reprlib.repr(value)}")
    return fields
