"""Names the ranks that are to blame, after a collective failed.

Gloo's own errors name an address and a port, and a rank that waits for one that gave up looks no better than one that
is dead. So the first rank that sees a failure raises an alarm at the rendezvous store, and every living process answers
from a thread of its own, with how many exchanges it has begun. Who does not answer is gone; who answers with fewer than
the others has not come to the exchange. All who heard the alarm fail, so that nobody waits for a peer that gave up.
"""

# pyright: reportPrivateImportUsage=false

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from thinwire.errors import RankLostError

GRACE_S = 3.0  # how long a living rank may take to answer
POLL_S = 0.5  # between looks for an alarm; a look is some hundred bytes on the wire

_ALARM = "alarm"


class Liveness:
    """Roll-call among the ranks of one group.

    Args:
        store: where only this group meets.
        ranks: global ranks of the group.
        rank: this rank's place in the group.
        fail: called with a `RankLostError`, in another thread, when some other rank raises the alarm. Held weakly.

    Attributes:
        begun: how many exchanges this rank has begun; whoever begins them counts here.
    """

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], rank: int, fail: Callable[[BaseException], None]
    ) -> None:
        self.begun = 0
        self._fail = weakref.WeakMethod(fail)
        self._ranks, self._rank = list(ranks), rank
        self._store = dist.PrefixStore("alive", store)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="thinwire-liveness", daemon=True)
        self._thread.start()
        _live.add(self)

    def close(self) -> None:
        """Stop answering."""
        self.stop()
        self._thread.join(GRACE_S)

    def stop(self) -> None:
        """Stop answering soon, without waiting for it."""
        self._closed.set()

    def explain(self, error: BaseException, during: str = "") -> BaseException:
        """Return a `RankLostError` that names the ranks to look at, caused by `error` `during` some round."""
        try:
            self._store.set(_ALARM, "")
            self._answer()
            begun = self._roll_call()
        except Exception:  # the store went down with its host
            verdict = "the rendezvous store is gone: rank 0, or whoever hosts it, ended. Look at its output first."
        else:
            missing = [rank for rank in self._ranks if rank not in begun]
            behind = [rank for rank, count in begun.items() if count == min(begun.values()) < max(begun.values())]
            if missing:
                verdict = f"{_names(missing)} did not answer within {GRACE_S:g} s: ended, or stopped. Look there first."
            elif behind:
                verdict = f"{_names(behind)} did not come to the exchange, though alive. Look there first."
            else:
                verdict = "every rank answers and takes part."
        lost = RankLostError(f"a collective failed; {verdict} ({during and f'{during}: '}{_one_line(error)})")
        lost.__cause__ = error
        return lost

    def _listen(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                alarm = self._store.check([_ALARM])
            except Exception:  # no store, nobody to answer
                return
            if alarm:
                error = self.explain(RuntimeError("another rank saw the failure"))
                fail = self._fail()
                if fail is not None:
                    fail(error)
                return

    def _answer(self) -> None:
        self._store.set(str(self._ranks[self._rank]), str(self.begun))

    def _roll_call(self) -> dict[int, int]:
        """Return how many exchanges each rank that answers has begun."""
        deadline = time.monotonic() + GRACE_S
        missing = list(self._ranks)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([str(rank)])]
            if missing:
                time.sleep(0.05)
        return {rank: int(self._store.get(str(rank))) for rank in self._ranks if rank not in missing}


_live: "weakref.WeakSet[Liveness]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter does; see `Lane`."""
    for liveness in list(_live):
        liveness.close()


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
