"""CLAN's settings: what is compressed, how, and with which memory."""

from thinwire.aggregators import Aggregator, Hierarchical, ThroughServers, TwoShot
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback
from thinwire.policy import PlanOptions
from thinwire.recipes import parse_recipe

CLAN_SETTINGS = {
    "onebit": "onebit",
    "topk": "topk:0.001",
    "randomk": "randomk:0.03125",
    "linear5": "linear:5",
    "linear7": "linear:7",
    "natural": "natural:3",
    "fp16": "fp16",
}
"""The paper's settings by name, and their recipes: scaled one-bit, top-k of 0.1 %, random-k of 1/32, linear dithering
with 5 bits (image models) and 7 (BERT), natural dithering with 3, and its 16-bit baseline."""

CLAN_OPTIONS = PlanOptions(min_nbytes=1_024_000, compress_1d=True)
"""The paper's threshold: parameters below 1,024,000 bytes travel uncompressed, whatever their dimensions."""


def clan_recipe(recipe: str | Aggregator) -> Aggregator:
    """Return the settings of CLAN's exchange that a name of `CLAN_SETTINGS`, or a recipe, stands for.

    Args:
        recipe: one of the names, or a recipe or settings whose exchange is the paper's `push_pull`: compressed both
            ways, through owners or servers, with plain error feedback where the kind is contractive (algorithm 4), and
            without memory where it is unbiased (algorithm 3).

    Raises:
        RecipeError: an unknown recipe, another exchange, or other feedback.

    Example:
        >>> clan_recipe("topk") == parse_recipe("topk:0.001")
        True
    """
    if isinstance(recipe, str):
        recipe = parse_recipe(CLAN_SETTINGS.get(recipe, recipe))
    if not isinstance(recipe, Aggregator):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RecipeError(f"CLAN: expected a recipe or settings of an exchange, got {type(recipe).__name__}")
    if not isinstance(recipe, TwoShot | Hierarchical | ThroughServers):
        raise RecipeError(
            "CLAN: expected an exchange that is compressed both ways through owners or servers, as "
            f"{', '.join(CLAN_SETTINGS)} or others with 'hier/' or without an aggregator, got {recipe.recipe()!r}"
        )
    if recipe.feedback not in (None, ErrorFeedback()):
        raise RecipeError(
            f"CLAN: expected plain error feedback, or none, got {recipe.recipe()!r}; for other feedback use "
            "thinwire.attach(..., options=thinwire.CLAN_OPTIONS)"
        )
    return recipe
