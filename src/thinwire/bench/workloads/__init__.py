"""Things to train: a small GPT, a small ResNet, and replays of large models' gradient exchange."""

from thinwire.bench.settings import Settings, split_replay
from thinwire.bench.workloads.base import Workload

__all__ = ["Workload", "make_workload"]


def make_workload(settings: Settings, rank: int, world_size: int) -> Workload:
    """Build this rank's side of the workload that ``settings`` names."""
    workload = _make(settings, rank, world_size)
    workload.optimizer_name, workload.learning_rate = settings.optimizer, settings.learning_rate
    return workload


def _make(settings: Settings, rank: int, world_size: int) -> Workload:
    if settings.workload == "gpt":
        from thinwire.bench.workloads.gpt import GptWorkload

        return GptWorkload(rank, world_size)
    if settings.workload == "digits":
        from thinwire.bench.workloads.digits import DigitsWorkload

        return DigitsWorkload(rank, world_size)
    from thinwire.bench.workloads.replay import ReplayWorkload

    name, scale = split_replay(settings.workload)
    return ReplayWorkload(name, rank, scale=scale, compute_s=settings.compute_s)
