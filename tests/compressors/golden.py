"""Kept bytes: what every compressor made of the same values when its wire format was laid down.

python tests/compressors/golden.py      writes tests/golden/bytes.json anew; only with a new WIRE_FORMAT
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from table import KEY, TABLE, name, too_long
from torch import Tensor

from thinwire import BlockSpec, Compressor
from thinwire.random import Key, uniform
from thinwire.wire import WIRE_FORMAT

FILE = Path(__file__).parents[1] / "golden" / "bytes.json"
SHORT, LONG = 40, 65_537


def values(n: int) -> Tensor:
    """Return (n,) float32 of many sizes and both signs, by exact arithmetic alone: the same everywhere."""
    sign, size, fraction = (uniform(Key(2026, stream=stream), n) for stream in range(3))
    powers = (((size * 16).to(torch.int32) + 119) << 23).view(torch.float32)
    return torch.where(sign < 0.5, -powers, powers) * (1 + fraction)


def record(compressor: Compressor) -> dict[str, Any]:
    """Return what is kept: the bytes of a short block, and digests of a long one and of what both decode to."""
    kept: dict[str, Any] = {}
    for label, n in (("short", SHORT), ("long", LONG)):
        n -= label == "long" and too_long(compressor, n)
        spec = BlockSpec(shape=(n,))
        data = compressor.encode(values(n), KEY)
        decoded = compressor.decode(data, spec, KEY)
        kept[label] = data.numpy().tobytes().hex() if label == "short" else _digest(data)
        kept[f"{label} decoded"] = _digest(decoded)
    return kept


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def main() -> None:
    """Write the file."""
    kept = {name(compressor): record(compressor) for compressor in TABLE}
    FILE.write_text(json.dumps({"wire_format": WIRE_FORMAT, "encodings": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
