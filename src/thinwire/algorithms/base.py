"""What all local methods share: ranks train apart, and exchange the differences to a copy that all of them hold."""

import dataclasses
import datetime
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.aggregators import MANY, MEAN
from thinwire.algorithms.averager import Averager
from thinwire.algorithms.outer import OuterSGD
from thinwire.algorithms.peers import broadcast, furthest, make_equal
from thinwire.algorithms.planning import plan_differences
from thinwire.algorithms.rhythm import Rhythm
from thinwire.algorithms.tracked import Fragments, Tracked, bare, check_groups, cut, track, trained_ids
from thinwire.comm.process_group import OverlappedDriver, common_group
from thinwire.errors import AttachError, NonFiniteError, StateError
from thinwire.feedback import Slot
from thinwire.integrations.agreement import agree
from thinwire.integrations.topology import Topology, node_sizes
from thinwire.plan import Plan
from thinwire.policy import PlanOptions
from thinwire.schedule import Phase

FORMAT = 1

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Settings(TypedDict, total=False):
    """What every local method takes besides its own settings; see `LocalMethod`."""

    process_group: dist.ProcessGroup | None
    buffers: Literal["mean", "local"]
    replicas: Literal["check", "broadcast"]
    on_nonfinite: Literal["raise", "warn"]
    nodes: Topology | None
    options: PlanOptions | None
    threads: int
    workers: int | None
    timeout: datetime.timedelta | None


