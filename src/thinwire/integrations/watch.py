"""What a link watches of its DDP model: uses of DDP in which its hook would be called in vain, or not at all."""

import logging
import weakref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import AttachError


def left_over(model: DistributedDataParallel) -> dict[str, int]:
    """Return the bytes that DDP sends besides gradients, which no recipe makes fewer, by what they are.

    `buffers` are broadcast before every forward pass, a map of `unused parameters` is summed after every backward.
    """
    found: dict[str, int] = {}
    if model.broadcast_buffers and model.modules_buffers:
        found["buffers"] = sum(buffer.nbytes for buffer in model.modules_buffers)
    if model.find_unused_parameters:
        found["unused parameters"] = 4 * sum(param.requires_grad for param in model.module.parameters())
    return found


class Watch:
    """A weak reference to a model, so that a model, its hook and its link do not keep each other.

    Args:
        model: wrapped, and attached to.
        frozen: its parameters that take no part, by name.
        speaks: whether this rank is the one that logs.
    """

    def __init__(self, model: DistributedDataParallel, frozen: dict[str, Tensor], *, speaks: bool) -> None:
        self._model = weakref.ref(model)
        self._frozen = {name: weakref.ref(param) for name, param in frozen.items()}
        self._speaks = speaks

    def begin(self) -> None:
        """Look at the model as a backward pass delivers its first bucket.

        Raises:
            AttachError: a parameter has thawed, which DDP would leave out: ranks would drift apart.
        """
        for name, reference in self._frozen.items():
            param = reference()
            if param is not None and param.requires_grad:
                raise AttachError(
                    f"{name!r} requires a gradient now, but was frozen when DistributedDataParallel was made, which "
                    "exchanges the parameters of that time only: ranks would drift apart. Thaw first, then wrap the "
                    "module anew and attach; 'Change what is trained or sent' in the documentation says how to keep "
                    "what is owed"
                )
        model = self._model()
        if self._speaks and model is not None and not model.require_backward_grad_sync:
            self._speaks = False  # once
            logging.getLogger("thinwire").warning(
                "gradients are exchanged inside no_sync() or accumulate(sync=False), so that nothing is saved: put the "
                "forward pass inside, too"
            )
