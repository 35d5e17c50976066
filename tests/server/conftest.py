"""Lets tests import `in_one_process` and `serving`, which the import mode does not find by itself."""

import sys
from pathlib import Path

for folder in (".", "../aggregators", "../distributed"):
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))
