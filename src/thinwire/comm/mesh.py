"""A TCP connection between every two ranks of a group, and the rounds that move blocks over them."""

# pyright: reportPrivateImportUsage=false

import contextlib
import datetime
import importlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from thinwire.comm.meeting import Meeting, close_all
from thinwire.errors import AttachError

PIECES_NBYTES = (8192, 16384, 32768)  # the smaller, the less a slow host's queue must hold; each is a wake of a thread
PIECE_S = 4e-3  # of the wire that a piece should take
PROBE_NBYTES = 32768  # to every other rank, once, to measure it
_NCCL = "THINWIRE_TRANSPORT=nccl"

Transport = Literal["mesh", "gloo", "nccl"]


def choose(store: dist.Store, ranks: Sequence[int], rank: int, *, on_gpu: bool = False) -> Transport:
    """Return what blocks travel by: meshes, where all ranks can, or NCCL, where all ask for it. Every rank must call.

    Args:
        store: where only this group meets.
        ranks: global ranks of the group.
        rank: this rank's place in it.
        on_gpu: whether the values lie on a GPU.

    Raises:
        AttachError: `THINWIRE_TRANSPORT` holds something else than "mesh", "gloo" or "nccl"; or "nccl" on some ranks
            only, or without a GPU. In the latter cases on all ranks.
    """
    wanted = os.environ.get("THINWIRE_TRANSPORT", "mesh") or "mesh"
    if wanted not in ("mesh", "gloo", "nccl"):
        raise AttachError(f"THINWIRE_TRANSPORT: expected 'mesh', 'gloo' or 'nccl', got {wanted!r}")
    if wanted == "nccl":
        reason = _NCCL if on_gpu and dist.is_nccl_available() else f"{_NCCL} without a GPU"
    else:
        reason = "THINWIRE_TRANSPORT=gloo" if wanted == "gloo" else _missing()
    store.set(f"transport/{rank}", reason)
    reasons = [store.get(f"transport/{other}").decode() for other in range(len(ranks))]
    if any(reason.startswith(_NCCL) for reason in reasons):
        if set(reasons) == {_NCCL}:
            return "nccl"
        found = ", ".join(f"rank {ranks[other]}: {reason or 'mesh'}" for other, reason in enumerate(reasons))
        raise AttachError(f"expected {_NCCL} on all ranks or none, and models on GPUs, got {found}")
    unable = [(ranks[other], reason) for other, reason in enumerate(reasons) if reason]
    if unable and rank == 0:
        wished = all(reason.startswith("THINWIRE_") for _, reason in unable)  # else nobody asked for it: say so
        first, reason = unable[0]
        logging.getLogger("thinwire").log(
            logging.INFO if wished else logging.WARNING,
            "blocks travel by gloo on all ranks: rank %d%s: %s",
            first,
            f" and {len(unable) - 1} more" if len(unable) > 1 else "",
            reason,
        )
    return "gloo" if unable else "mesh"


def _missing() -> str:
    """Return why the compiled module cannot be used, or ""."""
    if os.environ.get("THINWIRE_KERNELS") == "reference":
        return "THINWIRE_KERNELS=reference"
    try:
        importlib.import_module("thinwire._native")
    except ImportError as error:
        return f"no compiled module: {error}"
    return ""


class MeshError(ConnectionError):
    """A round over a mesh failed. The message names the rank and says why."""


class MeshClosedError(MeshError):
    """A round was ended from this side."""


