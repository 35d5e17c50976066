"""Lets tests import `in_one_process`, which the import mode does not find by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "aggregators"))
