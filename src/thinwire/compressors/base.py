"""The compressor interface: frozen settings plus methods that turn one block of floats into bytes and back.

A compressor knows nothing of ranks, groups, buckets or parameters' names. Concrete classes are final and implement
five methods; everything else here is built on those.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compressors.contract import Contract
from thinwire.errors import RecipeError, WireError
from thinwire.kernels import DecodeJob, EncodeJob
from thinwire.random import Key
from thinwire.spec import BlockSpec
from thinwire.wire import Layout


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

    def nbytes(self, spec: BlockSpec) -> int:
        """Return the encoded size in bytes."""
        return self.layout(spec).nbytes

    def encode(
        self,
        x: Tensor,
        key: Key | None = None,
        *,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> Tensor:
        """Encode one block.

        With `residual`, what is encoded is q = x + residual_scale * residual, and `residual` ends as q - decode(bytes).

        Args:
            x: the block; any shape, strides and floating dtype that `BlockSpec` admits.
            key: the stream of uniforms; required by stochastic kinds, unused by others.
            out: (nbytes,) uint8, written in place; allocated when None.
            residual: contiguous float32 with as many elements as `x`; read and rewritten.
            residual_scale: dimensionless factor on the residual.

        Returns:
            `out`, (nbytes,) uint8.

        Raises:
            ValueError: `x`, or what would be sent of it, holds inf or nan; the residual is then as it was.
            WireError: `out` has the wrong size or dtype.
            RecipeError: a stochastic compressor was given no key.
        """
        if self.stochastic and key is None:
            raise RecipeError(f"{self.recipe()} draws random numbers: pass key=Key(...)")
        spec = BlockSpec(shape=tuple(x.shape), dtype=x.dtype)
        layout = self.layout(spec)
        if out is None:
            out = torch.empty(layout.nbytes, dtype=torch.uint8, device=x.device)
        layout.check(out, f"{self.recipe()} encode, out")
        flat = x.detach().reshape(-1).to(torch.float32).contiguous()
        work = None if residual is None else self._checked_residual(residual, flat).clone()
        (finite,) = self.encode_jobs([EncodeJob(flat, out, work, residual_scale, key)], [spec])
        if not finite:
            raise ValueError(
                f"{self.recipe()} encode: expected finite values that fit its wire dtype, got inf, nan or an overflow; "
                "skip the step, as GradScaler does"
            )
        if residual is not None and work is not None:
            residual.copy_(work.view_as(residual))
        return out

    def decode(self, data: Tensor, spec: BlockSpec, key: Key | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return the block that `data` stands for, float32, in the shape of `spec`.

        `key` is the one it was encoded with; required where `shared_key`, unused by other kinds.

        Raises:
            WireError: `data` is not an encoding of such a block.
            RecipeError: a kind with a shared key was given none.
        """
        self._check_key(key)
        self.layout(spec).check(data, f"{self.recipe()} decode")
        if out is None:
            out = torch.empty(spec.shape, dtype=torch.float32, device=data.device)
        self.decode_jobs([DecodeJob(data, self._checked_output(out, spec), None, key)], [spec])
        return out

    def accumulate_(
        self, acc: Tensor, data: Tensor, spec: BlockSpec, key: Key | None = None, *, alpha: float = 1.0
    ) -> Tensor:
        """Add alpha * decode(data) to `acc` (contiguous float32) in one pass and return it.

        Raises:
            WireError: `data` is not an encoding of such a block.
            RecipeError: a kind with a shared key was given none.
        """
        self._check_key(key)
        self.layout(spec).check(data, f"{self.recipe()} accumulate_")
        self.decode_jobs([DecodeJob(data, self._checked_output(acc, spec), alpha, key)], [spec])
        return acc

    def _check_key(self, key: Key | None) -> None:
        if self.shared_key and key is None:
            raise RecipeError(f"{self.recipe()} draws the numbers of its encoder again: pass key=Key(...)")

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
