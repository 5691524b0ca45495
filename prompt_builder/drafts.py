"""Plans in the making: a front, chunks in their forms, evidence, and what they come to in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_builder.bodies import SentenceMemo
from prompt_builder.choice import against_standing, ordered, ranked
from prompt_builder.companions import NOTHING_KNOWN, Together
from prompt_builder.evidence import evidence_lines, most_tokens
from prompt_builder.knapsack import Form
from prompt_builder.material import Front, Material, Measured
from prompt_builder.order import Piece, by_relevance, likely_order, resident_places
from prompt_builder.outlook import Prefix
from prompt_builder.types import ChunkOrder, Dropped, Plan, PromptChunk, Tokenizer, TurnContext

# Evidence is looked for in this many of the most relevant chunks: time grows with them, and the rest seldom hold it.
EVIDENCE_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How chunks and evidence are to stand: the request's wishes where it has any, else the settings."""

    order: ChunkOrder
    pin_last: int
    evidence_lines: int


@dataclass(frozen=True, slots=True)
class Draft:
    """`relevance` is the sum of the values of all forms in the prompt, `tail` the new question's pieces.

    The first `resident` of the chunks continue what a replica holds of the front.
    """

    front: Front
    chunks: tuple[PromptChunk, ...]
    references: tuple[PromptChunk, ...]
    evidence: str
    relevance: float
    tail: Measured
    clashes: tuple[Dropped, ...]
    resident: int = 0

    @property
    def tokens(self) -> int:
        return self.front.tokens + self.tail.tokens

    @property
    def shown(self) -> frozenset[str]:
        return frozenset(chunk.label for chunk in (*self.chunks, *self.references))


class Drafts:
    """Makes the drafts of one request; evidence for the same chunks is looked for once.

    `past` is what other requests of the tenant had, for the order `reuse`.
    """

    def __init__(
        self,
        material: Material,
        layout: Layout,
        tokenizer: Tokenizer,
        memo: SentenceMemo,
        past: Together = NOTHING_KNOWN,
    ) -> None:
        self.material = material
        self.bare = material.bare
        self.layout = layout
        self._tokenizer = tokenizer
        self._memo = memo
        self._past = past
        self.evidence_tokens = most_tokens(layout.evidence_lines, tokenizer.count)
        self._evidence: dict[frozenset[str], str] = {}

    def draft(
        self, front: Front, forms: Sequence[Form], *, evidence: bool = False, first: Sequence[str] = ()
    ) -> Draft:
        """`first` are labels of chunks that come before the others, in that order."""
        sent, referred, clashes = against_standing(
            [form.chunk for form in forms], self.material.chunks_standing(front)
        )
        chunks = ordered(sent, self.layout.order, self.layout.pin_last, first)
        references = ordered(referred, self.layout.order)
        shown = {chunk.label for chunk in (*chunks, *references)}
        lines = self.evidence([form.whole for form in forms if form.label in shown]) if evidence else ""
        tail = self.material.tail(self._context(chunks, references, lines))
        relevance = sum(form.value for form in forms if form.label in shown)
        return Draft(front, chunks, references, lines, relevance, tail, tuple(clashes))

    def behind(self, draft: Draft, prefix: Prefix) -> Draft:
        """For the order `reuse`: the chunks first that continue the prefix, which is the front's, on a replica."""
        if self.layout.order != "reuse" or not draft.chunks:
            return draft
        chunks = ranked(draft.chunks)
        pin_last = self.layout.pin_last
        path = resident_places(self._pieces(chunks), prefix, pin_last)
        places = (*path, *by_relevance(len(chunks), path, pin_last))
        return self._with_chunks(draft, [chunks[place] for place in places], len(path))

    def settled(self, draft: Draft) -> Draft:
        """For the order `reuse`: the other chunks as requests to come are likely to reuse them.

        Nobody else's request begins with this conversation's past turns: behind these the most relevant stay last.
        """
        if self.layout.order != "reuse" or draft.front.past or self.bare.summary:
            return draft
        chunks = ranked(draft.chunks)
        path = [chunks.index(chunk) for chunk in draft.chunks[: draft.resident]]
        places = (*path, *likely_order(self._pieces(chunks), path, self._past, self.layout.pin_last))
        return self._with_chunks(draft, [chunks[place] for place in places], len(path))

    def _with_chunks(self, draft: Draft, chunks: Sequence[PromptChunk], resident: int) -> Draft:
        if tuple(chunks) == draft.chunks:
            return draft if resident == draft.resident else replace(draft, resident=resident)
        context = self._context(chunks, draft.references, draft.evidence)
        return replace(draft, chunks=tuple(chunks), tail=self.material.tail(context), resident=resident)

    def _context(
        self, chunks: Sequence[PromptChunk], references: Sequence[PromptChunk], evidence: str
    ) -> TurnContext:
        labels = tuple(chunk.label for chunk in references)
        return TurnContext(tuple(chunks), labels, evidence, self.bare.facts)

    def _pieces(self, chunks: Sequence[PromptChunk]) -> list[Piece]:
        return [
            Piece(chunk.label, chunk.rendered.token_ids, chunk_tokens(chunk, self._tokenizer), chunk.form == "whole")
            for chunk in chunks
        ]

    def evidence(self, chunks: Sequence[PromptChunk]) -> str:
        """Quotes from the whole text of the most relevant chunks; `chunks` in order of relevance."""
        looked_at = ranked(chunks)[:EVIDENCE_CHUNKS]
        key = frozenset(chunk.label for chunk in looked_at)
        if key not in self._evidence:
            self._evidence[key] = evidence_lines(
                self.bare.question,
                looked_at,
                lines=self.layout.evidence_lines,
                count=self._tokenizer.count,
                memo=self._memo,
            )
        return self._evidence[key]

    def plan(self, draft: Draft, dropped: Sequence[Dropped]) -> Plan:
        front = draft.front
        return replace(
            self.bare,
            past=front.past,
            stripped=front.stripped,
            rendering=front.rendering,
            chunks=draft.chunks,
            references=draft.references,
            evidence=draft.evidence,
            dropped=(*draft.clashes, *dropped),
        )


def whole_forms(chunks: Sequence[PromptChunk], tokenizer: Tokenizer) -> list[Form]:
    return [Form(chunk, chunk_tokens(chunk, tokenizer), chunk.relevance) for chunk in chunks]


def chunk_tokens(chunk: PromptChunk, tokenizer: Tokenizer) -> int:
    return len(chunk.rendered.token_ids) or tokenizer.count(chunk.rendered.text)
