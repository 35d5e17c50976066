"""The compressor interface: frozen settings plus methods that turn one block of floats into bytes and back.

A compressor knows nothing of ranks, groups, buckets or parameters' names. Concrete classes are final and implement
five methods; everything else here is built on those.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.compressors.contract import Contract
from thinwire.errors import RecipeError, WireError
from thinwire.kernels import DecodeJob, EncodeJob, ReduceJob
from thinwire.random import Key
from thinwire.spec import BlockSpec
from thinwire.wire import Layout

MAX_SUMMANDS = 1 << 16  # that `reduce_` counts


class Compressor(ABC):
    """Turns one block of floats into bytes and back.

    Implementations are frozen dataclasses whose fields are hyper-parameters only, and never keep state: what was not
    sent lives in a residual that the caller owns.
    """

    __slots__ = ()

    @abstractmethod
    def layout(self, spec: BlockSpec) -> Layout:
        """Return the exact layout of an encoded block, from arithmetic alone."""

    @abstractmethod
    def contract(self, spec: BlockSpec) -> Contract:
        """Return what is promised of the error on a block like `spec`."""

    @abstractmethod
    def recipe(self) -> str:
        """Return the short name with arguments, as the command line spells it."""

    @abstractmethod
    def encode_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> list[bool]:
        """Encode many blocks in one call; return, per block, whether all that was read and sent is finite.

        The bytes and residual of a block that is not finite are unspecified.
        """

    @abstractmethod
    def decode_jobs(self, jobs: Sequence[DecodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Decode many blocks in one call. Raises `WireError` on bytes that are not an encoding."""

    @property
    def unit(self) -> Literal["slice", "matrix"]:
        """What a block must be: any slice of a parameter, in memory order, or a whole one with its dimensions."""
        return "slice"

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws random numbers, and so needs a key."""
        return False

    @property
    def shared_key(self) -> bool:
        """Whether decoding draws the same numbers again, so that all ranks must use the same key on both hops."""
        return False

    def holds_back(self, spec: BlockSpec) -> bool:
        """Return whether some values of a block are not sent at all; what is sent of the others is then not 0."""
        return False

    # --- kinds that several senders encode by one scale, so that their bytes can be combined -------------------------

    @property
    def statistic_reduction(self) -> Literal["max", "sum"] | None:
        """How senders combine their statistics before any of them encodes; None: there is no statistic."""
        return None

    @property
    def linear(self) -> torch.dtype | None:
        """The dtype of whose numbers encoded blocks consist, where those of `summands` senders may be added up."""
        return None

    @property
    def reducible(self) -> Literal["sum", "mean"] | None:
        """What a block stands for into which others went by `reduce_`; None: there is no such thing."""
        return None

    @property
    def max_summands(self) -> int | None:
        """How many blocks may be added or reduced to one; None: as many as there are."""
        return None

    def with_summands(self, count: int) -> Self:
        """Return the settings for `count` blocks. Raises `RecipeError` beyond `max_summands`."""
        return self

    def num_statistics(self, spec: BlockSpec) -> int:
        """Return how many numbers the statistic of a block has."""
        return 0

    def statistic_jobs(self, jobs: Sequence[EncodeJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Write the statistic of many blocks into their `shared`, in one call; inf where a block is not finite."""
        raise NotImplementedError(f"{self.recipe()} has no statistic")

    def reduce_jobs(self, jobs: Sequence[ReduceJob], specs: Sequence[BlockSpec], *, threads: int = 1) -> None:
        """Reduce many pairs of encoded blocks in one call."""
        raise NotImplementedError(f"{self.recipe()} cannot be reduced")

    def statistic(self, x: Tensor, *, residual: Tensor | None = None, residual_scale: float = 1.0) -> Tensor | None:
        """Return what must be reduced over senders, by `statistic_reduction`, and then passed as `shared`.

        Args:
            x: the block, as for `encode`.
            residual: as for `encode`, but only read.
            residual_scale: dimensionless factor on the residual.

        Returns:
            (num_statistics,) float32; inf where q is not finite. None for kinds without.
        """
        if self.statistic_reduction is None:
            return None
        spec = BlockSpec(shape=tuple(x.shape), dtype=x.dtype)
        flat = x.detach().reshape(-1).to(torch.float32).contiguous()
        owed = None if residual is None else self._checked_residual(residual, flat)
        found = torch.empty(self.num_statistics(spec), dtype=torch.float32, device=x.device)
        nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
        self.statistic_jobs([EncodeJob(flat, nothing, owed, residual_scale, None, found)], [spec])
        return found

    def reduce_(
        self, acc: Tensor, data: Tensor, spec: BlockSpec, key: Key, *, counts: tuple[int, int] = (1, 1)
    ) -> Tensor:
        """Leave in `acc` one encoding of what `acc` and `data` stand for together, unbiased, and return it.

        Args:
            acc: (nbytes,) uint8, rewritten in place.
            data: (nbytes,) uint8, encoded with the same `shared`.
            spec: what they are blocks of.
            key: the stream of uniforms; other than those that the blocks were encoded with.
            counts: how many blocks have gone into `acc` and into `data`.

        Raises:
            WireError: `acc` or `data` is not an encoding of such a block.
            ValueError: a count below 1, or more than 65,536 together.
        """
        for name, block in (("acc", acc), ("data", data)):
            self.layout(spec).check(block, f"{self.recipe()} reduce_, {name}")
        if min(counts) < 1 or sum(counts) > MAX_SUMMANDS:
            raise ValueError(
                f"{self.recipe()} reduce_, counts: expected at least 1 each and {MAX_SUMMANDS} together, got {counts}"
            )
        self.reduce_jobs([ReduceJob(acc, data, spec.numel, key, counts)], [spec])
        return acc

    # ------------------------------------------------------------------------------------------------------------------

    def nbytes(self, spec: BlockSpec) -> int:
        """Return the encoded size in bytes."""
        return self.layout(spec).nbytes

    def encode(
        self,
        x: Tensor,
        key: Key | None = None,
        *,
        out: Tensor | None = None,
        shared: Tensor | None = None,
        residual: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> Tensor:
        """Encode one block.

        With `residual`, what is encoded is q = x + residual_scale * residual, and `residual` ends as q - decode(bytes).

        Args:
            x: the block; any shape, strides and floating dtype that `BlockSpec` admits.
            key: the stream of uniforms; required by stochastic kinds, unused by others.
            out: (nbytes,) uint8, written in place; allocated when None.
            shared: (num_statistics,) float32, the reduced statistic; required by kinds that have one, unused by others.
            residual: contiguous float32 with as many elements as `x`; read and rewritten.
            residual_scale: dimensionless factor on the residual.

        Returns:
            `out`, (nbytes,) uint8.

        Raises:
            ValueError: `x`, or what would be sent of it, holds inf or nan; the residual is then as it was.
            WireError: `out` has the wrong size or dtype.
            RecipeError: a stochastic compressor was given no key, or one with a statistic no `shared`.
        """
        if self.stochastic and key is None:
            raise RecipeError(f"{self.recipe()} draws random numbers: pass key=Key(...)")
        spec = BlockSpec(shape=tuple(x.shape), dtype=x.dtype)
        self._check_shared(shared, spec)
        layout = self.layout(spec)
        if out is None:
            out = torch.empty(layout.nbytes, dtype=torch.uint8, device=x.device)
        layout.check(out, f"{self.recipe()} encode, out")
        flat = x.detach().reshape(-1).to(torch.float32).contiguous()
        work = None if residual is None else self._checked_residual(residual, flat).clone()
        (finite,) = self.encode_jobs([EncodeJob(flat, out, work, residual_scale, key, shared)], [spec])
        if not finite:
            raise ValueError(
                f"{self.recipe()} encode: expected finite values that fit its wire dtype, got inf, nan or an overflow; "
                "skip the step, as GradScaler does"
            )
        if residual is not None and work is not None:
            residual.copy_(work.view_as(residual))
        return out

    def decode(
        self,
        data: Tensor,
        spec: BlockSpec,
        key: Key | None = None,
        *,
        out: Tensor | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Return the block that `data` stands for, float32, in the shape of `spec`.

        `key` is the one it was encoded with; required where `shared_key`, unused by other kinds. So is `shared`, where
        there is a statistic.

        Raises:
            WireError: `data` is not an encoding of such a block.
            RecipeError: a kind with a shared key, or with a statistic, was given none.
        """
        self._check_key(key)
        self._check_shared(shared, spec)
        self.layout(spec).check(data, f"{self.recipe()} decode")
        if out is None:
            out = torch.empty(spec.shape, dtype=torch.float32, device=data.device)
        self.decode_jobs([DecodeJob(data, self._checked_output(out, spec), None, key, shared)], [spec])
        return out

    def accumulate_(
        self,
        acc: Tensor,
        data: Tensor,
        spec: BlockSpec,
        key: Key | None = None,
        *,
        alpha: float = 1.0,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Add alpha * decode(data) to `acc` (contiguous float32) in one pass and return it.

        Raises:
            WireError: `data` is not an encoding of such a block.
            RecipeError: a kind with a shared key, or with a statistic, was given none.
        """
        self._check_key(key)
        self._check_shared(shared, spec)
        self.layout(spec).check(data, f"{self.recipe()} accumulate_")
        self.decode_jobs([DecodeJob(data, self._checked_output(acc, spec), alpha, key, shared)], [spec])
        return acc

    def _check_key(self, key: Key | None) -> None:
        if self.shared_key and key is None:
            raise RecipeError(f"{self.recipe()} draws the numbers of its encoder again: pass key=Key(...)")

    def _check_shared(self, shared: Tensor | None, spec: BlockSpec) -> None:
        if self.statistic_reduction is None:
            return
        if shared is None:
            raise RecipeError(
                f"{self.recipe()}: its scale is agreed on by all senders: pass shared=, the "
                f"{self.statistic_reduction} over senders of what `statistic` returns"
            )
        expected = self.num_statistics(spec)
        if shared.dtype != torch.float32 or shared.shape != (expected,) or not shared.is_contiguous():
            raise WireError(
                f"{self.recipe()}, shared: expected contiguous float32 of shape ({expected},), got {shared.dtype} of "
                f"shape {tuple(shared.shape)}"
            )

    def _checked_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        if residual.dtype != torch.float32 or residual.numel() != x.numel() or not residual.is_contiguous():
            raise WireError(
                f"{self.recipe()} encode, residual: expected contiguous float32 with {x.numel()} elements, got "
                f"{residual.dtype} with {residual.numel()}"
            )
        return residual.view(-1)

    def _checked_output(self, out: Tensor, spec: BlockSpec) -> Tensor:
        if out.dtype != torch.float32 or out.numel() != spec.numel or not out.is_contiguous():
            raise WireError(
                f"{self.recipe()} decode, out: expected contiguous float32 with {spec.numel} elements, got "
                f"{out.dtype} of shape {tuple(out.shape)}"
            )
        return out.view(-1)
