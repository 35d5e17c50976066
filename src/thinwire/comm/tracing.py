"""Ranges of what a rank does, on a time line: a trace for Perfetto, and ranges of torch.profiler.

Times are `time.perf_counter`'s. On Linux that is CLOCK_MONOTONIC, one clock for all processes of a machine, so traces
of ranks on one machine, emulated hosts included, can be laid over each other as they are; those of several cannot.
"""

import contextlib
import json
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast  # pyright: ignore[reportPrivateUsage]  # record_function costs 60x

from thinwire.errors import ThinwireError

MAX_RANGES = 200_000  # about 100 MB; what comes later is counted, not kept


class _Recorder:
    """Ranges of one rank: (kind, name, thread, start, end, args), in the order in which they end."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, str, str, float, float, dict[str, Any]]] = []
        self.num_dropped = 0

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the ranges as trace events: the process is the rank, and every thread has a row."""
        threads = sorted({one[2] for one in self.ranges}, key=lambda name: (name != "main", name))
        rows = {name: row for row, name in enumerate(threads)}
        named: list[dict[str, Any]] = [{"name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
        named.append({"name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for name, row in rows.items():
            named.append({"name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
            named.append({"name": "thread_sort_index", "pid": rank, "tid": row, "args": {"sort_index": row}})
        return [{"ph": "M", **one} for one in named] + [
            {
                "ph": "X", "cat": kind, "name": name, "pid": rank, "tid": rows[thread],
                "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": args,
            }
            for kind, name, thread, start, end, args in sorted(self.ranges, key=lambda one: one[3])
        ]  # fmt: skip


_recorder: _Recorder | None = None


class _Range(AbstractContextManager[None]):
    """One range, for the recorder that was at work when it began, and for torch.profiler."""

    def __init__(self, recorder: _Recorder, kind: str, name: str, args: dict[str, Any]) -> None:
        self._recorder, self._kind, self._name, self._args = recorder, kind, name, args
        self._profiled = _RecordFunctionFast(name)

    def __enter__(self) -> None:
        self._profiled.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        end = time.perf_counter()
        self._profiled.__exit__(*error)
        thread = threading.current_thread()
        row = "main" if thread is threading.main_thread() else thread.name.removeprefix("thinwire-")
        if len(self._recorder.ranges) < MAX_RANGES:
            self._recorder.ranges.append((self._kind, self._name, row, self._start, end, self._args))
        else:
            self._recorder.num_dropped += 1


def span(kind: str, what: str = "", **args: Any) -> AbstractContextManager[Any]:
    """Return a context manager: what runs inside is a range of this thread, in traces and in torch.profiler.

    Args:
        kind: what is done, in a word: encode, transport, wait, ...
        what: which message, bucket, ...
        args: what else a trace shall say of it; plain values.
    """
    name = f"{kind} {what}" if what else kind
    recorder = _recorder
    return _RecordFunctionFast(name) if recorder is None else _Range(recorder, kind, name, args)


def title(place: str, names: Sequence[str]) -> str:
    """Return what a trace calls a message: where it belongs, and the parameters, as far as they fit."""
    return f"{place} {names[0]}" + (f" +{len(names) - 1}" if len(names) > 1 else "")


@contextlib.contextmanager
def trace(path: str | Path) -> Generator[None]:
    """Write what this rank does inside to a file, for https://ui.perfetto.dev or chrome://tracing.

    Every rank writes a file of its own; `merge_traces` makes one of those of one machine. At most `MAX_RANGES` ranges
    are kept; `otherData.num_dropped` in the file says how many came later.

    Args:
        path: of the file, in the Trace Event Format (JSON).

    Raises:
        ThinwireError: the file cannot be written, or a trace is being recorded already.

    Example:
        ```python
        with thinwire.trace(f"step-{dist.get_rank()}.json"):
            loss(model(x)).backward()
            optimizer.step()
        ```
    """
    global _recorder
    if _recorder is not None:
        raise ThinwireError(f"cannot trace to {path}: this process records a trace already, and one at a time is kept")
    try:
        Path(path).write_text("")  # better now than after the step
    except OSError as error:
        raise ThinwireError(f"cannot write the trace {path}: {error.strerror}") from error
    recorder = _recorder = _Recorder()
    try:
        yield
    finally:
        _recorder = None
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        _write(path, recorder.events(rank), recorder.num_dropped)


def merge_traces(paths: Sequence[str | Path], path: str | Path) -> None:
    """Write the traces of several ranks of one machine as one, with a row per rank and thread.

    Raises:
        ThinwireError: one of them is no trace of `trace`.
    """
    events: list[dict[str, Any]] = []
    num_dropped = 0
    for one in paths:
        try:
            document = json.loads(Path(one).read_text())
            events += document["traceEvents"]
            num_dropped += document["otherData"]["num_dropped"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ThinwireError(f"{one}: expected a trace that `thinwire.trace` wrote: {error!r}") from error
    _write(path, events, num_dropped)


def _write(path: str | Path, events: list[dict[str, Any]], num_dropped: int) -> None:
    other = {"clock": "time.perf_counter, one clock for all processes of a machine", "num_dropped": num_dropped}
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    Path(path).write_text(json.dumps(document))
