"""What feedback keeps, and counters, that must survive a restart: keyed by parameter name, saved and re-sharded here.

`thinwire.feedback.Slot` lists what there is, residuals among it: float32, in checkpoints in the shape of their
parameter; partitions and buckets do not show. Each rank saves its own.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.aggregators import Block, Partition
from thinwire.errors import StateError
from thinwire.feedback import Slot
from thinwire.plan import Plan
from thinwire.spec import fills_memory

FORMAT = 3
_EF21 = frozenset({Slot.ESTIMATE, Slot.DELIVERED, Slot.MEAN})  # of one parameter; they determine each other
REPLICAS = "replicas"  # under this, what a sharded model's ranks keep of the exchange between its replicas
_KEYS = ("rank", "world_size", "partition_numel", "owners", "step", "loss_scale", "learning_rates", *map(str, Slot))


def of_one_rank(state: object) -> Mapping[str, Any]:
    """Return the state. Raises `StateError` for anything else, as a list of states."""
    if not isinstance(state, Mapping):
        raise StateError(f"expected the state of one rank, got a {type(state).__name__}; of several take [rank]")
    return cast(Mapping[str, Any], state)


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
        # Per slot and parameter: flat, in the parameter's memory order, (numel,) float32; rewritten in place by slices.
        self.whole: dict[Slot, dict[str, Tensor]] = {slot: {} for slot in Slot if not slot.owned}
        # Only partitions owned here, (partition.numel,) float32.
        self.owned: dict[Slot, dict[tuple[str, int], Tensor]] = {slot: {} for slot in Slot if slot.owned}
        for param in plan.params:
            for slot in param.slots:
                if not slot.owned:
                    self.whole[slot][param.info.name] = self.zeros(param.info.name, param.slot_numel(slot))
                    continue
                for partition in param.partitions:
                    if partition.owner == rank:
                        place = partition.name, partition.offset
                        self.owned[slot][place] = self.zeros(partition.name, partition.numel)

    def zeros(self, name: str, numel: int) -> Tensor:
        """Return (numel,) float32 beside a parameter; on the CPU if that has a shape only."""
        where = self._params[name].device
        return torch.zeros(numel, dtype=torch.float32, device="cpu" if where.type == "meta" else where)

    @property
    def worker(self) -> dict[str, Tensor]:
        """This rank's residuals."""
        return self.whole[Slot.WORKER]

    @property
    def owner(self) -> dict[tuple[str, int], Tensor]:
        """The residuals of the partitions owned here."""
        return self.owned[Slot.OWNER]

    @property
    def _owners(self) -> str:
        """A digest of who owns which of the partitions of which owners keep something."""
        owners = [
            f"{p.name} {p.offset} {p.owner}"
            for param in self._plan.params
            if any(slot.owned for slot in param.slots)
            for p in param.partitions
        ]
        return hashlib.sha256("\n".join(owners).encode()).hexdigest()

    def block(self, partition: Partition, value: Tensor, slots: Collection[Slot]) -> Block:
        """Return a block with the slices of `slots` that belong to it."""
        place, kept = (partition.name, partition.offset), dict[Slot, Tensor]()
        for slot in slots:
            if slot is Slot.FACTOR:
                kept[slot] = self.whole[slot][partition.name]
            elif not slot.owned:
                kept[slot] = self.whole[slot][partition.name][partition.offset : partition.offset + partition.numel]
            elif place in self.owned[slot]:
                kept[slot] = self.owned[slot][place]
        residual, owner_residual = kept.pop(Slot.WORKER, None), kept.pop(Slot.OWNER, None)
        return Block(partition, value, residual, owner_residual, kept)

    def rescale(self, ratio: float, fresh: Collection[tuple[Slot, str]]) -> None:
        """Bring all into the units of a new loss scale but `fresh`, slots and parameters that are in them already."""
        for slot, whole in self.whole.items():
            for name, tensor in whole.items():
                if (slot, name) not in fresh and slot is not Slot.FACTOR:
                    tensor.mul_(ratio)
        for slot, owned in self.owned.items():
            for (name, _), tensor in owned.items():
                if (slot, name) not in fresh:
                    tensor.mul_(ratio)

    @property
    def nbytes(self) -> int:
        """Memory of all that is kept."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all that is kept."""
        return [tensor for kept in (*self.whole.values(), *self.owned.values()) for tensor in kept.values()]

    def squared_norm(self) -> float:
        """Return the squared norm of this rank's residuals, in units of the unscaled gradient."""
        total = sum(float(torch.dot(residual, residual)) for residual in self.worker.values())
        return total / self.loss_scale**2

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors and numbers (`torch.load(..., weights_only=True)` reads them). Save one per rank.

        Every slot maps parameter names to float32 tensors of the parameter's shape ("factor": flat); those that owners
        keep are zero wherever another rank owns. All but "factor" are in units of `loss_scale` times the gradient.
        """
        return {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._plan.world_size,
            "partition_numel": self._plan.options.partition_numel,
            "owners": self._owners,
            "step": self.step,
            "loss_scale": self.loss_scale,
            "learning_rates": dict(self.learning_rates),
            **{str(slot): _cloned(self._as_parameters(slot, self._gathered(slot))) for slot in Slot},
        }

    def _gathered(self, slot: Slot) -> Mapping[str, Tensor]:
        """Return a slot by parameter, flat, zero where another rank owns."""
        if not slot.owned:
            return self.whole[slot]
        gathered = {
            param.info.name: self.zeros(param.info.name, param.info.numel)
            for param in self._plan.params
            if slot in param.slots
        }
        for (name, offset), tensor in self.owned[slot].items():
            gathered[name][offset : offset + tensor.numel()] = tensor
        return gathered

    def _as_parameters(self, slot: Slot, flat: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        if slot is Slot.FACTOR:
            return flat.items()
        return ((name, _logical(tensor, self._params[name])) for name, tensor in flat.items())

    def in_shape(self, name: str, flat: Tensor) -> Tensor:
        """View a parameter's numbers, flat in its memory order, in its shape."""
        return _logical(flat, self._params[name])

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over what `state_dict` of the same rank returned; nothing changes if it does not fit.

        Args:
            state: what to take over.
            strict: whether every tensor of the plan must be in `state`, and every one in `state` in the plan. Else what
                `state` lacks starts at zero and what the plan does not keep is dropped; rank 0 logs a warning that
                names both. Must be alike on all ranks.

        Raises:
            StateError: another format, rank, world size, partition size, owners or shapes, or with `strict` parameters
                or feedback that differ.
        """
        state = of_one_rank(state)
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
                    "rank: save and load one file a rank (with torch.distributed.checkpoint, "
                    "thinwire.Checkpointable(link)), or pass those of all ranks through thinwire.reshard_state"
                )
        if state["owners"] not in (None, self._owners):
            raise StateError(
                "state was saved when partitions had other owners: parameters or recipes have changed since. "
                "thinwire.reshard_state moves the residuals of all ranks to their new owners; with parameters that "
                "came or went, load what it returns with strict=False"
            )
        if not strict:
            state = {**state, **self._fitted(state)}
        for slot in Slot:
            self._check(slot, state[slot])
        for slot, whole in self.whole.items():
            for name, logical in self._as_parameters(slot, whole):
                logical.copy_(state[slot][name])
        for slot, owned in self.owned.items():
            for name in {name for name, _ in owned}:
                flat = self.zeros(name, self._plan.by_name[name].info.numel)
                _logical(flat, self._params[name]).copy_(state[slot][name])
                for (owned_name, offset), tensor in owned.items():
                    if owned_name == name:
                        tensor.copy_(flat[offset : offset + tensor.numel()])
        self.step = int(state["step"])
        self.loss_scale = float(state["loss_scale"])
        self.learning_rates = {name: float(lr) for name, lr in state["learning_rates"].items()}

    def _fitted(self, state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return the slots of `state` with what the plan keeps: zeros where they lack it, less what it keeps not."""
        fitted: dict[str, dict[str, Tensor]] = {str(slot): {} for slot in Slot}
        fresh, used = list[str](), set[tuple[Slot, str]]()
        for param in self._plan.params:
            name = param.info.name
            missing = {slot for slot in param.slots if name not in state[slot]}
            if Slot.FACTOR in param.slots - missing and state[Slot.FACTOR][name].numel() != param.factor_numel:
                missing.add(Slot.FACTOR)  # of another rank
            if missing & _EF21:
                missing |= param.slots & _EF21  # a mean of estimates beside other estimates would stay wrong for good
            for slot in sorted(param.slots):
                if slot in missing:
                    fresh.append(f"{name} ({slot})")
                    shape = (param.factor_numel,) if slot is Slot.FACTOR else param.info.shape
                    fitted[slot][name] = torch.zeros(shape, dtype=torch.float32)
                else:
                    used.add((slot, name))
                    fitted[slot][name] = state[slot][name]
        dropped = [f"{name} ({slot})" for slot in Slot for name in state[slot] if (slot, name) not in used]
        if self._rank == 0 and (fresh or dropped):
            logging.getLogger("thinwire").warning(
                "state loaded with strict=False: starting at zero: %s; dropped: %s",
                ", ".join(fresh) or "nothing",
                ", ".join(dropped) or "nothing",
            )
        return fitted

    def _check(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        what = f"{slot} {'residual' if slot in (Slot.WORKER, Slot.OWNER) else 'tensor'}"
        names = {name for name, _ in self.owned[slot]} if slot.owned else set(self.whole[slot])
        if missing := sorted(names - set(saved)):
            raise StateError(
                f"state has no {what} for {missing[0]!r} ({len(missing)} missing): it was saved with another recipe or "
                "model; load it into the same, or with strict=False, which starts at zero what is missing"
            )
        if not slot.owned and (extra := sorted(set(saved) - names)):
            raise StateError(
                f"state has a {what} for {extra[0]!r}, which this plan sends without such feedback: load it into a "
                "recipe that has it, as 'int8@ef' after 'int4', or with strict=False, which drops it"
            )
        for name in names:
            expected = tuple((self.whole[slot][name] if slot is Slot.FACTOR else self._params[name]).shape)
            if tuple(saved[name].shape) != expected:
                raise StateError(f"{name}: expected its {what} of shape {expected}, got {tuple(saved[name].shape)}")


def reshard_state(
    states: Sequence[Mapping[str, Any]], world_size: int, *, partition_numel: int = 65536
) -> list[dict[str, Any]]:
    """Turn the saved states of all ranks into states for another world size or partition size.

    What training still owes is conserved. With n workers' residuals w_i and the owners' residual o,

        owed = (1/n) sum_i w_i + o;    each new worker gets w = float32((1/n) sum_i w_i), whoever owns next gets o.

    The sum is in float64 and in rank order, so that `owed` changes by the rounding of w to float32 alone: not at all
    where the mean is a float32 number, as from one rank, or where the workers hold the same because they were
    re-sharded before; so a chain of world sizes rounds once. Momenta and EF21's estimates go as residuals do, owners'
    means as o; what is the same on all ranks stays so. How the w_i differ from each other is lost: the new run repeats
    itself bit for bit, not the run that the old ranks would have gone on with.

    Args:
        states: one `state_dict` per old rank, in any order; what this function returned serves, too.
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
    if any(REPLICAS in state for state in states):
        raise StateError(
            "states saved with a replicate_group cannot be re-sharded: expected states of shards alone; go on with the "
            "same ranks, or without residuals"
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
        if any(state.get(key, {}).get("chosen") != first.get(key, {}).get("chosen") for key in ("allocation", "auto")):
            raise StateError(f"rank {state['rank']} and rank 0 have not chosen the same recipes")
        for slot in Slot:
            if not slot.owned and (differing := sorted(set(state[slot]) ^ set(first[slot]))):
                what = f"{slot} tensor for {differing[0]!r}"
                raise StateError(f"rank {state['rank']} and rank 0 do not both have a {what}")
    kept = {slot: _merged(slot, states) for slot in Slot}
    measured = {"allocation": _mean_errors(states)} if "allocation" in first else {}
    return [
        {
            **first,
            **measured,
            "rank": rank,
            "world_size": world_size,
            "partition_numel": partition_numel,
            "owners": None,  # every state holds all owners' residuals: whoever owns a partition next takes its part
            **{str(slot): _cloned(kept[slot].items()) for slot in Slot},
        }
        for rank in range(world_size)
    ]


def _merged(slot: Slot, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return what is kept by the ranks together, by parameter: a mean, a sum of parts, or what all of them hold."""
    merged: dict[str, Tensor] = {}
    alike = slot.common or (slot.owned and states[0]["owners"] is None)  # None: each has all owners' parts
    for name in dict.fromkeys(name for state in states for name in state[slot]):
        tensors = [state[slot][name] for state in states if name in state[slot]]
        if alike:
            merged[name] = tensors[0]
            continue
        total = torch.zeros_like(tensors[0], dtype=torch.float64)
        for tensor in tensors:
            total += tensor
        merged[name] = (total if slot.owned else total / len(tensors)).float()
    return merged


def _mean_errors(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was chosen, and the mean over ranks of the errors measured since."""
    errors: dict[str, list[float]] = {}
    for state in states:
        for name, found in state["allocation"]["errors"].items():
            so_far = errors.get(name, [0.0] * len(found))
            errors[name] = [a + b / len(states) for a, b in zip(so_far, found, strict=True)]
    return {**states[0]["allocation"], "errors": errors}


def _cloned(items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in items}


def _logical(flat: Tensor, like: Tensor) -> Tensor:
    """View memory in `like`'s order as a tensor of `like`'s shape."""
    return flat.as_strided(like.shape, like.stride()) if fills_memory(like) else flat.view(like.shape)
