"""Recipe strings: the one table from short names to settings, for the command line and for `attach`.

    recipe      = [aggregator "/"] compressor ["+" compressor]     (up, and down where it differs)
    aggregator  = "gather"                                         (two-shot otherwise)
    compressor  = kind *(":" argument)
    kind        = dense | fp16 | bf16 | int8 | int7 | int6 | int5 | int4 | int3 | int2 | linear | natural | qsgd
                | onebit | topk | randomk | identity

Examples: `int8`, `int4:block=128`, `int8:stochastic`, `topk:0.01`, `topk:0.001:fp32`, `onebit`, `onebit:rms`, `fp16`,
`topk:0.01+int8`, `randomk:0.01:block=64`, `dense`, `dense:bf16`, `gather/onebit`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from thinwire.aggregators import Aggregator, Dense, Gather, TwoShot
from thinwire.compressors import (
    BlockQuant,
    Cast,
    Compressor,
    Identity,
    LinearDithering,
    NaturalDithering,
    OneBit,
    RandomK,
    TopK,
    Unbiased,
    needs_feedback,
)
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback
from thinwire.spec import BlockSpec

T = TypeVar("T", int, float)


def _block_quant(bits: int, arguments: Sequence[str]) -> BlockQuant:
    quant = BlockQuant(bits=bits)  # pyright: ignore[reportArgumentType]
    settings = ["block" if argument.startswith("block=") else "rounding" for argument in arguments]
    for argument in arguments:
        if argument in ("stochastic", "nearest"):
            quant = dataclasses.replace(quant, rounding=argument)
        elif argument.startswith("block="):
            quant = dataclasses.replace(quant, block=_number(int, argument.removeprefix("block=")))
        else:
            raise RecipeError(f"expected 'stochastic', 'nearest' or 'block=N', got {argument!r}")
    if len(set(settings)) < len(settings):
        raise RecipeError(f"expected each setting once, got {':'.join(arguments)!r}")
    return quant


def _dither(
    kind: type[LinearDithering] | type[NaturalDithering], defaults: dict[str, Any], arguments: Sequence[str]
) -> Compressor:
    if not arguments:
        raise RecipeError("expected bits, as in 'linear:5'")
    settings: dict[str, Any] = {"bits": _number(int, arguments[0])}
    for argument in arguments[1:]:
        name, value = "norm", argument
        if argument.startswith("block="):
            name, value = "block", _number(int, argument.removeprefix("block="))
        elif argument not in ("max", "l2") or "norm" in defaults:
            choices = "'block=N'" if "norm" in defaults else "'max', 'l2' or 'block=N'"
            raise RecipeError(f"expected {choices}, got {argument!r}")
        if name in settings:
            raise RecipeError(f"expected each setting once, got {':'.join(arguments)!r}")
        settings[name] = value
    return kind(**{**defaults, **settings})


def _identity(arguments: Sequence[str]) -> Identity:
    _no_more(arguments)
    return Identity()


def _cast(dtype: torch.dtype, arguments: Sequence[str]) -> Cast:
    _no_more(arguments)
    return Cast(dtype=dtype)


def _one_bit(arguments: Sequence[str]) -> OneBit:
    _no_more(arguments[1:])
    return OneBit(scale=arguments[0] if arguments else "l1")  # pyright: ignore[reportArgumentType]


def _top_k(arguments: Sequence[str]) -> TopK:
    if not arguments or arguments[0] in _TOP_K_EXTRAS:
        raise RecipeError("expected a density, as in 'topk:0.01'")
    kept, *extras = arguments
    chosen: dict[str, Any] = {}
    if kept.startswith("k="):
        chosen["k"] = _number(int, kept.removeprefix("k="))
    else:
        chosen["density"] = _number(float, kept)
    for extra in extras:
        if extra not in _TOP_K_EXTRAS:
            raise RecipeError(f"expected {', '.join(map(repr, _TOP_K_EXTRAS))}, got {extra!r}")
        field, value = _TOP_K_EXTRAS[extra]
        if field in chosen:
            raise RecipeError(f"expected each setting once, got {':'.join(arguments)!r}")
        chosen[field] = value
    return TopK(**chosen)


_TOP_K_EXTRAS: dict[str, tuple[str, Any]] = {
    "fp16": ("value_dtype", torch.float16),
    "fp32": ("value_dtype", torch.float32),
    "bf16": ("value_dtype", torch.bfloat16),
    "natural": ("value_dtype", "natural"),
    "exact": ("selection", "exact"),
    "bisect": ("selection", "bisect"),
    "sampled": ("selection", "sampled"),
    "chunked": ("chunked", True),
}


def _random_k(arguments: Sequence[str]) -> RandomK:
    if not arguments or arguments[0] in _RANDOM_K_EXTRAS:
        raise RecipeError("expected a density, as in 'randomk:0.01'")
    chosen: dict[str, Any] = {"density": _number(float, arguments[0])}
    for extra in arguments[1:]:
        if extra.startswith("block="):
            field, value = "block", _number(int, extra.removeprefix("block="))
        elif extra in _RANDOM_K_EXTRAS:
            field, value = _RANDOM_K_EXTRAS[extra]
        else:
            raise RecipeError(f"expected 'block=N', {', '.join(map(repr, _RANDOM_K_EXTRAS))}, got {extra!r}")
        if field in chosen:
            raise RecipeError(f"expected each setting once, got {':'.join(arguments)!r}")
        chosen[field] = value
    return RandomK(**chosen)


_RANDOM_K_EXTRAS: dict[str, tuple[str, Any]] = {
    "rotating": ("rotating", True),
    "scaled": ("scaled", True),
    "fp16": ("value_dtype", torch.float16),
    "fp32": ("value_dtype", torch.float32),
    "bf16": ("value_dtype", torch.bfloat16),
}


_KINDS: dict[str, Callable[[Sequence[str]], Compressor]] = {
    "fp16": lambda arguments: _cast(torch.float16, arguments),
    "bf16": lambda arguments: _cast(torch.bfloat16, arguments),
    **{f"int{bits}": functools.partial(_block_quant, bits) for bits in range(8, 1, -1)},
    "linear": functools.partial(_dither, LinearDithering, {}),
    "natural": functools.partial(_dither, NaturalDithering, {}),
    "qsgd": functools.partial(_dither, LinearDithering, {"norm": "l2", "block": 512}),
    "onebit": _one_bit,
    "topk": _top_k,
    "randomk": _random_k,
    "identity": _identity,
}


def recipe_names() -> list[str]:
    """Return every kind a recipe may name."""
    return ["dense", *_KINDS]


def parse_recipe(text: str) -> Aggregator:
    """Return the settings that a recipe string stands for.

    Feedback is added where the compressor needs it to converge, and nowhere else.

    Raises:
        RecipeError: an unknown name or argument; the message lists what is known.

    Example:
        >>> parse_recipe("topk:0.01").up
        TopK(density=0.01, k=None, value_dtype=torch.float16, selection='exact', chunked=False)
    """
    aggregator, slash, rest = text.strip().rpartition("/")
    first, plus, second = rest.partition("+")
    kind, *arguments = first.split(":")
    try:
        if aggregator not in ("", "gather") or (slash and not aggregator):
            raise RecipeError(f"expected the aggregator 'gather' or none, got {aggregator!r}")
        if plus and (aggregator or "dense" in (kind, second.partition(":")[0])):
            raise RecipeError(f"expected one compressor, got {rest!r}: only the two-shot exchange has two")
        if kind == "dense" and not aggregator:
            dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
            if arguments and arguments[0] not in dtypes:
                raise RecipeError(f"expected 'dense', 'dense:fp16' or 'dense:bf16', got {arguments[0]!r}")
            _no_more(arguments[1:])
            return Dense(wire_dtype=dtypes[arguments[0]] if arguments else None)
        up = _compressor(first, _KINDS if aggregator or plus else recipe_names())
        if aggregator == "gather":
            return Gather(up=up, feedback=default_feedback(up))
        down = _compressor(second, _KINDS) if plus else up
        return TwoShot(up=up, down=down, feedback=default_feedback(up) or default_feedback(down))
    except RecipeError as error:
        raise RecipeError(f"recipe {text!r}: {error}") from None


def _compressor(text: str, known: Iterable[str]) -> Compressor:
    kind, *arguments = text.split(":")
    if kind not in _KINDS:
        raise RecipeError(f"expected one of {', '.join(known)}, got {kind!r}")
    return _KINDS[kind](arguments)


def default_feedback(compressor: Compressor) -> ErrorFeedback | None:
    """Return `ErrorFeedback()` for kinds that need it, None for the others."""
    contract = compressor.contract(BlockSpec(shape=(65536,)))
    return None if isinstance(contract, Unbiased) or not needs_feedback(contract) else ErrorFeedback()


def _no_more(arguments: Sequence[str]) -> None:
    if arguments:
        raise RecipeError(f"expected no further argument, got {':'.join(arguments)!r}")


def _number(kind: type[T], text: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise RecipeError(f"expected a number, got {text!r}") from None
