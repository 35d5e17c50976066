"""Choosing the fastest recipe while training goes on: steps are timed, and all ranks decide from the same numbers."""

import json
import logging
import statistics
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from thinwire.auto import Pace, Trial
from thinwire.comm.process_group import all_gather_text
from thinwire.errors import PlanError, StateError
from thinwire.integrations.choosing import Chooser
from thinwire.integrations.stats import StepStats
from thinwire.phases import Candidates
from thinwire.plan import Plan

COUNTED = 2  # steps of a turn that count; the one before makes messages anew, and first touches their memory
FIRST_TURN = 2 + COUNTED  # in the first steps DDP rebuilds its buckets, too
TURN = 1 + COUNTED
WINDOW = 20  # steps between looks at whether they take as long as they did
NUM_WINDOWS = 2  # that must have drifted the same way, one after the other: a burst of less than 20 steps never does
MORE_WINDOWS = 4  # likewise, after a trial that changed nothing: where seconds scatter, trials must not follow trials


class Tuner(Chooser):
    """Holds the plan of the next step, and what is known of how long steps take.

    Threads: `next_plan` runs in the training thread, `note` in whichever ends the step, always before the next begins.

    Args:
        candidates: the plans to choose among.
        start: the first step in which there is a choice.
        rank: this rank.
        control: a group whose tensors live on the CPU.
    """

    key, title = "auto", "auto"

    def __init__(self, candidates: Candidates, start: int, rank: int, control: dist.ProcessGroup) -> None:
        self._candidates, self._start, self._rank, self._control = candidates, start, rank, control
        self._nbytes = [plan.busiest_nbytes for plan in candidates.plans]
        self._steps: list[tuple[float, float, float]] = []  # seconds: whole, wire, codec; since the last decision
        self._owes = False  # whether residuals may be other than zero
        self._pace: Pace | None = None  # what the choice is expected to take
        self._confirmed = False  # whether a whole window stands behind that
        self._drift, self._num_drifted, self._num_windows = 0, 0, NUM_WINDOWS
        self._chosen: int | None = None
        self._before: int | None = None  # what was chosen before the trial
        self._trial: Trial | None = None
        self._paces: dict[int, list[Pace]] = {}
        self._length = FIRST_TURN
        self._begin()

    def _begin(self) -> None:
        """Start a trial; alone there is nothing to exchange, and nothing to try."""
        self._pace, self._confirmed, self._drift, self._num_drifted = None, False, 0, 0
        self._paces, self._before = {}, self._chosen
        alone = self._control.size() == 1
        self._trial, self._chosen = (None, 0) if alone else (Trial(self._nbytes), None)

    @property
    def _candidate(self) -> int:
        candidate = self._chosen if self._trial is None else self._trial.candidate
        assert candidate is not None
        return candidate

    @property
    def plan(self) -> Plan:
        """What was chosen last, or is being tried."""
        return self._candidates.plans[self._candidate]

    def next_plan(self, step: int) -> Plan:
        """Return the plan of a step that begins. Collective every few steps.

        Raises:
            PlanError: ranks are in different steps.
        """
        if len(self._steps) >= self._length and self._control.size() > 1:
            self._decide(step)
            self._steps.clear()
        owing = self._candidates.owing[self._candidate]
        if self._trial is None and self._owes and not owing:
            return self._candidates.settling
        self._owes = self._owes or owing
        return self.plan

    def note(self, step: int, plan: Plan, seconds: float, stats: StepStats, *, delivered: bool) -> None:
        """Count a step that is over; `delivered` unless it left residuals as they were."""
        if step < self._start:
            return
        if delivered and plan is self._candidates.settling:
            self._owes = False
        if self._control.size() > 1:
            self._steps.append((seconds, stats.transport_s, stats.encode_s + stats.decode_s))

    def _decide(self, step: int) -> None:
        """Go on to the next turn, the choice, or the next window, on all ranks alike. Collective."""
        seconds, pace, codec_s = self._gather(step)
        if self._trial is None:
            self._watch(step, pace)
            return
        self._paces.setdefault(self._candidate, []).append(pace)
        self._trial.add(seconds, codec_s)
        self._length = TURN
        if self._trial.candidate is None:
            self._choose(step, self._trial)

    def _gather(self, step: int) -> tuple[list[float], Pace, float]:
        """Return the slowest rank's seconds of the steps that count, their medians, and seconds of codecs."""
        counted = self._steps[-(WINDOW if self._trial is None else COUNTED) :]
        where = f"step {step}, {self.facts[0]}"
        texts = all_gather_text(json.dumps({where: counted}), self._control)
        if any(not text.startswith(json.dumps({where: 0})[:-2]) for text in texts):
            raise PlanError(
                f"expected ranks in one step and one trial, got {', '.join(text[:60] for text in texts)}; load states "
                "of one moment on all ranks"
            )
        tables = [json.loads(text)[where] for text in texts]
        slowest = [[max(values) for values in zip(*steps, strict=True)] for steps in zip(*tables, strict=True)]
        seconds, wire, codec = (list(column) for column in zip(*slowest, strict=True))
        return seconds, Pace(statistics.median(seconds), statistics.median(wire)), statistics.median(codec)

    def _choose(self, step: int, trial: Trial) -> None:
        self._chosen, self._trial, self._length = trial.choose(), None, WINDOW
        self._num_windows = MORE_WINDOWS if self._chosen == self._before else NUM_WINDOWS
        paces = self._paces[self._chosen]
        self._pace = Pace(trial.medians()[self._chosen], statistics.median(pace.wire_s for pace in paces))
        names = self._candidates.settings.names
        measured = [f"{names[one]} takes {1e3 * s:.1f} ms" for one, s in trial.medians().items()]
        skipped = [f"{names[one]} was skipped, at least {1e3 * s:.1f} ms" for one, s in sorted(trial.bounds.items())]
        self._say(
            "step %d: auto chose %s: from the first bucket to the last mean %s",
            step,
            names[self._chosen],
            ", ".join(measured + skipped),
        )

    def _watch(self, step: int, pace: Pace) -> None:
        """Begin anew once steps have not been what they were for long enough."""
        assert self._pace is not None
        drift = self._pace.drift(pace)
        self._num_drifted = self._num_drifted + 1 if drift and drift == self._drift else abs(drift)
        self._drift = drift
        if self._num_drifted == self._num_windows:
            before = self._pace
            self._begin()
            self._length = TURN
            self._say(
                "step %d: auto tries again: from the first bucket to the last mean steps take %.1f ms where they took "
                "%.1f, with %.1f ms inside collectives where it was %.1f",
                step,
                1e3 * pace.step_s,
                1e3 * before.step_s,
                1e3 * pace.wire_s,
                1e3 * before.wire_s,
            )
        elif not drift and not self._confirmed:
            self._pace, self._confirmed = pace, True

    def _say(self, message: str, *values: object) -> None:
        if self._rank == 0:
            logging.getLogger("thinwire").info(message, *values)

    @property
    def facts(self) -> list[str]:
        """What ranks must agree on beside the plan: else they would not decide in the same step."""
        return [f"auto: {'trying' if self._trial is not None else 'chosen'}, owes={self._owes}"]

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, by recipe, and what it is expected to take; "" while there is none."""
        names, pace = self._candidates.settings.names, self._pace
        return {
            "candidates": list(names),
            "chosen": "" if self._chosen is None else names[self._chosen],
            "owes": self._owes,
            "pace": [] if pace is None else [pace.step_s, pace.wire_s],
        }

    def check(self, state: Mapping[str, Any] | None, *, strict: bool) -> None:
        """Raise `StateError` unless `load_state_dict` can take it over."""
        if state is None:
            if strict:
                raise StateError("state was saved without auto: load it with strict=False, which begins a trial")
            return
        candidates = list(self._candidates.settings.names)
        if list(state["candidates"]) != candidates:
            raise StateError(f"state was saved with the candidates {state['candidates']}, this run has {candidates}")

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` returned; a trial that was not over begins anew, as with None."""
        self._begin()
        self._steps.clear()
        self._before, self._num_windows, self._length = None, NUM_WINDOWS, FIRST_TURN
        self._owes = state is None or bool(state["owes"])  # what another recipe left
        if state is None or not state["pace"] or self._control.size() == 1:
            return
        self._chosen, self._trial = self._candidates.settings.names.index(state["chosen"]), None
        self._length = WINDOW
        self._pace = Pace(*map(float, state["pace"]))
