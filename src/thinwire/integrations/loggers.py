"""Loggers: where rank 0 writes each step's numbers."""

import csv
import logging
import pathlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from thinwire.integrations.stats import StepStats


class Logger(Protocol):
    """Anything with `write`; called on rank 0, in the training thread, when the next step begins."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of one finished step."""
        ...


class LogLine:
    """Logs one line every `every` steps through the standard `logging` module, logger "thinwire"."""

    def __init__(self, every: int = 100) -> None:
        self._every = every

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log if it is time."""
        if step % self._every == 0:
            logging.getLogger("thinwire").info(
                "step %d: sent %.3g MB of %.3g MB, %d collectives, encode %.1f ms, transport %.1f ms, decode %.1f ms, "
                "exposed %.1f ms, residual/gradient %.2f",
                step,
                values["wire_nbytes"] / 1e6,
                values["raw_nbytes"] / 1e6,
                values["num_collectives"],
                1e3 * values["encode_s"],
                1e3 * values["transport_s"],
                1e3 * values["decode_s"],
                1e3 * values["exposed_s"],
                values["residual_ratio"],
            )


class CSV:
    """Appends one row per step to a file, with a header if the file is new or empty."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self._path = pathlib.Path(path)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append a row."""
        fresh = not self._path.exists() or self._path.stat().st_size == 0
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(["step", *values])
            writer.writerow([step, *values.values()])


class TensorBoard:
    """Writes scalars `thinwire/NAME`.

    Args:
        target: a `SummaryWriter`, or a directory for a new one (needs `pip install '.[tensorboard]'`).
    """

    def __init__(self, target: Any) -> None:
        if isinstance(target, (str, pathlib.Path)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("TensorBoard logging needs `pip install '.[tensorboard]'`") from error
            target = SummaryWriter(str(target))
        self._writer = target

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write every number."""
        for name, value in values.items():
            self._writer.add_scalar(f"thinwire/{name}", value, step)


class Loggers:
    """Hands a step's numbers to loggers when the next step begins. `note` may be called in any thread."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers, self._lock = list(loggers), threading.Lock()
        self._unlogged: tuple[int, StepStats] | None = None

    def note(self, step: int, stats: StepStats) -> None:
        """Keep the numbers of a step that is over."""
        with self._lock:
            self._unlogged = (step, stats)

    def flush(self) -> None:
        """Write them. A logger that fails is dropped: a full disk must not leave other ranks waiting in an exchange."""
        with self._lock:
            unlogged, self._unlogged = self._unlogged, None
        if unlogged is not None:
            for logger in list(self._loggers):
                try:
                    logger.write(unlogged[0], unlogged[1].as_dict())
                except Exception:
                    logging.getLogger("thinwire").exception("a logger failed and is dropped: %r", logger)
                    self._loggers.remove(logger)
