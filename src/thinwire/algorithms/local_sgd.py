"""Local SGD: the mean of all ranks' models, every so many steps."""

from typing import Unpack

from torch import nn

from thinwire.algorithms.base import LocalMethod, Optimizers, Settings
from thinwire.algorithms.outer import OuterSGD
from thinwire.algorithms.rhythm import Rhythm
from thinwire.schedule import Phase


class LocalSGD(LocalMethod):
    r"""Every rank takes H = `sync_every` steps of its own; then all models become their mean.

        x_i <- theta - (1/n) sum_j (theta - x_j),   theta <- that, after steps H, 2 H, ...

    With H = 1 that is parameter averaging in every step. On one rank it is plain training, to the bit.

    Args:
        model, optimizer: what is trained; any optimizer. Its state (momentum, Adam's moments) stays with its rank.
        recipe: how differences travel: "dense" in float32, "int8", "int4", ...
        sync_every: H.
        settings: see `LocalMethod`.

    Example:
        ```python
        outer = thinwire.LocalSGD(model, optimizer, "int8", sync_every=8)
        for x in batches:
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        outer.sync()
        outer.close()
        ```

    References:
        Sebastian U. Stich, "Local SGD Converges Fast and Communicates Little", 2019. Differs from the paper: models
        travel as compressed differences to the last mean.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        recipe: Phase = "dense",
        *,
        sync_every: int,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(model, optimizer, recipe, lambda: (Rhythm(sync_every=sync_every), OuterSGD()), **settings)
