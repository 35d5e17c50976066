"""A server's half of a message: decodes what workers push, adds it up, and encodes the mean once for all."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.aggregators import Block, BufferPool, Message, Partition, Section
from thinwire.aggregators.push_pull_header import (
    MIXED,
    SCALES_DIFFER,
    PullHeader,
    PushHeader,
    read_push_header,
    write_pull_header,
)
from thinwire.errors import WireError
from thinwire.feedback import Slot
from thinwire.server.content import Content


class Units(NamedTuple):
    """When, and in units of what, a residual was left."""

    step: int = -1
    loss_scale: float = 1.0
    rate: float | None = None


@dataclass(slots=True)
class Kept:
    """What a server keeps of one partition between rounds.

    Attributes:
        tensors: (numel,) float32 each: its residual, and what else feedback keeps.
        units: of these.
        before: the units before the last round.
        undo: the message of the last round, and the partition's place in it: it can put the tensors back.
    """

    tensors: dict[Slot, Tensor] = field(default_factory=dict[Slot, Tensor])
    units: Units = field(default_factory=Units)
    before: Units = field(default_factory=Units)
    undo: tuple[Message, int] | None = None

    def take_back(self) -> None:
        """Put all back to what it was before the last round."""
        if self.undo is not None:
            message, place = self.undo
            message.restore({place})
            self.units, self.undo = self.before, None


class Store:
    """What a server keeps of all partitions, by name and offset: contents come and go with DDP's buckets.

    Attributes:
        lock: held while something is read, written or taken back: one worker may ask while others begin a step.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._kept: dict[tuple[str, int], Kept] = {}

    def of(self, partition: Partition) -> Kept:
        """Return what is kept of a partition, zeros at first.

        Raises:
            WireError: it had another number of elements before.
        """
        kept = self._kept.setdefault((partition.name, partition.offset), Kept())
        for slot in (slot for slot in partition.aggregator.slots if slot.owned):
            kept.tensors.setdefault(slot, torch.zeros(partition.numel, dtype=torch.float32))
        if any(tensor.numel() != partition.numel for tensor in kept.tensors.values()):
            raise WireError(f"{partition.name}: expected as many elements at {partition.offset} as before")
        return kept

    def read(
        self, place: tuple[str, int], out: Tensor, *, loss_scale: float, step: int, rate: float | None = None
    ) -> None:
        """Copy a partition's residual to `out`, in units of a loss scale and rate, as it was before this step."""
        with self.lock:
            kept = self._kept.get(place)
            if kept is None or Slot.OWNER not in kept.tensors:
                out.zero_()
                return
            if kept.units.step > step:  # workers commit no step without its rounds, and begin none before
                raise WireError(f"{place[0]}: expected a step from {kept.units.step} on, got {step}")
            residual = kept.tensors[Slot.OWNER]
            _check_numel(place, residual, out)
            if kept.units.step == step:
                kept.take_back()
            rates = kept.units.rate / rate if rate and kept.units.rate else 1.0  # as `ErrorFeedback.unit_ratio`
            torch.mul(residual, rates * (loss_scale / kept.units.loss_scale), out=out)

    def write(self, place: tuple[str, int], values: Tensor, units: Units) -> None:
        """Set a partition's residual, in these units; nothing is left to be taken back."""
        with self.lock:
            kept = self._kept.setdefault(place, Kept())
            residual = kept.tensors.setdefault(Slot.OWNER, torch.zeros(values.numel(), dtype=torch.float32))
            _check_numel(place, residual, values)
            residual.copy_(values)
            kept.units, kept.undo = units, None

    @property
    def nbytes(self) -> int:
        """Memory of all that is kept. Other threads may ask: what grows meanwhile is gone through as a copy."""
        return sum(tensor.nbytes for kept in self.items().values() for tensor in tuple(kept.tensors.values()))

    def items(self) -> Mapping[tuple[str, int], Kept]:
        """Return all that is kept."""
        return dict(self._kept)


