"""What changes between two versions of a system text: lines that agree, what a line keeps, and what kind of thing it
does not keep. Pure."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ChangeKind = Literal["clock", "date", "id", "number", "other"]

HOLE = "…"
_CONTEXT_CHARS = 50
_MOST_DIFFERENCE_CHARS = 400

# Words end at spaces and at the punctuation that stands between a name and its value, not inside ids and addresses.
_GAP = r"\s:=,;\"'<>\[\](){}|：，；。、（）「」"
_WORD = re.compile(rf"[^{_GAP}]+")
_FIRST_WORD = re.compile(rf"[^{_GAP}]*")
_HAS_DIGIT = re.compile(r"\d")
_HOLES = re.compile(rf"{HOLE}(?:[\s:./,+-]*{HOLE})+")

_TIME = re.compile(
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b\.?)?|\d{1,2}\s?[ap]m\b|\d+\s?[時时시]\s?\d+\s?[分분]",
    re.IGNORECASE,
)
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_NAMED_DAY = re.compile(
    rf"\b(?:(?:{_MONTHS})[a-z]*\.?|(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?)\b", re.IGNORECASE
)
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    r"|\d+\s?[年月日년월일]|(?:ngày|tháng|năm)\s\d+|\d{1,2}(?:st|nd|rd|th)\b",
    re.IGNORECASE,
)
_ID = re.compile(
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
    r"|\b(?=[\w-]*\d)[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{2,})*\b"
    r"|\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{6,}\b"
)
_NUMBER = re.compile(r"[-+]?\d[\d.,_]*")


@dataclass(frozen=True, slots=True)
class Mask:
    """What all versions of a line begin and end with, in whole words; what stands between changes."""

    before: str
    after: str

    @staticmethod
    def between(one: str, other: str) -> "Mask":
        return Mask(one, one).narrowed(other)

    def narrowed(self, line: str) -> "Mask":
        """What this line has of it as well."""
        before = _prefix(self.before, line)
        return Mask(before, _suffix(self.after, line[len(before) :]))

    @property
    def excerpt(self) -> str:
        """The line with `…` for what changes and for every word with a digit; about 100 characters at most."""
        before, after = self.before, self.after
        if len(before) > _CONTEXT_CHARS:
            before = HOLE + _FIRST_WORD.sub("", before[-_CONTEXT_CHARS:], count=1)
        if len(after) > _CONTEXT_CHARS:
            after = after[: _word_start(after, _CONTEXT_CHARS)] + HOLE
        return _HOLES.sub(HOLE, f"{_without_digits(before)}{HOLE}{_without_digits(after)}").strip()


NOTHING_KEPT = Mask("", "")


def kind_of(one: str, other: str) -> ChangeKind:
    """What differs between two versions of a line: a time of day, a date, an id, a number, or something else.

    Only what stands around the difference is looked at; a long one is something else.
    """
    head = max(0, common_prefix(one, other) - _CONTEXT_CHARS)
    tail = max(0, common_prefix(one[head:][::-1], other[head:][::-1]) - _CONTEXT_CHARS)
    pair = (one[head : len(one) - tail], other[head : len(other) - tail])
    if max(map(len, pair)) > _MOST_DIFFERENCE_CHARS:
        return "other"
    timeless = [_TIME.sub("", line) for line in pair]
    if timeless[0] == timeless[1]:
        return "clock"
    dateless = [_NAMED_DAY.sub("", _DATE.sub("", line)) for line in timeless]
    told = [_TIME.findall(line) for line in pair]
    if dateless[0] == dateless[1] or _names_days(pair, dateless):
        return "date" if told[0] == told[1] else "clock"
    without_ids = [_ID.sub("", line) for line in pair]
    if without_ids[0] == without_ids[1]:
        return "id"
    without_numbers = [_NUMBER.sub("", line) for line in pair]
    if without_numbers[0] == without_numbers[1]:
        return "number"
    return "other"


def matched(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Places of equal lines, (old, new), both rising: equal ends, between them lines that stand once in both.

    Takes O(n log n): the longest rising run of the lines that are unique in both (patience), and their equal
    neighbours.
    """
    shorter = min(len(old), len(new))
    head = 0
    while head < shorter and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    pairs = [(place, place) for place in range(head)]
    pairs += _between(old, new, head, len(old) - tail, len(new) - tail)
    pairs += [(len(old) - back, len(new) - back) for back in range(tail, 0, -1)]
    return pairs


