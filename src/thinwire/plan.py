"""The plan: a policy resolved once against a model. Printable; its digest is compared across ranks."""

import dataclasses
import hashlib
import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.aggregators import (
    Aggregator,
    Dense,
    Hierarchical,
    MessageLayout,
    NodePushPull,
    Partition,
    PowerSGD,
    PushPull,
    ThroughServers,
    TwoShot,
    between_nodes_nbytes,
    pooled_nbytes,
)
from thinwire.aggregators.push_pull import server_work
from thinwire.comm.process_group import DEPTH, SERVED_DEPTH
from thinwire.comm.rounds import Round, buffer_sizes
from thinwire.errors import PlanError
from thinwire.feedback import MomentumCorrection, Slot
from thinwire.policy import ParamInfo, Patterns, PlanOptions, Policy, resolver, whole_kinds
from thinwire.random import parameter_key
from thinwire.spec import COMPRESSIBLE_DTYPES, memory_shape
from thinwire.wire import WIRE_FORMAT

_OfNodes = Hierarchical | NodePushPull  # exchanges that know which ranks share a node


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParam:
    """One parameter's line of the plan.

    Attributes:
        info: which.
        aggregator: compressors and feedback.
        reason: why it travels dense, "" where it is compressed.
        partitions: its slices.
        slots: what is kept of it between steps.
        factor_numel: how many numbers `Slot.FACTOR` holds, if it is among them.
    """

    info: ParamInfo
    aggregator: Aggregator
    reason: str
    partitions: tuple[Partition, ...]
    slots: frozenset[Slot] = frozenset()
    factor_numel: int = 0

    def slot_numel(self, slot: Slot) -> int:
        """Return how many numbers a slot that is kept whole holds."""
        return self.factor_numel if slot is Slot.FACTOR else self.info.numel


