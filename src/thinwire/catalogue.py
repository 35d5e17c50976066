"""The catalogue: for every kind that a recipe may name, examples, what they promise, and when to choose them.

Kinds come from the table of recipes. One without a line here is listed with its shortest recipe, and with the first
line of its compressor's docstring.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.aggregators import Aggregator
from thinwire.compressors import Additive, Compressor, Contract, Contractive, NoContract, Unbiased, needs_feedback
from thinwire.errors import RecipeError
from thinwire.recipes import AGGREGATORS, example_recipe, parse_compressor, parse_recipe, recipe_names
from thinwire.spec import BlockSpec

FULL_PARTITION = BlockSpec(shape=(256, 256))
"""65,536 float32, as a matrix, so that kinds which need one have it."""

WHEN = {
    "dense": "the network is fast enough, or the arithmetic must be DDP's own",
    "dense:bf16": "half the bytes of DDP with one all-reduce; sums are rounded to 16 bits too",
    "fp16": "half the bytes with next to no error, where gradients lie within fp16's range",
    "bf16": "half the bytes, whatever the gradients' range",
    "int8": "the first thing to try: a quarter of the bytes, closest to an uncompressed run",
    "int8:stochastic": "as int8 where errors must average out and no residual may be kept",
    "int7": "as int8, an eighth less",
    "int6": "between int8 and int4, where int4 costs accuracy",
    "int5": "between int8 and int4, where int4 costs accuracy",
    "int4": "slow networks: an eighth of the bytes, with feedback near an uncompressed run",
    "int4:stochastic": "as int4 without memory for residuals; noisier",
    "int3": "slower networks than int4 can fill; compare losses at equal time",
    "int2": "the fewest bits of its family; compare with onebit",
    "int2:stochastic": "research: unbiased at two bits, and very noisy",
    "linear:5": "CLAN's setting for whole partitions; unbiased, so no residual is kept",
    "linear:7": "as linear:5 with far less variance",
    "linear:7:block=512": "unbiased near int8 at an eighth less",
    "natural:3": "CLAN's setting with the fewest bits; noisy",
    "natural:5": "unbiased at 5 bits, variance at most an eighth for any partition: magnitudes of many sizes",
    "qsgd:4": "to compare with QSGD; linear dithering by the maximum errs less on most blocks",
    "cnat:8": "a quarter of the bytes without any scale, variance at most an eighth; int8 errs far less",
    "terngrad": "to compare with TernGrad; one scale a partition makes it very noisy",
    "terngrad:block=512": "unbiased at 1.7 bits a value; compare with int2:stochastic",
    "gather/terngrad:shared": "to compare with TernGrad's shared scale, whose codes count alike on all ranks",
    "minmax:8:block=512": "as int8 for blocks that lie to one side of 0, such as activations",
    "minmax:8:bagua": "to compare with BAGUA's 8-bit kind, whose scale is one for a partition",
    "minmax:4:stochastic:block=512": "unbiased at 4 bits for blocks to one side of 0; else int4:stochastic errs less",
    "fixpoint:4:block=512": "to compare with AQ-SGD's quantiser of activations; int4 errs less on gradients",
    "int4:rotation=32": "as int4 where few values of a block are far larger than the others; slower",
    "e4m3": "small values keep their relative precision; on Gaussian blocks int8 errs less",
    "e5m2": "as e4m3 over a wider range with a bit less of precision",
    "e3m0": "4 bits whose levels are powers of two, for pseudo-gradients as in Streaming DiLoCo",
    "sign": "majority votes: the learning rate alone is the length of a step; for gradients onebit is right",
    "topk:0.01~int8": "topk with a byte a value; topk:0.01:natural has coarser ones",
    "scaled:linear:3": "unbiased kinds of few bits under feedback",
    "lowrank:4": "matrices whose gradients have few directions; costs matrix products",
    "powersgd:4": "as lowrank, from where the last step left: the better for it; two all-reduces of thin factors",
    "powersgd:4:alternating": "half the bytes and rounds of powersgd:4, a step later",
    "global:8": "all-reduces that add bytes: one message for all ranks, few levels for many",
    "global:8:halving": "all levels, in a tree of pairwise means",
    "globalexp": "partitions of very different scales, in a tree; noisy whatever the number of ranks",
    "topkc:0.01": "all-reduces of whole chunks: no indices, sums stay sparse",
    "sum/randomk:0.1": "one all-reduce, and the fewest rounds for any kind under feedback",
    "onebit": "very slow networks: a thirty-second of the bytes; best after dense steps (start_after=)",
    "onebit:rms": "to compare with 1-bit Adam; l1 errs less",
    "topk:0.01": "very slow networks: a hundredth of the bytes; best after dense steps (start_after=)",
    "topk:0.01:fp32": "as topk:0.01, should fp16 be too narrow for the values",
    "topk:0.01:natural:chunked": "the fewest bytes at its density",
    "topk:k=100": "a fixed number of values, whatever a partition's length",
    "topk:0.01:bisect": "to compare with MSTopK's selection",
    "topk:0.01:sampled": "to compare with the selection of deep gradient compression",
    "randomk:0.01": "no indices on the wire, and sums stay sparse; far noisier than topk at equal density",
    "randomk:0.01:rotating": "as randomk, where no coordinate may wait longer than 1/density steps",
    "gather/randomk:0.1:scaled": "unbiased sparsification without residuals; very noisy",
    "hier/int8": "several ranks a host: bytes between hosts do not grow with their number; needs attach(..., nodes=)",
    "hier:bf16/int4": "as hier/int8 with half of the bytes, and inside hosts with 16 bits",
    "identity": "one direction of a two-shot exchange left uncompressed, as in topk:0.01+identity",
}
"""Recipes worth showing, and when to choose them, in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One example of a kind, for a full partition of 65,536 float32.

    Attributes:
        recipe: as the command line spells it.
        compressor: what ranks send.
        kind: its name in the table of recipes.
        family: the module that the compressor is defined in: "block", "sign", ...
        bits_per_element: what a rank sends, per element.
        contract: what the compressor promises of its error.
        aggregators: class names of those that take it.
        needs_feedback: whether the recipe comes with error feedback.
        when: when to choose it.
    """

    recipe: str
    compressor: Compressor
    kind: str
    family: str
    bits_per_element: float
    contract: Contract
    aggregators: tuple[str, ...]
    needs_feedback: bool
    when: str


def catalogue() -> list[Entry]:
    """Return the examples of every kind, in the order of `recipe_names`."""
    shown: dict[str, list[str]] = {kind: [] for kind in recipe_names()}
    for recipe in WHEN:
        shown[_kind(recipe)].append(recipe)
    return [describe(recipe) for kind, recipes in shown.items() for recipe in recipes or [example_recipe(kind)]]


def describe(recipe: str) -> Entry:
    """Return the entry of any recipe.

    Raises:
        RecipeError: there is no such recipe, with any aggregator or without.

    Example:
        >>> describe("onebit").aggregators
        ('TwoShot', 'Gather', 'Hierarchical')
    """
    possible = list(_with_every_aggregator(recipe))
    chosen = parse_recipe(recipe) if "/" in recipe else possible[0] if possible else None
    compressor = parse_compressor(recipe) if chosen is None else chosen.up
    contract = compressor.contract(FULL_PARTITION)
    docstring = type(compressor).__doc__ or ""
    return Entry(
        recipe=(chosen or compressor).recipe(),
        compressor=compressor,
        kind=_kind(recipe),
        family=type(compressor).__module__.rpartition(".")[2],
        bits_per_element=8
        * (chosen.sent_once_nbytes if chosen else compressor.nbytes)(FULL_PARTITION)
        / FULL_PARTITION.numel,
        contract=contract,
        aggregators=tuple(dict.fromkeys(type(aggregator).__name__ for aggregator in possible)),
        needs_feedback=needs_feedback(contract) if chosen is None else chosen.feedback is not None,
        when=WHEN.get(recipe) or docstring.partition("\n")[0].rstrip("."),
    )


def contract_text(contract: Contract) -> str:
    """Return a contract in words.

    >>> contract_text(Contractive(1 - 2.0**-22)), contract_text(Unbiased(1.25))
    ('contractive, δ = 1 - 2.4e-07', 'unbiased, ω = 1.2')
    """
    match contract:
        case Unbiased(omega):
            return f"unbiased, ω = {omega:.2g}"
        case Contractive(1.0):
            return "exact"
        case Contractive(delta) if delta > 0.999:
            return f"contractive, δ = 1 - {1 - delta:.2g}"
        case Contractive(delta):
            return f"contractive, δ = {delta:.3g}"
        case Additive(error):
            return f"within {error:.2g} of the range of each block"
        case NoContract(why):
            return f"no bound: {why}"


def _kind(recipe: str) -> str:
    first = re.split("[@+~]", recipe.rpartition("/")[2])[0]
    return first.removeprefix("scaled:").partition(":")[0]


def _with_every_aggregator(recipe: str) -> Iterator[Aggregator]:
    compressor = recipe.rpartition("/")[2]
    for name in (*AGGREGATORS, "hier"):
        try:
            yield parse_recipe(f"{name}/{compressor}" if name else compressor)
        except RecipeError:
            continue
