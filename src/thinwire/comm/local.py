"""The lock-step driver: N ranks in one process, for tests of any world size and for simulation."""

from collections.abc import Sequence

import torch

from thinwire.comm.node_round import NodeRound
from thinwire.comm.rounds import AllGather, AllReduce, AllToAll, Exchange, Pull, Push, Round, SendRecv, Transfer
from thinwire.errors import ScheduleError


def run_lock_step(exchanges: Sequence[Exchange], schedule: Sequence[Round]) -> None:
    """Run one exchange per rank, round by round, moving bytes between their buffers.

    Args:
        exchanges: one generator per rank, rank 0 first.
        schedule: the rounds they must yield.

    Raises:
        ScheduleError: a rank yields another round than the schedule says, or another number of rounds.
    """
    for position, expected in enumerate(schedule):
        transfers = [next(exchange, None) for exchange in exchanges]
        for rank, transfer in enumerate(transfers):
            check_round(None if transfer is None else transfer.round, expected, position, rank)
        move([transfer for transfer in transfers if transfer is not None])
    for rank, exchange in enumerate(exchanges):
        extra = next(exchange, None)
        check_round(None if extra is None else extra.round, None, len(schedule), rank)


def check_round(got: Round | None, expected: Round | None, position: int, rank: int) -> None:
    """Raise `ScheduleError` unless an exchange yielded the round that its schedule lists."""
    if got != expected:
        raise ScheduleError(f"rank {rank}, round {position}: the schedule says {expected}, the exchange yields {got}")


def move(transfers: Sequence[Transfer]) -> None:
    """Do one round, of which these are all ranks' transfers."""
    match transfers[0].round:
        case AllToAll(nbytes):
            starts = [sum(nbytes[:d]) for d in range(len(nbytes))]
            for d, target in enumerate(transfers):
                for source, transfer in enumerate(transfers):
                    block = transfer.send[starts[d] : starts[d] + nbytes[d]]
                    target.receive[source * nbytes[d] : (source + 1) * nbytes[d]] = block
        case AllGather(nbytes):
            for target in transfers:
                start = 0
                for source, transfer in enumerate(transfers):
                    target.receive[start : start + nbytes[source]] = transfer.send
                    start += nbytes[source]
        case SendRecv() | NodeRound() as listed:
            filled = [0] * len(transfers)
            for source, target, start, stop in listed.moves:
                end = filled[target] + stop - start
                transfers[target].receive[filled[target] : end] = transfers[source].send[start:stop]
                filled[target] = end
        case AllReduce(op=op):
            total = transfers[0].send.clone()
            for transfer in transfers[1:]:
                if op == "max":
                    torch.maximum(total, transfer.send, out=total)
                else:
                    total += transfer.send
            for transfer in transfers:
                transfer.receive.copy_(total)
        case Push() | Pull() as served:
            raise ScheduleError(f"expected rounds between ranks, got {type(served).__name__}, which needs servers")
