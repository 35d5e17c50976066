"""Buckets that nothing compresses: DDP's own all-reduce, in DDP's own process group and from its hook."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Done = Callable[[Tensor | None, BaseException | None], None]


def all_reduce_mean(
    buffer: Tensor, group: dist.ProcessGroup, narrow: Tensor | None, done: Done
) -> "torch.futures.Future[Tensor]":
    """Form the mean of a bucket as DDP does, in place: multiply by 1/n, then sum over ranks.

    Issued at once, in its place among DDP's own collectives; no other thread is woken, and nothing is copied.

    Args:
        buffer: this rank's gradients.
        group: of the model.
        narrow: of another dtype and the buffer's shape, for the sum to be formed in; None forms it in the buffer.
        done: told the mean, or the error, before the future is.
    """
    torch.mul(buffer, 1.0 / group.size(), out=buffer if narrow is None else narrow)
    return told(group.allreduce([buffer if narrow is None else narrow]).get_future(), done, wide=buffer)


def told(
    summed: "torch.futures.Future[list[Tensor]]", done: Done | None, wide: Tensor | None = None
) -> "torch.futures.Future[Tensor]":
    """Return what was summed, in `wide` if that is given, once `done` knows of it."""

    def take(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
        try:
            mean = future.value()[0]
            if wide is not None and mean.dtype != wide.dtype:
                mean = wide.copy_(mean)
        except BaseException as error:
            if done is not None:
                done(None, error)
            raise
        if done is not None:
            done(mean, None)
        return mean

    return summed.then(take)