class Mesh:
    """Connections to all other ranks of a group; making one is collective.

    Args:
        store: where only this mesh meets.
        ranks: global ranks of the group, for messages.
        rank: this rank's place in the group.
        timeout: for all to connect, and for a round in which nothing moves.
        name: says which of several meshes this is.

    Raises:
        AttachError: a rank did not come, or the address to listen at cannot be found.
    """

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], rank: int, timeout: datetime.timedelta, name: str = ""
    ) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self._ranks = list(ranks)
        self._timeout_ms = min(round(timeout.total_seconds() * 1000), 2**31 - 1)
        self._lock = threading.Lock()  # held while descriptors are lent
        self._round = 0
        self._interrupted = False
        self.piece_nbytes = PIECES_NBYTES[0]  # must be the same on all ranks
        self._woken, self._wake = socket.socketpair()  # the one is readable once the other has been written to
        own: list[socket.socket] = [self._woken, self._wake]
        # A mesh that is dropped unclosed takes its sockets along; at exit a thread may still be using them.
        self._release = weakref.finalize(self, close_all, own)
        self._release.atexit = False
        if self.world_size == 1:
            self._fds = [-1]
            return
        try:
            sockets = Meeting(store, self._ranks, rank, timeout.total_seconds(), name).connect()
        except BaseException as error:
            self._release()
            with contextlib.suppress(Exception):
                store.set("failed", f"rank {ranks[rank]}: {error}")
            raise
        own += sockets.values()
        self._fds = [-1 if other == rank else sockets[other].fileno() for other in range(self.world_size)]

    def exchange(
        self,
        send: list[int],
        send_nbytes: list[int],
        receive: list[int],
        receive_nbytes: list[int],
        *,
        free_nbytes: int = 0,
    ) -> None:
        """Send one block to every rank and receive one from each. All ranks must call, in the same order.

        After an error the mesh is of no more use.

        Args:
            send: addresses of the blocks, by rank; the own one is copied.
            send_nbytes: their sizes.
            receive: addresses, by rank, to put what comes.
            receive_nbytes: sizes that must come.
            free_nbytes: blocks up to this size do not wait for their turn.

        Raises:
            MeshClosedError: `interrupt` or `close` was called.
            MeshError: a peer closed its connection, sent something else, or nothing moved for the time-out.
        """
        from thinwire import _native

        with self._lock:
            if self._interrupted:
                raise MeshClosedError("the connections were closed here")
            failure = _native.exchange(
                self._fds,
                self.rank,
                send,
                send_nbytes,
                receive,
                receive_nbytes,
                self._round,
                free_nbytes,
                self.piece_nbytes,
                self._timeout_ms,
                self._woken.fileno(),
            )
            self._round = (self._round + 1) % 2**32
        if failure is None:
            return
        self.interrupt()  # streams are cut in the middle of a block
        peer, reason = failure
        if peer < 0:
            raise MeshClosedError(reason)
        raise MeshError(f"rank {self._ranks[peer]}: {reason}")

    def interrupt(self) -> None:
        """End the round that is under way in another thread, and fail all later ones. Peers do not notice."""
        self._interrupted = True
        with contextlib.suppress(OSError):  # closed already
            self._wake.send(b"\0", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close all connections; ends a round that is under way."""
        self.interrupt()
        with self._lock:
            self._release()


def agree_on_pieces(meshes: Sequence[Mesh], store: dist.Store) -> None:
    """Give meshes of the same ranks the size of pieces that suits the slowest rank's wire. Collective.

    Raises:
        AttachError: a rank was lost.
    """
    first = meshes[0]
    world_size, others = first.world_size, first.world_size - 1
    memory = torch.empty((1 + world_size) * PROBE_NBYTES, dtype=torch.uint8)
    send = [memory.data_ptr()] * world_size
    receive = [memory[(1 + source) * PROBE_NBYTES :].data_ptr() for source in range(world_size)]
    try:
        first.exchange(send, [0] * world_size, receive, [0] * world_size)  # so that all begin at once
        started = time.perf_counter()
        first.exchange(send, [PROBE_NBYTES] * world_size, receive, [PROBE_NBYTES] * world_size)
    except MeshError as error:
        raise AttachError(f"{error}, while the wire was measured: look at its output") from error
    per_s = others * PROBE_NBYTES / (time.perf_counter() - started)
    store.set(f"bytes-per-s/{first.rank}", repr(per_s))
    slowest = min(float(store.get(f"bytes-per-s/{rank}")) for rank in range(world_size))
    fitting = [nbytes for nbytes in PIECES_NBYTES if nbytes <= slowest * PIECE_S]
    for mesh in meshes:
        mesh.piece_nbytes = max(fitting, default=PIECES_NBYTES[0])
