"""DiLoCo: an outer optimizer on what ranks have changed in many steps."""

from typing import Unpack

from torch import nn

from thinwire.algorithms.base import LocalMethod, Optimizers, Settings
from thinwire.algorithms.outer import OuterSGD
from thinwire.algorithms.rhythm import Rhythm
from thinwire.schedule import Phase


class DiLoCo(LocalMethod):
    r"""Every rank takes H = `sync_every` steps of its own; an outer optimizer then takes one with the mean change.

    With theta, the same on all ranks, and models x_i, after steps H, 2 H, ...

        D = (1/n) sum_i (theta - x_i);   theta <- OuterSGD(theta, D);   x_i <- theta.

    With `outer_lr` 1 and `outer_momentum` 0 this is `LocalSGD`. On one rank the outer optimizer steps all the same.

    Args:
        model, optimizer: what is trained; the paper's inner optimizer is AdamW. Its state stays with its rank.
        recipe: how differences travel: "dense" in float32; "int8", "int4", "e3m0"; or as SparseLoCo sends them, a
            sparse kind with few bits a value under error feedback, which then takes the place of the outer momentum:
            "topk:0.03:chunked~int2" with `outer_lr=1, outer_momentum=0`.
        sync_every: H; 50 to 500 in the paper and after it.
        outer_lr, outer_momentum, nesterov: of `OuterSGD`.
        settings: see `LocalMethod`.

    Example:
        ```python
        outer = thinwire.DiLoCo(model, optimizer, "int8", sync_every=50)
        for x in batches:
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        outer.sync()
        outer.close()
        ```

    References:
        Arthur Douillard, Qixuan Feng, Andrei A. Rusu, Rachita Chhaparia, Yani Donchev, Adhiguna Kuncoro, Marc'Aurelio
        Ranzato, Arthur Szlam, Jiajun Shen, "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
        Differs from the paper: differences travel compressed, with error feedback where the recipe needs it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        recipe: Phase = "dense",
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(
            model,
            optimizer,
            recipe,
            lambda: (
                Rhythm(sync_every=sync_every),
                OuterSGD(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov),
            ),
            **settings,
        )
