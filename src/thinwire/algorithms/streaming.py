"""Streaming DiLoCo: a fragment of the model at a time, exchanged while training goes on."""

from typing import Unpack

from torch import nn

from thinwire.algorithms.base import LocalMethod, Optimizers, Settings
from thinwire.algorithms.outer import OuterSGD
from thinwire.algorithms.rhythm import Rhythm
from thinwire.algorithms.tracked import Fragments
from thinwire.schedule import Phase


class StreamingDiLoCo(LocalMethod):
    r"""`DiLoCo` for one fragment of the model after the other, with tau = `overlap` steps for each exchange.

    Fragment p begins at the steps that `Rhythm` says, once in H = `sync_every`. There

        D_i = theta_p - x_i,p   is handed to threads in the background, which compress and exchange it;

    tau steps later, in which training has gone on,

        theta_p <- OuterSGD(theta_p, (1/n) sum_i D_i);   x_i,p <- alpha x_i,p + (1 - alpha) theta_p.

    theta is the same on all ranks, to the bit; with alpha > 0 models are not, not even after an exchange: evaluate and
    save inside `averaged()`, or after `sync()`. Training waits only for what tau steps did not suffice for.

    Args:
        model, optimizer: as of `DiLoCo`.
        recipe: as of `DiLoCo`; the paper sends 4-bit floats, "e3m0", whose sum is formed in float32.
        sync_every: H.
        fragments: their number, for runs of about equal bytes in the order of modules; or for each one a shell-style
            pattern on names, or several, as for the paper's strided layers: every parameter goes to the first that
            matches.
        overlap: tau, below H; the paper advises at most 5. 0 waits for every exchange.
        merge_alpha: alpha; the paper's is 0.5.
        outer_lr, outer_momentum, nesterov: of `OuterSGD`; 0.4 is the paper's.
        settings: see `LocalMethod`.

    Example:
        ```python
        outer = thinwire.StreamingDiLoCo(model, optimizer, "e3m0", sync_every=30, fragments=3, overlap=5)
        ```

    References:
        Arthur Douillard and others, "Streaming DiLoCo with overlapping communication: Towards a Distributed Free
        Lunch", 2025. Differs from the paper: 4-bit floats have one scale per block of 512 values, where the paper does
        not say; the owner sends the mean back in the same format, not in full.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        recipe: Phase = "dense",
        *,
        sync_every: int,
        fragments: Fragments,
        overlap: int = 1,
        merge_alpha: float = 0.5,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(
            model,
            optimizer,
            recipe,
            lambda: (
                Rhythm(
                    sync_every=sync_every,
                    num_fragments=fragments if isinstance(fragments, int) else len(fragments),
                    overlap=overlap,
                ),
                OuterSGD(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov),
            ),
            fragments=fragments,
            merge_alpha=merge_alpha,
            **settings,
        )
