"""The ladder of `thinwire selfcheck`: does a recipe do on this launch, with this model, what it promises?"""

from thinwire.ladder.climb import LADDER as LADDER
from thinwire.ladder.climb import selfcheck as selfcheck
from thinwire.ladder.report import Report as Report
from thinwire.ladder.report import Rung as Rung
