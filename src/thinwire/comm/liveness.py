"""Names the ranks that stopped answering, after a collective failed.

Gloo's own errors name an address and a port. Every rank that sees a failure reports itself at the rendezvous store and
waits a moment for the others to do the same; who does not report is gone.
"""

# pyright: reportPrivateImportUsage=false

import time
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.errors import RankLostError

GRACE_S = 3.0  # how long a rank that lives may take to see the failure too


class Liveness:
    """Roll-call among the ranks of one group.

    Args:
        store: where only this group meets.
        ranks: global ranks of the group.
        rank: this rank's place in the group.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int) -> None:
        self._ranks = list(ranks)
        self._rank = rank
        self._store = dist.PrefixStore("alive", store)

    def explain(self, error: BaseException) -> BaseException:
        """Return a `RankLostError` that names the missing ranks, caused by `error`."""
        try:
            self._store.set(str(self._ranks[self._rank]), "alive")
            missing = self._missing()
        except Exception:  # the store went down with its host
            lost = RankLostError(
                "a collective failed and the rendezvous store is gone: rank 0, or whoever hosts it, ended. Look at "
                f"its output first. ({_one_line(error)})"
            )
            lost.__cause__ = error
            return lost
        if missing:
            names = ", ".join(f"rank {rank}" for rank in missing)
            what = (
                f"{names} did not answer within {GRACE_S:g} s of a failed collective: it ended or hangs. Look at its "
            )
            lost = RankLostError(f"{what}output first. ({_one_line(error)})")
        else:
            lost = RankLostError(f"a collective failed though every rank still answers: {_one_line(error)}")
        lost.__cause__ = error
        return lost

    def _missing(self) -> list[int]:
        deadline = time.monotonic() + GRACE_S
        missing = list(self._ranks)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([str(rank)])]
            if missing:
                time.sleep(0.05)
        return missing


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