class Mean:
    """Forms the means of one content, round after round. One thread at a time.

    The arithmetic is `TwoShot`'s, by the same `Message`: sums in float32 in the order of `add`, one division.
    """

    def __init__(self, content: Content, store: Store, buffers: BufferPool, *, threads: int = 1) -> None:
        self.content = content
        partitions, starts = content.layout.partitions, range(len(content.layout.partitions))
        self._store, self._kept = store, [store.of(partition) for partition in partitions]
        values = torch.empty(sum(p.numel for p in partitions), dtype=torch.float32).split([p.numel for p in partitions])
        blocks = [self._block(p, value, kept) for p, value, kept in zip(partitions, values, self._kept, strict=True)]
        self._message = Message(content.layout, blocks, rank=0, threads=threads, buffers=buffers)
        self._up = Section(starts, content.layout.up)
        self._down = Section(starts, content.layout.down, down=True)
        self._headers: list[tuple[int, PushHeader]] = []
        self._bad = False  # something is not finite: nothing is decoded any more

    @staticmethod
    def _block(partition: Partition, value: Tensor, kept: Kept) -> Block:
        memory = {slot: tensor for slot, tensor in kept.tensors.items() if slot is not Slot.OWNER}
        return Block(partition, value, owner_residual=kept.tensors.get(Slot.OWNER), memory=memory)

    def add(self, rank: int, data: Tensor) -> None:
        """Add what a worker pushed, (push_nbytes,) uint8.

        Raises:
            WireError: it is not an encoding of this content, or of another step than the others'. The round is lost.
        """
        content = self.content
        if data.numel() != content.push_nbytes:
            raise WireError(f"push: expected {content.push_nbytes} bytes, got {data.numel()}")
        header = read_push_header(data, content.num_names, content.num_rates, content.layout.world_size)
        if not self._headers:
            self._bad, self._message.step = False, header.step
        before, first = self._headers[0] if self._headers else (rank, header)
        if header.step != first.step:
            raise WireError(f"push: expected step {first.step} as of worker {before}, got {header.step}")
        self._bad = self._bad or header.nonfinite > 0 or _scales_differ(header, first)
        if not self._bad:
            self._message.decode(self._up, data, accumulate=bool(self._headers))
        self._headers.append((rank, header))

    def _begin(self, header: PushHeader) -> None:
        """Take back a round that came to nothing, as all workers say who are at the same step again."""
        with self._store.lock:
            for kept in self._kept:
                if kept.units.step == header.step:
                    kept.take_back()
                kept.undo = None  # what it would need is given back now, and this round may come to nothing, too
            self._message.begin(header.step)

    def close(self) -> Tensor:
        """Divide and encode; return what all workers pull, (pull_nbytes,) uint8."""
        content, message = self.content, self._message
        headers = [header for _, header in self._headers]
        first = headers[0]
        self._begin(first)
        used = nonfinite = mean_nonfinite = who = 0
        for header in headers:
            used |= header.used
            if header.who:
                nonfinite |= header.nonfinite
                who |= header.who
            else:  # the sum of a node
                mean_nonfinite |= header.nonfinite
        num_present = sum(content.stands_for[rank] for rank, _ in self._headers)
        out = torch.empty(content.pull_nbytes, dtype=torch.uint8)
        bad = set[str]()
        if not self._bad:
            for block in message.blocks:
                block.value.div_(num_present)
            units = self._set_units(first)
            bad = message.encode(self._down, out)
            if bad:
                message.restore()
            else:
                self._commit(units)
                message.put_back({p.name for p, place in self._places() if not used >> place & 1})
        else:
            out[content.layout.header_nbytes :] = 0
        for partition, place in self._places():
            mean_nonfinite |= (partition.name in bad) << place
        answer = PullHeader(
            flags=SCALES_DIFFER if any(_scales_differ(header, first) for header in headers) else 0,
            num_present=num_present,
            used=used,
            nonfinite=nonfinite,
            mean_nonfinite=mean_nonfinite,
            who=who,
            loss_scale=first.loss_scale,
        )
        write_pull_header(out[: content.layout.header_nbytes], content.num_names, answer)
        self._headers.clear()
        return out

    def _places(self) -> list[tuple[Partition, int]]:
        return list(zip(self.content.layout.partitions, self.content.places, strict=True))

    def _set_units(self, header: PushHeader) -> list[Units]:
        """Let every block's residual be brought into the units of this step, in which they are then left."""
        found = list[Units]()
        for i, (block, kept) in enumerate(zip(self._message.blocks, self._kept, strict=True)):
            rate = header.rates[i] if header.rates else None
            found.append(Units(header.step, header.loss_scale, rate))
            if (feedback := block.partition.aggregator.feedback) is None:
                continue
            lr = 1.0 if rate is None else rate
            block.unit_ratio = feedback.unit_ratio(
                lr=lr,
                last_lr=lr if kept.units.rate is None else kept.units.rate,
                loss_scale=header.loss_scale,
                last_loss_scale=kept.units.loss_scale,
            )
            block.residual_scale = feedback.residual_scale(block.unit_ratio)
        return found

    def _commit(self, units: list[Units]) -> None:
        for place, (kept, now) in enumerate(zip(self._kept, units, strict=True)):
            kept.before, kept.units, kept.undo = kept.units, now, (self._message, place)


def _check_numel(place: tuple[str, int], residual: Tensor, got: Tensor) -> None:
    if residual.numel() != got.numel():
        raise WireError(f"{place[0]}: expected {residual.numel()} elements at {place[1]}, got {got.numel()}")


def _scales_differ(header: PushHeader, first: PushHeader) -> bool:
    return bool(header.flags & MIXED) or header.loss_scale != first.loss_scale
