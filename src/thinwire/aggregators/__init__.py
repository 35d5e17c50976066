"""Aggregators: how the mean over ranks is formed."""

from thinwire.aggregators.base import MEAN as MEAN
from thinwire.aggregators.base import Aggregator as Aggregator
from thinwire.aggregators.base import Block as Block
from thinwire.aggregators.base import BufferPool as BufferPool
from thinwire.aggregators.base import Message as Message
from thinwire.aggregators.base import MessageLayout as MessageLayout
from thinwire.aggregators.base import Partition as Partition
from thinwire.aggregators.checks import keeps_residual as keeps_residual
from thinwire.aggregators.dense import Dense as Dense
from thinwire.aggregators.gather import Gather as Gather
from thinwire.aggregators.two_shot import TwoShot as TwoShot
