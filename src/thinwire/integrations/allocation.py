"""Choosing recipes anew while training goes on: errors are measured, gathered, and turned into the same plan by all."""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire.aggregators import Block, Hierarchical, Message, Partition
from thinwire.allocate import choose
from thinwire.comm.process_group import all_gather_text
from thinwire.compressors import Compressor
from thinwire.errors import PlanError, StateError
from thinwire.integrations.choosing import Chooser
from thinwire.kernels import EncodeJob
from thinwire.kernels.reference_steps import tree_sum
from thinwire.phases import Choices
from thinwire.plan import Plan
from thinwire.random import Key

Errors = dict[str, list[float]]  # squared, by parameter and candidate


class Allocator(Chooser):
    """Holds the choice that is valid now, and the errors that the next one is made by.

    Args:
        choices: the candidates, resolved.
        start: the first step in which there is a choice.
        rank: this rank.
        control: a group whose tensors live on the CPU.
    """

    key, title = "allocation", "Allocate"

    def __init__(self, choices: Choices, start: int, rank: int, control: dist.ProcessGroup) -> None:
        self._choices, self._start, self._rank, self._control = choices, start, rank, control
        self._names = choices.names
        self._candidates = _by_place(choices)
        self._plan = choices.default
        self._chosen = dict.fromkeys(self._names, choices.settings.default_index)
        self._errors: Errors = {}  # of this rank, since the last choice, in units of the unscaled gradient
        self._last = start  # the step of the last choice

    @property
    def plan(self) -> Plan:
        """What was chosen last."""
        return self._plan

    def is_measured(self, step: int) -> bool:
        """Whether errors are measured in this step."""
        settings, since = self._choices.settings, step - self._start
        return since >= 0 and since % settings.every >= settings.every - settings.samples

    def measure(self, messages: Sequence[Message], step: int) -> Errors:
        """Return the errors of this rank's gradients under every candidate, before they are encoded."""
        errors: Errors = {}
        for block in (block for message in messages for block in message.blocks):
            partition = block.partition
            if partition.name in self._chosen:
                found = errors.setdefault(partition.name, [0.0] * len(self._choices.plans))
                key = Key(partition.key, step, self._rank, partition.offset)
                for place, candidate in enumerate(self._candidates[partition.name, partition.offset]):
                    found[place] += sum(_squared_error(kind, block, candidate, key) for kind in _lossy(candidate))
        return errors

    def add(self, errors: Errors, loss_scale: float) -> None:
        """Count the errors of a step that was finite on all ranks."""
        for name, found in errors.items():
            so_far = self._errors.get(name, [0.0] * len(found))
            self._errors[name] = [a + b / loss_scale**2 for a, b in zip(so_far, found, strict=True)]

    def next_plan(self, step: int) -> Plan:
        """Return the plan of a step that begins, after the choice that may be due. Collective where it is."""
        since = step - self._start
        if since > 0 and since % self._choices.settings.every == 0 and step != self._last:
            self._choose(step)
        return self.plan

    def _choose(self, step: int) -> None:
        """Make the choice that is due, on all ranks alike. Collective."""
        self._last = step
        texts = all_gather_text(json.dumps([step, self._errors]), self._control)
        gathered = [json.loads(text) for text in texts]
        if len(steps := {of for of, _ in gathered}) > 1:
            raise PlanError(f"expected ranks in one step, got {sorted(steps)}; load states of one moment on all ranks")
        self._errors = {}
        if not any(errors for _, errors in gathered):
            return
        nothing = [0.0] * len(self._choices.plans)  # of a parameter that no backward pass reached
        tables = [[errors.get(name, nothing) for name in self._names] for _, errors in gathered]
        table = [[math.sqrt(math.fsum(c)) for c in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
        settings = self._choices.settings
        budget = settings.budget * math.fsum(row[settings.default_index] for row in table)
        sizes = [[_nbytes(plan, name) for plan in self._choices.plans] for name in self._names]
        found = choose(table, sizes, budget)
        self._take(dict(zip(self._names, found, strict=True)))
        if self._rank == 0:
            error = math.fsum(row[candidate] for row, candidate in zip(table, found, strict=True))
            counts = Counter(settings.names[candidate] for candidate in found)
            logging.getLogger("thinwire").info(
                "step %d: chose %s; error %.3g of a budget of %.3g; all ranks send %d bytes a step of them, %d "
                "with %s for all",
                step,
                ", ".join(f"{name} for {counts[name]} parameters" for name in settings.names if counts[name]),
                error,
                budget,
                sum(row[candidate] for row, candidate in zip(sizes, found, strict=True)),
                sum(row[settings.default_index] for row in sizes),
                settings.names[settings.default_index],
            )

    def _take(self, chosen: Mapping[str, int]) -> None:
        self._chosen = dict(chosen)
        self._plan = self._choices.mixed(self._chosen)

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, by recipe, and what the next one is made by, as plain numbers and strings."""
        names = self._choices.settings.names
        return {
            "chosen": {name: names[candidate] for name, candidate in self._chosen.items()},
            "candidates": list(names),
            "errors": {name: list(found) for name, found in self._errors.items()},
            "last": self._last,
        }

    def check(self, state: Mapping[str, Any] | None, *, strict: bool) -> None:
        """Raise `StateError` unless `load_state_dict` can take it over."""
        if state is None:
            if strict:
                raise StateError(
                    "state was saved without Allocate: load it with strict=False, which begins with the default"
                )
            return
        candidates = list(self._choices.settings.names)
        if list(state["candidates"]) != candidates:
            raise StateError(f"state was saved with the candidates {state['candidates']}, this run has {candidates}")
        if strict and set(state["chosen"]) != set(self._names):
            differing = sorted(set(state["chosen"]) ^ set(self._names))
            raise StateError(f"state chooses for other parameters, {differing[0]!r} among them: pass strict=False")

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` returned, for the parameters that there are; None begins anew."""
        names, default = self._choices.settings.names, self._choices.settings.default_index
        saved = state or {"chosen": {}, "errors": {}, "last": self._start}
        chosen = {name: names.index(recipe) for name, recipe in saved["chosen"].items()}
        self._take({name: chosen.get(name, default) for name in self._names})
        self._errors = {name: list(found) for name, found in saved["errors"].items() if name in self._chosen}
        self._last = int(saved["last"])


def _by_place(choices: Choices) -> dict[tuple[str, int], tuple[Partition, ...]]:
    """Return every candidate's partition by name and offset."""
    places = (zip(*(plan.by_name[name].partitions for plan in choices.plans), strict=True) for name in choices.names)
    return {(group[0].name, group[0].offset): group for found in places for group in found}


def _lossy(partition: Partition) -> list[Compressor]:
    """Return the compressors inside a node, up and, where there is a way, down: what each loses is lost."""
    aggregator = partition.aggregator
    inner = [aggregator.inner] if isinstance(aggregator, Hierarchical) and aggregator.inner_dtype is not None else []
    return [*inner, aggregator.up, *([aggregator.down] if aggregator.has_owners else [])]


def _squared_error(kind: Compressor, block: Block, partition: Partition, key: Key) -> float:
    """Return ||x - C(x)||^2, summed in the tree of all kernels; inf where C cannot hold x."""
    left = torch.zeros_like(block.value)
    out = torch.empty(kind.nbytes(partition.spec), dtype=torch.uint8)
    (finite,) = kind.encode_jobs([EncodeJob(block.value, out, left, 1.0, key)], [partition.spec])
    return float(tree_sum(left.double().square())) if finite else math.inf


def _nbytes(plan: Plan, name: str) -> int:
    """Return what all ranks together send of a parameter in a step, if it travels alone."""
    param = plan.by_name[name]
    rounds = type(param.aggregator).schedule(param.partitions, plan.world_size)
    return sum(sum(one.sent_nbytes_by_rank()) for one in rounds)
