"""The link between a data-parallel model and its exchange: takes gradient buckets, gives back their mean.

Threads: the hook and `_begin_step` run in the training thread. Messages run in the driver's threads; whichever thread
finishes the last message of a step ends the step before the last future is resolved, so that residuals are settled
when `backward` returns.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.aggregators import MEAN, Block, Message, Partition, work_memory
from thinwire.codec import measure_codec
from thinwire.comm.device import Device, Failure, staged
from thinwire.comm.process_group import Outcome
from thinwire.comm.rounds import AllReduce
from thinwire.comm.tracing import span, title
from thinwire.errors import NonFiniteError, PlanError, RankLostError, ReplicaError, StateError
from thinwire.feedback import Slot
from thinwire.integrations.agreement import agree
from thinwire.integrations.all_reduce import all_reduce_mean
from thinwire.integrations.allocation import Allocator
from thinwire.integrations.buckets import Bucket, BucketPlan, Buckets, Waiter
from thinwire.integrations.choosing import Chooser
from thinwire.integrations.clipping import set_clipping
from thinwire.integrations.driver import Driver, ServedDriver
from thinwire.integrations.loggers import Logger, Loggers
from thinwire.integrations.replicas import ReplicaCheck
from thinwire.integrations.served import OwedByServers
from thinwire.integrations.sparse import nbytes_of, sum_sparse
from thinwire.integrations.stats import Totals
from thinwire.integrations.step import Step, squared_norm_of, values_of
from thinwire.integrations.tuning import Tuner
from thinwire.integrations.verdicts import lost, not_finite, scales_differ
from thinwire.integrations.watch import Watch
from thinwire.phases import Phases
from thinwire.plan import Plan
from thinwire.state import State, of_one_rank

NORM_EVERY = 50  # steps between measurements of residual_ratio, which cost a pass over the residuals


class Scaler(Protocol):
    """What is asked of a GradScaler."""

    def get_scale(self) -> float:
        """Return the current loss scale."""
        ...


class Link:
    """What `attach` returns.

    Attributes:
        phases: the plans of a schedule, by the step from which they are valid.
        plan: the last of them, or the only one: every partition with its compressors, owner and bytes;
            `print(link.plan)`. With `Allocate` and "auto" what was chosen last, or is being tried.
        state: residuals and counters.
        error: the first error of the exchange, with its own type (`backward` can only raise RuntimeError).
        skipped_steps: steps that were not finite and left everything as it was (with `scaler`).
    """

    def __init__(
        self,
        phases: Phases,
        params: Mapping[str, Tensor],
        driver: Driver,
        *,
        rank: int,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Scaler | None = None,
        on_nonfinite: Literal["raise", "warn"] = "raise",
        track_unused: bool = False,
        threads: int = 1,
        replicas: ReplicaCheck | None = None,
        check_replicas_every: int = 0,
        loggers: Sequence[Logger] = (),
        watch: Watch | None = None,
        sparse: Mapping[str, Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        left_over: Mapping[str, int] | None = None,
        device: Device | None = None,
        served: ServedDriver | None = None,
    ) -> None:
        self.phases, self.plan = phases, phases.final
        self.rank = rank
        self.state = State(phases.kept, params, rank)
        self._allocator, self._tuner, start = None, None, phases.plans[-1][0]
        if phases.choices is not None:
            self._allocator = Allocator(phases.choices, start, rank, driver.control)
        if phases.candidates is not None:
            self._tuner = Tuner(phases.candidates, start, rank, driver.control)
        self._chooser: Chooser | None = self._allocator or self._tuner
        if self._chooser is not None:
            self.plan = self._chooser.plan
        self.error: BaseException | None = None
        self.skipped_steps = 0
        self._failed: BaseException | None = None  # what ended the exchange for good
        self._sparse, self._group, self._left_over = dict(sparse or {}), group, dict(left_over or {})
        self._names = {id(param): name for name, param in (*params.items(), *self._sparse.items())}
        self._driver = driver
        # For questions to all ranks in the middle of a run; None where some may be gone, and nobody would answer.
        self._control = None if served is not None and served.goes_on else driver.control
        self._num_present = phases.kept.world_size
        # Where servers keep what owners keep; a failed step is then undone.
        self._served = None if served is None else OwedByServers(served, phases, self.state, rank)
        self._begun: Step | None = None  # the last step
        self._optimizer, self._scaler = optimizer, scaler
        self._on_nonfinite = on_nonfinite
        self._watch = watch
        self._agreed: Plan | None = phases.at(0)  # the plan that all ranks are known to use
        self._threads = threads
        self._replicas, self._check_replicas_every = replicas, check_replicas_every
        self._loggers = Loggers(loggers if rank == 0 else ())
        self._device = device  # None: the host itself
        self._where = next(iter(params.values())).device
        self._buffers, self._staging = work_memory(device, pinned=not driver.on_device)
        if device is not None:
            device.arrival(*self.state.tensors()).synchronize()
        self._buckets = Buckets(self._names, self._messages)
        self._totals = Totals()
        self._step: Step | None = None
        self._lock = threading.Lock()
        self._used: set[str] | None = None
        if track_unused:
            self._used = set()
            for name, param in params.items():
                param.register_post_accumulate_grad_hook(_Mark(self._used, name))

    # --- what users call -------------------------------------------------------------------------------------------

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Return per-step means since attach (or the last reset), and what stayed dense and why.

        Keys: those of `StepStats`, and `steps`, `skipped_steps`, `work_nbytes` (work memory: encoded bytes,
        undo copies, and copies of buckets in another dtype), `pinned_nbytes` (memory of the host that
        blocks of a GPU travel from and to),
        `residual_nbytes`, `num_present`, the ranks that the last mean was over, fewer than all once parameter servers
        go on without some, `dense`, a map from parameter name to the reason, and `left_over`, what DDP sends besides
        gradients, in bytes: `buffers` a forward pass, `unused parameters` a backward pass.
        """
        with self._lock:
            totals = self._totals
            if reset:
                self._totals = Totals(totals.last)
        copies = self._buckets.copies_nbytes
        return {
            "steps": totals.num_steps,
            "skipped_steps": self.skipped_steps,
            **totals.means(),
            "work_nbytes": copies + (self._buffers if self._staging is None else self._staging.near).allocated_nbytes,
            "pinned_nbytes": 0 if self._staging is None else self._staging.pinned.allocated_nbytes,
            "residual_nbytes": self.state.nbytes,
            "num_present": self._num_present,
            "dense": {
                **{param.info.name: param.reason for param in self.plan.params if param.reason},
                **dict.fromkeys(self._sparse, "sparse gradient"),
            },
            "left_over": dict(self._left_over),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and counters; every rank saves its own. See `State.state_dict`.

        `torch.distributed.checkpoint` keeps one rank's value of equal keys: give it `thinwire.Checkpointable(link)`.

        With parameter servers an exchange that failed is undone first, which closes the link: what is returned is what
        was kept before that step.

        Raises:
            StateError: an exchange failed or a backward pass did not come to its end, so that some residuals are of
                the step before and others are not.
            ServerError: servers did not say what they owe, as the run failed meanwhile: asked again, the state comes
                without. Or they cannot be asked, as the link is closed: call this before `close`.
        """
        lost = self._served is not None and (self._failed is not None or self._served.lost)
        if lost:
            logging.getLogger("thinwire").warning("the run has failed: the state has nothing of what servers owed")
            self._recover()
        elif self._failed is not None or self._step is not None:
            what = "a backward pass did not come to its end" if self._failed is None else "an exchange failed"
            raise StateError(
                f"{what}, and residuals are between two steps: go on from the checkpoint before it"
            ) from self._failed
        state = self.state.state_dict()
        if self._served is not None:
            state[Slot.OWNER] = {} if lost else self._served.read()
        return state if self._chooser is None else {**state, self._chooser.key: self._chooser.state_dict()}

    def _recover(self) -> None:
        """Undo the step that failed, once no thread is at work on it any more."""
        self._driver.close()
        if (step := self._begun) is not None:
            with self._queue():  # behind what the failed step has queued there
                for message in step.messages:
                    message.restore()
                    message.forget()
            self._wait_for_device()
            step.messages.clear()
        self._step = None

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over what `state_dict` returned on the same rank.

        Args:
            state: what to take over.
            strict: whether parameters and feedback must be the same as when it was saved. Else what `state` lacks
                starts at zero, what is not kept here is dropped, and a warning names both. Alike on all ranks.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        if (step := self._step) is not None:  # left by a backward pass that did not come to its end
            while step.pending > 0 and self._failed is None:  # bounded by the time-out of collectives
                time.sleep(0.005)
            self._step = None
        state = of_one_rank(state)
        chooser = self._chooser
        if chooser is not None:
            chooser.check(state.get(chooser.key), strict=strict)
        for other in (Allocator, Tuner):
            if strict and other.key in state and not isinstance(chooser, other):
                raise StateError(
                    f"state was saved with {other.title}, and this recipe does not choose so: attach with "
                    f"{other.title}, or load it with strict=False, which drops the choice"
                )
        served, owed = self._served, state.get(Slot.OWNER, {})
        if served is not None and Slot.OWNER in state:  # without, the state says what it lacks
            served.check(owed, strict=strict)
            state = {**state, Slot.OWNER: {}}
        self.state.load_state_dict(state, strict=strict)
        if served is not None:
            served.write(owed)
        if chooser is not None:
            chooser.load_state_dict(state.get(chooser.key))
            self.plan = chooser.plan
        self._agreed = None

    def planned_nbytes(self) -> int:
        """Return the payload bytes that this rank is to send in a step, by arithmetic, with DDP's buckets as they are.

        0 before the first step. `stats()["wire_nbytes"]` is what the driver counted.
        """
        return sum(round_.sent_nbytes(self.rank) for layout in self._buckets.layouts() for round_ in layout.rounds)

    def codec_seconds(self) -> float:
        """Return the seconds that one step's encoding and decoding take on this rank alone, measured now.

        Encodes and decodes as many values as one step does, in scratch memory; nothing travels and nothing changes.
        """
        return measure_codec(self.plan, self.rank, threads=self._threads, device=self._where)

    def close(self) -> None:
        """Stop the threads and leave the process groups. Collective; the model cannot train afterwards.

        With parameter servers ask for `state_dict` before: part of it lies with them.
        """
        self._loggers.flush()
        self._driver.close()
        self._wait_for_device()

    # --- the hook ---------------------------------------------------------------------------------------------------

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange one bucket; DDP's communication hook."""
        buffer = bucket.buffer()
        with span("hook", f"bucket {bucket.index()}", raw_nbytes=0 if buffer.is_sparse else buffer.nbytes):
            return self._exchange(bucket)

    def _exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._step = None  # what is left of a backward pass that did not get to its last bucket
        step = self._step or self._begin_step()
        if bucket.buffer().is_sparse:
            return self._sum_sparse(step, bucket)
        ours = self._buckets.find(bucket, step.plan)
        if step.number % NORM_EVERY == 0:
            step.local_norm = max(step.local_norm, float(torch.linalg.vector_norm(ours.buffer)))
        if ours.plan.is_dense and self._tuner is not None:
            # Where nothing pays, no harm may be done. Elsewhere the driver's errors, which name ranks, are worth more.
            return self._all_reduce(step, ours, is_last=bucket.is_last())
        if ours.plan.is_dense:
            messages = [
                Message(
                    ours.plan.layouts[0],
                    [],
                    self.rank,
                    flat=ours.buffer,
                    buffers=self._buffers,
                    staging=self._staging,
                )
            ]
        else:
            if ours.work is not ours.buffer:
                ours.work.copy_(ours.buffer)
            messages = ours.messages
            for message in messages:
                self._begin_message(step, message)
            if self._allocator is not None and self._allocator.is_measured(step.number):
                step.errors.update(self._allocator.measure(messages, step.number))
            set_clipping(ours.clipped, step.loss_scale)
        device = self._device
        raw: torch.futures.Future[Any] = torch.futures.Future() if device is None else device.future()
        arrival = None if device is None else device.arrival(ours.work, ours.buffer)
        waiter = ours.waiter = Waiter(ours, raw, pending=len(messages))
        with self._lock:
            step.pending += len(messages)
            step.messages += messages
            step.closed = bucket.is_last()
            step.last_submitted_s = time.perf_counter()
        if bucket.is_last():
            self._close_step()
        for i, message in enumerate(messages):
            message.name = title(f"bucket {bucket.index()}.{i}", message.layout.names)
            kind = type(message.layout.partitions[0].aggregator)
            exchange = kind.exchange(message)
            if device is not None and arrival is not None:
                exchange = staged(exchange, device, arrival)
            done = self._driver.submit(exchange, message.layout.rounds, message.name)
            done.add_done_callback(_Finish(self, step, waiter, message))
        return raw.then(unwrap)

    def _sum_sparse(self, step: Step, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Let a sparse gradient through, with its place in the step: inf and nan in it count as anywhere."""
        (name,), buffer = (self._names[id(param)] for param in bucket.parameters()), bucket.buffer()
        assert self._group is not None
        nbytes = nbytes_of(buffer)
        sent_nbytes = nbytes * (self._group.size() - 1)
        self._begin_sum(step, nbytes, sent_nbytes, is_last=bucket.is_last())

        def done(mean: Tensor | None, error: BaseException | None) -> None:
            self._summed(step, name, None if mean is None else mean._values(), error)

        return sum_sparse(buffer, self._group, done)

    def _all_reduce(self, step: Step, bucket: Bucket, *, is_last: bool) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket as DDP itself would, with its place in the step."""
        layout, buffer = bucket.plan.layouts[0], bucket.buffer
        (reduce,) = layout.rounds
        assert self._group is not None
        assert isinstance(reduce, AllReduce)
        if bucket.narrow is None and reduce.dtype != buffer.dtype:
            bucket.narrow = torch.empty_like(buffer, dtype=reduce.dtype)  # kept: fresh memory costs page faults
        self._begin_sum(step, buffer.nbytes, reduce.sent_nbytes(self.rank), is_last=is_last)
        started = time.perf_counter()

        def done(mean: Tensor | None, error: BaseException | None) -> None:
            with self._lock:
                step.stats.transport_s += time.perf_counter() - started
                if mean is not None and step.number % NORM_EVERY == 0:
                    step.squared_norm += float(torch.linalg.vector_norm(mean)) ** 2
            self._summed(step, layout.names[0], mean, error)

        return all_reduce_mean(buffer, self._group, bucket.narrow, done)

    def _begin_sum(self, step: Step, raw_nbytes: int, sent_nbytes: int, *, is_last: bool) -> None:
        """Count a bucket that DDP's own collective sums."""
        with self._lock:
            step.stats.raw_nbytes += raw_nbytes
            step.stats.wire_nbytes += sent_nbytes
            step.stats.num_collectives += 1
            step.pending += 1
            step.closed = is_last
            step.last_submitted_s = time.perf_counter()
        if is_last:
            self._close_step()

    def _summed(self, step: Step, name: str, mean: Tensor | None, error: BaseException | None) -> None:
        """Take the outcome of such a sum, in a thread of gloo's."""
        # The extremes are nan where any value is: one pass, no memory.
        if mean is not None and mean.numel() and not all(bool(x.isfinite()) for x in mean.aminmax()):
            step.nonfinite.add((MEAN, name))
        delivered = step.number % NORM_EVERY == 0 and mean is not None and bool(mean.any())
        with self._lock:
            step.delivered = step.delivered or delivered
            if error is not None:
                self._failed = self._failed or error
                step.error = step.error or error
            step.pending -= 1
            step_done = step.closed and step.pending == 0
        if step_done:
            self._end_step(step)
            self._wait_for_device()  # this future knows nothing of the exchanges' stream
        if mean is not None and step.error is not None:
            raise step.error

    def _messages(self, source: Plan, plan: BucketPlan, work: Tensor) -> list[Message]:
        def block(partition: Partition, at: int) -> Block:
            return self.state.block(partition, work[at : at + partition.numel], source.by_name[partition.name].slots)

        return [
            Message(
                layout,
                [block(p, at) for p, at in zip(layout.partitions, starts, strict=True)],
                self.rank,
                threads=self._threads,
                buffers=self._buffers,
                staging=self._staging,
            )
            for layout, starts in zip(plan.layouts, plan.starts, strict=True)
        ]

    def _close_step(self) -> None:
        self._step = None
        if self._used is not None:
            self._used.clear()

    def _pass_ended(self, step: Step) -> None:
        """End the step of a backward pass whose last bucket did not come: DDP may skip those that nobody used."""
        with self._lock:
            if step.closed:
                return
            step.closed = True
            done = step.pending == 0
        self._close_step()
        if done:
            self._end_step(step)
            self._wait_for_device()  # no future comes behind it
            if step.error is not None:
                raise step.error

    def _begin_step(self) -> Step:
        self._loggers.flush()
        self._check_replicas()
        if self._watch is not None:
            self._watch.begin()
        step = self._begun = Step(self.state.step, self._agreed_plan())
        if self._scaler is not None:
            step.loss_scale = float(self._scaler.get_scale())
        step.began_s = time.perf_counter()
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                for param in group["params"]:
                    if (name := self._names.get(id(param))) is not None:
                        step.learning_rates[name] = float(group["lr"])
        self._step = step
        if _in_backward():
            # Runs when the pass has come to its end, before DDP waits for the futures.
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._pass_ended, step))
        return step

    def _check_replicas(self) -> None:
        """Compare parameters over ranks, every so many steps; counts are equal on all ranks, as steps are committed.

        A rank that has joined (`DistributedDataParallel.join`) takes no more optimizer steps and is left out: DDP gives
        it the others' parameters in the end.
        """
        every = self._check_replicas_every
        if self._replicas is None or not every or self.state.step % every:
            return
        try:
            self._replicas.raise_if_different(self.state.step, takes_part=_in_backward())
        except ReplicaError as error:
            self.error = self.error or error
            raise

    def _agreed_plan(self) -> Plan:
        """Return the plan of this step. Collective where a phase begins, or state has been loaded into one of several.

        Ranks that count other steps would exchange other bytes. Servers have compared them in every push: with them
        ranks are asked after state has been loaded only, and a phase begins without those that are lost.
        """
        try:
            plan = self._plan_at(self.state.step)
            compared = self._served is not None and self._agreed is not None
            if plan is not self._agreed and len(self.phases.all_plans) > 1 and not compared:
                self._check_all_are_here()
                facts = () if self._chooser is None else self._chooser.facts
                agree(lambda: plan, self._driver.control, [f"step={self.state.step}", *facts])
        except (PlanError, RankLostError) as error:
            self.error = self.error or error
            raise
        self._agreed = plan
        return plan

    def _check_all_are_here(self) -> None:
        """Raise at once where a rank that all wait for is known to be gone."""
        if self._num_present < (world_size := self.phases.kept.world_size):
            raise RankLostError(
                f"step {self.state.step}: state was loaded, and all ranks must agree on the phase of the schedule that "
                f"it is in, but servers go on with {self._num_present} of {world_size} ranks: start all of them again"
            )

    def _plan_at(self, step: int) -> Plan:
        """Return the plan of a step, after the choice that may be due. Collective where it is."""
        plan, chooser = self.phases.at(step), self._chooser
        if chooser is None or plan is not self.phases.final:
            return plan
        plan = chooser.next_plan(step)
        self.plan = chooser.plan
        return plan

    def _begin_message(self, step: Step, message: Message) -> None:
        message.begin(step.number)
        message.loss_scale = step.loss_scale
        for block in message.blocks:
            name, feedback = block.partition.name, block.partition.aggregator.feedback
            if feedback is not None:
                lr = block.learning_rate = step.learning_rates.get(name, 1.0)
                block.unit_ratio = feedback.unit_ratio(
                    lr=lr,
                    last_lr=self.state.learning_rates.get(name, lr),
                    loss_scale=step.loss_scale,
                    last_loss_scale=self.state.loss_scale,
                )
                block.residual_scale = feedback.residual_scale(block.unit_ratio)
            block.used = self._used is None or name in self._used

    # --- when messages are done (driver threads) --------------------------------------------------------------------

    def _finished(self, step: Step, waiter: Waiter, message: Message, done: "Future[Outcome]") -> None:
        error = done.exception()
        squared_norm, delivered = 0.0, False
        if error is None and step.number % NORM_EVERY == 0:
            delivered = any(bool(value.any()) for value in values_of(message))
            squared_norm = squared_norm_of(message)  # now: the memory it lies in is given back with its bucket
        if self._scaler is None and self._served is None:
            message.forget()  # before it counts as done: whoever ends the step forgets what is left, in another thread
        with self._lock:
            if error is None:
                step.stats.add(message, done.result())
                step.squared_norm += squared_norm
                step.delivered = step.delivered or delivered
            else:
                # At once: backward raises for the first bucket that fails, while others are still under way.
                self._failed = self._failed or error
                step.error = step.error or error
                self.error = self.error or error
            step.pending -= 1
            waiter.pending -= 1
            bucket_done = waiter.pending == 0
            step_done = step.closed and step.pending == 0
        if step_done:
            self._end_step(step)
        if bucket_done:
            bucket = waiter.bucket
            if message.flat is None and bucket.work is not bucket.buffer:
                bucket.buffer.copy_(bucket.work)
            waiter.future.set_result(bucket.buffer if step.error is None else Failure(step.error))

    def _queue(self) -> AbstractContextManager[Any]:
        """What runs inside goes to the exchanges' stream, where there is a device."""
        return contextlib.nullcontext() if self._device is None else self._device.queue()

    def _wait_for_device(self) -> None:
        if self._device is not None:
            self._device.mark().synchronize()

    def _end_step(self, step: Step) -> None:
        """Commit residuals and counters, or put them back, before DDP lets the optimizer go on."""
        with self._queue():
            self._settle(step)

    def _settle(self, step: Step) -> None:
        nonfinite = sorted(step.nonfinite.union(*(message.nonfinite for message in step.messages)))
        if step.error is None and any(message.scales_differ for message in step.messages):
            for message in step.messages:
                message.restore()
            step.error = scales_differ(step.loss_scale, step.number, self._control)
        elif step.error is None and nonfinite and self._scaler is not None:
            for message in step.messages:
                message.restore()
            self.skipped_steps += 1
        elif step.error is None:
            if nonfinite:
                step.error = self._raise_or_warn(not_finite(nonfinite, step.number))
                if self._served is not None:
                    self._served.take_back(step.messages, step.number)
            elif step.number % NORM_EVERY == 0 and not step.delivered and not step.may_hold_back():
                step.error = lost(step.local_norm, step.number, self._control)
            if self._allocator is not None and not nonfinite:
                self._allocator.add(step.errors, step.loss_scale)
            self.state.step += 1
            self._commit_units(step)
        self._note_losses(step)
        now_s = time.perf_counter()
        step.stats.exposed_s = now_s - step.last_submitted_s
        if self._tuner is not None:
            delivered = step.error is None and not nonfinite
            self._tuner.note(step.number, step.plan, now_s - step.began_s, step.stats, delivered=delivered)
        if step.number % NORM_EVERY == 0 and not nonfinite:
            step.stats.residual_ratio = self._residual_ratio(step)
        else:
            step.stats.residual_ratio = self._totals.last.residual_ratio
        if self._failed is None or self._served is None:
            for message in step.messages:
                message.forget()
            step.messages.clear()
        with self._lock:
            self._totals.add(step.stats)
            self._loggers.note(step.number, step.stats)
            self.error = self.error or step.error

    def _note_losses(self, step: Step) -> None:
        """Say that servers go on without some ranks, once for each loss."""
        said = [message.num_present for message in step.messages if message.num_present is not None]
        if (present := min(said, default=self._num_present)) < self._num_present:
            logging.getLogger("thinwire").warning(
                "from step %d on the mean is over %d of %d ranks: servers go on without those that are lost, as "
                "--on-worker-loss continue says, and name them in their logs",
                step.number,
                present,
                self.phases.kept.world_size,
            )
            self._num_present = present

    def _commit_units(self, step: Step) -> None:
        """Note in which units the residuals are now; bring those that the step did not touch along."""
        names = {name for message in step.messages if message.flat is None for name in message.layout.names}
        fresh = {(slot, name) for name in names for slot in step.plan.by_name[name].slots}
        if step.loss_scale != self.state.loss_scale:
            self.state.rescale(step.loss_scale / self.state.loss_scale, fresh)
            self.state.loss_scale = step.loss_scale
        for name in {name for _, name in fresh} & step.learning_rates.keys():
            self.state.learning_rates[name] = step.learning_rates[name]

    def _raise_or_warn(self, error: NonFiniteError) -> NonFiniteError | None:
        if self._on_nonfinite == "raise":
            return error
        logging.getLogger("thinwire").warning("%s", error)
        return None

    def _residual_ratio(self, step: Step) -> float:
        gradient = step.squared_norm / step.loss_scale**2
        return (self.state.squared_norm() / gradient) ** 0.5 if gradient > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """A post-accumulate-grad hook that notes that backward reached a parameter."""

    used: set[str]
    name: str

    def __call__(self, param: Tensor) -> None:
        self.used.add(self.name)


@dataclass(frozen=True, slots=True)
class _Finish:
    """A done-callback with its arguments."""

    link: Link
    step: Step
    waiter: Waiter
    message: Message

    def __call__(self, done: "Future[Outcome]") -> None:
        try:
            with self.link._queue():
                self.link._finished(self.step, self.waiter, self.message, done)
        except BaseException as error:  # a future swallows what its callbacks raise, and backward would wait for ever
            self.link.error = self.link.error or error
            self.link._failed = self.link._failed or error
            self.link._driver.fail(error)
            if not self.waiter.future.done():
                self.waiter.future.set_result(Failure(error))


def _in_backward() -> bool:
    """Whether a backward pass calls the hook; else DDP's join does, for a rank that has no more inputs."""
    return torch._C._current_graph_task_id() >= 0


def unwrap(done: "torch.futures.Future[Any]") -> Tensor:
    """Return the bucket, or raise. `set_exception` would lose the message on its way through C++."""
    result = done.value()
    if isinstance(result, Failure):
        raise result.error
    return result
