"""PowerSGD: thin factors of matrices, summed on the wire; what is no matrix rides along."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator, MessageLayout, Partition
from thinwire.aggregators.division import divide_
from thinwire.aggregators.header import num_flags
from thinwire.aggregators.message import MEAN, Block, Message, Section
from thinwire.comm.rounds import AllReduce, Exchange
from thinwire.compressors import Compressor, Identity, LowRank
from thinwire.errors import RecipeError
from thinwire.feedback import ErrorFeedback, Feedback, Slot
from thinwire.kernels import serving_device
from thinwire.kernels.low_rank import ErrorForm, effective_rank, matrix_shape
from thinwire.random import SHARED_STREAM, Key
from thinwire.spec import BlockSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGD(Aggregator):
    r"""One step of a power iteration over all ranks' matrices together, from where the last step left.

    With M_i = g_i + e_i the matrix (m x n: the first dimension by all others) of rank i of N, and Q kept from the last
    step, its columns orthonormal:

        P = orthonormal columns of sum_i M_i Q,   Q <- (1/N) sum_i M_i^T P,   mean = P Q^T,   e_i <- M_i - P P^T M_i.

    Two all-reduces, of r m and r n numbers. `alternating`: one, of each side in turn: with P and Q held in turn,
    mean = (1/N) sum_i (M_i Q) Q^T, from which P is kept, and in the next step mean = P (1/N) sum_i P^T M_i, from which
    Q is. Half the bytes and rounds, and a subspace that is a step older.

    Errors are "local" by default: what of its own matrix lies outside the span. "aggregated" is the paper's form,
    e_i <- M_i - mean: the same mean error, but each rank's difference from the mean piles up in it like a random walk.

    Columns that are zero, or that others span, become zero, are sent as such, and are drawn anew for the next step
    (Philox, the same on all ranks). All that ranks must compute alike follows from the all-reduced numbers by sums in a
    fixed order, so that replicas stay bit-identical on machines of any kind. The numbers themselves are float32, summed
    in the backend's order, as DDP's own are: with three ranks or more they depend on buckets and messages.

    Where a plan uses it, what it leaves dense (`PlanOptions`) is summed in float32 in the same messages.

    Args:
        rank: r; matrices of which it saves less than half stay dense. None: tensors are sent as they are, which plans
            use for what rides along.
        alternating: one all-reduce a step instead of two.
        error: "local" or "aggregated".
        feedback: `ErrorFeedback`.

    Raises:
        RecipeError: a rank below 1, another form of the error, or other feedback.

    Example:
        >>> PowerSGD(rank=4).recipe(), PowerSGD(rank=2, alternating=True).recipe()
        ('powersgd:4', 'powersgd:2:alternating')

    References:
        Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization", 2019. Differs from the paper: Q is orthonormal before it is used; the local error.
    """

    rank: int | None = 4
    alternating: bool = False
    error: ErrorForm = "local"
    feedback: Feedback | None = field(default_factory=ErrorFeedback)
    up: Compressor = field(init=False, repr=False)  # what travels, seen as a compressor
    down: Compressor = field(default=Identity(), init=False, repr=False)  # nothing is sent back
    has_owners: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise RecipeError(f"PowerSGD: expected a rank of at least 1, got {self.rank}")
        if self.error not in ("local", "aggregated"):
            raise RecipeError(f"PowerSGD: expected error 'local' or 'aggregated', got {self.error!r}")
        if not isinstance(self.feedback, ErrorFeedback):
            raise RecipeError(f"PowerSGD: expected ErrorFeedback as feedback, got {self.feedback}")
        up = Identity() if self.rank is None else LowRank(rank=self.rank, value_dtype=torch.float32)
        object.__setattr__(self, "up", up)

    @property
    def cuts_show(self) -> bool:
        """Sums of float32."""
        return True

    @property
    def slots(self) -> frozenset[Slot]:
        """A residual, and the factor that the next step begins with."""
        return frozenset() if self.rank is None else frozenset({Slot.WORKER, Slot.FACTOR})

    def recipe(self) -> str:
        """`powersgd:RANK`, with `alternating`, `aggregated`, and the feedback where it is not the default."""
        if self.rank is None:
            return "dense"
        words = ["alternating"] if self.alternating else []
        words += ["aggregated"] if self.error == "aggregated" else []
        assert self.feedback is not None
        suffix = "" if self.feedback == ErrorFeedback() else f"@{self.feedback.recipe()}"
        return ":".join(["powersgd", str(self.rank), *words]) + suffix

    def together(self, dtype: torch.dtype) -> Hashable:
        """The number of rounds is one."""
        return self.alternating

    def sent_once_nbytes(self, spec: BlockSpec) -> int:
        """Both factors, or in the mean of two steps one of them."""
        if self.rank is None:
            return 4 * spec.numel
        both = 4 * sum(_sizes(spec.shape, self.rank))
        return both // 2 if self.alternating else both

    def factor_numel(self, shape: Sequence[int]) -> int:
        """Q's, or that of the larger factor, as either is kept where they alternate."""
        if self.rank is None:
            return 0
        p, q = _sizes(shape, self.rank)
        return max(p, q) if self.alternating else q

    @staticmethod
    def lay_out(partitions: Sequence[Partition], world_size: int) -> MessageLayout:
        """Flags, then P of every matrix and all of what rides along; in the second round, if there are matrices, Q."""
        names = tuple(dict.fromkeys(partition.name for partition in partitions))
        flags = num_flags(len(names), "sum")
        first, second = list[int](), list[int]()
        totals = [flags, 0]
        for partition in partitions:
            settings = partition.aggregator
            assert isinstance(settings, PowerSGD)
            first.append(4 * totals[0])
            second.append(4 * totals[1])
            if settings.rank is None:
                totals[0] += partition.numel
                continue
            p, q = _sizes(partition.spec.shape, settings.rank)
            totals[0] += max(p, q) if settings.alternating else p  # the one or the other, by the step
            totals[1] += 0 if settings.alternating else q
        return MessageLayout(
            partitions=tuple(partitions),
            world_size=world_size,
            rounds=tuple(AllReduce(numel, torch.float32, world_size) for numel in totals if numel),
            names=names,
            header_nbytes=4 * flags,
            up=tuple(first),
            down=tuple(second),
        )

    @staticmethod
    def exchange(message: Message) -> Exchange:
        """Multiply, sum, orthogonalise; multiply and sum once more; put together."""
        layout, world_size = message.layout, message.layout.world_size
        if not message.sections:
            message.sections = (Section(range(len(layout.partitions)), layout.up),)
        message.hold(message.sections[0])
        rounds = [r for r in layout.rounds if isinstance(r, AllReduce)]
        buffers = [message.near.take(4 * r.numel) for r in rounds]
        first, *second = [buffer.view(torch.float32) for buffer in buffers]
        matrices = [_Matrix(message, place) for place, p in enumerate(layout.partitions) if p.aggregator.slots]
        riding = [i for i, p in enumerate(layout.partitions) if not p.aggregator.slots]

        with message.timed_encode():
            bad: set[str] = set()
            for matrix in matrices:
                matrix.begin()
            _orthogonalise([matrix.known for matrix in matrices], message.threads)
            for matrix in matrices:
                if not matrix.multiply(first):
                    bad.add(matrix.name)
            for place in riding:
                value = message.blocks[place].value
                _deliver_owed(message.blocks[place])
                _part(first, layout.up[place], value.numel()).copy_(value)
                if not bool(value.isfinite().all()):
                    bad.add(layout.partitions[place].name)
            flags = first[: layout.header_nbytes // 4]
            message.write_flags(flags, bad, "sum")
        yield from message.all_reduce(rounds[0], first)

        message.read_flags(flags, "sum")
        if not message.nonfinite:
            message.nonfinite |= {(MEAN, m.name) for m in matrices if not bool(m.found(first).isfinite().all())}
        if second:
            with message.timed_encode():
                if message.nonfinite:
                    second[0].zero_()  # it travels all the same: ranks keep to one schedule
                else:
                    _orthogonalise([matrix.found(first) for matrix in matrices], message.threads)
                    for matrix in matrices:
                        matrix.multiply_back(first, second[0])
            yield from message.all_reduce(rounds[1], second[0])

        if not message.nonfinite:
            with message.timed_decode():
                for matrix in matrices:
                    matrix.deliver(first, second[0] if second else None, world_size)
                for place in riding:
                    block = message.blocks[place]
                    divide_(block.value.copy_(_part(first, layout.up[place], block.value.numel())), world_size)
            message.note_nonfinite_means()
        for buffer in buffers:
            message.near.give(buffer)
        message.finish()


def _sizes(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return how many numbers P and Q hold."""
    (m, n), r = matrix_shape(shape), effective_rank(shape, rank)
    return r * m, r * n


def _part(numbers: Tensor, start_nbytes: int, numel: int) -> Tensor:
    return numbers[start_nbytes // 4 : start_nbytes // 4 + numel]


def _deliver_owed(block: Block) -> None:
    """Add what a phase that compressed it has left to a tensor that now travels as it is."""
    if block.residual is not None:
        block.value.add_(block.residual.mul_(block.residual_scale))
        block.residual.zero_()


class _Matrix:
    """One matrix in one step. Factors lie column after column: (r, m) and (r, n) in memory."""

    def __init__(self, message: Message, place: int) -> None:
        block = message.blocks[place]
        settings, shape = block.partition.aggregator, block.partition.spec.shape
        assert isinstance(settings, PowerSGD)
        assert settings.rank is not None
        assert block.residual is not None
        self.name = block.partition.name
        self._block, self._settings, self._step, self._threads = block, settings, message.step, message.threads
        self._starts = message.layout.up[place], message.layout.down[place]
        (m, n), self._rank = matrix_shape(shape), effective_rank(shape, settings.rank)
        self._matrix, self._value = block.residual.view(m, n), block.value.view(m, n)
        if settings.alternating and (message.step + block.partition.key) % 2:  # P is known, and Q is found
            self._matrix, self._value = self._matrix.mT, self._value.mT
        self._found_numel = self._rank * self._matrix.shape[0]
        self._memory = block.memory[Slot.FACTOR]  # room for it in all phases, whatever their rank
        self.known = torch.empty(0)  # (r, columns), orthonormal: what the step begins with

    def begin(self) -> None:
        """Add the gradient to what is owed, and take up the factor; where it is zero, drawn numbers."""
        block, columns = self._block, self._matrix.shape[1]
        assert block.residual is not None
        if block.residual_scale != 1.0:
            block.residual.mul_(block.residual_scale)
        block.residual.add_(block.value)
        self.known = self._memory[: self._rank * columns].view(self._rank, columns).clone()
        empty = ~self.known.any(dim=1)
        if bool(empty.any()):
            partition = block.partition
            key = Key(partition.key, self._step, SHARED_STREAM)
            drawn = serving_device(empty).draw_q(key, columns, self._rank, empty.device)
            self.known[empty] = drawn.mT[empty]

    def found(self, numbers: Tensor) -> Tensor:
        """Return the factor of the first round, (r, rows), where it lies in the buffer."""
        return _part(numbers, self._starts[0], self._found_numel).view(self._rank, -1)

    def multiply(self, numbers: Tensor) -> bool:
        """Write M times what is known; return whether that is finite. Without a second round, leave the error."""
        # In memory of its own: where in the buffer a product is written shows in its last bits.
        found = self.known @ self._matrix.mT
        self.found(numbers).copy_(found)
        if self._settings.alternating and self._settings.error == "local":
            self._matrix.addmm_(found.mT, self.known, alpha=-1.0)
        return bool(found.isfinite().all())

    def multiply_back(self, numbers: Tensor, second: Tensor) -> None:
        """Write the own Q for the P that was found, and leave the error."""
        p = self.found(numbers).clone()
        q = p @ self._matrix
        self._back(second).copy_(q)
        if self._settings.error == "local":
            self._matrix.addmm_(p.mT, q, alpha=-1.0)

    def _back(self, second: Tensor) -> Tensor:
        return _part(second, self._starts[1], self._rank * self._matrix.shape[1]).view(self._rank, -1)

    def deliver(self, numbers: Tensor, second: Tensor | None, world_size: int) -> None:
        """Put the mean together, and keep the factor that was summed last."""
        if second is None:
            last = divide_(self.found(numbers), world_size)
            serving_device(last).reconstruct(last.mT, self.known.mT, out=self._value, threads=self._threads)
        else:
            last = divide_(self._back(second), world_size)
            serving_device(last).reconstruct(self.found(numbers).mT, last.mT, out=self._value, threads=self._threads)
        if self._settings.error == "aggregated":
            self._matrix.sub_(self._value)
        self._memory[: last.numel()].copy_(last.view(-1))


def _orthogonalise(factors: Sequence[Tensor], threads: int) -> None:
    """Make the rows of every factor orthonormal, in place; those of one shape together, since most are small."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for factor in factors:
        groups.setdefault(tuple(factor.shape), []).append(factor)
    for group in groups.values():
        together = torch.stack(group)
        serving_device(together).orthogonalise_(together.mT, threads=threads)
        for factor, done in zip(group, together, strict=True):
            factor.copy_(done)
