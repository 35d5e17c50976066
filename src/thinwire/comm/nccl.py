"""Rounds between the memories of GPUs, over an NCCL communicator: for networks that GPUs reach by themselves."""

# torch.distributed annotates few of its parameters.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportPrivateImportUsage=false

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.mesh import MeshClosedError, MeshError
from thinwire.comm.node_round import NodeRound
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Pull, Push, SendRecv, Transfer, cut
from thinwire.errors import AttachError, ScheduleError
from thinwire.wire import split

WATCHDOG_S = 60.0  # that NCCL's own watchdog, which ends the program, leaves to this rank's error
LONGEST_PAUSE_S = 5e-4  # between looks whether a round is done; the first come much sooner


class Nccl:
    """A communicator of its own, and one stream; making one is collective.

    One communicator, not one for each lane: kernels of two may wait for each other's place on the GPU, for ever where
    ranks start them in another order.

    Args:
        store: where only this communicator meets.
        ranks: global ranks of the group, for messages.
        rank: this rank's place in the group.
        device: this rank's GPU, with its index.
        timeout: of each round.

    Raises:
        AttachError: NCCL cannot connect the ranks; two on one GPU, for instance.
    """

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], rank: int, device: torch.device, timeout: datetime.timedelta
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._interrupted = False
        self._stream = torch.cuda.Stream(device)
        try:
            self._group = _connect(store, rank, len(ranks), timeout)
            flag = torch.zeros(1, device=device)
            torch.cuda.current_stream(device).synchronize()
            # Of all ranks, since a communicator whose first round is of some only is made by these alone.
            self.perform(Transfer(AllReduce(1, torch.float32, len(ranks)), flag, flag))
        except Exception as error:
            raise AttachError(
                f"rank {ranks[rank]}, {device}: NCCL could not connect the ranks; expected a GPU of its own for each: "
                f"{error}. THINWIRE_TRANSPORT=mesh goes by pinned memory instead"
            ) from error

    def perform(self, transfer: Transfer) -> None:
        """Do one round between tensors that are ready, and return when the bytes are here.

        The thread waits, not a stream, so that other messages are encoded and decoded meanwhile and a lost peer is
        noticed.

        Raises:
            MeshClosedError: `interrupt` was called.
            MeshError: it took longer than the time-out.
        """
        with torch.cuda.stream(self._stream):
            for work in start(transfer, self._group):
                work.wait()  # the stream does
            done = torch.cuda.Event()
            done.record(self._stream)
        wait_until(done.query, lambda: self._interrupted, self._timeout_s)

    def interrupt(self) -> None:
        """End the round that is under way in another thread, and fail all later ones."""
        self._interrupted = True

    def close(self) -> None:
        """Leave the communicator; what is under way ends with it, so that the GPU does not wait for a lost peer."""
        unfinished = not self._stream.query()
        self.interrupt()
        if unfinished:
            self._group.abort()
        else:
            self._group.shutdown()


def wait_until(done: Callable[[], bool], interrupted: Callable[[], bool], timeout_s: float) -> None:
    """Return when `done()` says so; look often at first.

    Raises:
        MeshClosedError: `interrupted()` said so first.
        MeshError: neither did for `timeout_s`.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 1e-5
    while not done():
        if interrupted():
            raise MeshClosedError("the exchange was ended here")
        if time.monotonic() > deadline:
            raise MeshError(f"a round over NCCL was not done within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def start(transfer: Transfer, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin a round between tensors of the group's own device. It is done when all that is returned is."""
    rank, world_size = group.rank(), group.size()
    send, receive = transfer.send, transfer.receive
    match transfer.round:
        case AllReduce(op=op):
            return [group.allreduce([send], dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)]
        case AllToAll(nbytes):
            return [group.alltoall_base(receive, send, [nbytes[rank]] * world_size, list(nbytes))]
        case AllGather(nbytes) if len(set(nbytes)) == 1:
            return [group._allgather_base(receive, send)]
        case AllGather(nbytes):
            blocks = split(receive, nbytes)
            blocks[rank].copy_(send)
            others = [other for other in range(world_size) if other != rank]
            return _batch(dict.fromkeys(others, send), {other: blocks[other] for other in others}, group)
        case SendRecv() | NodeRound() as moves:
            sends, receives = cut(transfer, moves, rank)
            return _batch(sends, dict(enumerate(receives)), group)
        case Push() | Pull() as served:
            raise ScheduleError(f"expected rounds between ranks, got {type(served).__name__}, which needs servers")


def _batch(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send and receive all at once, by rank, but for what is empty."""
    sends = {target: data for target, data in sends.items() if data.numel()}
    receives = {source: data for source, data in receives.items() if data.numel()}
    if not sends and not receives:
        return []
    device = next(iter((*sends.values(), *receives.values()))).device
    together = group._get_backend(device).supports_coalescing
    if together:
        group._start_coalescing(device)
    started = [group.recv([data], source, 0) for source, data in receives.items()]
    started += [group.send([data], target, 0) for target, data in sends.items()]
    return [group._end_coalescing(device)] if together else started


def _connect(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make a group that torch.distributed's own registry does not know, as `own_group` does."""
    distributed: Any = dist  # a torch for the CPU has no such class
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout + datetime.timedelta(seconds=WATCHDOG_S)
    backend = distributed.ProcessGroupNCCL(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group
