"""Settings that all tests share."""

import torch
from hypothesis import settings

# The same examples on every run, so that a failure seen once is seen again; no deadline on shared machines.
settings.register_profile("thinwire", deadline=None, derandomize=True, database=None)
settings.load_profile("thinwire")

torch.set_num_threads(1)
