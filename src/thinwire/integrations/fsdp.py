"""FSDP2 (`fully_shard`): gradients compressed on their way to their shards, weights on theirs to all ranks."""

import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.aggregators import MANY, Block, BufferPool, Message, MessageLayout
from thinwire.comm.process_group import OverlappedDriver, common_group
from thinwire.comm.tracing import title
from thinwire.compressors import Compressor
from thinwire.errors import AttachError, NonFiniteError, StateError
from thinwire.integrations.agreement import agree, largest
from thinwire.integrations.fsdp_groups import ShardGroup, shard_groups, shard_process_group
from thinwire.integrations.fsdp_plan import Recipe, ShardPlan, build_replica_plan, build_shard_plan
from thinwire.integrations.fsdp_replicas import Replicas, meet, replica_group
from thinwire.integrations.stats import StepStats
from thinwire.plan import Plan
from thinwire.policy import PlanOptions
from thinwire.schedule import Phase
from thinwire.state import REPLICAS, State


class ShardLink:
    """What `attach` returns for a `fully_shard` model.

    Attributes:
        plan: every partition of every gradient, and of weights if they are compressed; `print(link.plan)`.
        state: residuals and the step.
    """

    def __init__(
        self,
        plan: ShardPlan,
        groups: list[ShardGroup],
        gathered: list[ShardGroup],
        driver: OverlappedDriver,
        world_size: int,
        on_nonfinite: str,
        threads: int,
        replicas: Replicas | None = None,
    ) -> None:
        self.replicas = replicas
        self.plan, self._driver, self._groups, self._gathered = plan, driver, groups, gathered
        self.world_size, self.on_nonfinite, self.threads = world_size, on_nonfinite, threads
        shapes = {p.name: torch.empty(p.shape, device="meta") for group in groups for p in group.params}
        self.state = State(plan.gradients, shapes, driver.rank)
        self.buffers = BufferPool()
        # Groups work one after the other, weights and gradients, on the same memory: (numel of the largest,) float32.
        largest = max((group.shard_numel for group in (*groups, *gathered)), default=0)
        self.work = torch.empty(world_size * largest, dtype=torch.float32)
        self._failed: BaseException | None = None
        self._reduced: set[int] = set()  # groups that were reduced in the step under way
        self._num_steps, self._totals = 0, StepStats()
        self._num_gathers, self._weights = 0, StepStats()

    def stats(self) -> dict[str, Any]:
        """Return means per step: `raw_nbytes`, `wire_nbytes`, `num_collectives`, `encode_s`, `transport_s`, `decode_s`.

        Of the gradients of compressed groups only. Besides: `steps`, `work_nbytes`, `residual_nbytes`, and `dense`, a
        map from parameter name to the reason. Of compressed weights, in all and not per step, since evaluation gathers
        them too: `weight_gathers` (of one group each), `weight_raw_nbytes`, `weight_wire_nbytes`. With replicas,
        `replicas`: the first six of shards on their way between them.
        """
        steps = max(1, self._num_steps)
        keys = ("raw_nbytes", "wire_nbytes", "num_collectives", "encode_s", "transport_s", "decode_s")
        return {
            "steps": self._num_steps,
            **{key: getattr(self._totals, key) / steps for key in keys},
            "work_nbytes": self.buffers.allocated_nbytes + self.work.nbytes,
            "residual_nbytes": self.state.nbytes + (0 if self.replicas is None else self.replicas.nbytes),
            **(
                {}
                if (between := self.replicas) is None
                else {REPLICAS: {k: getattr(between.totals, k) / steps for k in keys}}
            ),
            "weight_gathers": self._num_gathers,
            "weight_raw_nbytes": self._weights.raw_nbytes,
            "weight_wire_nbytes": self._weights.wire_nbytes,
            "dense": {param.info.name: param.reason for param in self.plan.gradients.params if param.reason},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and step, plain tensors by parameter name; every rank saves its own.

        Raises:
            StateError: an exchange failed, so that some residuals are of the step before and others are not.
        """
        if self._failed is not None:
            raise StateError("an exchange failed: go on from the checkpoint before it") from self._failed
        state = self.state.state_dict()
        return state if self.replicas is None else {**state, REPLICAS: self.replicas.state_dict(self.state.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        between = state.get(REPLICAS) if isinstance(state, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if (between is None) != (self.replicas is None):
            expected = "without" if self.replicas is None else "with"
            raise StateError(f"expected a state saved {expected} a replicate_group, got another")
        before = None
        if self.replicas is not None and between is not None:
            before = self.replicas.state_dict(self.state.step)
            self.replicas.load_state_dict(between)
        try:
            self.state.load_state_dict(state)
        except BaseException:
            if self.replicas is not None and before is not None:
                self.replicas.load_state_dict(before)
            raise
        self._reduced.clear()

    def close(self) -> None:
        """Give FSDP2 its own collectives back and leave the process groups. Collective."""
        for group in self._groups:
            if isinstance(group.reduce_scatter, _GroupExchange):
                group.module.set_custom_reduce_scatter(group.reduce_scatter.before)
        for group in self._gathered:
            if isinstance(group.all_gather, _WeightGather):
                group.module.set_custom_all_gather(group.all_gather.before)
        self._driver.close()
        if self.replicas is not None:
            self.replicas.driver.close()

    def run(self, which: int, messages: list[Message], across: list[Message], own: Tensor, divisor: int) -> None:
        """Exchange the gradients of one group, and return when sums, divided by `divisor`, are in `own`.

        With replicas, their mean: what is not finite in one of them is nan in all, and raised when all know.
        """
        if which in self._reduced:  # a group comes again: what it draws must differ
            self._reduced.clear()
        if not self._reduced:
            self.state.step += 1
            self._num_steps += 1
        self._reduced.add(which)
        for message in (*messages, *across):
            message.begin(self.state.step)
            for block in message.blocks:
                if (feedback := block.partition.aggregator.feedback) is not None:
                    block.residual_scale = feedback.residual_scale(1.0)
        self._perform(f"group {which}", messages, self._totals, self._driver)
        bad = sorted({one for message in messages for one in message.nonfinite})
        what = "gradient"
        own.div_(divisor)
        if self.replicas is not None:
            if bad:
                own.fill_(float("nan"))
            self._perform(f"group {which}, replicas", across, self.replicas.totals, self.replicas.driver)
            theirs = sorted({one for message in across for one in message.nonfinite})
            # Who keeps another shard does not see where a sum overflowed in this one: all of the replica are told.
            if largest(float(bool(theirs)), self._driver):
                own.fill_(float("nan"))
                for message in (*messages, *across):  # nothing of this group was delivered anywhere
                    message.restore()
                if not bad:
                    bad = theirs or [(MANY, across[0].layout.names[0])]
                    what = "gradient, over replicas as ranks,"
        for message in (*messages, *across):
            message.forget()
        self._check_finite(
            bad,
            what,
            "its message's residuals are as before. FSDP2 is left inside a backward pass: go on from a checkpoint, or "
            "pass on_nonfinite='warn' to get nan in .grad instead",
        )

    def gather(self, messages: list[Message], step: int) -> None:
        """Bring the weights of one group to all ranks, and return when they are there."""
        for message in messages:
            message.begin(step)
        self._num_gathers += 1
        self._perform("weights", messages, self._weights, self._driver)
        for message in messages:
            message.forget()
        self._check_finite(
            sorted({one for message in messages for one in message.nonfinite}),
            "weight",
            "training has diverged: go on from a checkpoint, or pass on_nonfinite='warn' to compute with nan in the "
            "weights of its message instead",
        )

    def _perform(self, what: str, messages: list[Message], totals: StepStats, driver: OverlappedDriver) -> None:
        for i, message in enumerate(messages):
            message.name = title(f"{what}.{i}", message.layout.names)
        kinds = [type(message.layout.partitions[0].aggregator) for message in messages]
        done = [
            driver.submit(kind.exchange(m), m.layout.rounds, m.name) for kind, m in zip(kinds, messages, strict=True)
        ]
        try:
            outcomes = [future.result() for future in done]
        except BaseException as error:
            self._failed = self._failed or error
            raise
        for message, outcome in zip(messages, outcomes, strict=True):
            totals.add(message, outcome)

    def _check_finite(self, nonfinite: Sequence[tuple[int, str]], what: str, advice: str) -> None:
        """Raise, or warn, on all ranks alike, if any contribution, (rank, parameter), holds inf or nan."""
        if nonfinite and self.on_nonfinite == "raise":
            rank, name = nonfinite[0]
            raise NonFiniteError(
                f"the {what} of {name!r} on {'several ranks' if rank < 0 else f'rank {rank}'} holds inf or nan: all "
                f"ranks raise, and {advice}"
            )
        if nonfinite:
            logging.getLogger("thinwire").warning("inf or nan in the %ss of %s: nan delivered", what, nonfinite)


class _GroupExchange:
    """FSDP2's custom reduce-scatter for one group."""

    def __init__(self, link: ShardLink, which: int, group: ShardGroup, rank: int) -> None:
        self.before = group.reduce_scatter
        self._link, self._which, self._group, self._rank = link, which, group, rank
        self._messages: list[Message] | None = None  # made in the first step
        self._across: list[Message] = []  # between replicas

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that FSDP2 may keep."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce (world_size * shard,) to (shard,), whose mean or sum FSDP2 asks for. Synchronous."""
        ours, link = self._group, self._link
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise AttachError(
                f"FSDP2 asks for {op}, as after set_gradient_divide_factor: call "
                "set_force_sum_reduction_for_comms(True) too, so that it divides the sum itself"
            )
        work = link.work[: link.world_size * ours.shard_numel]
        if input_tensor.numel() != work.numel() or input_tensor.dtype != ours.dtype:
            raise AttachError(
                f"expected {work.numel()} gradients of {ours.dtype} for {ours.params[0].name!r} and others of its "
                f"group, got {input_tensor.numel()} of {input_tensor.dtype}: where some parameters may get no gradient "
                "call model.set_reduce_scatter_unused_params(True); after (un)freezing some, close and attach again"
            )
        own = work[self._rank * ours.shard_numel : (self._rank + 1) * ours.shard_numel]
        if self._messages is None:
            layouts = link.plan.layouts([param.name for param in ours.params])
            self._messages = _messages(link, ours, layouts, work, self._rank)
            if link.replicas is not None:
                self._across = link.replicas.messages(ours.params, own, threads=link.threads, buffers=link.buffers)
        work.copy_(input_tensor)
        # Divided once, and there: FSDP2 divides only sums.
        link.run(self._which, self._messages, self._across, own, link.world_size if op == dist.ReduceOp.AVG else 1)
        output_tensor.copy_(own)


class _WeightGather:
    """FSDP2's custom all-gather for one group."""

    def __init__(self, link: ShardLink, group: ShardGroup, rank: int) -> None:
        self.before = group.all_gather
        self._link, self._group, self._rank = link, group, rank
        self._step = 0  # keys the random streams; that of the last forward pass
        self._messages: list[Message] | None = None  # made in the first step

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that FSDP2 may keep."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather (shard,) to (world_size * shard,). Synchronous: all is there on return."""
        ours, link = self._group, self._link
        work = link.work[: link.world_size * ours.shard_numel]
        if (input_tensor.numel(), output_tensor.numel()) != (ours.shard_numel, work.numel()) or (
            input_tensor.dtype != ours.dtype
        ):
            raise AttachError(
                f"expected {ours.shard_numel} weights of {ours.dtype} for {ours.params[0].name!r} and others of its "
                f"group, got {input_tensor.numel()} of {input_tensor.dtype}: close and attach again after changing them"
            )
        if self._messages is None:
            layouts = link.plan.weight_layouts([param.name for param in ours.params])
            self._messages = _messages(link, ours, layouts, work, self._rank)
        # The backward pass must see the weights of the forward pass, but other groups may have been reduced since.
        if not ours.in_backward:
            self._step = link.state.step
        work[self._rank * ours.shard_numel : (self._rank + 1) * ours.shard_numel].copy_(input_tensor)
        link.gather(self._messages, self._step)
        output_tensor.copy_(work)  # `input_tensor` is a part of it: this rank, too, takes what it has sent


def _messages(
    link: ShardLink, group: ShardGroup, layouts: Sequence[MessageLayout], work: Tensor, rank: int
) -> list[Message]:
    """Return messages whose values lie in `work` as FSDP2's flat buffer has them."""
    params = {param.name: param for param in group.params}
    messages: list[Message] = []
    for layout in layouts:
        blocks: list[Block] = []
        for part in layout.partitions:
            param = params[part.name]
            first, _ = param.chunk(part.owner, link.world_size)
            at = part.owner * group.shard_numel + param.start + part.offset - first
            blocks.append(link.state.block(part, work[at : at + part.numel], part.aggregator.slots))
        messages.append(Message(layout, blocks, rank, threads=link.threads, buffers=link.buffers))
    return messages


def make_shard_link(
    model: nn.Module,
    recipe: Recipe,
    *,
    weights: str | Compressor | None = None,
    replicate_group: "dist.ProcessGroup | DeviceMesh | None" = None,
    replicate_recipe: Phase | None = None,
    options: PlanOptions | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    threads: int = 1,
    workers: int | None = None,
    timeout: datetime.timedelta | None = None,
) -> ShardLink:
    """Plan a `fully_shard` model on all ranks and take over its reduce-scatters, and all-gathers. Collective.

    See `thinwire.attach` for arguments and errors.
    """
    group = common_group(shard_process_group(model))
    if replicate_recipe is not None and replicate_group is None:
        raise AttachError("replicate_recipe: expected a replicate_group with it, as mesh['replicate']")
    between = None if replicate_group is None else replica_group(replicate_group, group)
    world_size = dist.get_world_size(group)
    workers = max(1, min(4, torch.get_num_threads()) if workers is None else workers)
    driver = OverlappedDriver(group, workers=workers, timeout=timeout)
    across = None if between is None else OverlappedDriver(between, workers=workers, timeout=timeout)
    groups: list[ShardGroup] = []
    gathered: list[ShardGroup] = []

    def build() -> ShardPlan:
        if on_nonfinite not in ("raise", "warn"):
            raise AttachError(f"expected on_nonfinite 'raise' or 'warn', got {on_nonfinite!r}")
        if threads < 1:
            raise AttachError(f"expected at least one thread, got {threads}")
        groups.extend(shard_groups(model, world_size))
        if weights is not None:
            gathered.extend(shard_groups(model, world_size, weights=True))
        return build_shard_plan(
            groups, recipe, world_size, options, weights=weights, gathered=gathered, every_group=across is not None
        )

    def build_between() -> Plan:
        assert across is not None
        ours = recipe if replicate_recipe is None else replicate_recipe
        return build_replica_plan(groups, ours, driver.rank, world_size, across.control.size(), options)

    plan, failed, replicas = None, None, None
    settings = [f"on_nonfinite={on_nonfinite!r}", f"replicate_group={'none' if across is None else 'given'}"]
    try:
        try:
            plan = agree(build, driver.control, settings)
        except Exception as error:
            failed = error  # raised once the other replicas know
        if across is not None:
            replica_plan = meet(model, build_between, plan, failed, driver, across)
            params = [param for one in groups for param in one.params]
            replicas = Replicas(replica_plan, across, params, driver.rank, world_size)
        if plan is None:
            assert failed is not None
            raise failed
    except BaseException:
        driver.close()
        if across is not None:
            across.close()
        raise
    if replicas is not None:
        plan = dataclasses.replace(plan, replicas=replicas.plan)
    compressed = [g for g in groups if tuple(p.name for p in g.params) in plan.groups]
    takes = [g for g in gathered if tuple(p.name for p in g.params) in plan.weight_groups]
    link = ShardLink(plan, compressed, takes, driver, world_size, on_nonfinite, threads, replicas)
    for which, one in enumerate(compressed):
        one.module.set_custom_reduce_scatter(_GroupExchange(link, which, one, driver.rank))
    for one in takes:
        one.module.set_custom_all_gather(_WeightGather(link, one, driver.rank))
    return link
