"""Training algorithms around the exchange: optimizers, schedules of the learning rate, and CLAN's settings."""

from thinwire.algorithms.clan import CLAN_OPTIONS as CLAN_OPTIONS
from thinwire.algorithms.clan import CLAN_SETTINGS as CLAN_SETTINGS
from thinwire.algorithms.clan import clan_recipe as clan_recipe
from thinwire.algorithms.lamb import LAMB as LAMB
from thinwire.algorithms.lans import LANS as LANS
from thinwire.algorithms.nag import NAG as NAG
from thinwire.algorithms.parameters import no_decay_groups as no_decay_groups
from thinwire.algorithms.warm_up import WarmUp as WarmUp
