"""One rank of a benchmark: ``python -m thinwire.bench.worker SETTINGS.json``, started once for all methods.

Rank 0 prints events for the engine, one JSON object a line: ``ready``, ``method``, ``step``, ``run``.
Importing torch on every rank costs seconds on few cores, so all methods run in the same processes, each with a fresh
model, optimizer and DDP.
"""

import datetime
import gc
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from thinwire.bench import measure, methods
from thinwire.bench.settings import LOSS_STEPS, Settings
from thinwire.bench.workloads import Workload, make_workload
from thinwire.comm.tracing import trace
from thinwire.kernels import backend
from thinwire.lab.units import parse_rate
from thinwire.optim import WarmUp

COMPUTE_STEPS = 5
MIN_STEPS = measure.WARM_UP_STEPS + 2
EVENT_INTERVAL_S = 0.2
STEPS_BETWEEN_LOOKS = 10  # at the loss
GROUP_TIMEOUT = datetime.timedelta(minutes=10)


def emit(event: str, **values: Any) -> None:
    """Tell the engine; only rank 0 speaks."""
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **values}), flush=True)


class Training:
    """Trains one method and keeps what happened: losses, seconds and bytes of every step on this rank."""

    def __init__(
        self, settings: Settings, workload: Workload, method: str, seed: int, trace_file: Path | None = None
    ) -> None:
        self.settings, self.workload, self.method, self.seed = settings, workload, method, seed
        self.bucket_cap_mb: float | None = None
        if settings.wrap == "fsdp":
            from thinwire.bench import sharding  # torch.distributed.fsdp takes a while to import

            self.model: nn.Module = sharding.wrap(workload, seed)
            self.optimizer = workload.optimizer(self.model.parameters())
            self.attached = sharding.attach(method, self.model, settings.start_after)
        else:
            self.bucket_cap_mb = methods.bucket_cap_mb(method, settings.bucket_cap_mb, parse_rate(settings.rate))
            self.model = model = wrap(workload, seed, self.bucket_cap_mb)
            self.optimizer = workload.optimizer(model.parameters())
            self.attached = methods.attach(method, model, self.optimizer, settings.start_after, settings.ranks_per_node)
        self.scheduler = schedule(settings, self.optimizer)
        self.trace_file = trace_file
        self.interface = measure.Interface()
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.sent_nbytes: list[float] = []
        self._last_event = 0.0

    def run(self) -> dict[str, Any] | None:
        """Train, check, evaluate; rank 0 returns the record of the run."""
        self.workload.start(self.seed)
        dist.barrier()
        while num_steps := self._steps_until_next_check():
            before = self.interface.sent_nbytes()
            for _ in range(num_steps):
                before = self._step(before)
        return self._record()

    def _step(self, before: int | None) -> int | None:
        start = time.perf_counter()
        loss = measure.timed_step(self.model, self.workload, self.optimizer)[0]
        self.step_s.append(time.perf_counter() - start)
        if self.scheduler is not None:
            self.scheduler.step()
        self.losses.append(loss)
        after = self.interface.sent_nbytes()
        if before is not None and after is not None:
            self.sent_nbytes.append(after - before)
        now = time.monotonic()
        if now - self._last_event > EVENT_INTERVAL_S:
            self._last_event = now
            emit(
                "step",
                method=self.method,
                seed=self.seed,
                step=len(self.losses),
                loss=loss if self.optimizer else None,
                seconds=sum(self.step_s),
                step_s=self.step_s[-1],
                sent_nbytes=sum(self.sent_nbytes),
            )
        return after

    def _steps_until_next_check(self) -> int:
        """How many steps all ranks train before they talk about stopping again; 0 ends the training.

        Rank 0's clock decides. The talk is between steps and outside the readings of the interface, so it costs the
        method neither seconds nor bytes.
        """
        done = len(self.step_s)
        if self.settings.steps is not None:
            left = self.settings.steps - done
            if self.settings.until_loss is None or not left:
                return left
            return 0 if self._is_reached(self.settings.until_loss) else min(STEPS_BETWEEN_LOOKS, left)
        least = max(MIN_STEPS, measure.WARM_UP_STEPS + self.attached.period)
        if done < least:
            return least - done
        left_s = self.settings.seconds - sum(self.step_s)
        steps = max(1, min(10, int(left_s / self.step_s[-1] / 2))) if left_s > 0 else 0
        decision = torch.tensor(steps)
        dist.broadcast(decision, src=0)
        return int(decision)

    def _is_reached(self, loss: float) -> bool:
        """Whether the training loss has come down to `loss`, the same answer on all ranks."""
        if len(self.losses) < LOSS_STEPS:
            return False
        (reached,) = measure.mean_over_ranks([measure.mean(self.losses[-LOSS_STEPS:])])
        return reached <= loss

    def _record(self) -> dict[str, Any] | None:
        steady = min(max(measure.WARM_UP_STEPS, self.attached.start_step + 1), len(self.step_s) - 1)
        counted = range(steady, len(self.step_s))
        if self.attached.settle is not None:
            self.attached.settle()
        if self.attached.period > 1:
            counted = measure.whole_periods(counted, self.attached.period, self.attached.under_way)
        steady, end = counted.start, counted.stop
        codec_s = None
        if self.attached.codec_s is not None:
            dist.barrier()  # all ranks at once, as in the measurement of backward
            codec_s = self.attached.codec_s()
        mine = {
            "losses": self.losses,
            "step_s": (measure.median if self.attached.period == 1 else measure.mean)(self.step_s[steady:end]),
            "sent_nbytes": self.sent_nbytes,
            "planned_nbytes": self.attached.planned_nbytes(),
            "codec_s": codec_s,
            "digest": measure.digest(self._equal_on_all()),
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        link = None if self.attached.link is None else _plain(self.attached.link.stats())
        bare = self._bare()
        accuracy, val_loss = self._evaluate(bare)
        bare.train()
        if self.trace_file is not None:
            self._trace(self.trace_file)
        if self.attached.close is not None:
            self.attached.close()
        # Right after the training it is compared with: machines grow slower and faster. The model is not used again.
        model, optimizer = self.model, self.optimizer
        if self.settings.wrap == "fsdp":  # which cannot compute without gathering its weights
            model, optimizer = bare, self.workload.optimizer(bare.parameters())
        phases = measure.compute_phases(model, self.workload, optimizer, COMPUTE_STEPS)
        # The link stays open until the process ends: the model's hook still refers to it.
        if dist.get_rank() != 0:
            return None

        def mean(values: Any) -> float:
            values = list(values)
            return sum(values) / len(values)

        learns = self.optimizer is not None
        emulated = bool(self.sent_nbytes)
        return {
            "method": self.method,
            "seed": self.seed,
            "steps": len(self.step_s),
            "steady_from_step": steady,
            "bucket_cap_mb": self.bucket_cap_mb,
            "start_after": self.settings.start_after if self.attached.link is not None else 0,
            "step_s": max(rank["step_s"] for rank in everyone),
            **dict(zip(("forward_s", "backward_s", "optimizer_s"), phases, strict=True)),
            "codec_s": None if codec_s is None else mean(rank["codec_s"] for rank in everyone),
            "sent_nbytes_per_step": mean(mean(r["sent_nbytes"][steady:end]) for r in everyone) if emulated else None,
            "planned_nbytes_per_step": mean(rank["planned_nbytes"] for rank in everyone),
            "dense_nbytes_per_step": self.attached.dense_nbytes,
            "bit_identical": len({rank["digest"] for rank in everyone}) == 1,
            "val_loss": val_loss,
            "accuracy": accuracy,
            "curve": {
                "step_s": self.step_s,
                "sent_nbytes": [mean(step) for step in zip(*(rank["sent_nbytes"] for rank in everyone), strict=True)],
                "loss": [mean(step) for step in zip(*(r["losses"] for r in everyone), strict=True)] if learns else [],
            },
            "link": link,
        }

    def _trace(self, file: Path) -> None:
        """Trace one step, after two that no rank enters late."""
        for _ in range(2):
            measure.timed_step(self.model, self.workload, self.optimizer)
        with trace(file):
            measure.timed_step(self.model, self.workload, self.optimizer)

    def _equal_on_all(self) -> Iterable[torch.Tensor]:
        """What must be the same on all ranks, to the bit."""
        if self.settings.wrap == "fsdp":
            from thinwire.bench import sharding

            return sharding.computed_with(self.model)
        if self.optimizer is not None:
            return self.model.parameters()
        # Where nothing learns, parameters never change; what was delivered in the last step must be equal instead.
        return (p.grad for p in self.model.parameters() if p.grad is not None)

    def _bare(self) -> nn.Module:
        """The model without wrapper: DDP's forward would prepare for a backward that never comes."""
        if self.settings.wrap == "fsdp":
            from thinwire.bench import sharding

            return sharding.whole(self.workload, self.model, self.seed)
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.module

    def _evaluate(self, bare: nn.Module) -> tuple[float | None, float | None]:
        """Accuracy and mean loss on the held-out data; each rank does its share (the replicas are equal)."""
        bare.eval()
        share = self.workload.evaluate(bare)
        if share is None:
            return None, None
        loss, correct, answers = measure.mean_over_ranks(share)
        return correct / answers, loss / answers


def schedule(settings: Settings, optimizer: torch.optim.Optimizer | None) -> LRScheduler | None:
    """What changes the learning rate after every step; None where nothing does."""
    if settings.decay is None or settings.steps is None or optimizer is None:
        return None
    rate = WarmUp(total=settings.steps, warm_up=settings.steps // 10, decay=settings.decay)
    return LambdaLR(optimizer, rate)


def wrap(workload: Workload, seed: int, bucket_cap_mb: float) -> DistributedDataParallel:
    """A fresh model under DDP."""
    return DistributedDataParallel(
        workload.model(seed),
        bucket_cap_mb=bucket_cap_mb,  # pyright: ignore[reportArgumentType]  (torch takes fractions, its annotation does not)
        gradient_as_bucket_view=workload.gradient_as_bucket_view,
        init_sync=workload.init_sync,
    )


def _plain(stats: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts among a link's counters."""
    return {name: value for name, value in stats.items() if isinstance(value, int | float | str)}


def main(path: str) -> None:
    """Run everything that the settings ask for."""
    torch.set_num_threads(1)  # the emulated hosts share the cores as it is
    settings = Settings.load(Path(path))
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    workload = make_workload(settings, dist.get_rank(), dist.get_world_size())
    numel = sum(p.numel() for p in workload.model(0).parameters())
    facts = {**workload.facts(), "num_parameters": numel}
    emit("ready", facts=facts, rate_nbytes_per_s=measure.measure_rate(), torch=torch.__version__, kernels=backend())
    for seed in settings.seed_numbers:
        for number, method in enumerate(settings.methods):
            emit("method", method=method, seed=seed)
            # In the folder of the settings, from where the engine takes them.
            file = Path(path).with_name(f"trace-{number}-{dist.get_rank()}.json") if settings.trace else None
            record = Training(settings, workload, method, seed, file if seed == settings.first_seed else None).run()
            if record is not None:
                emit("run", record=record)
            gc.collect()  # a replayed model must be gone before the next one comes
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
