"""Aggregators form the mean over ranks. This file holds what they share: partitions, messages, and their bytes.

A *partition* is the unit of compression and of ownership: a slice of one parameter. A *message* is the partitions that
travel together; its layout is fixed once, from arithmetic alone, and run every step. Message layouts list the rounds
with exact sizes, and `exchange` yields exactly those.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.rounds import Exchange, Round
from thinwire.compressors import Compressor
from thinwire.feedback import ErrorFeedback
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.random import OWNER_STREAM, Key
from thinwire.spec import BlockSpec
from thinwire.wire import align

MEAN = -1  # stands for "the mean over ranks" where a rank is named


class Aggregator(ABC):
    """How the mean over ranks is formed. Frozen settings; knows nothing of torch.distributed, threads or sockets."""

    __slots__ = ()

    up: Compressor  # what ranks send
    down: Compressor  # what owners send back
    feedback: ErrorFeedback | None

    @abstractmethod
    def recipe(self) -> str:
        """Return the recipe as the command line spells it."""

    @staticmethod
    @abstractmethod
    def lay_out(partitions: Sequence["Partition"], world_size: int) -> "MessageLayout":
        """Place partitions, each with settings of this class, in one message."""

    @staticmethod
    @abstractmethod
    def exchange(message: "Message") -> Exchange:
        """Run one step of a message on one rank: gradients in `message.blocks` become their mean."""

    @classmethod
    def schedule(cls, partitions: Sequence["Partition"], world_size: int) -> tuple[Round, ...]:
        """Return the rounds of a message, with exact sizes."""
        return cls.lay_out(partitions, world_size).rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A slice of one parameter, with what is done to it.

    Attributes:
        name: qualified name of the parameter.
        dtype: dtype of the parameter.
        offset: first element, in the parameter's memory order.
        numel: number of elements.
        owner: the rank that forms its mean.
        aggregator: compressors and feedback.
        key: Philox key of the parameter.
    """

    name: str
    dtype: torch.dtype
    offset: int
    numel: int
    owner: int
    aggregator: Aggregator
    key: int = 0

    @property
    def spec(self) -> BlockSpec:
        """What compressors see of it."""
        return BlockSpec(shape=(self.numel,), dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageLayout:
    """Where every partition of a message lies in every buffer.

    Attributes:
        partitions: in the order of the message.
        world_size: number of ranks.
        rounds: what the exchange yields.
        names: the parameters of the message, each once.
        header_nbytes: bytes of a header (see `write_header`).
        up: per partition, first byte of C(g) in the block it travels in.
        down: per partition, first byte in its owner's block on the way back.
    """

    partitions: tuple[Partition, ...]
    world_size: int
    rounds: tuple[Round, ...]
    names: tuple[str, ...]
    header_nbytes: int
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()


@dataclass(slots=True)
class Block:
    """One partition of a message in one step on one rank.

    Attributes:
        partition: which.
        value: (numel,) float32; the gradient, then the mean.
        residual: (numel,) float32, what this rank has not sent; None without feedback.
        owner_residual: (numel,) float32, on the owner: what it has not sent back.
        residual_scale: factor on both residuals in this step.
        unit_ratio: the part of it that converts units (loss scale, learning rate), without the decay.
        used: whether this rank's backward reached the parameter.
    """

    partition: Partition
    value: Tensor
    residual: Tensor | None = None
    owner_residual: Tensor | None = None
    residual_scale: float = 1.0
    unit_ratio: float = 1.0
    used: bool = True


@dataclass(slots=True)
class Message:
    """One message in one step on one rank, and what came of it.

    Attributes:
        layout: sizes and places.
        blocks: one per partition of the layout, or empty for a message that moves `flat` alone.
        rank: this rank.
        step: the training step, which keys the random streams.
        threads: native threads per kernel call.
        buffers: where work memory comes from.
        flat: the gradients as one contiguous tensor, for messages sent uncompressed by all-reduce.
        undo: residuals with their values from before this step, until `forget` or `restore`.
        nonfinite: (rank or MEAN, parameter) of every contribution that was not finite; equal on all ranks.
        unused: parameters that no rank's backward reached; equal on all ranks.
        encode_s, decode_s: wall seconds spent in kernels.
    """

    layout: MessageLayout
    blocks: list[Block]
    rank: int
    step: int = 0
    threads: int = 1
    buffers: "BufferPool" = field(default_factory=lambda: BufferPool())
    flat: Tensor | None = None
    undo: list[tuple[Tensor, Tensor]] = field(default_factory=lambda: [])
    nonfinite: set[tuple[int, str]] = field(default_factory=lambda: set())
    unused: set[str] = field(default_factory=lambda: set())
    encode_s: float = 0.0
    decode_s: float = 0.0

    def encode(self, places: Sequence[int], outs: Sequence[Tensor], *, down: bool = False) -> list[int]:
        """Encode the blocks at `places` into `outs`; return the places of those that were not finite.

        Residuals are remembered in `undo` first: a step that is not finite anywhere must leave them as they were.
        """
        started = time.perf_counter()
        jobs: list[EncodeJob] = []
        for place, out in zip(places, outs, strict=True):
            block = self.blocks[place]
            residual = block.owner_residual if down else block.residual
            if residual is not None:
                saved = self.buffers.take(residual.numel() * 4)
                saved.view(torch.float32).copy_(residual)
                self.undo.append((residual, saved))
            partition = block.partition
            stream = OWNER_STREAM if down else self.rank
            key = Key(partition.key, self.step, stream, partition.offset)
            jobs.append(EncodeJob(block.value, out, residual, block.residual_scale, key))
        bad: list[int] = []
        for compressor, members in self._by_compressor(places, down=down):
            specs = [self.blocks[places[m]].partition.spec for m in members]
            finite = compressor.encode_jobs([jobs[m] for m in members], specs, threads=self.threads)
            bad += [places[m] for m, ok in zip(members, finite, strict=True) if not ok]
        self.encode_s += time.perf_counter() - started
        return bad

    def decode(
        self, places: Sequence[int], data: Sequence[Tensor], *, down: bool = False, accumulate: bool = False
    ) -> None:
        """Set the values of the blocks at `places` from their bytes, or add to them."""
        started = time.perf_counter()
        alpha = 1.0 if accumulate else None
        for compressor, members in self._by_compressor(places, down=down):
            jobs = [DecodeJob(data[m], self.blocks[places[m]].value, alpha) for m in members]
            specs = [self.blocks[places[m]].partition.spec for m in members]
            compressor.decode_jobs(jobs, specs, threads=self.threads)
        self.decode_s += time.perf_counter() - started

    def _by_compressor(self, places: Sequence[int], *, down: bool) -> Iterable[tuple[Compressor, list[int]]]:
        groups: dict[Compressor, list[int]] = {}
        for member, place in enumerate(places):
            aggregator = self.blocks[place].partition.aggregator
            groups.setdefault(aggregator.down if down else aggregator.up, []).append(member)
        return groups.items()

    def restore(self) -> None:
        """Put residuals back to their values from before this step."""
        for residual, saved in self.undo:
            residual.copy_(saved.view(torch.float32))

    def forget(self) -> None:
        """Give the memory of `undo` back."""
        for _, saved in self.undo:
            self.buffers.give(saved)
        self.undo.clear()

    def finish(self) -> None:
        """Apply the non-finite and unused rules once all headers are known. Call at the end of every exchange."""
        if self.nonfinite:
            for block in self.blocks:
                block.value.fill_(float("nan"))
            self.restore()
        elif self.unused:
            # DDP discards what is delivered for these, so what was owed to them stays owed, in this step's units.
            ratios = {
                id(residual): block.unit_ratio
                for block in self.blocks
                if block.partition.name in self.unused
                for residual in (block.residual, block.owner_residual)
            }
            for residual, saved in self.undo:
                if id(residual) in ratios:
                    torch.mul(saved.view(torch.float32), ratios[id(residual)], out=residual)


# --- headers --------------------------------------------------------------------------------------------------------


def header_nbytes(num_names: int) -> int:
    """Return the size of a header: two bitmaps over the message's parameters, padded to 4 bytes."""
    return align(2 * (-(-num_names // 8)))


def write_header(out: Tensor, names: Sequence[str], used: set[str], nonfinite: set[str]) -> None:
    """Write bitmaps "used" and "not finite" over `names`; bit i % 8 (from the least) of byte i // 8 is name i."""
    bits = np.array([[name in used for name in names], [name in nonfinite for name in names]])
    packed = np.packbits(bits, axis=1, bitorder="little").reshape(-1)
    out.zero_()
    out[: packed.size] = torch.tensor(packed)


def read_header(data: Tensor, names: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the (used, not finite) names of a header."""
    width = -(-len(names) // 8)
    bits = np.unpackbits(data[: 2 * width].numpy().reshape(2, width), axis=1, bitorder="little")
    used, nonfinite = ({name for name, bit in zip(names, row, strict=False) if bit} for row in bits)
    return used, nonfinite


# --- work memory ----------------------------------------------------------------------------------------------------


class BufferPool:
    """Keeps work buffers between messages: fresh memory costs more in page faults than the kernels that fill it.

    A buffer belongs to its taker until given back; the pool holds every buffer for its own lifetime. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocated_nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialised uint8 tensor of `nbytes`, a view of a pooled buffer."""
        size = 1 << max(nbytes - 1, 63).bit_length()
        with self._lock:
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else None
            if buffer is None:
                self.allocated_nbytes += size
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8)
        return buffer[:nbytes]

    def give(self, view: Tensor) -> None:
        """Give back what `take` returned, or any view of it."""
        buffer = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())  # views of other dtypes name no base
        with self._lock:
            self._free[buffer.numel()].append(buffer)
