"""What the commands share with the person at the terminal: consoles, errors in one line, readable quantities."""

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.console import Console

from gateway.settings import Settings, what_is_wrong

T = TypeVar("T")

USAGE = 2
FAILURE = 1

# Control characters in a document or an answer could drive the terminal; tab and newline are kept.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


@dataclass(slots=True, eq=False)
class CliError(Exception):
    """Ends the command with one line on stderr. `exit_code`: 2 when the call is wrong, 1 when the work failed."""

    message: str
    exit_code: int = FAILURE

    def __str__(self) -> str:
        return self.message


# A pipe or a file has no width; this one keeps table rows on one line.
_PLAIN_WIDTH = 140


class Stopped(Exception):
    """The user ended a command that runs until it is told to end."""


def out() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def err() -> Console:
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PLAIN_WIDTH)


def printable(text: str) -> str:
    """`text` without control characters, fit for a terminal whatever document it came from."""
    return text.translate(_CONTROLS)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; SIGINT and SIGTERM cancel it, so that everything it owns is closed in order.

    Raises KeyboardInterrupt when it was cancelled, unless it ended by itself nevertheless.
    """
    try:
        return asyncio.run(_cancelled_by_signals(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _cancelled_by_signals(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


async def until_stopped(*watched: Awaitable[Any]) -> int:
    """Waits for the first of `watched` to end and returns its place. Raises Stopped at SIGINT or SIGTERM."""
    tasks = [asyncio.ensure_future(each) for each in watched]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        raise Stopped from None
    finally:
        for task in tasks:
            task.cancel()
    return next(place for place, task in enumerate(tasks) if task in done)


def given(**overrides: object) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in overrides.items() if value is not None}


def load_settings(**overrides: object) -> Settings:
    """Settings with the options that were given; raises CliError (2) naming each setting that is wrong."""
    try:
        return Settings(**given(**overrides))
    except ValidationError as error:
        raise CliError(f"Settings are wrong: {what_is_wrong(error)}.", USAGE) from error
    except (SettingsError, ValueError) as error:
        # A headstart.toml that is not TOML, or a variable that is not what its setting takes.
        raise CliError(f"Settings cannot be read: {error}.", USAGE) from error


def ms(value: object) -> str:
    """Milliseconds, in seconds from one second on; `?` where unknown."""
    if not isinstance(value, int | float):
        return "?"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms"


def count(value: object) -> str:
    """A number of tokens or items; `?` where unknown, which is not 0."""
    return f"{value:,}" if isinstance(value, int) else "?"


def counted(number: int, thing: str) -> str:
    """`1 line`, `2 lines`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def rate(value: object) -> str:
    """Tokens per second."""
    return f"{value:.1f}" if isinstance(value, int | float) else "?"
