"""Which lines of a system text can leave it together, and the text without them. Pure."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prompt_builder.labels import FACTS_MARK

LEAST_WRAPPED_CHARS = 60

_FENCE = re.compile(r"\s*(```+|~~~+)")
_ITEM = re.compile(r"\s*(?:[-*+•·]|\d{1,3}[.)]|[a-zA-Z][.)])\s")
_SENTENCE_END = re.compile(r"[.!?:;…。！？：；]['\")\]*_`]*\s*$")
_FENCES = ("`", "~")
_BULLETS = ("-", "*", "+", "•", "·")
_INDENTS = (" ", "\t")
_OPENS = ("{", "[")
_CLOSES = ("}", "]")


@dataclass(frozen=True, slots=True)
class Split:
    """`stays` is the text without the `moved` lines; both keep their order. `share`: of the text, in characters."""

    stays: str
    moved: tuple[str, ...]
    share: float

    @property
    def facts(self) -> str:
        """The moved lines as they stand before a question."""
        kept = "\n".join(self.moved).strip("\n")
        return f"{FACTS_MARK}\n{kept}" if kept.strip() else ""


def split(lines: Sequence[str], changing: Collection[int]) -> Split:
    """Takes the changing lines out, each with what it cannot stand without: its block, list or sentence."""
    ends = units(lines)
    leaving: set[int] = set()
    for first, end in ends:
        if any(place in changing for place in range(first, end)):
            leaving.update(range(first, end))
    moved = tuple(lines[place] for place in sorted(leaving))
    stays = "\n".join(line for place, line in enumerate(lines) if place not in leaving)
    total = sum(len(line) + 1 for line in lines)
    return Split(stays, moved, sum(len(line) + 1 for line in moved) / max(1, total))


def units(lines: Sequence[str]) -> list[tuple[int, int]]:
    """The lines in runs, (first, end), that are moved whole or not at all. Takes O(text).

    A run is a fenced block, JSON over several lines, a list with what is indented below its items, each with the line
    that announces it (`Context:`); lines that wrap one sentence; else a line alone.
    """
    blocks = _Blocks(lines)
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(lines):
        end = blocks.end(place)
        if end > place:
            announced = bool(found) and _announces(lines[place - 1])
            first = found.pop()[0] if announced else place
        else:
            first, end = place, place + 1
            while end < len(lines) and _goes_on(lines[end - 1], lines[end]):
                end += 1
        found.append((first, end))
        place = end
    return found


class _Blocks:
    """Where the blocks end that begin at a line."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._balanced: list[int] = []
        # The shortest fence of each mark that nobody closes: a longer one is not closed either.
        self._open: dict[str, int] = {}

    def end(self, first: int) -> int:
        """`first` where no block begins. A fence or bracket that nobody closes begins none."""
        line = self._lines[first]
        mark = line.lstrip()[:2]
        if mark[:1] in _FENCES and (fence := _FENCE.match(line)):
            return self._fenced_end(first, fence[1])
        if mark[:1] in _OPENS:
            if not self._balanced:
                self._balanced = _balanced_ends(self._lines)
            return self._balanced[first] if self._balanced[first] > first + 1 else first
        return self._list_end(first) if _is_item(line, mark) else first

    def _list_end(self, first: int) -> int:
        lines, end = self._lines, first + 1
        while end < len(lines):
            line = lines[end]
            if not (line[:1] in _INDENTS and line.strip()) and not _is_item(line, line.lstrip()[:2]):
                break
            end += 1
        return end

    def _fenced_end(self, first: int, mark: str) -> int:
        if len(mark) >= self._open.get(mark[0], len(mark) + 1):
            return first
        for at in range(first + 1, len(self._lines)):
            line = self._lines[at].strip()
            if line.startswith(mark) and not line.strip(mark[0]):
                return at + 1
        self._open[mark[0]] = len(mark)
        return first


def _is_item(line: str, mark: str) -> bool:
    """`mark`: the line's first two characters behind its indent. Most lines are told by these alone."""
    may_be = mark[:1] in _BULLETS or mark[:1].isdigit() or mark[1:] in (".", ")")
    return may_be and _ITEM.match(line) is not None


def _balanced_ends(lines: Sequence[str]) -> list[int]:
    """For each line, where the brackets that open in it are closed; strings are not told apart from structure."""
    ends = [place + 1 for place in range(len(lines))]
    waiting: list[tuple[int, int]] = []
    depth = 0
    for at, line in enumerate(lines):
        waiting.append((at, depth))
        depth += sum(line.count(mark) for mark in _OPENS) - sum(line.count(mark) for mark in _CLOSES)
        while waiting and depth <= waiting[-1][1]:
            ends[waiting.pop()[0]] = at + 1
    return ends


def _announces(line: str) -> bool:
    return line.rstrip().rstrip("*_").endswith((":", "："))


def _goes_on(line: str, following: str) -> bool:
    """Whether a sentence wraps near a margin to the next line; a script without small letters shows none."""
    return len(line) >= LEAST_WRAPPED_CHARS and following[:1].islower() and not _SENTENCE_END.search(line)
