"""For any text and any limit: chunks are bounded, in order, and hold everything but white space."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.chunking import chunk
from retrieval.records import ChunkingStrategy
from retrieval.sections import Parsed, Section
from retrieval.types import RenderedChunk


class PieceRenderer:
    """Counts like a byte-level tokenizer: words in pieces of five letters, other scripts by their bytes."""

    fingerprint = "pieces:1"

    def count(self, text: str) -> int:
        return len(self._ids(text))

    def render(self, title: str, text: str) -> RenderedChunk:
        # Quotes a line like the real renderer does, so that the rendered block has more tokens than its parts.
        block = f"[k000] {title}\n{text.replace('Question:', '> Question:')}\n\n"
        return RenderedChunk("k000", block, self._ids(block))

    def _ids(self, text: str) -> tuple[int, ...]:
        pieces = re.findall(r"[ ]?[A-Za-z]{1,5}|[^A-Za-z]", text)
        return tuple(n for piece in pieces for n in range(1 if piece.isascii() else len(piece.encode())))


alphabet = st.one_of(
    st.sampled_from(
        [" ", "\n", "\n\n", "a", "word", ". ", "。", "!", "ệ", "漢", "ก", "한", "नि", "👩‍👩‍👧", "Question:", "\t"]
    ),
    st.characters(exclude_categories=["Cs"]),
)
bodies = st.lists(alphabet, max_size=400).map("".join)
paths = st.lists(st.text(max_size=60), max_size=4).map(tuple)
sections = st.lists(st.builds(Section, paths, bodies, st.booleans()), min_size=1, max_size=3)
strategies = st.builds(ChunkingStrategy, st.integers(32, 120), st.integers(0, 60))


def visible(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=150, deadline=None)
@given(sections, strategies)
def test_every_chunk_is_within_the_limit_and_in_order(parts: list[Section], strategy: ChunkingStrategy) -> None:
    drafts = list(chunk(Parsed(tuple(parts), "text/plain"), PieceRenderer(), strategy))
    assert [draft.ordinal for draft in drafts] == list(range(len(drafts)))
    for draft in drafts:
        assert draft.text.strip() == draft.text != ""
        assert len(draft.rendered.token_ids) <= strategy.max_tokens


@settings(max_examples=150, deadline=None)
@given(bodies, strategies, st.booleans())
def test_nothing_is_lost_and_nothing_is_out_of_place(text: str, strategy: ChunkingStrategy, rows: bool) -> None:
    drafts = list(chunk(Parsed((Section((), text, rows),), "text/plain"), PieceRenderer(), strategy))
    whole, end = visible(text), 0
    for draft in drafts:
        body = visible(draft.text)
        # Each chunk begins where the one before ended, or overlaps with it, and reaches further.
        starts = [at for at in range(end, -1, -1) if whole.startswith(body, at) and at + len(body) > end]
        assert starts
        end = starts[0] + len(body)
    assert end == len(whole)


@settings(max_examples=50, deadline=None)
@given(bodies, strategies)
def test_the_same_text_always_gives_the_same_chunks(text: str, strategy: ChunkingStrategy) -> None:
    parsed = Parsed((Section(("T",), text),), "text/plain")
    assert list(chunk(parsed, PieceRenderer(), strategy)) == list(chunk(parsed, PieceRenderer(), strategy))
