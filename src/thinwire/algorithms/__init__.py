"""Training algorithms around the exchange: local methods, optimizers, learning rates, CLAN's settings."""

from thinwire.algorithms.base import LocalMethod as LocalMethod
from thinwire.algorithms.clan import CLAN_OPTIONS as CLAN_OPTIONS
from thinwire.algorithms.clan import CLAN_SETTINGS as CLAN_SETTINGS
from thinwire.algorithms.clan import clan_recipe as clan_recipe
from thinwire.algorithms.diloco import DiLoCo as DiLoCo
from thinwire.algorithms.lamb import LAMB as LAMB
from thinwire.algorithms.lans import LANS as LANS
from thinwire.algorithms.local_sgd import LocalSGD as LocalSGD
from thinwire.algorithms.nag import NAG as NAG
from thinwire.algorithms.outer import OuterSGD as OuterSGD
from thinwire.algorithms.parameters import no_decay_groups as no_decay_groups
from thinwire.algorithms.post_local_sgd import PostLocalSGD as PostLocalSGD
from thinwire.algorithms.rhythm import Rhythm as Rhythm
from thinwire.algorithms.streaming import StreamingDiLoCo as StreamingDiLoCo
from thinwire.algorithms.warm_up import WarmUp as WarmUp
