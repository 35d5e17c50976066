"""A profile: what a cluster's links, a model's computation and a machine's kernels take. Plain values, one JSON file.

Seconds, bytes and plain numbers only. Rates are bytes of payload per second.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from thinwire.advisor import document
from thinwire.errors import ProfileError
from thinwire.spec import BlockSpec

SCHEMA = 2
WITHOUT_OVERHEAD = 1  # the schema before, which knew no `Overhead`

Operation = Literal["all_reduce", "all_gather", "all_to_all", "send_recv"]
KernelOperation = Literal["encode", "encode_feedback", "decode", "accumulate", "exchange"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkClass:
    """What a pair of ranks of one class takes: `nbytes` arrive alpha + nbytes / beta after they were sent.

    Attributes:
        alpha_s: alpha, seconds one way of a message without bytes.
        beta: bytes per second, of one pair and one direction, nothing else being sent.
        residual: of the fit: root mean square of (fitted - measured) / measured; 0 where nothing was measured.
    """

    alpha_s: float
    beta: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        document.at_least_0(self, "alpha_s", "residual")
        document.above_0(self, "beta")

    def seconds(self, nbytes: float) -> float:
        """Return alpha + nbytes / beta.

        >>> LinkClass(alpha_s=50e-6, beta=1.25e9).seconds(1.25e6)
        0.00105
        """
        return self.alpha_s + nbytes / self.beta


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An ordered pair of hosts whose link is not as its class: slow, or slow one way."""

    source: int
    target: int
    alpha_s: float
    beta: float

    def __post_init__(self) -> None:
        document.at_least_0(self, "source", "target", "alpha_s")
        document.above_0(self, "beta")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFit:
    """Seconds of one collective of all ranks, alone on the network: alpha + sent / beta.

    Attributes:
        operation: as the rounds of `thinwire.comm.rounds`, which count `sent`, the bytes that leave the busiest rank.
        alpha_s: alpha, seconds of a collective without bytes.
        beta: sent bytes per second and rank: the bus bandwidth.
        residual: as in `LinkClass`.
        cpu_s_per_nbyte: processor seconds that a rank spends per sent byte, copies and system calls.
        cpu_s: processor seconds that a rank spends per collective, beside those for its bytes.
        points: what was measured: (sent bytes, seconds).
    """

    operation: Operation
    alpha_s: float
    beta: float
    residual: float = 0.0
    cpu_s_per_nbyte: float = 0.0
    cpu_s: float = 0.0
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        document.at_least_0(self, "alpha_s", "residual", "cpu_s_per_nbyte", "cpu_s")
        document.above_0(self, "beta")

    def seconds(self, sent_nbytes: float) -> float:
        """Return alpha + sent / beta."""
        return self.alpha_s + sent_nbytes / self.beta


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts with equally many ranks, and the links inside and between them.

    Attributes:
        hosts: number of hosts.
        ranks_per_host: one rank a GPU, or one a host on CPUs.
        between: pairs of ranks on different hosts. A host's ranks share what it can send and receive.
        inside: pairs on one host; None where there are none.
        collectives: of all ranks, where measured.
        exceptions: pairs of hosts that are not as `between`.
        interface: the network interface in use, "" where unknown.
    """

    hosts: int
    ranks_per_host: int
    between: LinkClass
    inside: LinkClass | None = None
    collectives: tuple[CollectiveFit, ...] = ()
    exceptions: tuple[Pair, ...] = ()
    interface: str = ""

    def __post_init__(self) -> None:
        document.above_0(self, "hosts", "ranks_per_host")
        if self.ranks_per_host > 1 and self.inside is None:
            raise ProfileError(f"inside: expected a link between the {self.ranks_per_host} ranks of one host, got none")
        for pair in self.exceptions:
            if max(pair.source, pair.target) >= self.hosts or pair.source == pair.target:
                raise ProfileError(
                    f"exceptions: expected two of hosts 0 to {self.hosts - 1}, got {pair.source} to {pair.target}"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    def fit(self, operation: Operation) -> CollectiveFit | None:
        """Return what was measured of a collective; None where it was not."""
        return next((fit for fit in self.collectives if fit.operation == operation), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedParameter:
    """One parameter, and when its gradient is ready.

    Attributes:
        name: qualified name.
        shape: its sizes.
        ready_s: seconds from the start of the backward pass until its gradient is there.
        dtype: as torch prints it, without "torch.".
    """

    name: str
    shape: tuple[int, ...]
    ready_s: float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        document.at_least_0(self, "ready_s")
        if any(size < 0 for size in self.shape):
            raise ProfileError(f"shape: expected sizes of 0 or more, got {list(self.shape)}")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ProfileError(f"dtype: expected one of torch's, such as float32, got {self.dtype!r}")

    @property
    def spec(self) -> BlockSpec:
        """Shape and dtype."""
        return BlockSpec(shape=self.shape, dtype=getattr(torch, self.dtype))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """The computation of one step of one rank, all ranks running and nothing exchanged.

    Attributes:
        forward_s: seconds, loss included.
        backward_s: seconds of the backward pass.
        optimizer_s: seconds.
        parameters: those that train, in order of registration.
        busy_cores: processor cores that one rank keeps busy in its backward pass: 0 where accelerators compute. Kernels
            on CPUs share them.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    parameters: tuple[TimedParameter, ...]
    busy_cores: float = 0.0

    def __post_init__(self) -> None:
        document.at_least_0(self, "forward_s", "backward_s", "optimizer_s", "busy_cores")
        if not self.parameters:
            raise ProfileError("parameters: expected at least one, got none")
        [(name, times)] = Counter(parameter.name for parameter in self.parameters).most_common(1)
        if times > 1:
            raise ProfileError(f"parameters: expected every name once, got {name!r} {times} times")
        late = max(self.parameters, key=lambda parameter: parameter.ready_s)
        if late.ready_s > self.backward_s * (1 + 1e-9):
            raise ProfileError(
                f"parameters: expected all ready after at most backward_s = {self.backward_s:g}, got {late.name!r} "
                f"after {late.ready_s:g}"
            )

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which nothing is exchanged."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and an empty tensor on the meta device per parameter, for `build_plan`."""
        return [(p.name, torch.empty(p.shape, dtype=p.spec.dtype, device="meta")) for p in self.parameters]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpeed:
    """Seconds of one operation of one kind: num_calls * call_s + nbytes * s_per_nbyte, of raw float32 bytes.

    Attributes:
        recipe: of the compressor, as `Compressor.recipe` spells it; of the aggregator for kinds without one.
        operation: "exchange" is all that a kind without a compressor does on one rank.
        threads: native threads per call.
        s_per_nbyte: seconds per byte of float32.
        partition_s: seconds per partition, beside those for its bytes.
    """

    recipe: str
    operation: KernelOperation
    threads: int
    s_per_nbyte: float
    partition_s: float = 0.0

    def __post_init__(self) -> None:
        document.above_0(self, "threads")
        document.at_least_0(self, "s_per_nbyte", "partition_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """How fast this machine's kernels are.

    Attributes:
        cores: processor cores of a machine.
        ranks_per_machine: ranks that share them: those of one host, or all ranks of an emulated network.
        speeds: one per kind, operation and number of threads.
    """

    cores: int
    ranks_per_machine: int
    speeds: tuple[KernelSpeed, ...] = ()

    def __post_init__(self) -> None:
        document.above_0(self, "cores", "ranks_per_machine")

    def speed(self, recipe: str, operation: KernelOperation, threads: int = 1) -> KernelSpeed | None:
        """Return what was measured; None where it was not."""
        wanted = (recipe, operation, threads)
        return next((s for s in self.speeds if (s.recipe, s.operation, s.threads) == wanted), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Processor seconds of one rank that neither kernels nor collectives account for, however few the bytes.

    Attributes:
        message_s: per message, of thinwire's driver: Python, and changes of threads.
        round_s: per round of a message, likewise.
        bucket_s: of DDP, per bucket.
        copy_s_per_nbyte: of DDP, per byte of gradient that it copies into a bucket and back.
    """

    message_s: float = 0.0
    round_s: float = 0.0
    bucket_s: float = 0.0
    copy_s_per_nbyte: float = 0.0

    def __post_init__(self) -> None:
        document.at_least_0(self, "message_s", "round_s", "bucket_s", "copy_s_per_nbyte")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A cluster, a model on it, and the kernels of its machines.

    Attributes:
        cluster: hosts and links.
        computation: of the model.
        kernels: of a machine.
        overhead: fixed costs of exchanging.
        model: what the computation is of, in words.
        assumptions: what was not measured but taken for granted, each a sentence.
    """

    cluster: Cluster
    computation: Computation
    kernels: Kernels
    overhead: Overhead = Overhead()
    model: str = ""
    assumptions: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the JSON document."""
        return {"schema": SCHEMA, **document.as_dict(self)}

    def check_model(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `ProfileError` unless the profile is of a model with parameters of these names and shapes."""
        mine = {parameter.name: parameter.shape for parameter in self.computation.parameters}
        for name in dict.fromkeys([*mine, *shapes]):
            if mine.get(name) != shapes.get(name):
                found, expected = (
                    "no such parameter" if shape is None else f"shape {list(shape)}"
                    for shape in (mine.get(name), shapes.get(name))
                )
                raise ProfileError(
                    f"the profile is of another model{f' ({self.model})' if self.model else ''}: {name} has {found} "
                    f"there and {expected} here; profile this model"
                )


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile.json`.

    Raises:
        ProfileError: the file cannot be written.
    """
    document.write(profile.as_dict(), path)


def read_profile(path: Path) -> Profile:
    """Read what `write_profile` wrote, or someone by hand.

    In profiles of schema 1 fixed costs are missing, which then becomes one of their assumptions.

    Raises:
        ProfileError: no such file, not JSON, another schema, a field missing or unknown, or a value that cannot be; the
            message names file and field.
    """
    values = document.read(path)
    if (schema := values.get("schema")) not in (WITHOUT_OVERHEAD, SCHEMA):
        raise ProfileError(f"{path}: schema: expected {SCHEMA}, got {schema!r}; make it anew with thinwire probe")
    profile = document.parse(Profile, {key: value for key, value in values.items() if key != "schema"}, str(path))
    if schema == SCHEMA:
        return profile
    missing = "messages and buckets cost nothing by themselves, as this profile of schema 1 does not say"
    return replace(profile, assumptions=(*profile.assumptions, missing))
