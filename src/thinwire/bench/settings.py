"""What one benchmark run is asked to do: plain values that travel to the ranks as JSON, and the names users type."""

import dataclasses as dc
import json
import re
from pathlib import Path
from typing import Literal

from thinwire.errors import AttachError, RecipeError
from thinwire.shapes import MODELS, model_layers

BASELINES = ("ddp", "ddp-fp16", "ddp-powersgd:4")
"""PyTorch's own ways to exchange gradients, under the names that the command line and the JSON use."""

DEMO_METHODS = (*BASELINES, "int8", "int4", "topk:0.01", "onebit")

OPTIMIZERS = ("adamw", "sgd", "nag", "lans", "lamb")

SHARDED_METHODS = ("fsdp", "int8", "int4", "int4:weights=int8", "onebit")
"""Of FSDP2 models: ``fsdp`` is FSDP2 as it is; after ``:weights=`` stands what weights are gathered in."""

WRAPS = ("ddp", "fsdp")

LOSS_STEPS = 100
"""Over which a training loss is averaged before it is called reached: whole periods of 10, 50 or 100 steps."""

_WEIGHTS = ":weights="
_LOCAL = re.compile(r"(localsgd|diloco):([1-9]\d*):(.+)|(streaming):([1-9]\d*):([1-9]\d*):(\d+):(.+)")
AUTO = "auto"  # among the methods: `thinwire.attach(model, "auto")`
AUTO_START = 40  # by when its first trial is over: three turns of three steps for each of four candidates
BASELINE = re.compile(r"fsdp|ddp|ddp-fp16|ddp-powersgd:[1-9]\d*")
_WORKLOAD = re.compile(rf"gpt|digits|replay:({'|'.join(MODELS)})(/[1-9]\d*)?")


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One benchmark: a workload, a network, the methods to compare on it, and how long each may train.

    Args:
        workload: ``gpt``, ``digits``, or ``replay:NAME[/SCALE]``.
        methods: baselines (``ddp``, ``ddp-fp16``, ``ddp-powersgd:RANK``; ``fsdp``), recipes (``int8``, ``topk:0.01``;
            ``int4:weights=int8``), ``auto``, and local methods (``localsgd:H:RECIPE``, ``diloco:H:RECIPE``,
            ``streaming:H:FRAGMENTS:OVERLAP:RECIPE``).
        wrap: what the model is put into, ``ddp`` or ``fsdp`` (FSDP2).
        nodes: emulated hosts.
        ranks_per_node: ranks on each of them, which talk to each other through its loopback.
        rate: of each host's link, both ways, such as ``100mbit``; None leaves it as it is.
        latency: one way, such as ``5ms``; None adds none.
        steps: train exactly this many; None trains for ``seconds``.
        seconds: of training per method and seed (evaluation not counted). Used where ``steps`` is None.
        seeds: repeat everything for so many seeds.
        first_seed: the first of them; the others follow it.
        until_loss: end a training before its last step once its training loss, mean over ranks and over its last
            `LOSS_STEPS` steps, is at most this; None never does. Looked at after every tenth step.
        bucket_cap_mb: DDP's bucket size for every method; None takes each method's own best.
        start_after: steps that thinwire's recipes first exchange dense.
        optimizer: of the workload, one of `OPTIMIZERS`; ``sgd`` and ``nag`` are with momentum, which ``@dgc`` and
            ``@nag`` recipes apply themselves.
        learning_rate: of the optimizer; None takes the workload's.
        decay: ``linear`` or ``cosine``: the learning rate warms up for a tenth of ``steps``, then falls to 0; None
            leaves it as it is.
        compute_s: of forward plus backward in a replay; None takes the model's default.
        trace: whether ranks trace one more step with each method of the first seed, beside these settings.
    """

    workload: str = "gpt"
    methods: tuple[str, ...] = DEMO_METHODS
    wrap: str = "ddp"
    nodes: int = 4
    ranks_per_node: int = 1
    rate: str | None = "100mbit"
    latency: str | None = None
    steps: int | None = None
    seconds: float = 24.0
    seeds: int = 1
    first_seed: int = 0
    until_loss: float | None = None
    bucket_cap_mb: float | None = None
    start_after: int = 0
    optimizer: str = "adamw"
    learning_rate: float | None = None
    decay: Literal["linear", "cosine"] | None = None
    compute_s: float | None = None
    trace: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def seed_numbers(self) -> range:
        """The seeds themselves."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def save(self, path: Path) -> None:
        """Write these settings as JSON, for the ranks."""
        path.write_text(json.dumps(dc.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Settings":
        """Read what ``save`` wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "methods": tuple(values["methods"])})


@dc.dataclass(frozen=True, slots=True)
class LocalName:
    """What the name of a local method says.

    Attributes:
        kind: ``localsgd``, ``diloco`` or ``streaming``.
        sync_every: steps between exchanges.
        recipe: how differences travel.
        fragments, overlap: of ``streaming``.
    """

    kind: str
    sync_every: int
    recipe: str
    fragments: int = 1
    overlap: int = 0


def split_local(method: str) -> LocalName | None:
    """Parts of a local method's name; None for any other method.

    >>> split_local("streaming:30:3:5:e3m0")
    LocalName(kind='streaming', sync_every=30, recipe='e3m0', fragments=3, overlap=5)
    """
    match = _LOCAL.fullmatch(method)
    if match is None:
        return None
    if match[1]:
        return LocalName(match[1], int(match[2]), match[3])
    return LocalName(match[4], int(match[5]), match[8], int(match[6]), int(match[7]))


def _check_local(name: LocalName) -> None:
    """Raise ``ThinwireError`` for a rhythm or a recipe that there is not."""
    from thinwire.algorithms import Rhythm
    from thinwire.recipes import parse_recipe

    Rhythm(sync_every=name.sync_every, num_fragments=name.fragments, overlap=name.overlap)
    parse_recipe(name.recipe)


def parse_methods(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of methods.

    Raises:
        ValueError: a name that is neither a baseline nor a local method, recipe or schedule, or one given twice.
    """
    methods = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in methods:
        if BASELINE.fullmatch(name) or name == AUTO:
            continue
        from thinwire.bench.servers import split_method
        from thinwire.recipes import parse_compressor, recipe_names
        from thinwire.schedule import parse_schedule

        try:
            if (local := split_local(name)) is not None:
                _check_local(local)
            else:
                recipe, kind = split_weights(split_method(name)[1])
                parse_schedule(recipe)
                if kind is not None:
                    parse_compressor(kind)
        except (RecipeError, AttachError) as error:
            raise ValueError(
                f"unknown method {name!r} ({error}); choose from PyTorch's own ddp, ddp-fp16, ddp-powersgd:RANK, fsdp, "
                "localsgd:H:RECIPE, diloco:H:RECIPE, streaming:H:FRAGMENTS:OVERLAP:RECIPE, and thinwire's recipes "
                f"{', '.join(recipe_names())}, also after 'servers:N/', and auto"
            ) from error
    if len(set(methods)) != len(methods) or not methods:
        raise ValueError(f"expected one or more different methods, got {text!r}")
    return methods


def split_weights(method: str) -> tuple[str, str | None]:
    """Return the recipe of gradients, and that of weights if there is one.

    >>> split_weights("int4:weights=int8"), split_weights("onebit")
    (('int4', 'int8'), ('onebit', None))
    """
    recipe, found, kind = method.partition(_WEIGHTS)
    return recipe, kind if found else None


def parse_workload(text: str) -> str:
    """Check a workload's name.

    Raises:
        ValueError: no such workload.
    """
    if not _WORKLOAD.fullmatch(text):
        raise ValueError(
            f"unknown workload {text!r}; choose gpt, digits, or replay:NAME[/SCALE] with NAME {', '.join(MODELS)} "
            "and SCALE a whole number that divides the model's widths"
        )
    if text.startswith("replay:"):
        name, scale = split_replay(text)
        model_layers(name, scale)  # raises for a scale that does not fit
    return text


def split_replay(workload: str) -> tuple[str, int]:
    """Model and scale of a replay's name.

    >>> split_replay("replay:bert-large/4")
    ('bert-large', 4)
    """
    name, _, scale = workload.removeprefix("replay:").partition("/")
    return name, int(scale or 1)
