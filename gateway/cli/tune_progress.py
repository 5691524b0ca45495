"""How far a sweep is: a bar on a terminal, a line from time to time elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 10.0


class Progressing:
    """Use as `with`. One stage after the other; each replaces the bar of the one before."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what = ""
        self._done = 0
        self._total = 0
        self._told_s = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._what, self._total, self._done = what, total, done
        self._task = self._progress.add_task(what, total=total, completed=done)
        if not self._console.is_terminal:
            self._console.print(f"  {what}: {done:,} of {total:,}", markup=False)

    def advance(self) -> None:
        self._done += 1
        if self._task is not None:
            self._progress.advance(self._task)
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._told_s >= PLAIN_EVERY_S:
            self._told_s = now_s
            self._console.print(f"  {self._what}: {self._done:,} of {self._total:,}", markup=False)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
