"""Volatile system texts, whatever they hold: no changing value is shown, no word is lost, what stays is stable."""

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.volatile import SystemTexts
from prompt_builder.movable import split, units
from prompt_builder.volatile import Mask, matched

SAID = st.text(alphabet="abcdefghij .,:-*`{}[]\té한", max_size=30)
LINES = st.lists(SAID, max_size=12)
# Letters that no line of the texts around them holds.
VALUE = st.text(alphabet="uvwxyz", min_size=1, max_size=8)


@given(LINES, st.lists(VALUE, min_size=5, max_size=9, unique=True), st.integers(0, 12), SAID, SAID)
def test_a_report_never_shows_a_value_that_changes(
    lines: list[str], values: list[str], at: int, before: str, after: str
) -> None:
    texts = SystemTexts("report")
    for value in values:
        told = [*lines[:at], f"{before} {value} {after}", *lines[at:]]
        observed = texts.observe("t", "m", "\n".join(told), len)
        if observed.report is not None:
            shown = " ".join(line.text for line in observed.report.lines)
            assert not set(re.findall(r"[u-z]+", shown))


@settings(max_examples=60)
@given(LINES, st.lists(VALUE, min_size=3, max_size=9), st.integers(0, 12), st.data())
def test_what_is_moved_and_what_stays_are_the_whole_text(
    lines: list[str], values: list[str], at: int, data: st.DataObject
) -> None:
    body = [f"{line}{number}" for number, line in enumerate(lines * 3)]
    texts = SystemTexts("move")
    stays = set()
    for value in values:
        text = "\n".join([*body[:at], f"Now {value}", *body[at:]])
        observed = texts.observe("t", "m", text, len)
        if observed.split is not None:
            together = [*observed.split.stays.split("\n"), *observed.split.moved]
            assert sorted(filter(None, together)) == sorted(filter(None, text.split("\n")))
            stays.add(observed.split.stays)
    assert len(stays) <= 1


@given(LINES, st.sets(st.integers(0, 11)))
def test_a_split_keeps_every_line_once_and_in_order(lines: list[str], changing: set[int]) -> None:
    parts = split(lines, changing)
    assert len(parts.moved) + (len(parts.stays.split("\n")) if len(parts.moved) < len(lines) else 0) == len(lines)
    runs = units(lines)
    assert [place for first, end in runs for place in range(first, end)] == list(range(len(lines)))


@given(LINES, LINES)
def test_matched_lines_are_equal_and_in_order_on_both_sides(old: list[str], new: list[str]) -> None:
    pairs = matched(old, new)
    assert all(old[one] == new[other] for one, other in pairs)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(pairs))
    assert len(matched(old, old)) == len(old)


@given(st.lists(SAID, min_size=2, max_size=6))
def test_a_mask_is_the_beginning_and_end_of_every_version(versions: list[str]) -> None:
    mask = Mask.between(versions[0], versions[1])
    for version in versions[2:]:
        mask = mask.narrowed(version)
    for version in versions:
        assert version.startswith(mask.before)
        assert version.endswith(mask.after)
        assert len(mask.before) + len(mask.after) <= len(version)
