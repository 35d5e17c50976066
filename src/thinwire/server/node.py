"""The ranks of one node: lanes over which its leader gathers what they send, and hands on what servers answered."""

# pyright: reportPrivateImportUsage=false

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.comm.lane import Lane
from thinwire.comm.mesh import PIECES_NBYTES, Mesh, choose
from thinwire.comm.nodes import Nodes
from thinwire.comm.process_group import own_group, own_store, perform
from thinwire.comm.rounds import SendRecv, Transfer


class NodeLanes:
    """Two lanes between the ranks of a node, for what goes to the leader and for what comes from it.

    Making them is collective among the ranks of a node; no connection leaves it.

    Args:
        ranks: global ranks of all that take part in the exchange.
        rank: this rank's place among them.
        nodes: which of these places share a node.
        timeout: for all to connect, and for a round in which nothing moves.
    """

    def __init__(self, ranks: Sequence[int], rank: int, nodes: Nodes, timeout: datetime.timedelta) -> None:
        node = nodes.of[rank]
        self._places = nodes.ranks(node)
        own, place = [ranks[i] for i in self._places], rank - nodes.firsts[node]
        store = own_store(own, place)
        transport = choose(store, own, place)
        self._lanes: list[Lane] = []
        for name in ("gather", "spread"):
            group = own_group(dist.PrefixStore(name, store), place, len(own), timeout)
            mesh = None
            if transport == "mesh":
                mesh = Mesh(dist.PrefixStore(f"{name}-mesh", store), own, place, timeout, name)
                mesh.piece_nbytes = PIECES_NBYTES[-1]  # inside a node nothing is slow
            self._lanes.append(Lane(group, mesh, f"thinwire-node-{name}"))

    def lane(self, position: int) -> Lane:
        """Return the lane for the round at a position of a schedule."""
        return self._lanes[position > 0]

    def moves(self, round_: SendRecv) -> SendRecv:
        """Return the moves inside this node, by place in the node."""
        first, places = self._places.start, self._places
        own = tuple((a - first, b - first, start, stop) for a, b, start, stop in round_.moves if a in places)
        return SendRecv(own, len(places))

    def perform(self, transfer: Transfer, lane: Lane) -> None:
        """Do one round, in the lane's thread."""
        assert isinstance(transfer.round, SendRecv)
        perform(Transfer(self.moves(transfer.round), transfer.send, transfer.receive), lane.group, lane.mesh)

    def interrupt(self) -> None:
        """End the rounds that are under way."""
        for lane in self._lanes:
            lane.interrupt()

    def close(self, timeout: float | None) -> None:
        """End the threads, waiting at most `timeout` seconds, and close all connections."""
        for lane in self._lanes:
            lane.close(timeout)
            if lane.mesh is not None:
                lane.mesh.close()
