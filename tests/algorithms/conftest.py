"""Helpers of this folder are found by name: the import mode does not do that by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
