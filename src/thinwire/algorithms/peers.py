"""Ranks that must hold the same: at the start, and after one has missed exchanges. All of this is collective."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.algorithms.tracked import local
from thinwire.comm.process_group import all_gather_text
from thinwire.errors import ReplicaError
from thinwire.integrations.replicas import ReplicaCheck


def make_equal(model: nn.Module, control: dist.ProcessGroup, *, broadcasts: bool) -> None:
    """Compare all parameters and buffers, frozen ones too, with the other ranks', or take rank 0's.

    Raises:
        ReplicaError: they differ; all ranks raise.
    """
    held = {name: local(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if broadcasts:
        for tensor in held.values():
            broadcast(tensor, 0, control)
    elif (difference := ReplicaCheck(held, control).difference()) is not None:
        raise ReplicaError(
            f"expected the same model on all ranks at the start, got {difference}. Seed alike, or load the same "
            "weights, before this; or pass replicas='broadcast' to take rank 0's. Load what a checkpoint holds of "
            "each rank after this"
        )


def broadcast(tensor: Tensor, source: int, control: dist.ProcessGroup) -> None:
    """Make a tensor of any dtype and strides, on the CPU, what it is on `source`."""
    if not tensor.numel() or control.size() == 1:
        return
    sent = tensor.contiguous().view(-1)
    control.broadcast(sent.view(torch.uint8), source).wait()  # gloo does not know all dtypes
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent.view(tensor.shape))


def furthest(counts: Sequence[int], control: dist.ProcessGroup) -> tuple[int, list[int]] | None:
    """Return the first rank whose first count is the largest, and its counts; None where all have that one alike."""
    everyone = [[int(count) for count in text.split()] for text in all_gather_text(" ".join(map(str, counts)), control)]
    most = max(first for first, *_ in everyone)
    if all(first == most for first, *_ in everyone):
        return None
    source = next(rank for rank, (first, *_) in enumerate(everyone) if first == most)
    return source, everyone[source]
