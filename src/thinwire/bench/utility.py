"""A study in the form of "On the Utility of Gradient Compression": in how many set-ups does compression win?

Data centres: models x GPUs x batch x method x bandwidth, each against DDP that overlaps its exchange with backward and
sends 16 bits. As the paper's model has it: GPUs in one ring at the rate of the network, compression after backward,
backward slowed by the exchange that overlaps it. Nothing here is measured; every input is listed with its source.
"""

import dataclasses as dc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from thinwire.advisor.profile import Cluster, Computation, Kernels, KernelSpeed, LinkClass, Profile, TimedParameter
from thinwire.advisor.simulate import AFTER_BACKWARD, ONE_STREAM, Exchanged, simulate
from thinwire.plan import build_plan
from thinwire.policy import PlanOptions
from thinwire.shapes import BACKWARD_SHARE, TIMELINES, deadlines, model_layers, num_parameters

SCHEMA = 1
PAPER = (
    'Saurabh Agarwal, Hongyi Wang, Shivaram Venkataraman, Dimitris Papailiopoulos, "On the Utility of Gradient '
    'Compression in Distributed Training Systems", 2022'
)
PAPER_RESULT = "6 set-ups of more than 200 beat optimised synchronous SGD"

MODELS = ("resnet50", "resnet101", "bert-base")
GPUS = (8, 16, 32, 64, 96)
BATCHES = (16, 32, 64)
RATES_GBIT = (10.0, 25.0)
BASELINE = "dense:fp16"
METHODS = {
    "powersgd:4": ("PowerSGD, rank 4", 0.045),
    "powersgd:8": ("PowerSGD, rank 8", 0.064),
    "powersgd:16": ("PowerSGD, rank 16", 0.130),
    "gather/topk:0.2:fp32": ("top-k, 20 %", 0.295),
    "gather/topk:0.1:fp32": ("top-k, 10 %", 0.289),
    "gather/topk:0.01:fp32": ("top-k, 1 %", 0.240),
    "sign": ("signs, majority vote", 0.016),
}
"""Recipe -> what it is, and seconds to encode and decode ResNet-50 on a V100."""

ALPHA_S = 10e-6
GAMMA = 1.07
TABLE_BATCH = 64  # of the times in TIMELINES
TOKENS = {"bert-base": 512 / 128}  # the paper's sequences over those of TIMELINES
WHOLE_NBYTES = 1 << 40  # more than any model
CAST_S_PER_NBYTE = 1.5 / 900e9  # float32 read, 16 bits written

SOURCES = {
    "models": "parameter shapes by rule, with the published parameter counts",
    "backward": (
        "for 64 examples a GPU, in proportion to the batch; BERT with the 512 tokens of the paper's code, four "
        "times as long as with 128"
    ),
    "methods": (
        "encode and decode on a V100, ResNet-50: orders of magnitude after the paper, unverified; for other models "
        "in proportion to the parameters. That decoding grows with the number of GPUs is left out, which is in "
        "favour of top-k and signs"
    ),
    "gamma": "backward is 1.04 to 1.1 times as long while an exchange runs, in the paper: 1.07 for the baseline",
    "alpha": "10 microseconds a message, of a data centre",
    "cast": "6 bytes of memory traffic per value at the 900 GB/s of a V100's data sheet",
    "buckets": "DDP's for baselines: 25 MiB, the first 1 MiB; methods compress the whole model once, after backward",
    "rates": (
        "10 Gbit/s as between p3.8xlarge instances, 25 Gbit/s as between p3.16xlarge ones; a ring of all GPUs has it"
    ),
}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One set-up."""

    model: str
    num_gpus: int
    batch: int
    rate_gbit: float
    recipe: str


def setups() -> Iterator[Setup]:
    """Return all of them, method by method last."""
    for model in MODELS:
        for rate_gbit in RATES_GBIT:
            for num_gpus in GPUS:
                for batch in BATCHES:
                    for recipe in METHODS:
                        yield Setup(model=model, num_gpus=num_gpus, batch=batch, rate_gbit=rate_gbit, recipe=recipe)


def study(
    chosen: Iterable[Setup] | None = None, on_row: Callable[[Mapping[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Simulate set-ups and their baselines; return the document.

    Args:
        chosen: which; None for all.
        on_row: called with each row as it comes.
    """
    exchanges: dict[tuple[str, int, str], Exchanged] = {}
    baselines: dict[tuple[str, int, int, float, str], float] = {}

    def seconds(setup: Setup, recipe: str) -> float:
        profile = _profile(setup, recipe)
        key = setup.model, setup.num_gpus, recipe
        if key not in exchanges:
            cap = None if recipe in ("dense", BASELINE) else WHOLE_NBYTES
            options = PlanOptions(min_nbytes=0, message_nbytes=WHOLE_NBYTES)
            plan = build_plan(profile.computation.named_tensors(), recipe, setup.num_gpus, options)
            exchanges[key] = Exchanged.of(plan, profile, bucket_cap_nbytes=cap)
        step = simulate(
            exchanges[key], profile, driving=ONE_STREAM if recipe in ("dense", BASELINE) else AFTER_BACKWARD
        )
        return step.step_s - profile.computation.forward_s

    rows: list[dict[str, Any]] = []
    for setup in setups() if chosen is None else chosen:
        for recipe in ("dense", BASELINE):
            key = setup.model, setup.num_gpus, setup.batch, setup.rate_gbit, recipe
            if key not in baselines:
                baselines[key] = seconds(setup, recipe)
        where = setup.model, setup.num_gpus, setup.batch, setup.rate_gbit
        fp32_s, fp16_s = baselines[*where, "dense"], baselines[*where, BASELINE]
        method_s = seconds(setup, setup.recipe)
        rows.append(
            {
                **dc.asdict(setup),
                "method": METHODS[setup.recipe][0],
                "observed_s": method_s,
                "ddp_s": fp32_s,
                "ddp_16bit_s": fp16_s,
                "speedup_vs_ddp": fp32_s / method_s,
                "speedup_vs_16bit": fp16_s / method_s,
                "wins": method_s < fp16_s,
            }
        )
        on_row(rows[-1])
    return {"schema": SCHEMA, "conditions": _conditions(), "rows": rows, **_counts(rows)}


