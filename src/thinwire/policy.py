"""Policies: what each parameter gets, as recipes, patterns or functions say it, and why some stay dense."""

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.aggregators import Aggregator, Dense
from thinwire.compressors import Compressor
from thinwire.errors import PlanError, RecipeError
from thinwire.recipes import parse_recipe
from thinwire.spec import COMPRESSIBLE_DTYPES, BlockSpec


def plain_name(name: str) -> str:
    """Return a name as it is without compiling and activation checkpointing, so that patterns and states still fit."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamInfo:
    """What a policy is told of one parameter.

    Attributes:
        name: qualified name, as `named_parameters` gives it.
        shape: its shape.
        dtype: its dtype.
        index: its place in the order of registration.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes uncompressed."""
        return self.numel * self.dtype.itemsize


Policy = Callable[[ParamInfo], str | Aggregator | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """How parameters are cut and which stay dense.

    Attributes:
        partition_numel: elements per partition, at most; 65,536 lets top-k use 16-bit indices. Parameters of kinds that
            need whole matrices are not cut.
        message_nbytes: raw bytes per rank after which a message is closed, if it also has a sixteenth of that to send;
            smaller overlaps better on slow wires, larger costs fewer collectives.
        min_nbytes: recipes and patterns leave smaller parameters dense.
        compress_1d: whether recipes and patterns compress one-dimensional parameters too.
        seed: seed of every random stream.
        node_sizes: for `Hierarchical` settings that do not say which ranks share a node, as they say it.
        num_servers: parameter servers that form the means, as `PushPull` says; 0: ranks do.
    """

    partition_numel: int = 65536
    message_nbytes: int = 1 << 22
    min_nbytes: int = 1 << 16
    compress_1d: bool = False
    seed: int = 0
    node_sizes: int | tuple[int, ...] | None = None
    num_servers: int = 0

    def __post_init__(self) -> None:
        if self.partition_numel < 1 or self.message_nbytes < 1 or self.min_nbytes < 0 or self.num_servers < 0:
            raise PlanError(f"expected positive sizes, got {self}")


class Patterns:
    """A policy of first-match patterns on qualified names.

    Args:
        recipes: shell-style pattern -> recipe string or `Aggregator`; the first that matches decides. Parameters that
            match none stay dense, which the plan and the log say. Thresholds of `PlanOptions` apply.

    Raises:
        RecipeError: an unknown recipe, or a schedule: those go around patterns, not into them.
        PlanError: something else than a recipe or an `Aggregator`.

    Example:
        >>> Patterns({"head.*": "dense", "*": "int8"}).resolve("head.weight").recipe()
        'dense'
    """

    def __init__(self, recipes: Mapping[str, str | Aggregator]) -> None:
        self._rules = [(pattern, _settings(recipe, f"pattern {pattern!r}")) for pattern, recipe in recipes.items()]

    def resolve(self, name: str) -> Aggregator | None:
        """Return what the first matching pattern says, or None."""
        return next((recipe for pattern, recipe in self._rules if fnmatch.fnmatchcase(name, pattern)), None)

    def check(self, names: Sequence[str]) -> None:
        """Raise `PlanError` for a pattern that matches no parameter, or none that those before it leave."""
        left = list(names)
        for place, (pattern, _) in enumerate(self._rules):
            matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if matched and not set(matched) & set(left):
                before = [p for p, _ in self._rules[:place] if fnmatch.fnmatchcase(matched[0], p)]
                raise PlanError(
                    f"pattern {pattern!r} decides nothing: all that it matches, as {matched[0]!r}, is decided by those "
                    f"before it, as {before[0]!r}; the first that matches counts, so put the special ones first"
                )
            left = [name for name in left if name not in matched]
            if not matched:
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names[:3])
                raise PlanError(f"pattern {pattern!r} matches no parameter; close names: {', '.join(close)}")


def _settings(recipe: object, where: str) -> Aggregator:
    """Return what a pattern or a function says, as settings; `where` is for errors."""
    if isinstance(recipe, Aggregator):
        return recipe
    around = "schedules go around patterns and functions: Schedule([(0, 'dense'), (500, {'*': 'int4'})])"
    if not isinstance(recipe, str):
        raise PlanError(f"{where}: expected a recipe, an Aggregator or None, got {recipe!r}; {around}")
    if len(recipe.split()) > 1:
        raise RecipeError(f"{where}: expected one recipe, got {recipe!r}; {around}")
    try:
        return parse_recipe(recipe)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def resolver(
    policy: "str | Aggregator | Mapping[str, str | Aggregator] | Patterns | Policy",
    infos: Sequence[ParamInfo],
    options: PlanOptions,
) -> Callable[[ParamInfo], tuple[Aggregator, str]]:
    """Return a function from a parameter to its aggregator and, if dense, why."""
    if isinstance(policy, str):
        policy = parse_recipe(policy)
    if isinstance(policy, Mapping):
        policy = Patterns(policy)
    if isinstance(policy, Patterns):
        policy.check([info.name for info in infos])
    elif not isinstance(policy, Aggregator) and not callable(policy):
        raise PlanError(f"expected a recipe, an Aggregator, patterns or a function of ParamInfo, got {policy!r}")

    def resolve(info: ParamInfo) -> tuple[Aggregator, str]:
        if info.dtype not in COMPRESSIBLE_DTYPES:
            return Dense(), f"dtype {str(info.dtype).removeprefix('torch.')}"
        if isinstance(policy, Aggregator):
            aggregator = policy
        elif isinstance(policy, Patterns):
            aggregator = policy.resolve(info.name)
        else:
            aggregator = policy(info)  # type: ignore[operator]
            if aggregator is None:
                return Dense(), "policy"
            return _with_reason(_settings(aggregator, f"policy({info.name!r})"))
        if aggregator is None:
            return Dense(), "no pattern matches"
        if isinstance(aggregator, Dense):
            return _with_reason(aggregator)
        if len(info.shape) < 2 and not options.compress_1d:
            return Dense(), "one-dimensional"
        if info.nbytes < options.min_nbytes:
            return Dense(), f"below {options.min_nbytes:,} bytes"
        return _if_it_pays(info, aggregator)

    return resolve


def _with_reason(aggregator: Aggregator) -> tuple[Aggregator, str]:
    return aggregator, "asked for" if isinstance(aggregator, Dense) else ""


def whole_kinds(aggregator: Aggregator) -> list[Compressor]:
    """Return the compressors of an aggregator that must see whole matrices."""
    return [compressor for compressor in (aggregator.up, aggregator.down) if compressor.unit == "matrix"]


def _if_it_pays(info: ParamInfo, aggregator: Aggregator) -> tuple[Aggregator, str]:
    """Return the aggregator, or dense and why where a kind for matrices has nothing to gain from this one."""
    if whole := whole_kinds(aggregator):
        if len(info.shape) < 2:
            return Dense(), "one-dimensional"  # also with compress_1d: a vector has no rank to lower
        spec = BlockSpec(shape=info.shape, dtype=info.dtype)
        for compressor in whole:
            if 2 * compressor.nbytes(spec) > spec.raw_nbytes:
                return Dense(), f"{compressor.recipe()} saves less than half"
    return aggregator, ""
