"""What does not go together in a benchmark, said before a network is made for it."""

from thinwire.aggregators import Aggregator, Dense, Hierarchical, TwoShot
from thinwire.bench.servers import split_method
from thinwire.bench.settings import AUTO, BASELINE, Settings, split_local, split_weights
from thinwire.errors import ThinwireError
from thinwire.feedback import MomentumCorrection
from thinwire.schedule import parse_schedule

_APPLIED_BY = {"dgc": "sgd", "nag": "nag"}  # whose momentum is taken out where recipes apply it


def check_settings(settings: Settings) -> None:
    """Raise `ThinwireError` for methods that do not go with each other's or the benchmark's settings."""
    for method in settings.methods:
        if settings.wrap == "ddp":
            _check_ddp(method, settings)
        else:
            _check_fsdp(method, settings)
        if split_local(method) is not None or split_method(method)[0]:
            _check_apart(method, settings)
    if settings.start_after < 0:
        raise ThinwireError(f"--start-after: expected at least 0, got {settings.start_after}")
    if settings.wrap == "fsdp":
        _check_sharded(settings)


def _exchanges(method: str) -> list[Aggregator]:
    """Return what each phase of a method exchanges by; nothing of baselines and of auto, which has no momentum."""
    if BASELINE.fullmatch(method) or method == AUTO:
        return []
    local = split_local(method)
    recipe = split_weights(split_method(method)[1])[0] if local is None else local.recipe
    return [phase for _, phase in parse_schedule(recipe).phases if isinstance(phase, Aggregator)]


def _momentum(method: str) -> str | None:
    """Return what a method calls the momentum that it applies itself."""
    feedback = (exchange.feedback for exchange in _exchanges(method))
    return next((one.recipe().partition(":")[0] for one in feedback if isinstance(one, MomentumCorrection)), None)


def _check_ddp(method: str, settings: Settings) -> None:
    if method == "fsdp" or split_weights(method)[1] is not None:
        raise ThinwireError(f"--methods {method}: expected --wrap fsdp with it; DDP sends no weights")
    momentum = _momentum(method)
    if momentum is None or settings.workload.startswith("replay:"):  # which has no optimizer
        return
    if split_local(method) is not None:
        raise ThinwireError(f"--methods {method}: @{momentum} applies momentum, which outer steps have themselves")
    if settings.optimizer != _APPLIED_BY[momentum]:
        raise ThinwireError(f"--methods {method}: expected --optimizer {_APPLIED_BY[momentum]} with it")


def _check_fsdp(method: str, settings: Settings) -> None:
    if method == AUTO:
        raise ThinwireError("--methods auto: expected --wrap ddp with it; it chooses among exchanges of DDP models")
    if method.startswith("ddp"):
        raise ThinwireError(f"--methods {method}: expected --wrap ddp with it, or fsdp, the baseline of FSDP2")
    if momentum := _momentum(method):
        raise ThinwireError(f"--methods {method}: @{momentum} applies momentum, which goes with DDP's gradients alone")
    if any(isinstance(exchange, Hierarchical) for exchange in _exchanges(method)):
        raise ThinwireError(f"--methods {method}: expected --wrap ddp with it; FSDP2 knows of no nodes")


def _check_apart(method: str, settings: Settings) -> None:
    """Local methods and servers count what leaves a rank, and are made for a DDP model."""
    if settings.wrap != "ddp" or settings.ranks_per_node > 1:
        raise ThinwireError(f"--methods {method}: expected --wrap ddp and one rank a host with it")
    if split_local(method) is not None and settings.start_after:
        raise ThinwireError(f"--start-after: expected 0 with {method}, which has no dense steps")
    if split_method(method)[0] and not all(isinstance(one, TwoShot | Dense) for one in _exchanges(method)):
        raise ThinwireError(f"--methods {method}: expected a recipe of the two-shot exchange behind servers, as int8")


def _check_sharded(settings: Settings) -> None:
    if settings.workload.startswith("replay:"):
        raise ThinwireError(
            "--wrap fsdp: a replay makes up gradients in DDP's buckets and never reads its parameters, which FSDP2 "
            "would gather; expected --workload gpt or digits"
        )
    if settings.ranks_per_node > 1:
        raise ThinwireError(
            "--wrap fsdp: expected one rank a host; several would take FSDP2 over one host and "
            "attach(..., replicate_group=) between hosts"
        )
    if settings.bucket_cap_mb is not None:
        raise ThinwireError("--bucket-cap-mb: FSDP2 has no buckets; leave it out")
    if settings.optimizer not in ("adamw", "sgd"):
        raise ThinwireError(f"--optimizer {settings.optimizer}: expected adamw or sgd with --wrap fsdp")
