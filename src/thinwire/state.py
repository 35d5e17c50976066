"""Residuals and counters that must survive a restart: float32, keyed by parameter name, saved and re-sharded here.

In a checkpoint residuals have the shape of their parameter; partitions and buckets do not show. Each rank saves its
own.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.aggregators import Partition, keeps_residual
from thinwire.errors import StateError
from thinwire.plan import Plan
from thinwire.spec import fills_memory

FORMAT = 1
_KEYS = ("rank", "world_size", "partition_numel", "owners", "step", "loss_scale", "learning_rates", "worker", "owner")


class State:
    """What one rank keeps between steps.

    Everything is created at once, so that checkpoints have the same keys on every rank from the first step on.

    Args:
        plan: what is compressed and who owns it.
        params: the parameters, by name, for shapes and strides.
        rank: this rank.
    """

    def __init__(self, plan: Plan, params: Mapping[str, Tensor], rank: int) -> None:
        self._plan, self._params, self._rank = plan, params, rank
        self.step = 0  # committed steps; keys every random stream
        self.loss_scale = 1.0  # residuals are in units of loss_scale x gradient; as of the last committed step
        self.learning_rates: dict[str, float] = {}  # of the last committed step, where feedback corrects for them
        # Flat, in the parameter's memory order, (numel,) float32; encode rewrites slices of them in place.
        self.worker: dict[str, Tensor] = {}
        # Only partitions owned here, (partition.numel,) float32.
        self.owner: dict[tuple[str, int], Tensor] = {}
        for param in plan.params:
            aggregator = param.aggregator
            if keeps_residual(aggregator.up, aggregator.feedback):
                self.worker[param.info.name] = torch.zeros(param.info.numel, dtype=torch.float32)
            if keeps_residual(aggregator.down, aggregator.feedback):
                for partition in param.partitions:
                    if partition.owner == rank:
                        self.owner[partition.name, partition.offset] = torch.zeros(partition.numel, dtype=torch.float32)

    @property
    def _owners(self) -> str:
        """A digest of who owns which of the partitions with an owner's residual."""
        owners = [
            f"{p.name} {p.offset} {p.owner}"
            for param in self._plan.params
            if keeps_residual(param.aggregator.down, param.aggregator.feedback)
            for p in param.partitions
        ]
        return hashlib.sha256("\n".join(owners).encode()).hexdigest()

    def residual(self, partition: Partition) -> Tensor | None:
        """Return the slice of this rank's residual that belongs to a partition, or None."""
        whole = self.worker.get(partition.name)
        return None if whole is None else whole[partition.offset : partition.offset + partition.numel]

    def owner_residual(self, partition: Partition) -> Tensor | None:
        """Return the owner's residual of a partition owned here, or None."""
        return self.owner.get((partition.name, partition.offset))

    @property
    def nbytes(self) -> int:
        """Memory of all residuals."""
        return sum(4 * residual.numel() for residual in (*self.worker.values(), *self.owner.values()))

    def squared_norm(self) -> float:
        """Return the squared norm of this rank's residuals, in units of the unscaled gradient."""
        total = sum(float(torch.dot(residual, residual)) for residual in self.worker.values())
        return total / self.loss_scale**2

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and numbers (`torch.load(..., weights_only=True)` reads them). Save one per rank.

        `worker` and `owner` map parameter names to float32 tensors of the parameter's shape; `owner` is zero wherever
        another rank owns. Both are in units of `loss_scale` times the gradient.
        """
        owner = {
            param.info.name: torch.zeros(param.info.numel, dtype=torch.float32)
            for param in self._plan.params
            if keeps_residual(param.aggregator.down, param.aggregator.feedback)
        }
        for (name, offset), residual in self.owner.items():
            owner[name][offset : offset + residual.numel()] = residual
        return {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._plan.world_size,
            "partition_numel": self._plan.options.partition_numel,
            "owners": self._owners,
            "step": self.step,
            "loss_scale": self.loss_scale,
            "learning_rates": dict(self.learning_rates),
            "worker": {name: _logical(flat, self._params[name]).clone() for name, flat in self.worker.items()},
            "owner": {name: _logical(flat, self._params[name]).clone() for name, flat in owner.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rank returned; nothing changes if it does not fit.

        Raises:
            StateError: another format, rank, world size, partition size or owners, or parameters that
                differ.
        """
        if state.get("format") != FORMAT:
            raise StateError(f"expected a thinwire state of format {FORMAT}, got {state.get('format')!r}")
        if missing := [key for key in _KEYS if key not in state]:
            raise StateError(f"expected all that state_dict() returned, got a state without {missing[0]!r}")
        for key, expected in (
            ("world_size", self._plan.world_size),
            ("partition_numel", self._plan.options.partition_numel),
            ("rank", self._rank),
        ):
            if state[key] != expected:
                raise StateError(
                    f"state was saved with {key} {state[key]}, this run has {expected}; residuals belong to their "
                    "rank: gather the states of all ranks and pass them through thinwire.reshard_state"
                )
        if state["owners"] not in (None, self._owners):
            raise StateError(
                "state was saved when partitions had other owners: parameters or recipes have changed since. "
                "thinwire.reshard_state moves the residuals of all ranks to their new owners; parameters that came or "
                "went must first be added to each state's 'worker' and 'owner', as zeros, or taken out"
            )
        owned = {name for name, _ in self.owner}
        for kind, names in (("worker", set(self.worker)), ("owner", owned)):
            saved: Mapping[str, Tensor] = state[kind]
            if missing := sorted(names - set(saved)):
                raise StateError(f"state has no {kind} residual for {missing[0]!r} ({len(missing)} missing)")
            if kind == "worker" and (extra := sorted(set(saved) - names)):
                raise StateError(f"state has a residual for {extra[0]!r}, which this plan sends without feedback")
            for name in names:
                if tuple(saved[name].shape) != tuple(self._params[name].shape):
                    raise StateError(
                        f"{name}: expected a residual of shape {tuple(self._params[name].shape)}, got "
                        f"{tuple(saved[name].shape)}"
                    )
        for name, flat in self.worker.items():
            _logical(flat, self._params[name]).copy_(state["worker"][name])
        for name in owned:
            flat = torch.empty(self._plan.by_name[name].info.numel, dtype=torch.float32)
            _logical(flat, self._params[name]).copy_(state["owner"][name])
            for (owned_name, offset), residual in self.owner.items():
                if owned_name == name:
                    residual.copy_(flat[offset : offset + residual.numel()])
        self.step = int(state["step"])
        self.loss_scale = float(state["loss_scale"])
        self.learning_rates = {name: float(lr) for name, lr in state["learning_rates"].items()}


