"""Aggregators: how the mean over ranks is formed."""

from thinwire.aggregators.base import Aggregator as Aggregator
from thinwire.aggregators.base import MessageLayout as MessageLayout
from thinwire.aggregators.base import Partition as Partition
from thinwire.aggregators.buffers import BufferPool as BufferPool
from thinwire.aggregators.buffers import pooled_nbytes as pooled_nbytes
from thinwire.aggregators.checks import default_feedback as default_feedback
from thinwire.aggregators.checks import typical_contract as typical_contract
from thinwire.aggregators.dense import Dense as Dense
from thinwire.aggregators.gather import Gather as Gather
from thinwire.aggregators.header import MANY as MANY
from thinwire.aggregators.hierarchical import Hierarchical as Hierarchical
from thinwire.aggregators.hierarchical import between_nodes_nbytes as between_nodes_nbytes
from thinwire.aggregators.message import MEAN as MEAN
from thinwire.aggregators.message import Block as Block
from thinwire.aggregators.message import Message as Message
from thinwire.aggregators.message import Section as Section
from thinwire.aggregators.power_sgd import PowerSGD as PowerSGD
from thinwire.aggregators.push_pull import PushPull as PushPull
from thinwire.aggregators.reduce_scatter import ReduceScatter as ReduceScatter
from thinwire.aggregators.shard_all_gather import ShardAllGather as ShardAllGather
from thinwire.aggregators.staging import Staging as Staging
from thinwire.aggregators.staging import work_memory as work_memory
from thinwire.aggregators.sum_on_wire import SumOnWire as SumOnWire
from thinwire.aggregators.tree import TreeReduce as TreeReduce
from thinwire.aggregators.two_shot import TwoShot as TwoShot
from thinwire.comm.nodes import Nodes as Nodes
