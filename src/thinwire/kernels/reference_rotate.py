"""Rotations in plain torch, the specification: fast Walsh-Hadamard transforms of groups of 2**k values."""

import torch
from torch import Tensor

from thinwire.kernels.reference_steps import FLOAT32_MAX


def _butterflies(groups: Tensor) -> Tensor:
    """Return H times each row: pairs 1 apart become sum and difference, then pairs 2 apart, 4 apart, ..."""
    n, apart = groups.shape[1], 1
    while apart < n:
        pairs = groups.view(-1, n // (2 * apart), 2, apart)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack([a + b, a - b], dim=2).view(-1, n)
        apart *= 2
    return groups


def rotate(x: Tensor, rotation: int) -> Tensor:
    """Return y, x rotated in groups of `rotation` = 2**k values and divided by sqrt(2**k), so that nothing overflows.

    y = H (2**-k x), exact but for the sums. What is left after the last whole group is not rotated, only multiplied by
    the float32 nearest to 2**(-k / 2).
    """
    full = x.numel() // rotation * rotation
    groups = x[:full].view(-1, rotation) * (1 / rotation)
    rest = x[full:] * torch.tensor(rotation**-0.5, dtype=torch.float32, device=x.device)
    return torch.cat([_butterflies(groups).view(-1), rest])


def unrotate(y: Tensor, rotation: int) -> Tensor:
    """Return x, the inverse: 2**k H (2**-k y), and the rest times the float32 nearest to 2**(k / 2); finite."""
    full = y.numel() // rotation * rotation
    groups = _butterflies(y[:full].view(-1, rotation) * (1 / rotation)) * rotation
    rest = y[full:] * torch.tensor(rotation**0.5, dtype=torch.float32, device=y.device)
    return torch.cat([groups.view(-1), rest]).clamp(-FLOAT32_MAX, FLOAT32_MAX)
