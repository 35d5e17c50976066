"""`thinwire server` that kills itself at a stage of a round: STAGE, then the server's arguments."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from thinwire.cli import main
from thinwire.server.mean import Mean
from thinwire.server.service import Service

ROUND = 3  # of the first content that comes to it


def trap(kind: type, name: str, when: Callable[..., bool], *, after: bool = False) -> None:
    """Die before, or after, a call of a method for which `when` holds."""
    method = getattr(kind, name)

    def trapped(*args: Any) -> Any:
        fatal = when(*args)
        result = method(*args) if after or not fatal else None
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, name, trapped)


def pushes(service: Service, rank: int, frame: Any) -> bool:
    return frame.round == ROUND


if __name__ == "__main__":
    stage, *arguments = sys.argv[1:]
    match stage:
        case "push":  # the first of a round is here, and not taken
            trap(Service, "_push", pushes)
        case "pushed":  # it is taken, and others are still to come
            trap(Service, "_push", pushes, after=True)
        case "encode":  # all have pushed; of whichever content is the twelfth
            calls = itertools.count(1)
            trap(Mean, "close", lambda mean: next(calls) == 12)
        case "encoded":  # the mean is there, and nobody has it
            trap(Service, "_publish", lambda service, served, data: served.round == ROUND)
        case "answered":  # one has it, and others wait
            trap(Service, "_answer", lambda service, served, round_, rank: round_ == ROUND, after=True)
        case _:
            raise SystemExit(f"expected a stage, got {stage}")
    raise SystemExit(main(arguments))
