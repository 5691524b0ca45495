"""Plans in the making: a front, chunks in their forms, evidence, and what they come to in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_builder.choice import against_standing, ordered
from prompt_builder.evidence import SentenceMemo, evidence_lines, most_tokens
from prompt_builder.knapsack import Form
from prompt_builder.material import Front, Material, Measured
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
    """`relevance` is the sum of the values of all forms in the prompt, `tail` the new question's pieces."""

    front: Front
    chunks: tuple[PromptChunk, ...]
    references: tuple[PromptChunk, ...]
    evidence: str
    relevance: float
    tail: Measured
    clashes: tuple[Dropped, ...]

    @property
    def tokens(self) -> int:
        return self.front.tokens + self.tail.tokens

    @property
    def shown(self) -> frozenset[str]:
        return frozenset(chunk.label for chunk in (*self.chunks, *self.references))


class Drafts:
    """Makes the drafts of one request; evidence for the same chunks is looked for once."""

    def __init__(
        self, material: Material, bare: Plan, layout: Layout, tokenizer: Tokenizer, memo: SentenceMemo
    ) -> None:
        self.material = material
        self.bare = bare
        self.layout = layout
        self._tokenizer = tokenizer
        self._memo = memo
        self.evidence_tokens = most_tokens(layout.evidence_lines, tokenizer.count)
        self._evidence: dict[frozenset[str], str] = {}

    def draft(
        self, front: Front, forms: Sequence[Form], *, evidence: bool = False, first: Sequence[str] = ()
    ) -> Draft:
        """`first` are labels of chunks that come before the others, in that order."""
        sent, referred, clashes = against_standing([form.chunk for form in forms], front.past)
        chunks = ordered(sent, self.layout.order, self.layout.pin_last, first)
        references = ordered(referred, self.layout.order)
        shown = {chunk.label for chunk in (*chunks, *references)}
        lines = self.evidence([form.chunk for form in forms if form.chunk.label in shown]) if evidence else ""
        context = TurnContext(chunks, tuple(chunk.label for chunk in references), lines, self.bare.facts)
        relevance = sum(form.value for form in forms if form.chunk.label in shown)
        return Draft(front, chunks, references, lines, relevance, self.material.tail(context), tuple(clashes))

    def evidence(self, chunks: Sequence[PromptChunk]) -> str:
        """Quotes from the whole text of the most relevant chunks; `chunks` in order of relevance."""
        looked_at = sorted(chunks, key=lambda chunk: (-chunk.relevance, chunk.label))[:EVIDENCE_CHUNKS]
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
