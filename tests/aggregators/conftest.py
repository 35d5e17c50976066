"""Lets tests import `world` and `late_device`, which the import mode does not find by itself."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
