"""A message at work: its blocks on one rank, encoded, decoded, and put back where a step must not count."""

import contextlib
import time
from collections.abc import Container, Generator, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from thinwire.aggregators.base import MessageLayout, Partition
from thinwire.aggregators.buffers import BufferPool
from thinwire.aggregators.header import MANY, bitmap, names_in, read_flags, read_header, write_flags, write_header
from thinwire.aggregators.staging import Staging, joined
from thinwire.aggregators.undo import Undo
from thinwire.comm.rounds import AllReduce, Exchange, Transfer
from thinwire.comm.tracing import span
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback, Memory, Slot
from thinwire.kernels import DecodeBatch, EncodeBatch, serving_device
from thinwire.random import OWNER_STREAM, SHARED_STREAM, Key
from thinwire.spec import BlockSpec

MEAN = -1  # stands for "the mean over ranks" where a rank is named


@dataclass(slots=True)
class Block:
    """One partition of a message on one rank.

    Attributes:
        partition: which.
        value: (numel,) float32; the gradient, then the mean.
        residual: (numel,) float32, what this rank has not sent; None without feedback.
        owner_residual: (numel,) float32, on the owner: what it has not sent back.
        memory: what else the feedback keeps, each (numel,) float32.
        residual_scale: factor on both residuals in this step.
        unit_ratio: the part of it that converts units (loss scale, learning rate), without the decay.
        gradient_scale: factor on the gradient in this step: clipping.
        used: whether this rank's backward reached the parameter in this step.
        learning_rate: of this step, where feedback corrects for it.
    """

    partition: Partition
    value: Tensor
    residual: Tensor | None = None
    owner_residual: Tensor | None = None
    memory: Memory = field(default_factory=dict[Slot, Tensor])
    residual_scale: float = 1.0
    unit_ratio: float = 1.0
    gradient_scale: float = 1.0
    used: bool = True
    learning_rate: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Some blocks of a message and where they lie in a buffer.

    Attributes:
        places: which, as indices into the message's blocks.
        starts: first byte of each in the buffer.
        down: encoded by the owner for all, not by a rank for the owner.
        inside: sent between ranks of one node, by `Aggregator.inner`.
        stream: of the random numbers that encoding draws; None is the rank's own.
    """

    places: Sequence[int]
    starts: Sequence[int]
    down: bool = False
    inside: bool = False
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """The blocks of a section that share a compressor."""

    compressor: Compressor
    places: Sequence[int]
    specs: Sequence[BlockSpec]


@dataclass(frozen=True, slots=True)
class _Encode:
    """What encoding a section takes: prepared once, used every step."""

    undo: Undo
    batches: Sequence[tuple[_Group, EncodeBatch]]
    remembering: Sequence[tuple[Feedback, Block]]  # blocks whose feedback keeps more than a residual
    seen: Section | None  # those whose feedback wants to see what was sent
    spans: Sequence[tuple[int, int]]  # the bytes that encoding writes


@dataclass(slots=True, eq=False)
class Message:
    """One message on one rank, step after step, and what came of the last one.

    Blocks, their values and residuals stay the same tensors for the life of a message, so that kernel calls are
    prepared once; `begin` starts another step.

    Attributes:
        layout: sizes and places.
        blocks: one per partition of the layout, or empty for a message that moves `flat` alone.
        rank: this rank.
        step: the training step, which keys the random streams.
        loss_scale: the factor that gradients of this rank came with.
        name: what traces call it.
        threads: native threads per kernel call.
        buffers: where the memory comes from that blocks travel from and to.
        staging: copies between that and the values' device, where the wire cannot reach the device's memory.
        flat: the gradients as one contiguous tensor, for messages sent uncompressed by all-reduce.
        sections: what the aggregator prepared for this message; its own business.
        nonfinite: (rank, MEAN or MANY, parameter) of every contribution that was not finite; equal on all ranks.
        unused: parameters that no rank's backward reached; equal on all ranks.
        scales_differ: whether ranks had different loss scales, so that nothing was delivered; equal on all ranks.
        num_present: how many ranks the last mean is over, where servers say so, which may go on without some.
        encode_s, decode_s: wall seconds spent in kernels.
    """

    layout: MessageLayout
    blocks: list[Block]
    rank: int
    step: int = 0
    loss_scale: float = 1.0
    name: str = ""
    threads: int = 1
    buffers: BufferPool = field(default_factory=BufferPool)
    staging: Staging | None = None
    flat: Tensor | None = None
    sections: tuple[Section, ...] = ()
    nonfinite: set[tuple[int, str]] = field(default_factory=lambda: set())
    unused: set[str] = field(default_factory=lambda: set())
    scales_differ: bool = False
    num_present: int | None = None
    encode_s: float = 0.0
    decode_s: float = 0.0
    _statistics: Tensor | None = None
    _measured: Section | None = None  # in this step, and not encoded yet
    _encodes: dict[Section, _Encode] = field(default_factory=lambda: {})
    _decodes: dict[Section, list[tuple[_Group, DecodeBatch]]] = field(default_factory=lambda: {})

    def begin(self, step: int) -> None:
        """Forget what came of the last step."""
        self.step = step
        self.forget()
        self.nonfinite, self.unused, self._measured, self.scales_differ = set(), set(), None, False
        self.num_present = None
        self.encode_s = self.decode_s = 0.0

    @property
    def near(self) -> BufferPool:
        """Where work memory beside the values comes from."""
        return self.buffers if self.staging is None else self.staging.near

    @property
    def statistics(self) -> Tensor:
        """What ranks agree on before they encode: (numel of the first round,) float32, the same tensor every step."""
        if self._statistics is None:
            agreement = self.layout.rounds[0]
            assert isinstance(agreement, AllReduce)
            device = self.blocks[0].value.device
            self._statistics = torch.zeros(agreement.numel, dtype=torch.float32, device=device)
        return self._statistics

    def measure(self, section: Section, out: Tensor) -> set[str]:
        """Write the statistics of blocks that will be encoded into `out`; return the names of those not finite."""
        with self.timed_encode():
            self._measured, prepared = section, self._ready(section)
            for group, batch in prepared.batches:
                batch.at(out, step=self.step, residual_scales=self._residual_scales(group))
                group.compressor.statistic_jobs(batch, group.specs, threads=self.threads)
        if bool(self.statistics[self.layout.shared[0] :].isfinite().all()):
            return set()
        places = [place for group, _ in prepared.batches for place in group.places]
        return {self.blocks[place].partition.name for place in places if not bool(self._shared(place).isfinite().all())}

    def encode(self, section: Section, out: Tensor) -> set[str]:
        """Encode blocks into `out`; return the names of those that were not finite. Their values are used up.

        What feedback keeps is copied first: a step that is not finite anywhere must leave it as it was.
        """
        bad: set[str] = set()
        with self.timed_encode():
            prepared = self._encodes[section] if self._measured is section else self._ready(section)
            self._measured = None
            near = out if self.staging is None else self.staging.near.take(out.numel())
            for group, batch in prepared.batches:
                batch.at(near, step=self.step, residual_scales=self._residual_scales(group))
                finite = group.compressor.encode_jobs(batch, group.specs, threads=self.threads)
                if not all(finite):
                    pairs = zip(group.places, finite, strict=True)
                    bad |= {self.blocks[place].partition.name for place, ok in pairs if not ok}
        if prepared.seen is not None and not bad:  # else all of the message is put back
            with self.timed_decode():
                self._decode(prepared.seen, near, accumulate=False)
            for place in prepared.seen.places:
                block = self.blocks[place]
                assert block.partition.aggregator.feedback is not None
                block.partition.aggregator.feedback.after_up(block.value, block.memory)
        if self.staging is not None:
            if not bad:  # else nobody will decode it, and the caller may write something else
                self.staging.send(near, out, prepared.spans)
            self.staging.near.give(near)
        return bad

    def _ready(self, section: Section) -> _Encode:
        """Copy what is kept of blocks, and let feedback turn their values into what is encoded."""
        prepared = self.hold(section)
        for feedback, block in prepared.remembering:
            if section.down:
                feedback.before_down(block.value, block.memory, unit_ratio=block.unit_ratio)
            else:
                if block.gradient_scale != 1.0:
                    block.value.mul_(block.gradient_scale)
                feedback.before_up(block.value, block.memory, unit_ratio=block.unit_ratio)
        return prepared

    def _residual_scales(self, group: _Group) -> list[float]:
        return [self.blocks[place].residual_scale for place in group.places]

    @contextlib.contextmanager
    def timed_encode(self) -> Generator[None]:
        """Count what runs inside as encoding."""
        started = time.perf_counter()
        with span("encode", self.name, parameters=self.layout.names):
            yield
        self.encode_s += time.perf_counter() - started

    @contextlib.contextmanager
    def timed_decode(self) -> Generator[None]:
        """Count what runs inside as decoding."""
        started = time.perf_counter()
        with span("decode", self.name, parameters=self.layout.names):
            yield
        self.decode_s += time.perf_counter() - started

    def note_nonfinite_means(self) -> None:
        """Note means that are not finite, where all ranks hold the same sums: they may overflow where no rank did."""
        finite = self.all_finite(range(len(self.blocks)))
        pairs = zip(self.layout.partitions, finite, strict=True)
        self.nonfinite |= {(MEAN, partition.name) for partition, ok in pairs if not ok}

    def all_finite(self, places: Sequence[int]) -> list[bool]:
        """Return, of each block, whether all its values are finite."""
        values = [self.blocks[place].value for place in places]
        return serving_device(values[0]).all_finite(values, threads=self.threads) if values else []

    def hold(self, section: Section) -> _Encode:
        """Copy what is kept of blocks; of those that are not encoded in this step, so that `finish` finds them too."""
        if section not in self._encodes:
            self._encodes[section] = self._prepare_encode(section)
        prepared = self._encodes[section]
        prepared.undo.save(self.near)
        return prepared

    def settle(self) -> None:
        """Turn what was decoded into what is delivered, where feedback keeps that. Call before `finish`."""
        for block in self.blocks:
            if Slot.DELIVERED in block.memory:
                assert block.partition.aggregator.feedback is not None
                block.partition.aggregator.feedback.settle(block.value, block.memory)
                if not bool(block.value.isfinite().all()):
                    self.nonfinite.add((MEAN, block.partition.name))

    def decode(self, section: Section, data: Tensor, *, accumulate: bool = False) -> None:
        """Set the values of blocks from their bytes in `data`, or add to them."""
        with self.timed_decode():
            if self.staging is None:
                self._decode(section, data, accumulate=accumulate)
                return
            near = self.staging.fetch(data)
            self._decode(section, near, accumulate=accumulate)
            self.staging.near.give(near)

    def _decode(self, section: Section, near: Tensor, *, accumulate: bool) -> None:
        if section not in self._decodes:
            self._decodes[section] = self._prepare_decode(section)
        for group, batch in self._decodes[section]:
            batch.at(near, step=self.step, alpha=1.0 if accumulate else None)
            group.compressor.decode_jobs(batch, group.specs, threads=self.threads)

    def all_reduce(self, combine: AllReduce, numbers: Tensor) -> Exchange:
        """Combine numbers that lie beside the values, in place."""
        if self.staging is None:
            yield Transfer(combine, numbers, numbers)
            return
        pinned = self.staging.pinned.take(numbers.nbytes).view(numbers.dtype)
        self.staging.device.copy(pinned, numbers)
        yield Transfer(combine, pinned, pinned)
        self.staging.device.copy(numbers, pinned)
        self.staging.pinned.give(pinned)

    def _prepare_encode(self, section: Section) -> _Encode:
        residuals = {
            place: block.owner_residual if section.down else block.residual
            for place, block in ((place, self.blocks[place]) for place in section.places)
        }
        own = self.rank if section.stream is None else section.stream
        stream = OWNER_STREAM if section.down else own
        prepared: list[tuple[_Group, EncodeBatch]] = []
        spans: list[tuple[int, int]] = []
        for group, starts, nbytes in self._groups(section):
            spans += [(start, start + size) for start, size in zip(starts, nbytes, strict=True)]
            values = [self.blocks[place].value for place in group.places]
            keys = self._keys(group, SHARED_STREAM if group.compressor.shared_key else stream)
            owed = [residuals[place] for place in group.places]
            shared = self._all_shared(group)
            prepared.append((group, EncodeBatch(values, owed, keys, starts, nbytes, shared)))
        kept = [("", place, residual) for place, residual in residuals.items() if residual is not None]
        remembering: list[tuple[Feedback, Block]] = []
        seen: list[int] = []
        for i, place in enumerate(section.places):
            block, aggregator = self.blocks[place], self.blocks[place].partition.aggregator
            if aggregator.feedback is None or not block.memory:
                continue
            kept += [(slot, place, tensor) for slot, tensor in block.memory.items() if slot.owned == section.down]
            remembering.append((aggregator.feedback, block))
            sparse = aggregator.up.holds_back(block.partition.spec)
            if not section.down and aggregator.feedback.sees_sent(sparse=sparse):
                seen.append(i)
        kept.sort(key=lambda one: one[0])  # neighbours in memory are copied as one
        places, starts = ([numbers[i] for i in seen] for numbers in (section.places, section.starts))
        undo = Undo([(place, tensor) for _, place, tensor in kept])
        return _Encode(undo, prepared, remembering, Section(places, starts) if seen else None, joined(spans))

    def _prepare_decode(self, section: Section) -> list[tuple[_Group, DecodeBatch]]:
        prepared: list[tuple[_Group, DecodeBatch]] = []
        for group, starts, nbytes in self._groups(section):
            values = [self.blocks[place].value for place in group.places]
            keys = self._keys(group, SHARED_STREAM) if group.compressor.shared_key else None
            prepared.append((group, DecodeBatch(values, starts, nbytes, keys, self._all_shared(group))))
        return prepared

    def _all_shared(self, group: _Group) -> list[Tensor] | None:
        if group.compressor.statistic_reduction is None:
            return None
        return [self._shared(place) for place in group.places]

    def _shared(self, place: int) -> Tensor:
        """Return the statistics of one block, in those of the message."""
        partition, start = self.blocks[place].partition, self.layout.shared[place]
        return self.statistics[start : start + partition.aggregator.up.num_statistics(partition.spec)]

    def _keys(self, group: _Group, stream: int) -> list[Key]:
        """Return what the blocks of a group draw from; the step is set as each begins."""
        partitions = [self.blocks[place].partition for place in group.places]
        return [Key(partition.key, 0, stream, partition.offset) for partition in partitions]

    def _groups(self, section: Section) -> Iterable[tuple[_Group, list[int], list[int]]]:
        """Yield the blocks of a section by compressor, with the first byte and the size of each."""
        members: dict[Compressor, list[tuple[int, int]]] = {}
        for place, start in zip(section.places, section.starts, strict=True):
            aggregator = self.blocks[place].partition.aggregator
            hop = aggregator.down if section.down else aggregator.inner if section.inside else aggregator.up
            members.setdefault(hop, []).append((place, start))
        for compressor, found in members.items():
            specs = [self.blocks[place].partition.spec for place, _ in found]
            group = _Group(compressor, [place for place, _ in found], specs)
            yield group, [start for _, start in found], [compressor.nbytes(spec) for spec in specs]

    def restore(self, places: Container[int] | None = None) -> None:
        """Put residuals (of some blocks) back to their values from before this step, in the units they then had."""
        for undo in (prepared.undo for prepared in self._encodes.values()):
            for (place, residual), (_, saved) in zip(undo.residuals, undo.saved(), strict=False):  # saved: all or none
                if places is None or place in places:
                    residual.copy_(saved)

    def forget(self) -> None:
        """Give the memory that `restore` needs back."""
        for prepared in self._encodes.values():
            prepared.undo.forget(self.near)

    def finish(self) -> None:
        """Apply the non-finite and unused rules once all values are there. Call at the end of every exchange.

        What is not delivered stays owed: residuals are put back, in the units of this step.
        """
        if not self.nonfinite:
            # A mean that float32 holds may be too large for a 16-bit parameter. All ranks have the same values.
            narrow = [block for block in self.blocks if block.partition.dtype.itemsize < 4]
            fits = [block.value.to(block.partition.dtype).isfinite().all() for block in narrow]
            if fits and not bool(torch.stack(fits).all()):  # waits for a device once
                pairs = zip(narrow, fits, strict=True)
                self.nonfinite |= {(MEAN, block.partition.name) for block, fit in pairs if not bool(fit)}
        if self.nonfinite:
            for block in self.blocks:
                block.value.fill_(float("nan"))
            self.put_back(set(self.layout.names))
        elif self.unused:  # DDP discards what is delivered for these
            self.put_back(self.unused)

    def put_back(self, names: Set[str]) -> None:
        """Let what these parameters owe stay owed, in the units of this step."""
        for undo in (prepared.undo for prepared in self._encodes.values()):
            for (place, kept), (_, saved) in zip(undo.residuals, undo.saved(), strict=True):
                block = self.blocks[place]
                if block.partition.name in names:
                    has_units = kept is not block.memory.get(Slot.FACTOR)
                    torch.mul(saved, block.unit_ratio if has_units else 1.0, out=kept)

    def write_flags(self, out: Tensor, nonfinite: Set[str], op: Literal["sum", "max"]) -> None:
        """Write which parameters this rank's backward reached, and what is not finite, as numbers to be combined."""
        used = {block.partition.name for block in self.blocks if block.used}
        write_flags(out, self.layout.names, used, nonfinite, self.rank, op, self.loss_scale)

    def read_flags(self, data: Tensor, op: Literal["sum", "max"]) -> None:
        """Note what the flags of all ranks together say."""
        self.unused, nonfinite, differ = read_flags(data, self.layout.names, op)
        self.nonfinite |= nonfinite
        if differ:
            self.refuse()

    def write_header(self, out: Tensor, nonfinite: Set[str], *, used: bool) -> None:
        """Write which parameters this rank's backward reached (none unless `used`), and what is not finite."""
        names = self.layout.names
        reached = 0
        if used and all(block.used for block in self.blocks):
            reached = (1 << len(names)) - 1
        elif used:
            reached = bitmap(names, {block.partition.name for block in self.blocks if block.used})
        write_header(out, len(names), reached, bitmap(names, nonfinite) if nonfinite else 0, self.loss_scale)

    def read_headers(self, headers: Sequence[Tensor]) -> None:
        """Note what the headers of all ranks say, rank 0 first."""
        names, reached, scales = self.layout.names, 0, set[bytes]()
        for rank, data in enumerate(self._on_host(headers)):
            used, nonfinite, scale = read_header(data, len(names))
            reached |= used
            scales.add(scale)
            self.nonfinite |= {(rank, name) for name in names_in(nonfinite, names)}
        self.unused = names_in(((1 << len(names)) - 1) & ~reached, names)
        if len(scales) > 1:
            self.refuse()

    def _on_host(self, headers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return headers where they can be read; those on a device in one copy."""
        if not headers or headers[0].is_cpu:
            return headers
        return torch.stack([data[: self.layout.header_nbytes] for data in headers]).cpu().unbind()

    def refuse(self) -> None:
        """Deliver nothing: what ranks sent is in different units."""
        self.scales_differ = True
        self.nonfinite |= {(MANY, name) for name in self.layout.names}

    def read_mean_headers(self, headers: Sequence[Tensor]) -> None:
        """Note what the headers of all owners say about the mean."""
        for data in self._on_host(headers):
            _, nonfinite, _ = read_header(data, len(self.layout.names))
            self.nonfinite |= {(MEAN, name) for name in names_in(nonfinite, self.layout.names)}
