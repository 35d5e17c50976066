"""FSDP2 (`fully_shard`): gradients compressed on their way to the rank that keeps their shard."""

# pyright: reportPrivateUsage=false

import datetime
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.aggregators import BufferPool, Message, ReduceScatter
from thinwire.comm.process_group import OverlappedDriver, common_group
from thinwire.comm.tracing import title
from thinwire.errors import AttachError, NonFiniteError, StateError
from thinwire.integrations.agreement import agree
from thinwire.integrations.fsdp_groups import ShardGroup, shard_groups, shard_process_group
from thinwire.integrations.fsdp_plan import Recipe, ShardPlan, build_shard_plan
from thinwire.integrations.stats import StepStats
from thinwire.plan import PlanOptions
from thinwire.state import State


class ShardLink:
    """What `attach` returns for a `fully_shard` model.

    Attributes:
        plan: every partition of every gradient; `print(link.plan)`.
        state: residuals and the step.
    """

    def __init__(
        self,
        plan: ShardPlan,
        groups: list[ShardGroup],
        driver: OverlappedDriver,
        world_size: int,
        on_nonfinite: str,
        threads: int,
    ) -> None:
        self.plan, self._driver, self._groups = plan, driver, groups
        self.world_size, self.on_nonfinite, self.threads = world_size, on_nonfinite, threads
        shapes = {p.name: torch.empty(p.shape, device="meta") for group in groups for p in group.params}
        self.state = State(plan.gradients, shapes, driver.rank)
        self.buffers = BufferPool()
        # Groups work one after the other, on the same memory: (numel of the largest,) float32.
        self.work = torch.empty(world_size * max((g.shard_numel for g in groups), default=0), dtype=torch.float32)
        self._failed: BaseException | None = None
        self._reduced: set[int] = set()  # groups that were reduced in the step under way
        self._num_steps, self._totals = 0, StepStats()

    def stats(self) -> dict[str, Any]:
        """Return means per step: `raw_nbytes`, `wire_nbytes`, `num_collectives`, `encode_s`, `transport_s`, `decode_s`.

        Of compressed groups only. Besides: `steps`, `work_nbytes`, `residual_nbytes`, and `dense`, a map from parameter
        name to the reason.
        """
        steps = max(1, self._num_steps)
        keys = ("raw_nbytes", "wire_nbytes", "num_collectives", "encode_s", "transport_s", "decode_s")
        return {
            "steps": self._num_steps,
            **{key: getattr(self._totals, key) / steps for key in keys},
            "work_nbytes": self.buffers.allocated_nbytes + self.work.nbytes,
            "residual_nbytes": self.state.nbytes,
            "dense": {param.info.name: param.reason for param in self.plan.gradients.params if param.reason},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and step, plain tensors by parameter name; every rank saves its own.

        Raises:
            StateError: an exchange failed, so that some residuals are of the step before and others are not.
        """
        if self._failed is not None:
            raise StateError("an exchange failed: go on from the checkpoint before it") from self._failed
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        self.state.load_state_dict(state)
        self._reduced.clear()

    def close(self) -> None:
        """Give FSDP2 its own reduce-scatters back and leave the process groups. Collective."""
        for group in self._groups:
            if isinstance(group.inner._reduce_scatter_comm, _GroupExchange):
                group.module.set_custom_reduce_scatter(group.inner._reduce_scatter_comm.before)
        self._driver.close()

    def run(self, which: int, messages: list[Message]) -> None:
        """Exchange the gradients of one group, and return when the sums are there."""
        if which in self._reduced:  # a group comes again: what it draws must differ
            self._reduced.clear()
        if not self._reduced:
            self.state.step += 1
            self._num_steps += 1
        self._reduced.add(which)
        for message in messages:
            message.begin(self.state.step)
            for block in message.blocks:
                if (feedback := block.partition.aggregator.feedback) is not None:
                    block.residual_scale = feedback.residual_scale(1.0)
        for i, message in enumerate(messages):
            message.name = title(f"group {which}.{i}", message.layout.names)
        done = [self._driver.submit(ReduceScatter.exchange(m), m.layout.rounds, m.name) for m in messages]
        try:
            outcomes = [future.result() for future in done]
        except BaseException as error:
            self._failed = self._failed or error
            raise
        for message, outcome in zip(messages, outcomes, strict=True):
            message.forget()
            self._totals.add(message, outcome)
        nonfinite = sorted({one for message in messages for one in message.nonfinite})
        if nonfinite and self.on_nonfinite == "raise":
            rank, name = nonfinite[0]
            raise NonFiniteError(
                f"the gradient of {name!r} on {'several ranks' if rank < 0 else f'rank {rank}'} holds inf or nan: all "
                "ranks raise, and its message's residuals are as before. FSDP2 is left inside a backward pass: go on "
                "from a checkpoint, or pass on_nonfinite='warn' to get nan in .grad instead"
            )
        if nonfinite:
            logging.getLogger("thinwire").warning("inf or nan in the gradients of %s: nan delivered", nonfinite)


class _GroupExchange:
    """FSDP2's custom reduce-scatter for one group."""

    def __init__(self, link: ShardLink, which: int, group: ShardGroup, rank: int) -> None:
        self.before = group.inner._reduce_scatter_comm
        self._link, self._which, self._group, self._rank = link, which, group, rank
        self._messages: list[Message] | None = None  # made in the first step

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
        if self._messages is None:
            self._messages = self._lay_out(work)
        work.copy_(input_tensor)
        link.run(self._which, self._messages)
        own = work[self._rank * ours.shard_numel : (self._rank + 1) * ours.shard_numel]
        if op == dist.ReduceOp.AVG:
            own.div_(link.world_size)  # once, and here: FSDP2 divides only sums
        output_tensor.copy_(own)

    def _lay_out(self, work: Tensor) -> list[Message]:
        link, group = self._link, self._group
        params = {param.name: param for param in group.params}
        messages: list[Message] = []
        for layout in link.plan.layouts([param.name for param in group.params]):
            blocks = []
            for part in layout.partitions:
                param = params[part.name]
                first, _ = param.chunk(part.owner, link.world_size)
                at = part.owner * group.shard_numel + param.start + part.offset - first
                slots = link.plan.gradients.by_name[part.name].slots
                blocks.append(link.state.block(part, work[at : at + part.numel], slots))
            messages.append(Message(layout, blocks, self._rank, threads=link.threads, buffers=link.buffers))
        return messages


def make_shard_link(
    model: nn.Module,
    recipe: Recipe,
    *,
    options: PlanOptions | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    threads: int = 1,
    workers: int | None = None,
    timeout: datetime.timedelta | None = None,
) -> ShardLink:
    """Plan a `fully_shard` model on all ranks and take over its reduce-scatters. Collective.

    See `thinwire.attach` for arguments and errors.
    """
    group = common_group(shard_process_group(model))
    world_size = dist.get_world_size(group)
    workers = max(1, min(4, torch.get_num_threads()) if workers is None else workers)
    driver = OverlappedDriver(group, num_rounds=2, workers=workers, timeout=timeout)
    groups: list[ShardGroup] = []

    def build() -> ShardPlan:
        if on_nonfinite not in ("raise", "warn"):
            raise AttachError(f"expected on_nonfinite 'raise' or 'warn', got {on_nonfinite!r}")
        if threads < 1:
            raise AttachError(f"expected at least one thread, got {threads}")
        groups.extend(shard_groups(model, world_size))
        return build_shard_plan(groups, recipe, world_size, options)

    try:
        plan = agree(build, driver.control, [f"on_nonfinite={on_nonfinite!r}"])
    except BaseException:
        driver.close()
        raise
    compressed = [g for g in groups if tuple(p.name for p in g.params) in plan.groups]
    link = ShardLink(plan, compressed, driver, world_size, on_nonfinite, threads)
    for which, one in enumerate(compressed):
        one.module.set_custom_reduce_scatter(_GroupExchange(link, which, one, driver.rank))
    return link
