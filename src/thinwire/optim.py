"""Optimizers for large batches and for compressed gradients, and what they are used with."""

from thinwire.algorithms import LAMB as LAMB
from thinwire.algorithms import LANS as LANS
from thinwire.algorithms import NAG as NAG
from thinwire.algorithms import WarmUp as WarmUp
from thinwire.algorithms import no_decay_groups as no_decay_groups
