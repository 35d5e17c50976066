"""What a step that must not count takes back."""

import torch

from thinwire.aggregators import BufferPool
from thinwire.aggregators.undo import Undo


def test_neighbours_are_copied_as_one_and_put_back_apart() -> None:
    """Slices of one parameter's residual lie side by side; those of others may do so by chance, in another storage."""
    memory = torch.arange(30.0)
    other = torch.empty(0).set_(torch.arange(5.0).untyped_storage())
    residuals = [memory[0:10], memory[10:20], memory[25:30], other]
    undo = Undo([(place, residual) for place, residual in enumerate(residuals)])
    assert [run.numel() for run in undo._runs] == [20, 5, 5]
    pool = BufferPool()
    before = [residual.clone() for residual in residuals]
    for _ in range(2):
        undo.save(pool)
        for residual in residuals:
            residual.add_(1.0)
        for (residual, saved), expected in zip(undo.saved(), before, strict=True):
            assert torch.equal(saved, expected)
            residual.copy_(saved)
        undo.forget(pool)
    assert torch.equal(memory, torch.arange(30.0))
    assert pool.allocated_nbytes == 128


def test_tensors_of_different_storages_are_never_joined() -> None:
    """Adjacent addresses do not make one tensor."""
    memory = bytearray(80)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=10, offset=at) for at in (0, 40))
    assert second.data_ptr() == first.data_ptr() + 40
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    undo = Undo([(0, first), (1, second)])
    assert [run.numel() for run in undo._runs] == [10, 10]
