"""Every compressor over every length that a layout or a kernel could trip over, and every class of values."""

import pytest
import torch
from table import KEY, TABLE, name, too_long
from torch import Tensor

from thinwire import BlockSpec, Compressor

SHORT = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17]
LENGTHS = SHORT + [2**k + d for k in range(5, 21) for d in (-1, 0, 1)]
VALUES = {
    "normal": lambda n: torch.randn(n),
    "zero": lambda n: torch.zeros(n),
    "minus zero": lambda n: torch.full((n,), -0.0),
    "denormal": lambda n: torch.randn(n) * 1e-42,
    "huge": lambda n: torch.randn(n).clamp(-3, 3) * 1e37,
    "one outlier": lambda n: torch.randn(n) * 1e-3 + 100.0 * (torch.arange(n) == n // 2),
    "all equal": lambda n: torch.full((n,), -0.7),
}


def check(compressor: Compressor, x: Tensor, residual: Tensor) -> None:
    spec, flat = BlockSpec(shape=tuple(x.shape), dtype=x.dtype), x.reshape(-1).float()
    before, q = x.clone(), flat + residual
    try:
        data = compressor.encode(x, KEY, residual=residual)
    except ValueError:  # float16 on the wire has no room for the huge ones: refused, and nothing changed
        assert (flat.numel() and flat.abs().max() > 65504) or "fp16" in compressor.recipe()
        return
    finally:
        assert torch.equal(x, before), "the input is only read"
    assert data.numel() == compressor.layout(spec).nbytes
    decoded = compressor.decode(data, spec, KEY).view(-1)
    assert torch.equal(residual, q - decoded), "residual + delivered = input"
    doubled = compressor.accumulate_(decoded.clone(), data, spec, KEY, alpha=1.0)
    assert torch.equal(doubled, decoded + decoded)


@pytest.mark.parametrize("compressor", TABLE, ids=name)
def test_every_length(compressor: Compressor) -> None:
    torch.manual_seed(0)
    for i, n in enumerate(LENGTHS):
        if too_long(compressor, n):
            continue
        classes = list(VALUES) if n <= 4097 else [list(VALUES)[i % len(VALUES)]]
        for values in classes:
            x, residual = VALUES[values](n), torch.randn(n) * 1e-3
            check(compressor, torch.stack([x, x], dim=1)[:, 0] if i % 2 else x, residual)  # with gaps, and without


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("compressor", TABLE, ids=name)
def test_every_length_in_16_bits(compressor: Compressor, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for i, n in enumerate(LENGTHS):
        if too_long(compressor, n):
            continue
        for values in VALUES if n in SHORT else [list(VALUES)[i % len(VALUES)]]:
            x, residual = VALUES[values](n).clamp(-6e4, 6e4).to(dtype), torch.randn(n) * 1e-3
            check(compressor, torch.stack([x, x], dim=1)[:, 0] if i % 2 else x, residual)