@dataclass(frozen=True, slots=True)
class Plan:
    """Every partition with compressors, feedback, owner, raw and wire bytes.

    `print(plan)` shows a table; `digest` is equal on two ranks iff they would send the same bytes in the same order.
    """

    params: tuple[PlannedParam, ...]
    world_size: int
    options: PlanOptions
    by_name: dict[str, PlannedParam] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {param.info.name: param for param in self.params})

    @property
    def is_dense(self) -> bool:
        """Whether nothing is compressed, so that DDP's own all-reduce does it all."""
        return all(isinstance(param.aggregator, Dense) for param in self.params)

    def messages(self, names: Sequence[str]) -> list[MessageLayout]:
        """Cut the parameters `names`, in this order, into messages.

        Each holds partitions of one kind of aggregator, and is closed once it has `message_nbytes` of raw gradient. An
        all-reduce sums numbers of one dtype, so that those of others are kept apart.
        """
        layouts: list[MessageLayout] = []
        by_kind: dict[tuple[type[Aggregator], Hashable], list[Partition]] = {}
        sizes: dict[tuple[type[Aggregator], Hashable], tuple[int, int]] = {}  # raw bytes, and those to send
        for name in names:
            for partition in self.by_name[name].partitions:
                kind = type(partition.aggregator)
                key = (kind, partition.aggregator.together(partition.dtype))
                pending = by_kind.setdefault(key, [])
                pending.append(partition)
                if kind is Dense:
                    continue
                raw, sent = sizes.pop(key, (0, 0))
                raw += partition.spec.raw_nbytes
                sent += partition.aggregator.sent_once_nbytes(partition.spec)
                if self._is_full(raw, sent):
                    layouts.append(kind.lay_out(by_kind.pop(key), self.world_size))
                else:
                    sizes[key] = raw, sent
        layouts += [kind.lay_out(pending, self.world_size) for (kind, _), pending in by_kind.items()]
        return layouts

    def _is_full(self, raw: int, sent: int) -> bool:
        """Whether a message should be closed: a collective costs processor time even where its bytes cost nothing."""
        return raw >= self.options.message_nbytes and 16 * sent >= self.options.message_nbytes

    def sent_nbytes(self, rank: int) -> int:
        """Return the payload bytes that `rank` sends per step, if the whole model were one bucket.

        DDP's buckets cut some messages shorter, which adds a header of a few bytes for each cut.
        """
        return sum(r.sent_nbytes(rank) for r in self._rounds())

    @property
    def between_nodes_nbytes(self) -> int:
        """The most bytes per step that leave one node, of what goes through nodes; 0 where nothing does.

        What servers on a node answer is not counted.
        """
        found = [
            between_nodes_nbytes(m) for m in self._one_bucket() if isinstance(m.partitions[0].aggregator, _OfNodes)
        ]
        return max(map(sum, zip(*found, strict=True)), default=0)

    @property
    def busiest_nbytes(self) -> int:
        """The largest `sent_nbytes` of any rank."""
        return max(map(sum, zip(*(r.sent_nbytes_by_rank() for r in self._rounds()), strict=True)))

    @property
    def _is_served(self) -> bool:
        return any(isinstance(param.aggregator, ThroughServers) for param in self.params)

    def _one_bucket(self) -> list[MessageLayout]:
        """Return the messages of a step, if the whole model were one bucket."""
        return self.messages([param.info.name for param in reversed(self.params)])

    def _rounds(self) -> list[Round]:
        return [r for layout in self._one_bucket() for r in layout.rounds]

    def residual_nbytes(self, rank: int) -> int:
        """Return the memory of what feedback keeps on `rank`: its residuals, and those of the partitions it owns.

        With a GradScaler as much again is held during a step, so that a skipped one can be undone, and through servers,
        so that one can be in which they are lost; else only for the messages under way.
        """
        return self.worker_nbytes + self.owner_nbytes(rank)

    @property
    def worker_nbytes(self) -> int:
        """Bytes of what feedback keeps on every rank, of all that it sends: of a residual 4 for each number."""
        return sum(4 * param.slot_numel(slot) for param in self.params for slot in param.slots if not slot.owned)

    def owner_nbytes(self, rank: int) -> int:
        """Return the bytes of what feedback keeps on `rank` of the partitions it owns."""
        return self._owner_nbytes()[rank]

    def _owner_nbytes(self) -> list[int]:
        """Return the same of all ranks, in one pass."""
        owned = [0] * self.world_size
        for param in self.params:
            if num_slots := sum(slot.owned for slot in param.slots):  # where servers own, they keep it
                for partition in param.partitions:
                    owned[partition.owner] += 4 * partition.numel * num_slots
        return owned

    def buffers_nbytes(self, rank: int) -> int:
        """Return the bytes of all buffers that a message sends from and receives into on `rank`, of the largest one.

        On a GPU in pinned memory, and about as much beside the gradients. Buckets that are sent dense, by all-reduce,
        are cut by DDP: a plan does not know how large they are, and holds the model for one.
        """
        return max(sum(sum(buffer_sizes(r, rank)) for r in layout.rounds) for layout in self._one_bucket())

    def work_nbytes(self, rank: int) -> int:
        """Return about the most work memory that exchanges take on `rank`, beside a GPU in part of the host.

        Of as many messages as are under way at once, each as large as the largest: the buffers of all its rounds, and
        copies by which its residuals can be put back. Besides, float32 copies of 16-bit gradients that are compressed.
        Buffers of other sizes that few messages take come on top. Through servers the copies of all messages are held
        until the step is over, so that it can be undone. With a GradScaler they are, too, which this does not count.
        """
        layouts = [layout for layout in self._one_bucket() if not isinstance(layout.partitions[0].aggregator, Dense)]
        sizes = [self.message_nbytes(layout, rank) for layout in layouts]
        held = min(DEPTH, len(sizes)) * max(map(sum, sizes), default=0)
        if self._is_served:
            held = min(SERVED_DEPTH, len(sizes)) * max((buffers for buffers, _ in sizes), default=0)
            held += sum(of_message for _, of_message in sizes)
        infos = {name: self.by_name[name].info for layout in layouts for name in layout.names}
        copies = sum(4 * info.numel for info in infos.values() if info.dtype != torch.float32)
        return held + copies

    def message_nbytes(self, layout: MessageLayout, rank: int) -> tuple[int, int]:
        """Return the work memory of a message on `rank`, in the sizes that pools lend: of buffers, and of copies."""
        buffers = [size for round_ in layout.rounds for size in buffer_sizes(round_, rank)]
        copies = [
            sum(
                4 * (self.by_name[p.name].factor_numel if slot is Slot.FACTOR else p.numel)
                for p in layout.partitions
                for slot in self.by_name[p.name].slots
                if slot.owned == owned and (p.owner == rank or not owned)
            )
            for owned in (False, True)
        ]
        of_buffers, of_copies = (sum(pooled_nbytes(size) for size in sizes if size) for sizes in (buffers, copies))
        return of_buffers, of_copies

    @property
    def raw_nbytes(self) -> int:
        """Bytes of all gradients, uncompressed."""
        return sum(param.info.nbytes for param in self.params)

    @property
    def compression_ratio(self) -> float:
        """Bytes that DDP's ring all-reduce would send over the bytes that the busiest rank sends; 1 with one rank."""
        ring = 2 * (self.world_size - 1) / self.world_size * self.raw_nbytes
        busiest = self.busiest_nbytes
        return ring / busiest if busiest and ring else 1.0

    def lines(self) -> list[str]:
        """Return all that must agree between ranks, one fact a line."""
        facts = [f"wire format {WIRE_FORMAT}", f"world size {self.world_size}", f"options {self.options}"]
        for param in self.params:
            info = param.info
            facts.append(f"{info.name}: shape {list(info.shape)}, {info.dtype}, {param.aggregator}")
        return facts

    @property
    def digest(self) -> str:
        """SHA-256 of `lines`."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def __str__(self) -> str:
        rows = [("parameter", "shape", "recipe", "partitions", "raw", "sent once", "why dense")]
        for param in self.params:
            if param.info.dtype in COMPRESSIBLE_DTYPES:
                wire = sum(p.aggregator.sent_once_nbytes(p.spec) for p in param.partitions)
            else:
                wire = param.info.nbytes
            recipe = "dense" if param.reason else param.aggregator.recipe()
            shape = "x".join(map(str, param.info.shape)) or "scalar"
            num = str(len(param.partitions))
            rows.append((param.info.name, shape, recipe, num, f"{param.info.nbytes:,}", f"{wire:,}", param.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        left = (0, 1, 2, 6)
        table = "\n".join(
            "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
            for row in rows
        )
        return (
            f"{table}\n{self.world_size} ranks; {self.raw_nbytes:,} bytes of gradient, {self.busiest_nbytes:,} sent "
            f"per step by the busiest rank: {self.compression_ratio:.1f}x less than a ring all-reduce; "
            f"{self._between_nodes()}{self._at_servers()}{self.memory()}"
        )

    def memory(self) -> str:
        """Return what the rank that owns the most keeps and works in, in words."""
        owned = self._owner_nbytes()
        rank = owned.index(max(owned))
        kept = (
            f"residuals take {self.worker_nbytes + owned[rank]:,} bytes a rank ({self.worker_nbytes:,} of what it "
            f"sends, {owned[rank]:,} of what it owns)"
        )
        work = f"work memory up to about {self.work_nbytes(rank):,}"
        if self._is_served:
            return f"{kept}; {work}, with copies of all residuals during a step, for {SERVED_DEPTH} messages under way"
        return f"{kept}, twice that during a step with a GradScaler; {work}, for {DEPTH} messages under way"

    def _at_servers(self) -> str:
        if not self.options.num_servers:
            return ""
        return f"as much comes back from {self.options.num_servers} servers, which keep residuals of their own; "

    def _between_nodes(self) -> str:
        if not any(isinstance(param.aggregator, _OfNodes) for param in self.params):
            return ""
        ring = round(2 * (self.world_size - 1) / self.world_size * self.raw_nbytes)
        return f"{self.between_nodes_nbytes:,} of all leave the busiest node, {ring:,} by a ring; "


def build_plan(
    named_parameters: Iterable[tuple[str, Tensor]],
    policy: "str | Aggregator | Mapping[str, str | Aggregator] | Patterns | Policy",
    world_size: int,
    options: PlanOptions | None = None,
    *,
    momentum: MomentumCorrection | None = None,
    all_reduce: bool = True,
    whole: Collection[str] = (),
    nodes: Hierarchical | NodePushPull | None = None,
) -> Plan:
    """Resolve a policy against a model's parameters.

    Where one parameter is sent with `MomentumCorrection`, the optimizer has no momentum for any: those that stay dense
    get it here, too, and the others must ask for the same.

    Args:
        named_parameters: those that train, in order of registration.
        policy: a recipe string or `Aggregator` for all; patterns; or a function of `ParamInfo` that returns
            either, or None for dense, and whose word is final but for dtypes that no compressor takes.
        world_size: number of ranks.
        options: cuts and thresholds.
        momentum: for all that stays dense, if other phases of training have it.
        all_reduce: whether a plan without compression may use DDP's own all-reduce; else owners form the mean.
        whole: names of parameters that are not cut, beside those whose compressor must see them whole.
        nodes: an exchange of other phases, which a plan without compression takes over, so that sums leave a node once.

    Raises:
        RecipeError: an unknown recipe or a setting out of range.
        PlanError: a pattern that matches nothing, a policy that returns something else, no parameters, or momentum for
            some and not for others.
    """
    options = options or PlanOptions()
    tensors = dict(named_parameters)
    infos = [
        ParamInfo(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, index=index)
        for index, (name, tensor) in enumerate(tensors.items())
    ]
    if not infos:
        raise PlanError("expected a model with parameters that require gradients, got none")
    resolve = resolver(policy, infos, options)
    resolved = [resolve(info) for info in infos]
    settings = {a for info, (a, _) in zip(infos, resolved, strict=True) if info.dtype in COMPRESSIBLE_DTYPES}
    # One all-reduce sums a whole bucket, so that all in it must travel alike.
    topologies = {a.node_sizes or options.node_sizes for a in settings if isinstance(a, _OfNodes)}
    if len(topologies) > 1:
        raise PlanError(f"expected the same nodes for all parameters, got {', '.join(map(str, topologies))}")
    momentum = _one_momentum(settings, momentum)
    served = options.num_servers or max((a.num_servers for a in settings if isinstance(a, ThroughServers)), default=0)
    one_dense = (
        all_reduce
        and not served
        and momentum is None
        and len(settings) <= 1
        and all(isinstance(aggregator, Dense) for aggregator in settings)
    )
    carrier = next((a for a in settings if isinstance(a, PowerSGD | _OfNodes)), None)
    if all(isinstance(aggregator, Dense) for aggregator in settings):
        carrier = nodes
    params: list[PlannedParam] = []
    # Owners are dealt in reverse order of registration, which is about the order in which gradients become ready, each
    # partition to whoever owns the fewest bytes so far: the wire waits for the fullest owner of a message. So whatever
    # run of parameters makes a bucket, its bytes are spread within two partitions' worth. Among servers it is work
    # that is spread: their processors are what is short.
    owners = [(0, owner) for owner in range(served or world_size)]  # a heap of (bytes or work, owner)
    for info, (aggregator, reason) in reversed(list(zip(infos, resolved, strict=True))):
        if isinstance(aggregator, Dense) and not one_dense and info.dtype in COMPRESSIBLE_DTYPES:
            # Rides along in a compressed message; owners sum in rank order, so that buckets do not show in the bits.
            owned = TwoShot(up=aggregator.up, down=aggregator.down, feedback=momentum)
            aggregator = owned if carrier is None or momentum is not None else _riding(carrier, owned)
        if isinstance(aggregator, _OfNodes) and aggregator.node_sizes is None:
            aggregator = dataclasses.replace(aggregator, node_sizes=options.node_sizes)
        if served and info.dtype in COMPRESSIBLE_DTYPES:
            aggregator = _through_servers(info.name, aggregator, served)
        aggregator = aggregator.for_world(world_size)
        if momentum is not None and aggregator.feedback != momentum:
            got = aggregator.feedback if info.dtype in COMPRESSIBLE_DTYPES else info.dtype
            raise PlanError(
                f"{info.name}: expected {momentum} as for other parameters and phases, since the optimizer must have "
                f"no momentum, got {got}; write '@dgc' after every recipe but dense"
            )
        shape = memory_shape(tensors[info.name])
        params.append(
            PlannedParam(
                info=info,
                aggregator=aggregator,
                reason=reason,
                partitions=_cut(info, shape, aggregator, options, owners, info.name in whole),
                slots=aggregator.slots,
                factor_numel=aggregator.factor_numel(shape),
            )
        )
    return Plan(tuple(reversed(params)), world_size, options)


def _riding(carrier: PowerSGD | Hierarchical | NodePushPull, owned: TwoShot) -> Aggregator:
    """Return what lets a dense parameter ride in the messages of another kind than `TwoShot`."""
    if isinstance(carrier, PowerSGD):
        return dataclasses.replace(carrier, rank=None)
    return Hierarchical(up=owned.up, down=owned.down, node_sizes=carrier.node_sizes)


def _through_servers(name: str, aggregator: Aggregator, num_servers: int) -> PushPull | NodePushPull:
    """Return a two-shot exchange, or one between nodes, with servers as owners."""
    if isinstance(aggregator, ThroughServers):
        return dataclasses.replace(aggregator, num_servers=num_servers)
    if isinstance(aggregator, Hierarchical):
        settings = {field.name: getattr(aggregator, field.name) for field in dataclasses.fields(aggregator)}
        return NodePushPull(**settings, num_servers=num_servers)
    if not isinstance(aggregator, TwoShot):
        raise PlanError(
            f"{name}: expected a recipe of the two-shot exchange, such as 'int8', 'topk:0.01' or 'hier/int8', which "
            f"servers can form the mean of, got {aggregator.recipe()!r}; or attach without servers"
        )
    return PushPull(up=aggregator.up, down=aggregator.down, feedback=aggregator.feedback, num_servers=num_servers)


def _one_momentum(settings: Iterable[Aggregator], momentum: MomentumCorrection | None) -> MomentumCorrection | None:
    """Return the momentum that all parameters get, `momentum` or what the settings say."""
    found = {momentum} if momentum is not None else set[MomentumCorrection]()
    found |= {a.feedback for a in settings if isinstance(a.feedback, MomentumCorrection)}
    if len(found) > 1:
        raise PlanError(f"expected one momentum for all parameters, got {', '.join(sorted(map(str, found)))}")
    return next(iter(found), None)


def _cut(
    info: ParamInfo,
    shape: tuple[int, ...],
    aggregator: Aggregator,
    options: PlanOptions,
    owners: list[tuple[int, int]],
    whole: bool,
) -> tuple[Partition, ...]:
    """Cut one parameter into partitions and deal owners to them.

    `owners` is a heap of (bytes or work owned, rank or server), `shape` is the parameter's in memory order.
    """
    partitions: list[Partition] = []
    whole = whole or bool(whole_kinds(aggregator))
    step = max(info.numel, 1) if whole or isinstance(aggregator, Dense) else options.partition_numel
    key = parameter_key(options.seed, info.name)
    for offset in range(0, max(info.numel, 1), step):
        load, owner = owners[0]
        partition = Partition(
            name=info.name,
            dtype=info.dtype,
            offset=offset,
            numel=min(step, info.numel - offset),
            owner=owner,
            aggregator=aggregator,
            key=key,
            shape=shape if whole else None,
        )
        nbytes = partition.spec.raw_nbytes
        if info.dtype in COMPRESSIBLE_DTYPES:
            try:
                nbytes = sum(compressor.nbytes(partition.spec) for compressor in (aggregator.up, aggregator.down))
            except ValueError as error:
                raise PlanError(f"{info.name}: {error}") from error
            if isinstance(aggregator, ThroughServers):
                nbytes = server_work(partition)
        heapq.heapreplace(owners, (load + nbytes, owner))
        partitions.append(partition)
    return tuple(partitions)


def first_difference(plans: Sequence[Sequence[str]]) -> str | None:
    """Return a sentence on the first line in which another rank's plan differs from rank 0's, or None."""
    for rank, lines in enumerate(plans[1:], start=1):
        for position in range(max(len(lines), len(plans[0]))):
            ours = plans[0][position] if position < len(plans[0]) else "nothing more"
            theirs = lines[position] if position < len(lines) else "nothing more"
            if ours != theirs:
                return f"rank 0 has `{ours}`, rank {rank} has `{theirs}`"
    return None
