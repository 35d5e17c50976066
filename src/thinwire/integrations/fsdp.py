"""FSDP2 (`fully_shard`): gradients compressed on their way to their shards, weights on theirs to all ranks."""

import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.aggregators import MANY, BufferPool, Message
from thinwire.comm.process_group import OverlappedDriver, common_group
from thinwire.comm.tracing import title
from thinwire.errors import AttachError, LossScaleError, NonFiniteError, StateError
from thinwire.feedback import Slot
from thinwire.integrations.agreement import agree, largest
from thinwire.integrations.fsdp_build import Recipe, WeightRecipe, build_replica_phases, build_shard_phases
from thinwire.integrations.fsdp_collectives import GroupReduce, WeightGather
from thinwire.integrations.fsdp_groups import ShardGroup, shard_groups, shard_process_group
from thinwire.integrations.fsdp_plan import ShardPhases, ShardPlan
from thinwire.integrations.fsdp_replicas import Replicas, meet, replica_group
from thinwire.integrations.link import Scaler
from thinwire.integrations.stats import StepStats
from thinwire.phases import Phases
from thinwire.policy import PlanOptions
from thinwire.state import REPLICAS, State, of_one_rank


@dataclass(slots=True)
class _Pass:
    """A backward pass, from its first reduction to its end.

    Attributes:
        plan: valid in it.
        loss_scale: the factor that gradients of this rank come with.
        reduced: groups that have been reduced in it.
        messages: with a scaler all of them, whose residuals can still be put back.
        names: parameters that thinwire has sent.
        nonfinite: whether something of it was not finite on this rank.
    """

    plan: ShardPlan
    loss_scale: float = 1.0
    reduced: set[int] = field(default_factory=lambda: set())
    messages: list[Message] = field(default_factory=lambda: [])
    names: set[str] = field(default_factory=lambda: set())
    nonfinite: bool = False


