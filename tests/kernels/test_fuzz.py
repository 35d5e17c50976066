"""Foreign bytes: decoders refuse them or read them alike in every backend, and write nowhere else."""

from types import ModuleType

import pytest
import torch
from cases import KEY, KINDS, Kind
from torch import Tensor

from thinwire.errors import WireError
from thinwire.kernels import reference
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.wire import align

LENGTHS = (0, 1, 7, 64, 65, 513, 1031)
NUM_ROUNDS = 12
GUARD = 16


def foreign(kind: Kind, n: int, generator: torch.Generator, which: int) -> Tensor:
    """Return bytes of the right length: random ones, or an encoding with a few bytes changed."""
    size = align(kind.nbytes(n))
    if which % 3 == 0:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    data = torch.zeros(size, dtype=torch.uint8)
    kind.encode(reference, [EncodeJob(torch.randn(n, generator=generator), data, key=KEY)])
    for _ in range(which if size else 0):
        place = int(torch.randint(0, size, (), generator=generator))
        data[place] = int(torch.randint(0, 256, (), generator=generator))
    return data


def decoded(kernels: ModuleType, kind: Kind, data: Tensor, n: int, alpha: float | None) -> Tensor | None:
    """Return what is read, or None where it is refused; nothing around the output may change."""
    guarded = torch.full((n + 2 * GUARD,), 7.0)
    before = data.clone()
    try:
        kind.decode(kernels, [DecodeJob(data, guarded[GUARD : GUARD + n], alpha, KEY)])
        out = guarded[GUARD : GUARD + n].clone()
    except WireError:
        assert bool((guarded == 7.0).all()), "refused, and yet written"
        out = None
    assert bool((guarded[:GUARD] == 7.0).all())
    assert bool((guarded[GUARD + n :] == 7.0).all())
    assert torch.equal(data, before)
    return out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_backends_agree_on_foreign_bytes(native: ModuleType, kind: Kind) -> None:
    generator = torch.Generator().manual_seed(len(kind.label))
    for n in LENGTHS:
        for which in range(NUM_ROUNDS):
            data = foreign(kind, n, generator, which)
            alpha = (None, 0.5)[which % 2]
            expected, got = (decoded(kernels, kind, data, n, alpha) for kernels in (reference, native))
            assert (expected is None) == (got is None), "one backend refuses what another reads"
            if expected is not None and got is not None:
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_every_truncation_is_refused(native: ModuleType, kind: Kind) -> None:
    for n in (1, 65, 513):
        data = torch.zeros(kind.nbytes(n), dtype=torch.uint8)
        for size in (size for size in {0, 1, len(data) // 2, len(data) - 1} if 0 <= size < len(data)):
            out = torch.full((n,), 7.0)
            with pytest.raises(WireError, match="expected at least"):
                kind.decode(native, [DecodeJob(data[:size].clone(), out, key=KEY)])
            assert bool((out == 7.0).all())
