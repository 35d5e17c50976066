"""Sparse gradients of embeddings: DDP's own sum, uncompressed."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.integrations.all_reduce import Done, told


def sparse_names(model: nn.Module) -> set[str]:
    """Return the parameters that DDP expects sparse gradients for: weights of embeddings that say so."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def sum_sparse(buffer: Tensor, group: dist.ProcessGroup, done: Done | None = None) -> "torch.futures.Future[Tensor]":
    """Form the mean of a sparse gradient as DDP does: divide, then gather every rank's indices and values.

    Runs in DDP's process group, in its place among DDP's own collectives: what is sent depends on the data, so that no
    schedule can hold it. A rank without indices sends none.

    Args:
        buffer: this rank's gradient, sparse COO; changed in place.
        group: of the model.
        done: told the mean, or the error, before the future is.
    """
    buffer.div_(group.size())
    return told(group.allreduce([buffer]).get_future(), done)


def nbytes_of(sparse: Tensor) -> int:
    """Return the bytes of indices and values."""
    return sparse._indices().nbytes + sparse._values().nbytes
