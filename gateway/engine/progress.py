"""Steps that take longer than a blink, shown while they run."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

HEARTBEAT_S = 10.0


class Steps:
    """Shows one step at a time: a spinner with the elapsed time on a terminal, plain lines elsewhere.

    Where the output is not a terminal a step is announced, and said to go on every `HEARTBEAT_S` seconds, so that
    nobody who reads a log has to wonder whether the command hangs. A step that raises is not reported as done.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def step(self, text: str, limit_s: float | None = None) -> Iterator[None]:
        """`limit_s` is shown as the longest that the step may take."""
        started = time.monotonic()
        label = text if limit_s is None else f"{text} (at most {limit_s:.0f} s)"
        with self._spinner(label) if self.console.is_terminal else self._heartbeat(label):
            yield
        self.console.print(f"  done: {text}, {time.monotonic() - started:.1f} s", markup=False, highlight=False)

    @contextmanager
    def _spinner(self, label: str) -> Iterator[None]:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(label, total=None)
            yield

    @contextmanager
    def _heartbeat(self, label: str) -> Iterator[None]:
        self.console.print(f"  {label} ...", markup=False, highlight=False)
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(label, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _beat(self, label: str, ended: threading.Event) -> None:
        started = time.monotonic()
        while not ended.wait(HEARTBEAT_S):
            elapsed_s = time.monotonic() - started
            self.console.print(f"  {label}: {elapsed_s:.0f} s so far", markup=False, highlight=False)
