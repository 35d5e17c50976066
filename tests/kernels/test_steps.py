"""Steps that reference kernels share."""

import math

import torch

from thinwire.kernels.reference_steps import sqrt


def test_roots_are_correctly_rounded() -> None:
    """As in C++; torch's own root is the neighbouring number for some per cent of all numbers."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.rand(20_000, dtype=torch.float64, generator=generator)
    assert sqrt(wide).tolist() == [math.sqrt(x) for x in wide.tolist()]
    narrow = wide.to(torch.float32)
    assert torch.equal(sqrt(narrow), sqrt(narrow.double()).to(torch.float32))  # 53 bits round to 24 rightly
