"""Run a script on some processors: `python pin.py CPUS[:CPUS...] NUM_THREADS SCRIPT [ARGUMENT...]`.

What torchrun starts for `thinwire launch --cpu-affinity`. Of the sets the one at LOCAL_RANK counts; with "own" for
NUM_THREADS there are as many OpenMP threads as processors in it, with "kept" OMP_NUM_THREADS stays as it is. The script
takes the place of this process, so that nothing of it is left, and nothing but the standard library is imported here.
"""

import os
import sys


def main() -> None:
    """Take the place of this process."""
    sets, threads, *command = sys.argv[1:]
    cpus: set[int] = set()
    for part in sets.split(":")[int(os.environ["LOCAL_RANK"])].split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    os.sched_setaffinity(0, cpus)
    if threads == "own":
        os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    main()