class LocalMethod:
    r"""Ranks take optimizer steps of their own; now and then they exchange what these have changed.

    All ranks hold the same theta, at first the model's parameters. When an exchange begins, a rank with the model x_i

        gives D_i = theta - x_i;   all get D, the mean over ranks as the recipe delivers it;
        theta <- OuterSGD(theta, D);   x_i <- alpha x_i + (1 - alpha) theta   (alpha = `merge_alpha`; 0: x_i <- theta).

    Of differences, not of weights, few bits are enough, and what a recipe with feedback leaves unsent is sent with the
    next difference. Every rank decodes the same bytes, so that theta is the same on all, to the bit.

    An optimizer step is what counts: not a parameter group, a backward pass or an evaluation. The count is kept by a
    hook on the optimizer, so that the training loop stays as it is; a step that a GradScaler skips is none.

    Args:
        model: the module itself; one in `DistributedDataParallel` over the ranks of one host; or a `fully_shard` one.
        optimizer: of this model; several that step in turn count as one step, with the last of them. Their parameters
            that require gradients are exchanged, all groups. A parameter without gradient on every rank stays as it is.
        recipe: as `thinwire.attach` takes it, but for schedules and momentum.
        schedule: returns when to exchange, and the outer optimizer; may raise, which all ranks then learn.
        fragments: how tensors are cut, for a rhythm of several.
        merge_alpha: alpha, in [0, 1).
        process_group: the replicas: all ranks; with a sharded model those that hold the same shard; with DDP inside
            hosts one rank of each host, or all ranks and a recipe as "hier/int8".
        buffers: "mean": buffers of 16 or 32-bit floats (BatchNorm's statistics) are exchanged with the parameters,
            uncompressed, and their mean taken, so that ranks evaluate alike; "local": never touched.
        replicas: what to do if ranks hold different models at the start: "check" raises on all, "broadcast" takes rank
            0's everywhere, which sends the whole model.
        on_nonfinite: if a difference holds inf or nan on any rank, whether all raise, or go back to theta with a log
            line.
        nodes, options, threads, workers, timeout: as of `thinwire.attach`.

    Attributes:
        plan: every partition with its compressors, owner and bytes; `print(outer.plan)`.
        step: optimizer steps so far.
        rhythm, rule: when exchanges begin and end, and the outer optimizer.

    Raises:
        AttachError: settings out of range, or an optimizer, model or group that do not go together.
        PlanError: the ranks' settings differ; the first difference is named. All ranks raise.
        ReplicaError: ranks hold different models at the start.

        Later, `optimizer.step` raises: `NonFiniteError`, `RankLostError` where a rank does not come.
    """

    rhythm: Rhythm
    rule: OuterSGD
    _found: list[Tracked]
    _parts: list[list[Tracked]]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        recipe: Phase,
        schedule: Callable[[], tuple[Rhythm, OuterSGD]],
        *,
        fragments: Fragments = 1,
        merge_alpha: float = 0.0,
        **settings: Unpack[Settings],
    ) -> None:
        self.step = 0
        self._alpha = merge_alpha
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._on_nonfinite = settings.get("on_nonfinite", "raise")
        group = common_group(settings.get("process_group"))
        threads, workers = settings.get("threads", 1), settings.get("workers")
        workers = min(4, torch.get_num_threads()) if workers is None else workers
        self._driver = OverlappedDriver(group, workers=max(1, workers), timeout=settings.get("timeout"))
        self.rank, self.world_size = self._driver.rank, dist.get_world_size(group)
        facts: list[str] = []

        def build() -> Plan:
            self.rhythm, self.rule = schedule()
            plan = self._build(model, recipe, fragments, group, settings)
            facts.append(f"{type(self).__name__}: {self.rhythm}, {self.rule}, merge_alpha={merge_alpha}")
            facts.append(f"on_nonfinite={self._on_nonfinite!r}, replicas={settings.get('replicas', 'check')!r}")
            facts.extend(f"fragment {p}: {[one.name for one in part]}" for p, part in enumerate(self._parts))
            return plan

        try:
            self.plan = agree(build, self._driver.control, facts)
            make_equal(bare(model), self._driver.control, broadcasts=settings.get("replicas") == "broadcast")
        except BaseException:
            self._driver.close()
            raise
        self._averager = Averager(
            self.plan, [[one.name for one in part] for part in self._parts], self._driver, threads=threads
        )
        # By name, float32 in the shape of what lies on this rank; equal on all ranks, but for shards.
        self._theta = {one.name: self._value(one).clone() for one in self._found}
        self._velocity = {
            one.name: torch.zeros_like(self._theta[one.name])
            for one in self._found
            if one.trained and self.rule.momentum
        }
        self._begun_at = [0] * len(self._parts)  # the step at which each exchange last began
        self._arrived: dict[int, bool] = {}  # parts whose mean has come but is not merged, and whether it is good
        self._hooks = [self._optimizers[-1].register_step_post_hook(self._stepped)]
        if self.rank == 0 and self.world_size == 1:
            logging.getLogger("thinwire").warning("world size 1: there is nobody to exchange with")

    def _build(
        self, model: nn.Module, recipe: Phase, fragments: Fragments, group: dist.ProcessGroup, settings: Settings
    ) -> Plan:
        for optimizer in self._optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise AttachError(f"expected a torch optimizer, or several, got {type(optimizer).__name__}")
            if any(group.get("worker_momentum") for group in optimizer.param_groups):
                raise AttachError(
                    "worker_momentum: expected an optimizer with its own momentum; nothing else applies it here"
                )
        if not self._optimizers:
            raise AttachError("expected a torch optimizer, or several, got none")
        for name, choices in (
            ("buffers", ("mean", "local")),
            ("replicas", ("check", "broadcast")),
            ("on_nonfinite", ("raise", "warn")),
        ):
            if (got := settings.get(name, choices[0])) not in choices:
                raise AttachError(f"{name}: expected {choices[0]!r} or {choices[1]!r}, got {got!r}")
        if settings.get("threads", 1) < 1 or (settings.get("workers") or 1) < 1:
            raise AttachError("expected at least one thread and one worker")
        if not 0.0 <= self._alpha < 1.0:
            raise AttachError(f"merge_alpha: expected a number in [0, 1), got {self._alpha}")
        check_groups(model, group)
        self._found = track(model, self._optimizers, buffers=settings.get("buffers", "mean") == "mean")
        sharded = any(hasattr(one.get(), "to_local") for one in self._found)
        if sharded and self._on_nonfinite == "warn":
            raise AttachError(
                "on_nonfinite='warn': ranks that hold other shards would not go back to theta; expected 'raise' with "
                "a sharded model"
            )
        self._parts = cut(self._found, fragments)
        if len(self._parts) != self.rhythm.num_fragments:
            raise AttachError(f"expected {self.rhythm.num_fragments} fragments, got {len(self._parts)}")
        options = settings.get("options") or PlanOptions()
        if (nodes := settings.get("nodes")) is not None:
            options = dataclasses.replace(options, node_sizes=node_sizes(nodes, group))
        return plan_differences(self._found, recipe, self.world_size, options)

    # --- what users call ----------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Exchange now what the last exchanges have not seen, and set the model to theta. Collective.

        For the end of training, and before saving for another world size. The rhythm goes on as it was.
        """
        self._check_running()
        for part in range(len(self._parts)):
            if self._under_way(part):
                self._end(part)
            if self._begun_at[part] < self.step:
                self._begin(part)
                self._end(part)
            for one in self._parts[part]:
                self._set(one, self._theta[one.name])

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Inside, the model has the weights of theta, which are the same on all ranks; afterwards its own again.

        For evaluation and saving while ranks are apart. Not for training.
        """
        own = [one.local().clone() for one in self._found]
        try:
            for one in self._found:
                self._set(one, self._theta[one.name])
            yield
        finally:
            for one, kept in zip(self._found, own, strict=True):
                one.local().copy_(kept)

    def stats(self) -> dict[str, Any]:
        """Return means per exchange of one fragment, and how much memory is kept.

        Keys: those of `thinwire.integrations.stats.StepStats` (of which `residual_ratio` is not measured; `exposed_s`
        is what training waited), and `steps`, `exchanges`, `work_nbytes`, `residual_nbytes`, `outer_nbytes` (theta,
        the outer momentum and the differences), `dense`, a map from name to the reason.
        """
        means = self._averager.totals.means()
        kept = (*self._theta.values(), *self._velocity.values(), *self._averager.values.values())
        return {
            "steps": self.step,
            "exchanges": self._averager.totals.num_steps,
            **{key: value for key, value in means.items() if key != "residual_ratio"},
            "work_nbytes": self._averager.buffers.allocated_nbytes,
            "residual_nbytes": self._averager.state.nbytes,
            "outer_nbytes": sum(tensor.nbytes for tensor in kept),
            "dense": {param.info.name: param.reason for param in self.plan.params if param.reason},
        }

    def planned_nbytes(self) -> int:
        """Return the payload bytes that this rank sends in `sync_every` steps, by arithmetic."""
        return self._averager.planned_nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return all that must survive a restart, as plain tensors and numbers, at any step; every rank saves its own.

        Save the model and the optimizer of every rank, too: between exchanges they differ. Waits for an exchange that
        is under way, whose mean becomes a part of the state.

        Raises:
            StateError: an exchange failed, so that some residuals are of the step before and others are not.
        """
        self._check_running()
        for part in range(len(self._parts)):
            if self._averager.flies(part):
                self._arrive(part)
        pending = [one.name for part in self._arrived for one in self._parts[part]]
        return {
            "format": FORMAT,
            "rhythm": dataclasses.asdict(self.rhythm),
            "parts": [[one.name for one in part] for part in self._parts],
            "step": self.step,
            "begun_at": list(self._begun_at),
            "counts": list(self._averager.counts),
            "arrived": dict(self._arrived),
            "theta": {name: tensor.clone() for name, tensor in self._theta.items()},
            "momentum": {name: tensor.clone() for name, tensor in self._velocity.items()},
            "pending": {name: self._averager.values[name].clone() for name in pending},
            "exchange": self._averager.state.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank, after the model's and the optimizer's.

        For another world size, save after `sync()`, and pass the "exchange" of all ranks through
        `thinwire.reshard_state`; the rest is the same on all ranks.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise StateError(f"expected what state_dict() of a local method returned, got {type(state).__name__}")
        parts = [[one.name for one in part] for part in self._parts]
        for key, ours in (("rhythm", dataclasses.asdict(self.rhythm)), ("parts", parts)):
            if state[key] != ours:
                raise StateError(f"state was saved with {key} {state[key]}, this run has {ours}; expected the same")
        for what, held in (("theta", self._theta), ("momentum", self._velocity)):
            shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
            got = {name: tuple(tensor.shape) for name, tensor in state[what].items()}
            if got != shapes:
                name = next(name for name in (*shapes, *got) if got.get(name) != shapes.get(name))
                raise StateError(
                    f"{name}: expected its {what} of shape {shapes.get(name)}, got {got.get(name)} (None: there is "
                    "none); load into the same model, sharded alike, with the same outer optimizer"
                )
        for part in range(len(self._parts)):
            if self._averager.flies(part):
                self._averager.finish(part)
        self._averager.state.load_state_dict(state["exchange"])
        for held, saved in (
            (self._theta, state["theta"]),
            (self._velocity, state["momentum"]),
            (self._averager.values, state["pending"]),
        ):
            for name, tensor in saved.items():
                held[name].copy_(tensor)
        self.step, self._begun_at, self._arrived = state["step"], list(state["begun_at"]), dict(state["arrived"])
        self._averager.counts = list(state["counts"])

    def rejoin(self) -> bool:
        """Bring ranks that have missed exchanges to where the others are; return whether this is one. Collective.

        For all ranks to call after a restart, whether they have loaded a checkpoint or found none, as a new host. Those
        with fewer exchanges than the furthest take its theta, outer momentum and count; their model becomes theta, and
        what they had not sent yet is lost. Their inner optimizer is as it was: if they loaded none, it starts anew.
        EF21 and PowerSGD then begin anew on all ranks. Unless a rank is behind, this costs one small collective.

        Raises:
            StateError: as of `state_dict`.
        """
        self._check_running()
        for part in range(len(self._parts)):
            if self._averager.flies(part):
                self._arrive(part)
        found = furthest([self._averager.state.step, self.step], self._driver.control)
        if found is None:
            return False
        source, counts = found
        behind = self._averager.state.step < counts[0]
        rows = zip(self._begun_at, self._averager.counts, strict=True)
        marks = torch.tensor([(begun, count, self._arrived.get(p, -1)) for p, (begun, count) in enumerate(rows)])
        held = (*self._theta.values(), *self._velocity.values(), *self._averager.values.values(), marks)
        for tensor in held:
            # Ranks that are as far keep what they have: their own models belong to it.
            broadcast(tensor if behind or self.rank == source else tensor.clone(), source, self._driver.control)
        state = self._averager.state
        for slot, kept in (*state.whole.items(), *state.owned.items()):
            # What is no residual (EF21's estimates, PowerSGD's factors) must fit that of other ranks: all begin anew.
            if behind or slot not in (Slot.WORKER, Slot.OWNER):
                for tensor in kept.values():
                    tensor.zero_()
        if behind:
            state.step, self.step = counts
            self._begun_at, self._averager.counts, _ = (list(column) for column in zip(*marks.tolist(), strict=True))
            self._arrived = {p: bool(good) for p, (*_, good) in enumerate(marks.tolist()) if good >= 0}
            for one in self._found:
                self._set(one, self._theta[one.name])
        return behind

    def close(self) -> None:
        """Let the optimizer be, stop the threads and leave the process groups. Collective."""
        for hook in self._hooks:
            hook.remove()
        self._driver.close()

    # --- the rhythm ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count an optimizer step; the optimizer's hook."""
        self._check_running()
        self.step += 1
        begins, ends = self.rhythm.begins(self.step), self.rhythm.ends(self.step)
        if self.rhythm.overlap:  # what ends was begun before
            self._end_all(ends)
        if begins:
            self._check_optimizers()
        for part in begins:
            self._begin(part)
        if not self.rhythm.overlap:
            self._end_all(ends)

    def _end_all(self, parts: Sequence[int]) -> None:
        for part in parts:
            if self._under_way(part):
                self._end(part)

    def _under_way(self, part: int) -> bool:
        return part in self._arrived or self._averager.flies(part)

    def _begin(self, part: int) -> None:
        """Give the differences of one fragment to the exchange."""
        self._begun_at[part] = self.step
        for one in self._parts[part]:
            # From what this rank started at: a 16-bit parameter cannot be theta, and the rest is no progress.
            start = self._theta[one.name].to(one.local().dtype).to(torch.float32)
            torch.sub(start, self._value(one), out=self._averager.values[one.name])
        self._averager.begin(part)

    def _arrive(self, part: int) -> None:
        """Wait for the mean of one fragment.

        Raises:
            NonFiniteError: it is none, unless that was only to be logged.
        """
        verdict = self._averager.finish(part)
        self._arrived[part] = not verdict.nonfinite
        if verdict.nonfinite:
            rank, name = verdict.nonfinite[0]
            where = {MEAN: "in the mean over ranks", MANY: "on several ranks"}.get(rank, f"on rank {rank}")
            text = (
                f"what {name!r} has changed since the last exchange holds inf or nan {where}, or does not fit its wire "
                f"format ({len(verdict.nonfinite)} such tensors, step {self.step})"
            )
            if self._on_nonfinite == "raise":
                raise NonFiniteError(
                    f"{text}: all ranks raise; theta, its momentum and residuals are as before. Look at that rank's "
                    "loss, go on from a checkpoint, or pass on_nonfinite='warn' to go back to theta"
                )
            logging.getLogger("thinwire").warning("%s: all ranks go back to theta", text)

    @torch.no_grad()
    def _end(self, part: int) -> None:
        """Take the outer step of one fragment, and bring the model to it."""
        if part not in self._arrived:
            self._arrive(part)
        good = self._arrived.pop(part)
        for one in self._parts[part]:
            theta, mean = self._theta[one.name], self._averager.values[one.name]
            if good and self.world_size == 1 and self.rule.is_mean and not self._alpha and not self.rhythm.overlap:
                theta.copy_(one.local())  # its own mean: plain training, to the bit
                continue
            if good and one.trained:
                self.rule.step(theta, mean, self._velocity.get(one.name))
            elif good:
                theta.sub_(mean)
            if good and self._alpha:
                self._set(one, self._value(one) * self._alpha + theta * (1.0 - self._alpha))
            else:
                self._set(one, theta)

    @staticmethod
    def _value(one: Tracked) -> Tensor:
        """Return this rank's part in float32; its own memory, if that is what it is."""
        return one.local().to(torch.float32)

    @staticmethod
    def _set(one: Tracked, value: Tensor) -> None:
        one.local().copy_(value)

    def _check_running(self) -> None:
        if self._averager.failed is not None:
            raise StateError("an exchange failed: go on from the checkpoint before it") from self._averager.failed

    def _check_optimizers(self) -> None:
        """Raise `AttachError` for a parameter that the optimizer has got, or that has thawed, since the start."""
        known = {id(one.get()) for one in self._found if one.trained}
        if new := len(trained_ids(self._optimizers) - known):
            raise AttachError(
                f"{new} parameters train now that were frozen, or not in the optimizer, when {type(self).__name__} was "
                "made, and would not be exchanged: ranks would drift apart. Close it, and make it anew"
            )