def _between(old: Sequence[str], new: Sequence[str], first: int, old_end: int, new_end: int) -> list[tuple[int, int]]:
    if first >= old_end or first >= new_end:
        return []
    anchors = _rising(_unique_in_both(old, new, first, old_end, new_end))
    pairs: list[tuple[int, int]] = []
    old_at, new_at = first, first
    for old_next, new_next in [*anchors, (old_end, new_end)]:
        inner: list[tuple[int, int]] = []
        while old_at < old_next and new_at < new_next and old[old_at] == new[new_at]:
            inner.append((old_at, new_at))
            old_at, new_at = old_at + 1, new_at + 1
        back_old, back_new = old_next, new_next
        behind: list[tuple[int, int]] = []
        while back_old > old_at and back_new > new_at and old[back_old - 1] == new[back_new - 1]:
            back_old, back_new = back_old - 1, back_new - 1
            behind.append((back_old, back_new))
        pairs += [*inner, *behind[::-1]]
        if old_next < old_end:
            pairs.append((old_next, new_next))
        old_at, new_at = old_next + 1, new_next + 1
    return pairs


def _unique_in_both(
    old: Sequence[str], new: Sequence[str], first: int, old_end: int, new_end: int
) -> list[tuple[int, int]]:
    """In the order of `new`."""
    old_counts, new_counts = Counter(old[first:old_end]), Counter(new[first:new_end])
    places = {old[place]: place for place in range(first, old_end) if old_counts[old[place]] == 1}
    return [
        (places[new[place]], place)
        for place in range(first, new_end)
        if new_counts[new[place]] == 1 and new[place] in places
    ]


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs whose first numbers rise."""
    ends: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for index, (place, _) in enumerate(pairs):
        pile = bisect_left(ends, place)
        before.append(at[pile - 1] if pile else -1)
        if pile == len(ends):
            ends.append(place)
            at.append(index)
        else:
            ends[pile], at[pile] = place, index
    run: list[tuple[int, int]] = []
    index = at[-1] if at else -1
    while index >= 0:
        run.append(pairs[index])
        index = before[index]
    return run[::-1]


def _names_days(pair: Sequence[str], dateless: Sequence[str]) -> bool:
    """Lines that name a month or a weekday, and differ but for that in numbers alone."""
    if not all(_NAMED_DAY.search(line) for line in pair):
        return False
    return _NUMBER.sub("", dateless[0]) == _NUMBER.sub("", dateless[1])


def _prefix(kept: str, line: str) -> str:
    """What both begin with, in whole words of both."""
    shared = common_prefix(kept, line)
    if _splits_word(kept, shared) or _splits_word(line, shared):
        shared = _word_start(kept, shared)
    return kept[:shared]


def _suffix(kept: str, line: str) -> str:
    """What both end with, in whole words of both."""
    shared = common_prefix(kept[::-1], line[::-1])
    if _splits_word(kept, len(kept) - shared) or _splits_word(line, len(line) - shared):
        found = _FIRST_WORD.match(kept, len(kept) - shared)
        return kept[found.end() :] if found else ""
    return kept[len(kept) - shared :]


def _word_start(text: str, place: int) -> int:
    while place > 0 and _WORD.match(text[place - 1]):
        place -= 1
    return place


def _splits_word(text: str, place: int) -> bool:
    return 0 < place < len(text) and bool(_WORD.match(text[place - 1]) and _WORD.match(text[place]))


def common_prefix(one: str, other: str) -> int:
    """How many characters both begin with; found by halving, for comparing slices is quick."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _without_digits(text: str) -> str:
    return _WORD.sub(lambda word: HOLE if _HAS_DIGIT.search(word[0]) else word[0], text)
