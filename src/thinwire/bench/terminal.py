"""Tables that grow while something is measured: live with rich on a terminal, lines of text elsewhere."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, its least width in characters, and on which side its cells stand."""

    heading: str
    width: int = 0
    left: bool = False


def open_table(columns: Sequence[Column], file: TextIO) -> "TextTable | RichTable":
    """Return a table on `file`: use it as a context manager, and add rows inside."""
    if file.isatty():
        try:
            import rich  # noqa: F401
        except ModuleNotFoundError:
            pass
        else:
            return RichTable(columns, file)
    return TextTable(columns, file)


class TextTable(AbstractContextManager["TextTable"]):
    """Prints a line per row as it comes."""

    def __init__(self, columns: Sequence[Column], file: TextIO) -> None:
        self._columns, self._file = columns, file

    def __enter__(self) -> "TextTable":
        """Print the headings."""
        self.add([column.heading for column in self._columns])
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""

    def status(self, text: str) -> None:
        """Say nothing: every line stays."""

    def add(self, cells: Sequence[str]) -> None:
        """Print a row."""
        padded: list[str] = []
        for column, cell in zip(self._columns, cells, strict=True):
            width = max(column.width, len(column.heading))
            padded.append(cell.ljust(width) if column.left else cell.rjust(width))
        print("  ".join(padded).rstrip(), file=self._file, flush=True)


class RichTable(AbstractContextManager["RichTable"]):
    """Redraws the table with every row, and what is being measured below it."""

    def __init__(self, columns: Sequence[Column], file: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._table = rich_table([column.heading for column in columns], [column.left for column in columns])
        self._live = Live(self._table, console=Console(file=file), vertical_overflow="visible", refresh_per_second=5)

    def __enter__(self) -> "RichTable":
        """Start drawing."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing; the last picture stays."""
        self.status("")
        self._live.stop()

    def status(self, text: str) -> None:
        """Show what is being measured."""
        self._table.caption = text or None

    def add(self, cells: Sequence[str]) -> None:
        """Add a row."""
        self._table.add_row(*cells)


def rich_table(headings: Sequence[str], left: Sequence[bool]) -> Any:
    """Return an empty rich table, whose cells stand left or right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption_justify="left")
    for index, (heading, is_left) in enumerate(zip(headings, left, strict=True)):
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=index == 0)
    return table
