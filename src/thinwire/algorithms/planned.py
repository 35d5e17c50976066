"""A local method's plan and rhythm for parameters of which only the shapes are known: what `thinwire advise` asks."""

import functools
from collections.abc import Sequence

from torch import Tensor

from thinwire.advisor.apart import Apart
from thinwire.algorithms.planning import plan_differences
from thinwire.algorithms.rhythm import Rhythm
from thinwire.algorithms.tracked import Tracked, cut
from thinwire.policy import PlanOptions


def planned(
    name: str,
    kind: str,
    recipe: str,
    named_tensors: Sequence[tuple[str, Tensor]],
    world_size: int,
    *,
    sync_every: int,
    fragments: int = 1,
    overlap: int = 0,
    options: PlanOptions | None = None,
) -> Apart:
    """Return what `LocalSGD`, `DiLoCo` or `StreamingDiLoCo` would exchange of these parameters, and how often.

    Args:
        name: what it is called.
        kind: "localsgd", "diloco" or "streaming".
        recipe: how differences travel.
        sync_every: steps between exchanges.
        fragments: of "streaming".
        overlap: steps that go on meanwhile, likewise.
        named_tensors: parameters; of their values nothing is read.
        world_size: number of ranks.
        options: as of `thinwire.attach`; of recipes that know of nodes it holds their sizes.

    Raises:
        AttachError: a rhythm that there is not, more fragments than parameters, or a recipe that is none for it.
        RecipeError: as `build_plan` does.
    """
    rhythm = Rhythm(sync_every=sync_every, num_fragments=fragments, overlap=overlap)
    found = [Tracked(one, functools.partial(_same, tensor), trained=True) for one, tensor in named_tensors]
    plan = plan_differences(found, recipe, world_size, options or PlanOptions())
    return Apart(
        name=name,
        plan=plan,
        parts=tuple(tuple(one.name for one in part) for part in cut(found, rhythm.num_fragments)),
        sync_every=rhythm.sync_every,
        overlap=rhythm.overlap,
        nbytes_per_element=8 if kind == "localsgd" else 12,  # its outer step has no momentum
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor
