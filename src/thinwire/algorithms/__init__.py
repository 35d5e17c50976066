"""Training algorithms around the exchange: optimizers and schedules of the learning rate."""

from thinwire.algorithms.lamb import LAMB as LAMB
from thinwire.algorithms.lans import LANS as LANS
from thinwire.algorithms.nag import NAG as NAG
from thinwire.algorithms.parameters import no_decay_groups as no_decay_groups
from thinwire.algorithms.warm_up import WarmUp as WarmUp