def _counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_rate = {
        f"{rate:g}": {
            "setups": sum(row["rate_gbit"] == rate for row in rows),
            "wins": sum(row["wins"] for row in rows if row["rate_gbit"] == rate),
            "wins_vs_fp32": sum(row["speedup_vs_ddp"] > 1 for row in rows if row["rate_gbit"] == rate),
        }
        for rate in RATES_GBIT
    }
    return {"setups": len(rows), "wins": sum(row["wins"] for row in rows), "by_rate_gbit": by_rate}


def _conditions() -> dict[str, Any]:
    return {
        "paper": PAPER,
        "paper_result": PAPER_RESULT,
        "backward_s": {model: _backward_s(model, TABLE_BATCH) for model in MODELS},
        "backward_sources": {model: TIMELINES[model].source for model in MODELS},
        "codec_s_resnet50": {recipe: seconds for recipe, (_, seconds) in METHODS.items()},
        "gamma": GAMMA,
        "alpha_s": ALPHA_S,
        "gpus": list(GPUS),
        "batches": list(BATCHES),
        "rates_gbit": list(RATES_GBIT),
        "sources": SOURCES,
    }


def _backward_s(model: str, batch: int) -> float:
    return TIMELINES[model].compute_s * BACKWARD_SHARE * TOKENS.get(model, 1.0) * batch / TABLE_BATCH


def _profile(setup: Setup, recipe: str) -> Profile:
    layers = model_layers(setup.model)
    slowed = GAMMA if recipe.startswith("dense") else 1.0
    backward_s = slowed * _backward_s(setup.model, setup.batch)
    parameters = tuple(
        TimedParameter(name=name, shape=shape, ready_s=min(due, backward_s))
        for layer, due in zip(layers, deadlines(layers, backward_s), strict=True)
        for name, shape in layer.parameters
    )
    return Profile(
        cluster=Cluster(
            hosts=setup.num_gpus,
            ranks_per_host=1,
            between=LinkClass(alpha_s=ALPHA_S, beta=setup.rate_gbit * 1e9 / 8),
        ),
        computation=Computation(forward_s=0.0, backward_s=backward_s, optimizer_s=0.0, parameters=parameters),
        kernels=Kernels(cores=1, ranks_per_machine=1, speeds=_speeds()),
    )


def _speeds() -> tuple[KernelSpeed, ...]:
    """All of a method's time is charged where it encodes, by the bytes of ResNet-50."""
    resnet50_nbytes = 4 * num_parameters(model_layers("resnet50"))
    speeds = [_speed("fp16", "encode", CAST_S_PER_NBYTE), _speed("fp16", "decode", CAST_S_PER_NBYTE)]
    speeds += [_speed("identity", operation, 0.0) for operation in ("encode", "decode", "accumulate")]
    for recipe, (_, seconds) in METHODS.items():
        compressor = recipe.rpartition("/")[2]
        each = seconds / resnet50_nbytes
        if recipe.startswith("powersgd"):
            speeds.append(_speed(recipe, "exchange", each))
            continue
        speeds += [_speed(compressor, operation, each) for operation in ("encode", "encode_feedback")]
        speeds += [_speed(compressor, operation, 0.0) for operation in ("decode", "accumulate")]
    return tuple(speeds)


def _speed(recipe: str, operation: Any, s_per_nbyte: float) -> KernelSpeed:
    return KernelSpeed(recipe=recipe, operation=operation, threads=1, s_per_nbyte=s_per_nbyte)
