"""What every parser returns: sections of plain text under their heading paths."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrieval.types import UnusableFile


@dataclass(frozen=True, slots=True)
class Section:
    """`text` is NFC; paragraphs are separated by blank lines, rows of tables stand one to a line.

    `rows` says that every line stands for itself, as in a table.
    """

    heading_path: tuple[str, ...]
    text: str
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document in reading order. `media_type` is what its content was found to be."""

    sections: tuple[Section, ...]
    media_type: str


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Bounds on one file, so that a hostile one costs bounded time and memory."""

    max_pages: int = 5_000
    max_archive_entries: int = 10_000
    max_unpacked_bytes: int = 200 * 2**20
    max_xml_part_bytes: int = 64 * 2**20
    max_text_characters: int = 20_000_000
    max_seconds: float = 120.0
    max_memory_bytes: int = 3 * 2**30


class Budget:
    """The time and text that one file may still take; `spend` raises UnusableFile when either is gone."""

    def __init__(self, limits: ParseLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._end_s = clock() + limits.max_seconds
        self._characters = 0

    def spend(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > self._limits.max_text_characters:
            raise UnusableFile(
                "invalid_file",
                f"The file holds more than {self._limits.max_text_characters:,} characters of text. "
                f"Split it and upload the parts.",
            )
        if self._clock() > self._end_s:
            raise UnusableFile(
                "invalid_file",
                f"Reading the file took more than {self._limits.max_seconds:.0f} seconds. "
                f"Split it, or save it anew, and upload it again.",
            )


class Outline:
    """Collects sections while a parser walks a document with headings of levels 1 (top) to 9."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._path: list[tuple[int, str]] = []
        self._blocks: list[str] = []
        self._sections: list[Section] = []
        self._bare = False

    def heading(self, level: int, text: str) -> None:
        self._close(next_level=level)
        title = " ".join(text.split())
        while self._path and self._path[-1][0] >= level:
            self._path.pop()
        if title:
            self._path.append((level, title))
            self._bare = True

    def block(self, text: str) -> None:
        """A paragraph, or the rows of a table joined by line ends."""
        self._budget.spend(text)
        if text.strip():
            self._blocks.append(text.strip("\n"))

    def sections(self) -> tuple[Section, ...]:
        self._close()
        return tuple(self._sections)

    def _close(self, next_level: int = 0) -> None:
        if not self._blocks and self._bare and self._path[-1][0] >= next_level:
            # A heading with nothing below it is text too.
            self._blocks.append(self._path[-1][1])
        if self._blocks:
            path = tuple(title for _, title in self._path)
            self._sections.append(Section(path, "\n\n".join(self._blocks)))
            self._blocks = []
        self._bare = False


def row_text(header: Sequence[str], cells: Sequence[str]) -> str:
    """One row of a table as `header: value; header: value`, so that it can be understood alone."""
    parts = []
    for position, cell in enumerate(cells):
        value = " ".join(cell.split())
        if value:
            name = " ".join(header[position].split()) if position < len(header) else ""
            parts.append(f"{name}: {value}" if name else value)
    return "; ".join(parts)


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a table whose first row is the header; a table of one row is that row."""
    if len(rows) == 1:
        return row_text((), rows[0])
    lines = (row_text(rows[0], row) for row in rows[1:])
    return "\n".join(line for line in lines if line)
