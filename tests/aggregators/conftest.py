"""Lets tests import `world`, `late_device` and `in_one_process`, which the import mode does not find by itself."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / folder) for folder in ("distributed", "server"))]
