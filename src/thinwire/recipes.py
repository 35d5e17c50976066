"""Recipe strings: the one table from short names to settings, for the command line and for `attach`.

    recipe      = [aggregator "/"] compressor ["+" compressor] ["@" feedback]     (up, and down where it differs)
    aggregator  = "gather" | "sum" | "hier" [":" dtype]  (otherwise what the kind is for: mostly the two-shot exchange)
    dtype       = "fp16" | "bf16"                        (inside a node, where it is not the parameter's own)
    compressor  = single ["~" single]                              (a sparse one, and how its values are sent)
    single      = ["scaled:"] kind *(":" argument)
    kind        = one of `recipe_names()`
    feedback    = name *(":" argument)                             (where left out: "ef" where it is needed, else none)
    name        = ef | dgc | ef21 | nag

Examples: `int8`, `int4:block=128`, `int8:stochastic`, `topk:0.01`, `topk:0.001:fp32`, `onebit`, `onebit:rms`, `fp16`,
`topk:0.01+int8`, `topk:0.01~int8`, `topk:0.001@dgc:0.9`, `int4@ef21`, `scaled:linear:3`, `randomk:0.01:block=64`,
`dense`, `dense:bf16`, `gather/onebit`, `sum/randomk:0.01`, `hier/int8`, `hier:fp16/int4`. Of themselves `global:8` and
`topkc:0.01` are summed on the wire, `globalexp` and `global:8:halving` reduced in a tree, and `sign` is a vote.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch

from thinwire.aggregators import Aggregator, Dense, Gather, Hierarchical, PowerSGD, SumOnWire, TreeReduce, TwoShot
from thinwire.aggregators import default_feedback as default_feedback
from thinwire.compressors import (
    BlockCast,
    BlockQuant,
    Cast,
    Compose,
    Compressor,
    FixedPoint,
    GlobalExponential,
    GlobalLinear,
    Identity,
    LinearDithering,
    LowRank,
    MinMax,
    NaturalCompression,
    NaturalDithering,
    OneBit,
    RandomK,
    Scaled,
    Sign,
    TernGrad,
    TopK,
    TopKC,
)
from thinwire.errors import RecipeError
from thinwire.feedback import EF21, ErrorFeedback, Feedback, MomentumCorrection
from thinwire.kernels.float_formats import FORMATS

Made = TypeVar("Made")
Word = tuple[str, Any]  # the field that a word sets, and to what


@dataclass(frozen=True)
class _Kind(Generic[Made]):
    """How the arguments of one kind become fields of its settings."""

    make: Callable[..., Made]
    words: Mapping[str, Word] = field(default_factory=dict[str, Word])
    numbers: Mapping[str, type[int] | type[float]] = field(default_factory=dict[str, type[int] | type[float]])
    first: tuple[str, type[int] | type[float], str] | None = None  # the field that comes first, bare, and an example
    instead: str | None = None  # the one of `numbers` that may stand in its place
    optional: bool = False  # whether `first` may be left out

    def __call__(self, arguments: Sequence[str]) -> Made:
        """Return the settings. Raises `RecipeError`."""
        chosen: dict[str, Any] = {}
        rest = list(arguments)
        if self.first is not None and not self._left_out(rest):
            name, number, example = self.first
            if not rest or rest[0] in self.words:
                raise RecipeError(f"expected {name if name == 'bits' else f'a {name}'}, as in {example!r}")
            chosen[name] = _number(number, rest.pop(0))
        for argument in rest:
            name, value = self._read(argument)
            if name in chosen:
                raise RecipeError(f"expected each setting once, got {':'.join(arguments)!r}")
            chosen[name] = value
        return self.make(**chosen)

    def _left_out(self, rest: Sequence[str]) -> bool:
        if self.optional and (not rest or rest[0] in self.words or "=" in rest[0]):
            return True
        return bool(rest and self.instead and rest[0].startswith(f"{self.instead}="))

    def _read(self, argument: str) -> Word:
        name, equals, number = argument.partition("=")
        if equals and name in self.numbers:
            return name, _number(self.numbers[name], number)
        if argument in self.words:
            return self.words[argument]
        known = [*self.words, *(f"{name}=N" for name in self.numbers)]
        raise RecipeError(f"expected {_alternatives(known) if known else 'no further argument'}, got {argument!r}")


_VALUES: dict[str, Word] = {
    "fp16": ("value_dtype", torch.float16),
    "fp32": ("value_dtype", torch.float32),
    "bf16": ("value_dtype", torch.bfloat16),
}
_ROUNDING: dict[str, Word] = {"stochastic": ("rounding", "stochastic"), "nearest": ("rounding", "nearest")}
_NORMS: dict[str, Word] = {"max": ("norm", "max"), "l2": ("norm", "l2")}
_GLOBAL: dict[str, Word] = {**_NORMS, "across-max": ("across", "max"), "across-l2": ("across", "l2")}
_RULES: dict[str, Word] = {"affine": ("rule", "affine"), "bagua": ("rule", "bagua")}
_SCALES: dict[str, Word] = {"l1": ("scale", "l1"), "rms": ("scale", "rms")}
_TIES: dict[str, Word] = {"plus": ("ties", "plus"), "random": ("ties", "random")}
_SELECTIONS: dict[str, Word] = {name: ("selection", name) for name in ("exact", "bisect", "sampled")}


def _int(bits: Literal[2, 3, 4, 5, 6, 7, 8]) -> _Kind[Compressor]:
    return _Kind(partial(BlockQuant, bits=bits), _ROUNDING, {"block": int, "rotation": int})


_KINDS: dict[str, _Kind[Compressor]] = {
    "fp16": _Kind(partial(Cast, dtype=torch.float16)),
    "bf16": _Kind(partial(Cast, dtype=torch.bfloat16)),
    **{f"int{bits}": _int(bits) for bits in (8, 7, 6, 5, 4, 3, 2)},
    **{name: _Kind(partial(BlockCast, format=name), {}, {"block": int}) for name in FORMATS},
    "linear": _Kind(LinearDithering, _NORMS, {"block": int}, ("bits", int, "linear:5")),
    "natural": _Kind(NaturalDithering, _NORMS, {"block": int}, ("bits", int, "natural:3")),
    "qsgd": _Kind(partial(LinearDithering, norm="l2", block=512), {}, {"block": int}, ("bits", int, "qsgd:4")),
    "cnat": _Kind(NaturalCompression, {}, {}, ("bits", int, "cnat:8")),
    "terngrad": _Kind(TernGrad, {"shared": ("shared", True)}, {"block": int, "clip": float}),
    "minmax": _Kind(MinMax, {**_RULES, **_ROUNDING}, {"block": int}, ("bits", int, "minmax:8")),
    "fixpoint": _Kind(FixedPoint, {}, {"block": int}, ("bits", int, "fixpoint:4")),
    "onebit": _Kind(OneBit, _SCALES),
    "sign": _Kind(Sign, _TIES),
    "topk": _Kind(
        TopK,
        {**_VALUES, "natural": ("value_dtype", "natural"), **_SELECTIONS, "chunked": ("chunked", True)},
        {"k": int},
        ("density", float, "topk:0.01"),
        instead="k",
    ),
    "randomk": _Kind(
        RandomK,
        {"rotating": ("rotating", True), "scaled": ("scaled", True), **_VALUES},
        {"block": int},
        ("density", float, "randomk:0.01"),
    ),
    "lowrank": _Kind(LowRank, _VALUES, {"num_iterations": int}, ("rank", int, "lowrank:4")),
    "identity": _Kind(Identity),
    "global": _Kind(GlobalLinear, {**_GLOBAL, "halving": ("halving", True)}, {}, ("bits", int, "global:8")),
    "globalexp": _Kind(GlobalExponential, _GLOBAL),
    "topkc": _Kind(
        TopKC,
        {name: _VALUES[name] for name in ("fp16", "fp32")},
        {"chunk": int},
        ("density", float, "topkc:0.01"),
    ),
}

_POWER_SGD: _Kind[Aggregator] = _Kind(
    PowerSGD,
    {
        "alternating": ("alternating", True),
        "local": ("error", "local"),
        "aggregated": ("error", "aggregated"),
    },
    {},
    ("rank", int, "powersgd:4"),
)

_FEEDBACK: dict[str, _Kind[Feedback]] = {
    "ef": _Kind(ErrorFeedback, {"lr": ("lr_correction", True)}, {"decay": float}),
    "dgc": _Kind(
        MomentumCorrection,
        {"nesterov": ("nesterov", True), "unmasked": ("masking", False)},
        {"clip": float},
        ("momentum", float, "dgc:0.9"),
        optional=True,
    ),
    "ef21": _Kind(EF21),
    "nag": _Kind(
        partial(MomentumCorrection, nesterov=True, masking=False),
        {},
        {"clip": float},
        ("momentum", float, "nag:0.9"),
        optional=True,
    ),
}


AGGREGATORS = ("", "gather", "sum")  # what may stand before the slash; with nothing the kind decides


def recipe_names() -> list[str]:
    """Return every kind a recipe may name."""
    return ["dense", *_KINDS, "powersgd"]


def example_recipe(kind: str) -> str:
    """Return the shortest recipe of a kind.

    >>> example_recipe("linear"), example_recipe("int8")
    ('linear:5', 'int8')
    """
    first = _POWER_SGD.first if kind == "powersgd" else _KINDS[kind].first if kind in _KINDS else None
    return kind if first is None else first[2]


def parse_recipe(text: str) -> Aggregator:
    """Return the settings that a recipe string stands for.

    Feedback is added where the compressor needs it to converge, and nowhere else.

    Raises:
        RecipeError: an unknown name or argument; the message names what comes near.

    Example:
        >>> parse_recipe("topk:0.01").up
        TopK(density=0.01, k=None, value_dtype=torch.float16, selection='exact', chunked=False)
    """
    rest, at, wanted = text.strip().partition("@")
    if rest.partition("/")[0].partition(":")[0] == "hier":
        return _hierarchical(text)
    aggregator, slash, rest = rest.rpartition("/")
    first, plus, second = rest.partition("+")
    kind, *arguments = first.split(":")
    try:
        if aggregator not in AGGREGATORS or (slash and not aggregator):
            known = _alternatives((*AGGREGATORS[1:], "hier"))
            raise RecipeError(f"expected the aggregator {known} or none, got {aggregator!r}")
        if plus and (aggregator or {"dense", "powersgd"} & {kind, second.partition(":")[0]}):
            raise RecipeError(f"expected one compressor, got {rest!r}: only the two-shot exchange has two")
        if kind == "dense" and not aggregator:
            if at:
                raise RecipeError(f"expected no feedback, since dense loses nothing, got {wanted!r}")
            dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
            if arguments and arguments[0] not in dtypes:
                raise RecipeError(f"expected 'dense', 'dense:fp16' or 'dense:bf16', got {arguments[0]!r}")
            if len(arguments) > 1:
                raise RecipeError(f"expected no further argument, got {':'.join(arguments[1:])!r}")
            return Dense(wire_dtype=dtypes[arguments[0]] if arguments else None)
        if kind == "powersgd" and not aggregator:
            settings = _POWER_SGD(arguments)
            return dataclasses.replace(settings, feedback=_feedback(wanted)) if at else settings  # type: ignore[type-var]
        up = _compressor(first, _KINDS if aggregator or plus else recipe_names())
        down = _compressor(second, _KINDS) if plus else up
        votes = isinstance(up, Sign) and not plus
        feedback = _feedback(wanted) if at else None if votes else default_feedback(up, down)
        if aggregator == "gather" or (votes and not aggregator):
            return Gather(up=up, feedback=feedback)
        if up.reducible is not None and not (aggregator or plus):
            if feedback is not None:
                raise RecipeError(f"expected no feedback, since {first!r} is unbiased, got {wanted!r}")
            return TreeReduce(up=up)
        if aggregator == "sum" or (up.linear is not None and up.statistic_reduction is not None and not plus):
            return SumOnWire(up=up, feedback=feedback)
        return TwoShot(up=up, down=down, feedback=feedback)
    except RecipeError as error:
        raise RecipeError(f"recipe {text!r}: {error}") from None


def parse_candidate(of: str, candidate: object) -> Aggregator:
    """Return one of the settings that something chooses among: what a recipe string stands for, or the settings given.

    Raises:
        RecipeError: an unknown recipe, or anything else; the message begins with `of`, who chooses.
    """
    settings = parse_recipe(candidate) if isinstance(candidate, str) else candidate
    if not isinstance(settings, Aggregator):
        raise RecipeError(f"{of}: expected recipes or Aggregators, got {candidate!r}")
    return settings


def parse_candidates(of: str, candidates: str | Iterable[object]) -> tuple[Aggregator, ...]:
    """Return all of them. Raises `RecipeError` for fewer than two, or one twice, too."""
    given = (candidates,) if isinstance(candidates, str) else candidates
    settings = tuple(parse_candidate(of, candidate) for candidate in given)
    if len(settings) < 2 or len(set(settings)) < len(settings):
        names = ", ".join(one.recipe() for one in settings) or "none"
        raise RecipeError(f"{of}: expected at least two candidates, each once, got {names}")
    return settings


_INSIDE = {"hier": None, "hier:fp16": torch.float16, "hier:bf16": torch.bfloat16}


def _hierarchical(text: str) -> Hierarchical:
    rest, at, wanted = text.strip().partition("@")
    aggregator, _, rest = rest.partition("/")
    first, plus, second = rest.partition("+")
    try:
        if aggregator not in _INSIDE:
            raise RecipeError(f"expected {_alternatives(_INSIDE)} before the slash, got {aggregator!r}")
        up = _compressor(first, _KINDS)
        down = _compressor(second, _KINDS) if plus else up
        feedback = _feedback(wanted) if at else default_feedback(up, down)
        return Hierarchical(up=up, down=down, feedback=feedback, inner_dtype=_INSIDE[aggregator])
    except RecipeError as error:
        raise RecipeError(f"recipe {text!r}: {error}") from None


def parse_compressor(text: str) -> Compressor:
    """Return the compressor alone that a part of a recipe stands for.

    Raises:
        RecipeError: an unknown name or argument.

    Example:
        >>> parse_compressor("global:8:halving").recipe()
        'global:8:halving'
    """
    try:
        return _compressor(text.strip(), _KINDS)
    except RecipeError as error:
        raise RecipeError(f"recipe {text!r}: {error}") from None


def parse_feedback(text: str) -> Feedback:
    """Return the feedback that the part of a recipe after "@" stands for.

    Raises:
        RecipeError: an unknown name or argument.

    Example:
        >>> parse_feedback("ef:decay=0.9")
        ErrorFeedback(decay=0.9, lr_correction=False)
    """
    try:
        return _feedback(text.strip())
    except RecipeError as error:
        raise RecipeError(f"recipe {text!r}: {error}") from None


def _compressor(text: str, known: Iterable[str]) -> Compressor:
    first, at, then = text.partition("~")
    if at:
        _check_pair(first, then)
        sparse, values = _single(f"{first}:fp32", ("topk", "randomk")), _single(then, _KINDS)
        assert isinstance(sparse, TopK | RandomK)
        return Compose(first=sparse, then=values)
    return _single(text, known)


def _check_pair(first: str, then: str) -> None:
    """Raise `RecipeError` for what reads well on either side of a `~` but not around it."""
    if "~" in then:
        raise RecipeError(f"expected one '~', after which stands what the values are encoded by, got {then!r} there")
    settings = first.split(":")
    if dtypes := [setting for setting in settings[1:] if setting in (*_VALUES, "natural")]:
        without = ":".join(setting for setting in settings if setting not in dtypes)
        raise RecipeError(
            f"expected no dtype of values before '~', since {then!r}, after it, says how they travel, got "
            f"{dtypes[0]!r}: write '{without}~{then}'"
        )


def _single(text: str, known: Iterable[str]) -> Compressor:
    kind, *arguments = text.split(":")
    if kind == "auto":
        raise RecipeError("'auto' chooses among recipes and stands alone: expected thinwire.attach(model, 'auto')")
    if kind == "scaled":
        return Scaled(inner=_single(":".join(arguments), _KINDS))
    if kind not in known:
        if len(known := list(known)) < 5:
            raise RecipeError(f"expected {_alternatives(known)}, got {kind!r}")
        close = difflib.get_close_matches(kind.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {_alternatives(close)}" if close else "for example int8, int4, topk:0.01, onebit or fp16"
        raise RecipeError(f"expected a kind of compressor, got {kind!r}: {hint} (`thinwire compressors` lists all)")
    return _KINDS[kind](arguments)


def _feedback(text: str) -> Feedback:
    kind, *arguments = text.split(":")
    if kind not in _FEEDBACK:
        raise RecipeError(f"expected the feedback {_alternatives(_FEEDBACK)}, got {kind!r}")
    return _FEEDBACK[kind](arguments)


def _number(kind: type[int] | type[float], text: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise RecipeError(f"expected a number, got {text!r}") from None


def _alternatives(words: Iterable[str]) -> str:
    *most, last = map(repr, words)
    return f"{', '.join(most)} or {last}" if most else last
