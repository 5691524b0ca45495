"""Sections to chunks, bounded in the served model's tokens as they will stand in a prompt."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from retrieval.records import ChunkingStrategy
from retrieval.sections import Parsed, Section
from retrieval.spans import LINES, SENTENCES, Cutter, Span
from retrieval.types import ChunkRenderer, RenderedChunk, UnusableFile

HEADING_SEPARATOR = " > "
# A chunk that ends at a boundary with less than this share of the budget takes part of what follows.
LEAST_FILL = 1 / 3
LEAST_BODY_TOKENS = 8
_BLANK_LINES = re.compile(r"\n[ \t]*\n\s*\n")
_WIDE_SPACE = re.compile(r"[ \t\u00a0\u3000]{16,}")


@dataclass(frozen=True, slots=True)
class ChunkDraft:
    """A chunk before it is embedded. `title` is the heading path, `text` the body."""

    ordinal: int
    title: str
    text: str
    rendered: RenderedChunk


def chunk(parsed: Parsed, renderer: ChunkRenderer, strategy: ChunkingStrategy) -> Iterator[ChunkDraft]:
    """Chunks in reading order, made as they are asked for.

    Each rendered block has at most `strategy.max_tokens`. Cuts fall between paragraphs, else lines (rows of a
    table are whole wherever they fit), sentences, words, graphemes; neighbours of one section share up to
    `strategy.overlap_tokens` of whole sentences or words. Everything but white space is in some chunk.
    CPU-bound: every text is tokenized about twice. Raises UnusableFile when `max_tokens` leaves no room beside a
    label.
    """
    ordinal = 0
    for section in parsed.sections:
        for title, text, rendered in _Packer(section, renderer, strategy).chunks():
            yield ChunkDraft(ordinal, title, text, rendered)
            ordinal += 1


class _Packer:
    """Fills chunks of one section from the front; spans that do not fit go back to the front of the queue."""

    def __init__(self, section: Section, renderer: ChunkRenderer, strategy: ChunkingStrategy) -> None:
        self._renderer = renderer
        self._max_tokens = strategy.max_tokens
        self._title, title_tokens = self._fitting_title(section.heading_path)
        self._budget = strategy.max_tokens - title_tokens
        self._overlap = min(strategy.overlap_tokens, self._budget // 2)
        self._least = 0.0 if section.rows else self._budget * LEAST_FILL
        self._deepest_shared = LINES if section.rows else SENTENCES
        # Long runs of white space cost tokens and say nothing.
        self._text = _WIDE_SPACE.sub("    ", _BLANK_LINES.sub("\n\n", section.text))
        self._cutter = Cutter(self._text, self._budget, renderer.count)
        self._source = self._cutter.whole()
        self._returned: list[Span] = []

    def chunks(self) -> Iterator[tuple[str, str, RenderedChunk]]:
        shared: list[Span] = []
        while taken := self._fill(shared):
            shared, taken, rendered = self._fit(shared, taken)
            if self._text[taken[0].start : taken[-1].end].strip():
                yield self._title, self._slice([*shared, *taken]), rendered
            shared = self._tail(taken)

    def _fill(self, shared: list[Span]) -> list[Span]:
        """The spans of the next chunk; `shared`, from the chunk before, is emptied where it takes too much room."""
        taken: list[Span] = []
        used = sum(span.tokens for span in shared)
        while (span := self._next()) is not None:
            if used + span.tokens <= self._budget or not (taken or shared):
                taken.append(span)
                used += span.tokens
                continue
            if not taken:
                shared.clear()
                used = 0
            elif used < self._least and len(parts := self._cutter.finer(span)) > 1:
                self._give_back(parts)
                continue
            else:
                self._give_back([span])
                break
            self._give_back([span])
        return taken

    def _fit(self, shared: list[Span], taken: list[Span]) -> tuple[list[Span], list[Span], RenderedChunk]:
        """What of the spans is within the limit once rendered.

        Tokens of parts do not quite add up to those of the whole, and rendering may quote a line.
        """
        while True:
            rendered = self._renderer.render(self._title, self._slice([*shared, *taken]))
            if self._size(rendered) <= self._max_tokens:
                return shared, taken, rendered
            if shared:
                shared = []
            elif len(taken) > 1:
                self._give_back([taken.pop()])
            else:
                first, *rest = self._cutter.finer(taken[0])
                if not rest:
                    raise _no_room(self._max_tokens)
                self._give_back(rest)
                taken = [first]

    def _tail(self, taken: list[Span]) -> list[Span]:
        """The last whole sentences, rows or windows that the next chunk repeats."""
        tail: list[Span] = []
        room, stack = self._overlap, list(taken)
        while stack and room > 0:
            span = stack.pop()
            if span.tokens <= room:
                tail.append(span)
                room -= span.tokens
                continue
            parts = self._cutter.finer(span, self._deepest_shared)
            if len(parts) == 1:
                break
            stack.extend(parts)
        return tail[::-1]

    def _next(self) -> Span | None:
        return self._returned.pop() if self._returned else next(self._source, None)

    def _give_back(self, spans: list[Span]) -> None:
        self._returned.extend(reversed(spans))

    def _slice(self, spans: list[Span]) -> str:
        return self._text[spans[0].start : spans[-1].end].strip()

    def _size(self, rendered: RenderedChunk) -> int:
        return len(rendered.token_ids) or self._renderer.count(rendered.text)

    def _fitting_title(self, heading_path: tuple[str, ...]) -> tuple[str, int]:
        """The heading path in at most a third of the limit, and the tokens of a block without a body.

        The nearest headings stay; one that is too long alone is cut.
        """
        empty_tokens = self._size(self._renderer.render("", ""))
        if empty_tokens + LEAST_BODY_TOKENS > self._max_tokens:
            raise _no_room(self._max_tokens)
        path = heading_path
        while path:
            title = HEADING_SEPARATOR.join(path)
            tokens = self._size(self._renderer.render(title, ""))
            if tokens <= empty_tokens + self._max_tokens // 3:
                return title, tokens
            if len(path) > 1:
                path = path[1:]
            else:
                cut = path[0][: len(path[0]) // 2].rstrip("… ")
                path = (f"{cut}…",) if cut else ()
        return "", empty_tokens


def _no_room(max_tokens: int) -> UnusableFile:
    return UnusableFile(
        "invalid_file", f"Chunks of {max_tokens} tokens leave no room for text beside their label. Allow more tokens."
    )
