"""Progress displays: a live table for the stack's start, a bar for simulations.

Without a terminal, changes of the stack are plain lines and bars are not shown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as rich_progress
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from motet.cli.supervisor import State
from motet.shared.clock import now_s

STYLE: dict[State, str] = {
    "waiting": "dim",
    "starting": "yellow",
    "ready": "green",
    "restarting": "red",
    "stopping": "yellow",
    "stopped": "dim",
}
REDRAW_S = 0.1


class _Console(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # the terminal is gone; the stack continues


class Progress:
    """Shows the children's states. Use as an async context manager around the start; afterwards changes come as lines."""

    def __init__(self) -> None:
        self._console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._began = now_s()
        self._rows: dict[str, tuple[State, str, float]] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self.silent = False
        """Changes of children are not printed: after a failed start the reason is the last word."""

    async def __aenter__(self) -> Progress:
        if self._console.is_terminal:
            # no thread of its own: children are forked from this process
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._table)
            self._live.start()
            self._redrawing = asyncio.create_task(self._redraw(self._live))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._live is not None:
            self._redrawing.cancel()
            self._live.refresh()
            self._live.stop()
            self._live = None

    async def _redraw(self, live: Live) -> None:
        while True:
            live.refresh()
            await asyncio.sleep(REDRAW_S)

    @property
    def elapsed_s(self) -> float:
        return now_s() - self._began

    def expect(self, names: list[str]) -> None:
        """Show these children from the beginning."""
        for name in names:
            self._rows[name] = ("waiting", "", 0.0)

    def changed(self, name: str, state: State, note: str) -> None:
        before = self._rows.get(name)
        self._rows[name] = (state, note, self.elapsed_s)
        if self._live is None and not self.silent and (before is None or _words(before) != _words(self._rows[name])):
            self.line(f"{name:<12} {state}{f': {note}' if note else ''}")

    def line(self, text: str) -> None:
        """One line of plain text with the seconds since the start."""
        self._console.print(Text(f"[{self.elapsed_s:6.1f} s] {text}"))

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, (state, note, at_s) in self._rows.items():
            mark = self._spinner if state == "starting" else Text("✓" if state == "ready" else " ", style="green")
            detail = f"{at_s:.1f} s" if state == "ready" else note
            table.add_row(mark, name, Text(state, style=STYLE[state]), Text(detail, style="dim"))
        return table


def _words(row: tuple[State, str, float]) -> tuple[State, str]:
    """A state and its note without numbers: lines of a log are for changes, not for every step of a progress."""
    return row[0], re.sub(r"[\d.]+", "", row[1])


@contextmanager
def bar(title: str, total: float) -> Iterator[Callable[[float], None]]:
    """A progress bar on standard error; yields a function that takes the part of `total` that is done."""
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    console = _Console(stderr=True)
    with rich_progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda done: shown.update(task, completed=min(done, total))
