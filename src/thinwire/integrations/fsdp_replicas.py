"""Replicas of a sharded model: each rank exchanges its shards with the same rank of every other replica.

FSDP2's own HSDP sends shards over a replicate dimension uncompressed before any hook runs. So the model is sharded over
one dimension alone, and what FSDP2 takes for the result of a reduce-scatter is the mean over replicas too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thinwire.aggregators import BufferPool, Message
from thinwire.comm.process_group import OverlappedDriver, all_gather_text
from thinwire.errors import AttachError, StateError
from thinwire.integrations.agreement import agree
from thinwire.integrations.fsdp_groups import ShardedParam
from thinwire.integrations.replicas import ReplicaCheck
from thinwire.integrations.stats import StepStats
from thinwire.phases import Phases
from thinwire.plan import Plan
from thinwire.state import State


class Replicas:
    """The exchange between replicas, of one rank's shards.

    Attributes:
        phases: plans of the shards, every partition of them, by the step from which they are valid.
        state: residuals between replicas.
        driver: over the ranks that keep the same shards.
        totals: what was counted since attach.
    """

    def __init__(
        self, phases: Phases, driver: OverlappedDriver, params: Sequence[ShardedParam], rank: int, world_size: int
    ) -> None:
        self.phases, self.driver, self.totals = phases, driver, StepStats()
        self._place = {"shard_rank": rank, "num_shards": world_size}
        shapes = {p.name: torch.empty(p.shard_shape(rank, world_size), device="meta") for p in params}
        self.state = State(phases.kept, shapes, driver.rank)

    @property
    def nbytes(self) -> int:
        """Memory of the residuals."""
        return self.state.nbytes

    def messages(
        self, plan: Plan, params: Sequence[ShardedParam], own: Tensor, *, threads: int, buffers: BufferPool
    ) -> list[Message]:
        """Return the messages of a plan that work on this rank's part of a group's flat buffer."""
        starts = {param.name: param.start for param in params}
        messages: list[Message] = []
        for layout in plan.messages(list(starts)):
            blocks = []
            for part in layout.partitions:
                at = starts[part.name] + part.offset
                slots = plan.by_name[part.name].slots
                blocks.append(self.state.block(part, own[at : at + part.numel], slots))
            messages.append(Message(layout, blocks, self.driver.rank, threads=threads, buffers=buffers))
        return messages

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the residuals of this rank's shards, plain tensors by parameter name."""
        self.state.step = step
        return {**self.state.state_dict(), **self._place}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over what `state_dict` returned on the same rank of the same replica; `strict` as for `State`.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        for key, expected in self._place.items():
            if state.get(key) != expected:
                raise StateError(f"state between replicas was saved with {key} {state.get(key)}, this is {expected}")
        self.state.load_state_dict(state, strict=strict)


def replica_group(group: "dist.ProcessGroup | DeviceMesh", shards: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the ranks that keep the same shards in every replica.

    Raises:
        AttachError: not a group of one dimension that meets the shards in this rank alone.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AttachError(
                f"replicate_group: expected a mesh of one dimension, as mesh['replicate'], got {group.ndim}"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise AttachError(f"replicate_group: expected a process group or a mesh, got {type(group).__name__}")
    both = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(shards))
    if both != {dist.get_rank()}:
        raise AttachError(
            f"replicate_group and the ranks that the model is sharded over share ranks {sorted(both)}: expected this "
            f"one alone, {dist.get_rank()}; shard over mesh['shard'] and pass mesh['replicate'] of one mesh"
        )
    if dist.get_world_size(shards) == 1:
        raise AttachError(
            "replicate_group: the model is sharded over one rank, and FSDP2 reduces nothing then; expected "
            "DistributedDataParallel instead"
        )
    return group


def meet(
    model: nn.Module,
    build: Callable[[], Phases],
    settings: Sequence[str],
    failed: Exception | None,
    driver: OverlappedDriver,
    across: OverlappedDriver,
) -> Phases:
    """Agree with the other replicas on plans, and on weights, which FSDP2 copies to none of them. Collective.

    An error on any rank of any replica is raised on all: each tells the same ranks of other replicas, then its own.

    Args:
        model: with its shards.
        build: plans the exchange between replicas.
        settings: what else must be equal in all replicas, one fact a line.
        failed: what went wrong in this replica already.
        driver: over the ranks of this replica.
        across: over the ranks that keep the same shards.
    """

    def build_unless_failed() -> Phases:
        if failed is not None:
            raise failed
        return build()

    between, error = None, failed
    try:
        between = agree(build_unless_failed, across.control, settings)
        shards = {name: param.to_local() for name, param in model.named_parameters() if isinstance(param, DTensor)}
        if (difference := ReplicaCheck(shards, across.control).difference()) is not None:
            raise AttachError(
                f"replicas, here counted as ranks, begin with different weights: {difference}; expected the same, as "
                "from one seed or checkpoint: nothing copies them"
            )
    except Exception as raised:
        error = raised
    stories = all_gather_text("" if error is None else str(error), driver.control)
    if error is not None:
        raise error
    for rank, story in enumerate(stories):
        if story:
            raise AttachError(f"rank {rank} of this replica could not attach: {story}")
    assert between is not None
    return between