class ShardLink:
    """What `attach` returns for a `fully_shard` model.

    Attributes:
        phases: the plans of a schedule, by the step from which they are valid.
        plan: the last of them, or the only one: every partition of every gradient, and of weights if they are
            compressed; `print(link.plan)`.
        state: residuals and counters.
        skipped_steps: steps that were not finite and left everything as it was (with `scaler`).
    """

    def __init__(
        self,
        phases: ShardPhases,
        groups: list[ShardGroup],
        gathered: list[ShardGroup],
        driver: OverlappedDriver,
        *,
        world_size: int,
        on_nonfinite: str,
        threads: int,
        scaler: Scaler | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.phases, self.plan, self.replicas = phases, phases.final, replicas
        self._driver, self._groups, self._gathered = driver, groups, gathered
        self.world_size, self.on_nonfinite, self.threads = world_size, on_nonfinite, threads
        self._scaler = scaler
        shapes = {p.name: torch.empty(p.shape, device="meta") for group in groups for p in group.params}
        self.state = State(phases.kept, shapes, driver.rank)
        self.buffers = BufferPool()
        # Groups work one after the other, weights and gradients, on the same memory: (numel of the largest,) float32.
        reduced = [group for group in groups if group.names in phases.reduced]
        numel = world_size * max((group.shard_numel for group in (*reduced, *gathered)), default=0)
        self.work = torch.empty(numel, dtype=torch.float32)
        self.skipped_steps = 0
        self._failed: BaseException | None = None
        self._pass: _Pass | None = None  # under way
        self._ends = False  # whether autograd will call `_pass_ended`
        self._agreed: ShardPlan | None = phases.at(0)  # the plan that all ranks are known to use
        self._num_steps, self._totals = 0, StepStats()
        self._num_gathers, self._weights = 0, StepStats()

    def stats(self) -> dict[str, Any]:
        """Return means per step: `raw_nbytes`, `wire_nbytes`, `num_collectives`, `encode_s`, `transport_s`, `decode_s`.

        Of the gradients of compressed groups only. Besides: `steps`, `skipped_steps`, `work_nbytes`, `residual_nbytes`,
        and `dense`, a map from parameter name to the reason. Of compressed weights, in all and not per step, since
        evaluation gathers them too: `weight_gathers` (of one group each), `weight_raw_nbytes`, `weight_wire_nbytes`.
        With replicas, `replicas`: the first six of shards on their way between them.
        """
        self.settle()
        steps = max(1, self._num_steps)
        keys = ("raw_nbytes", "wire_nbytes", "num_collectives", "encode_s", "transport_s", "decode_s")
        return {
            "steps": self._num_steps,
            "skipped_steps": self.skipped_steps,
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
            StateError: an exchange failed or a backward pass did not come to its end, so that some residuals are of
                the step before and others are not.
        """
        if self._failed is None:
            self.settle()
        if self._failed is not None or self._pass is not None:
            what = "a backward pass did not come to its end" if self._failed is None else "an exchange failed"
            raise StateError(
                f"{what}, and residuals are between two steps: go on from the checkpoint before it"
            ) from self._failed
        state = self.state.state_dict()
        return state if self.replicas is None else {**state, REPLICAS: self.replicas.state_dict(self.state.step)}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over what `state_dict` returned on the same rank.

        Args:
            state: what to take over.
            strict: whether parameters and feedback must be the same as when it was saved. Else what `state` lacks
                starts at zero, what is not kept here is dropped, and a warning names both. Alike on all ranks.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        state = of_one_rank(state)
        between, replicas = state.get(REPLICAS), self.replicas
        if (between is None) != (replicas is None):
            expected = "without" if replicas is None else "with"
            if strict:
                raise StateError(f"expected a state saved {expected} a replicate_group, got another")
            what = "dropped" if replicas is None else "starting at zero"
            logging.getLogger("thinwire").warning("state loaded with strict=False: between replicas: %s", what)
        before = None
        if replicas is not None:
            before = replicas.state_dict(self.state.step)
            ours = {**before, **{slot: {} for slot in Slot}} if between is None else between
            replicas.load_state_dict(ours, strict=strict)
        try:
            self.state.load_state_dict(state, strict=strict)
        except BaseException:
            if replicas is not None and before is not None:
                replicas.load_state_dict(before)
            raise
        self._pass, self._agreed = None, None

    def close(self) -> None:
        """Give FSDP2 its own collectives back and leave the process groups. Collective."""
        for group in self._groups:
            if isinstance(group.reduce_scatter, GroupReduce):
                group.module.set_custom_reduce_scatter(group.reduce_scatter.before)
        for group in self._gathered:
            if isinstance(group.all_gather, WeightGather):
                group.module.set_custom_all_gather(group.all_gather.before)
        self._driver.close()
        if self.replicas is not None:
            self.replicas.driver.close()

    # --- what the collectives of groups call, in FSDP2's order ------------------------------------------------------

    def begin(self, which: int) -> ShardPlan:
        """Note that a group is reduced, in the backward pass under way or a new one; return what is valid in that."""
        if self._pass is not None and which in self._pass.reduced:
            self._end_pass()  # a group comes again: what it draws must differ
        if self._pass is None:
            self._pass = _Pass(self._agreed_plan())
            if self._scaler is not None:
                self._pass.loss_scale = float(self._scaler.get_scale())
        if not self._ends:
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)
            self._ends = True
        self._pass.reduced.add(which)
        return self._pass.plan

    def look_at(self, shard: Tensor) -> None:
        """With a scaler, note whether the optimizer's step will be skipped for what this rank got of a group."""
        assert self._pass is not None
        if self._scaler is not None and not bool(shard.isfinite().all()):
            self._pass.nonfinite = True

    def run(self, which: int, messages: list[Message], across: list[Message], own: Tensor, divisor: int) -> None:
        """Exchange the gradients of one group, and return when sums, divided by `divisor`, are in `own`.

        With replicas, their mean: what is not finite in one of them is nan in all, and raised when all know.
        """
        step = self._pass
        assert step is not None
        self._begin_messages(step, messages, self.state)
        self._perform(f"group {which}", messages, self._totals, self._driver)
        bad = sorted({one for message in messages for one in message.nonfinite})
        what, differ = "gradient", any(message.scales_differ for message in messages)
        own.div_(divisor)
        if self.replicas is not None:
            if bad:
                own.fill_(float("nan"))
            self._begin_messages(step, across, self.replicas.state)
            self._perform(f"group {which}, replicas", across, self.replicas.totals, self.replicas.driver)
            theirs = sorted({one for message in across for one in message.nonfinite})
            differ = differ or any(message.scales_differ for message in across)
            # Who keeps another shard does not see where a sum overflowed in this one: all of the replica are told.
            worst = self._largest(2.0 if differ else 1.0 if theirs else 0.0)
            differ = worst == 2.0
            if worst:
                own.fill_(float("nan"))
                for message in (*messages, *across):  # nothing of this group was delivered anywhere
                    message.restore()
                if not bad:
                    bad = theirs or [(MANY, across[0].layout.names[0])]
                    what = "gradient, over replicas as ranks,"
        step.names.update(name for message in messages for name in message.layout.names)
        step.messages += (*messages, *across)
        if differ:
            self._refuse_scales(step)
        if self._scaler is not None:
            step.nonfinite = step.nonfinite or bool(bad)
            return
        self._forget(step)
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

    # --- steps ------------------------------------------------------------------------------------------------------

    def _agreed_plan(self) -> ShardPlan:
        """Return the plan of this step. Collective where a phase begins, or state has been loaded into one of several.

        Ranks that count other steps would exchange other bytes.
        """
        plan = self.phases.at(self.state.step)
        if plan is not self._agreed and len(self.phases.plans) > 1:
            agree(lambda: plan, self._driver.control, [f"step={self.state.step}"])
            if self.replicas is not None and plan.replicas is not None:
                between = plan.replicas
                agree(lambda: between, self.replicas.driver.control, [f"step={self.state.step}"])
        self._agreed = plan
        return plan

    def _begin_messages(self, step: _Pass, messages: Sequence[Message], state: State) -> None:
        for message in messages:
            message.begin(self.state.step)
            message.loss_scale = step.loss_scale
            for block in message.blocks:
                if (feedback := block.partition.aggregator.feedback) is not None:
                    block.unit_ratio = feedback.unit_ratio(loss_scale=step.loss_scale, last_loss_scale=state.loss_scale)
                    block.residual_scale = feedback.residual_scale(block.unit_ratio)

    def _pass_ended(self) -> None:
        """Called by autograd when a backward pass has come to its end, after FSDP2's own call."""
        self._ends = False
        self.settle()

    def settle(self) -> None:
        """End the pass that is over.

        A layer that reentrant checkpointing computes again has a backward pass of its own, inside the other; if that
        reduced last, nothing is called at the end of the outer one, which is then found to be over later. Collective
        where there is something to end and a scaler.
        """
        if self._pass is not None and not self._groups[0].pass_goes_on:
            self._end_pass()

    def _end_pass(self) -> None:
        """Commit residuals and counters, or put them back where the scaler skips the step. Collective with a scaler."""
        step, self._pass = self._pass, None
        assert step is not None
        self._num_steps += 1
        # A shard that is not finite is known to its rank alone, and GradScaler skips the step on all.
        if self._scaler is not None and self._largest(float(step.nonfinite)):
            for message in step.messages:
                message.restore()
            self.skipped_steps += 1
            self._forget(step)
            return
        self._forget(step)
        self.state.step += 1
        for state in (self.state, *(() if self.replicas is None else (self.replicas.state,))):
            if step.loss_scale != state.loss_scale:
                fresh = {(slot, name) for slot, kept in state.whole.items() for name in kept if name in step.names}
                fresh |= {(slot, name) for slot, kept in state.owned.items() for name, _ in kept if name in step.names}
                state.rescale(step.loss_scale / state.loss_scale, fresh)
                state.loss_scale = step.loss_scale

    def _largest(self, value: float) -> float:
        try:
            return largest(value, self._driver)
        except BaseException as error:
            self._failed = self._failed or error
            raise

    def _forget(self, step: _Pass) -> None:
        for message in step.messages:
            message.forget()
        step.messages.clear()

    def _refuse_scales(self, step: _Pass) -> None:
        """Raise on all ranks alike: gradients are in different units."""
        for message in step.messages:
            message.restore()
        self._forget(step)
        self._pass = None
        raise LossScaleError(
            f"expected GradScalers of one scale on all ranks, got {step.loss_scale:g} on this one and another on "
            f"others, in step {self.state.step}: gradients are in different units; nothing was delivered and residuals "
            "kept. Give all scalers the same arguments, load the same scaler state everywhere, and call step() and "
            "update() alike. FSDP2 is left inside a backward pass: go on from a checkpoint"
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


def make_shard_link(
    model: nn.Module,
    recipe: Recipe,
    *,
    weights: WeightRecipe | None = None,
    replicate_group: "dist.ProcessGroup | DeviceMesh | None" = None,
    replicate_recipe: Recipe | None = None,
    scaler: Scaler | None = None,
    start_after: int = 0,
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
    if scaler is not None and not getattr(scaler, "is_enabled", lambda: True)():
        scaler = None  # a GradScaler(enabled=False) skips nothing
    world_size = dist.get_world_size(group)
    workers = max(1, min(4, torch.get_num_threads()) if workers is None else workers)
    driver = OverlappedDriver(group, workers=workers, timeout=timeout)
    across = None if between is None else OverlappedDriver(between, workers=workers, timeout=timeout)
    groups: list[ShardGroup] = []
    gathered: list[ShardGroup] = []

    def build() -> ShardPhases:
        if on_nonfinite not in ("raise", "warn"):
            raise AttachError(f"expected on_nonfinite 'raise' or 'warn', got {on_nonfinite!r}")
        if threads < 1:
            raise AttachError(f"expected at least one thread, got {threads}")
        if start_after < 0:
            raise AttachError(f"expected start_after >= 0 steps, got {start_after}")
        if options is not None and options.num_servers:
            raise AttachError("num_servers: expected 0, since shards are summed by the ranks that keep them")
        groups.extend(shard_groups(model, world_size))
        if weights is not None:
            gathered.extend(shard_groups(model, world_size, weights=True))
        return build_shard_phases(
            groups,
            recipe,
            world_size,
            options,
            start_after=start_after,
            weights=weights,
            gathered=gathered,
            every_group=across is not None,
        )

    def build_between() -> Phases:
        assert across is not None
        ours = recipe if replicate_recipe is None else replicate_recipe
        num_replicas = across.control.size()
        return build_replica_phases(
            groups, ours, driver.rank, world_size, num_replicas, options, start_after=start_after
        )

    phases, failed, replicas = None, None, None
    settings = [
        f"on_nonfinite={on_nonfinite!r}",
        f"replicate_group={'none' if across is None else 'given'}",
        f"scaler={'none' if scaler is None else f'of scale {scaler.get_scale():g}'}",
    ]
    try:
        try:
            phases = agree(build, driver.control, settings)
        except Exception as error:
            failed = error  # raised once the other replicas know
        if across is not None:
            said = [*settings, f"plan of a replica: {phases and phases.digest}"]
            replica_phases = meet(model, build_between, said, failed, driver, across)
            params = [param for one in groups for param in one.params]
            replicas = Replicas(replica_phases, across, params, driver.rank, world_size)
        if phases is None:
            assert failed is not None
            raise failed
    except BaseException:
        driver.close()
        if across is not None:
            across.close()
        raise
    if replicas is not None:
        phases = phases.with_replicas(replicas.phases)
    # With a scaler all groups: the step is skipped for what is not finite in any of them.
    reduced = groups if scaler is not None else [one for one in groups if one.names in phases.reduced]
    takes = [one for one in gathered if one.names in phases.final.weight_groups]
    link = ShardLink(
        phases,
        reduced,
        takes,
        driver,
        world_size=world_size,
        on_nonfinite=on_nonfinite,
        threads=threads,
        scaler=scaler,
        replicas=replicas,
    )
    for which, one in enumerate(reduced):
        one.module.set_custom_reduce_scatter(GroupReduce(link, which, one, driver.rank))
    for one in takes:
        one.module.set_custom_all_gather(WeightGather(link, one, driver.rank))
    return link
