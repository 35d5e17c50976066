"""What FSDP2 calls in place of its own reduce-scatters and all-gathers, one object for each group of parameters."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import Block, Message
from thinwire.errors import AttachError
from thinwire.integrations.fsdp_groups import ShardGroup
from thinwire.integrations.fsdp_plan import ShardPlan
from thinwire.plan import Plan

if TYPE_CHECKING:
    from thinwire.integrations.fsdp import ShardLink


class GroupReduce:
    """FSDP2's custom reduce-scatter for one group.

    Attributes:
        before: what FSDP2 had; it serves phases in which nothing of the group is compressed.
    """

    def __init__(self, link: "ShardLink", which: int, group: ShardGroup, rank: int) -> None:
        self.before = group.reduce_scatter
        self._link, self._which, self._group, self._rank = link, which, group, rank
        self._plan: ShardPlan | None = None  # for which the messages were made, in the first step of a phase
        self._messages: list[Message] = []
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
        plan = link.begin(self._which)
        if ours.names not in plan.groups:
            self.before(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
            link.look_at(output_tensor)
            return
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
        if plan is not self._plan:
            self._plan = plan
            self._messages = _messages(link, ours, plan.gradients, work, self._rank)
            if link.replicas is not None:
                assert plan.replicas is not None
                self._across = link.replicas.messages(
                    plan.replicas, ours.params, own, threads=link.threads, buffers=link.buffers
                )
        work.copy_(input_tensor)
        # Divided once, and there: FSDP2 divides only sums.
        link.run(self._which, self._messages, self._across, own, link.world_size if op == dist.ReduceOp.AVG else 1)
        output_tensor.copy_(own)
        link.look_at(output_tensor)


class WeightGather:
    """FSDP2's custom all-gather for one group.

    Attributes:
        before: what FSDP2 had.
    """

    def __init__(self, link: "ShardLink", group: ShardGroup, rank: int) -> None:
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
            assert link.plan.weights is not None
            self._messages = _messages(link, ours, link.plan.weights, work, self._rank)
        # The backward pass must see the weights of the forward pass, but other groups may have been reduced since.
        if not ours.in_backward:
            link.settle()
            self._step = link.state.step
        work[self._rank * ours.shard_numel : (self._rank + 1) * ours.shard_numel].copy_(input_tensor)
        link.gather(self._messages, self._step)
        output_tensor.copy_(work)  # `input_tensor` is a part of it: this rank, too, takes what it has sent


def _messages(link: "ShardLink", group: ShardGroup, plan: Plan, work: Tensor, rank: int) -> list[Message]:
    """Return messages whose values lie in `work` as FSDP2's flat buffer has them."""
    params = {param.name: param for param in group.params}
    messages: list[Message] = []
    for layout in plan.messages(group.names):
        blocks: list[Block] = []
        for part in layout.partitions:
            param = params[part.name]
            first, _ = param.chunk(part.owner, link.world_size)
            at = part.owner * group.shard_numel + param.start + part.offset - first
            blocks.append(link.state.block(part, work[at : at + part.numel], plan.by_name[part.name].slots))
        messages.append(Message(layout, blocks, rank, threads=link.threads, buffers=link.buffers))
    return messages