def reshard_state(
    states: Sequence[Mapping[str, Any]], world_size: int, *, partition_numel: int = 65536
) -> list[dict[str, Any]]:
    """Turn the saved states of all ranks into states for another world size or partition size.

    What training still owes is conserved: the mean over ranks of the workers' residuals, plus the owners' residual.
    Every new worker gets the mean of the old ones; owners' residuals go to whoever owns next.

    Args:
        states: one `state_dict` per old rank, in any order.
        world_size: number of new ranks.
        partition_numel: of the new plan.

    Returns:
        One state per new rank.

    Raises:
        StateError: a rank is missing or twice, or the states are not of one moment.
    """
    for state in states:
        if missing := [key for key in ("format", *_KEYS) if key not in state]:
            raise StateError(f"expected all that state_dict() returned, got a state without {missing[0]!r}")
    if not states or world_size < 1:
        raise StateError(
            f"expected states to make others of, and for at least one rank, got {len(states)}, {world_size}"
        )
    states = sorted(states, key=lambda state: state["rank"])
    first = states[0]
    if [state["rank"] for state in states] != list(range(first["world_size"])):
        ranks = [state["rank"] for state in states]
        raise StateError(f"expected one state for each of ranks 0..{first['world_size'] - 1}, got ranks {ranks}")
    for state in states:
        for key in ("format", "step", "loss_scale", "owners"):
            if state[key] != first[key]:
                raise StateError(f"rank {state['rank']} has {key} {state[key]}, rank 0 has {first[key]}")
        if differing := sorted(set(state["worker"]) ^ set(first["worker"])):
            raise StateError(f"rank {state['rank']} and rank 0 do not both have a residual for {differing[0]!r}")
    worker = {name: torch.stack([s["worker"][name] for s in states]).mean(dim=0) for name in first["worker"]}
    owner: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for state in states for name in state["owner"]):
        owner[name] = torch.stack([state["owner"][name] for state in states if name in state["owner"]]).sum(dim=0)
    return [
        {
            **first,
            "rank": rank,
            "world_size": world_size,
            "partition_numel": partition_numel,
            "owners": None,  # every state holds all owners' residuals: whoever owns a partition next takes its part
            "worker": _cloned(worker.items()),
            "owner": _cloned(owner.items()),
        }
        for rank in range(world_size)
    ]


def _cloned(items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in items}


def _logical(flat: Tensor, like: Tensor) -> Tensor:
    """View memory in `like`'s order as a tensor of `like`'s shape."""
    return flat.as_strided(like.shape, like.stride()) if fills_memory(like) else flat.view(like.shape)
