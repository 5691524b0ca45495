"""Where text may be cut: paragraphs, then lines, then sentences, then windows of words or graphemes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import regex

# A whole is not counted when it is longer than this many characters per token of the budget: it is cut first.
LONGEST_TOKEN_CHARACTERS = 12
PARTS_PER_BUDGET = 16
_SAMPLE_CHARACTERS = 400

_PARAGRAPH = regex.compile(r"\n[ \t]*\n\s*")
_LINE = regex.compile(r"\n+")
# Latin-like scripts end a sentence by a mark and a space; Chinese, Japanese and Hindi by the mark alone.
_SENTENCE = regex.compile(r"""[.!?…؟]+["'”’»)\]]*\s+|[。！？｡।॥]+[”’」』）》]*\s*""")
_LAST_SPACE = regex.compile(r"(?r)\s|[,;:、，；：・—–]")
_GRAPHEME = regex.compile(r"\X")
_LEVELS = (_PARAGRAPH, _LINE, _SENTENCE)
PARAGRAPHS, LINES, SENTENCES, WINDOWS, HALVES = range(5)


@dataclass(frozen=True, slots=True)
class Span:
    """`text[start:end]` of a section, with the tokens that it takes; `level` is the next cut to try on it."""

    start: int
    end: int
    tokens: int
    level: int


class Cutter:
    """Cuts one section into contiguous spans of at most `budget_tokens`, at the best boundaries there are."""

    def __init__(self, text: str, budget_tokens: int, count: Callable[[str], int]) -> None:
        self._text = text
        self._budget = budget_tokens
        self._count = count

    def whole(self) -> Iterator[Span]:
        """The section as spans within the budget: paragraphs, and parts of those that are too long."""
        yield from self._within_budget(0, len(self._text), level=PARAGRAPHS)

    def finer(self, span: Span, deepest: int = HALVES) -> list[Span]:
        """The span in smaller parts by the first cut, no deeper than `deepest`, that parts it; else itself alone."""
        for level in range(span.level, deepest + 1):
            parts = self._cut(span.start, span.end, level)
            if len(parts) > 1:
                return [part for start, end in parts for part in self._within_budget(start, end, level + 1)]
        return [span]

    def _within_budget(self, start: int, end: int, level: int) -> Iterator[Span]:
        """Iterative, so that the levels of cutting cost no recursion depth on long texts."""
        stack = [(start, end, level)]
        while stack:
            start, end, level = stack.pop()
            if end - start <= self._budget * LONGEST_TOKEN_CHARACTERS or end - start == 1:
                tokens = self._count(self._text[start:end])
                if tokens <= self._budget or end - start == 1:
                    yield Span(start, end, tokens, min(level, HALVES))
                    continue
            parts = self._cut(start, end, level)
            # The last level halves whatever it is given, so it may be needed again.
            deeper = min(level + 1, HALVES)
            stack.extend((part_start, part_end, deeper) for part_start, part_end in reversed(parts))

    def _cut(self, start: int, end: int, level: int) -> list[tuple[int, int]]:
        if level < len(_LEVELS):
            cuts = [match.end() for match in _LEVELS[level].finditer(self._text, start, end) if match.end() < end]
        elif level == WINDOWS:
            cuts = self._windows(start, end)
        else:
            cuts = [(start + end) // 2] if end - start > 1 else []
        return list(zip([start, *cuts], [*cuts, end], strict=True))

    def _windows(self, start: int, end: int) -> list[int]:
        """Cuts about every sixteenth of a budget, behind a space or a comma, else between graphemes."""
        sample = self._text[start : min(end, start + _SAMPLE_CHARACTERS)]
        characters_per_token = len(sample) / max(1, self._count(sample))
        size = max(1, int(self._budget / PARTS_PER_BUDGET * characters_per_token))
        cuts, position = [], start
        while end - position > size:
            limit = position + size
            # The window's second half, from behind: not so far back that windows become tiny.
            space = _LAST_SPACE.search(self._text, position + size // 2, limit)
            cut = space.end() if space and space.end() > position else self._grapheme_end(position, limit, end)
            if cut >= end:
                break
            cuts.append(cut)
            position = cut
        return cuts

    def _grapheme_end(self, position: int, limit: int, end: int) -> int:
        """The first end of a grapheme at or behind `limit`, within a few code points; else `limit` itself."""
        match = None
        for match in _GRAPHEME.finditer(self._text, max(position, limit - 32), min(end, limit + 32)):
            if match.end() >= limit:
                break
        return match.end() if match and match.end() - limit < 32 else limit
