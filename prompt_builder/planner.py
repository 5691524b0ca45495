"""What goes into a prompt: chunks, turns and room for the answer, within the model's context window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prompt_builder.choice import Turn, against_standing, distinct, flat, ordered, turns
from prompt_builder.evidence import evidence_lines, most_tokens
from prompt_builder.layout import (
    block_tokens,
    blocks_of,
    for_template,
    past_block,
    repaired_references,
    scaffold_tokens,
)
from prompt_builder.template import ChatTemplate
from prompt_builder.types import (
    ChunkOrder,
    Dropped,
    Limits,
    PastMessage,
    Plan,
    PromptChunk,
    QuestionTooLong,
    Rendering,
    RenderingChoice,
    Tokenizer,
    Transcript,
)
from retrieval.types import Candidates

# History that must be cut is cut in steps of this many turns, so that the prompts of the next turns keep their
# front; a cut of one turn a time would move it at every turn.
TURNS_PER_CUT = 4

# Evidence is looked for in this many of the most relevant chunks: time grows with them, and the rest seldom hold it.
EVIDENCE_CHUNKS = 8


class Planner:
    """Pure: the same arguments give the same plan.

    In a window that is too small things leave in this order, each with a reason in `Plan.dropped`: chunks, least
    relevant first, down to one; then whole turns, oldest first, in steps of TURNS_PER_CUT (room that a step leaves
    over goes to chunks again); then `max_tokens` shrinks, down to `min_answer_tokens`; then evidence and the last
    chunk. A `max_tokens` above half of the window claims only that half against chunks and turns (a client that asks
    for everything must not lose its documents for it) and is cut to what is left. System text, facts and question
    always stay.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        instructions: str,
        *,
        rendering: RenderingChoice = "stripped",
        chunk_order: ChunkOrder = "relevance_last",
        evidence_lines: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instructions = instructions
        self._rendering: Rendering = "stripped" if rendering == "auto" else rendering
        self._chunk_order: ChunkOrder = chunk_order
        self._evidence_lines = evidence_lines
        self._evidence_tokens = most_tokens(evidence_lines, tokenizer.count)

    def plan(self, transcript: Transcript, candidates: Candidates, limits: Limits) -> Plan:
        """The largest plan that fits `limits`; raises QuestionTooLong when not even the question does."""
        wanted, clashes = distinct(candidates.items, limits.top_k)
        whole = self._draft(transcript, transcript.past, wanted, limits)
        if limits.window_tokens is None:
            return _and_dropped(self._with_evidence(whole, wanted), clashes)
        room = Room.of(limits, limits.window_tokens)
        if self.tokens(whole) + self._evidence_tokens <= room.prompt_tokens:
            plan = self._with_evidence(whole, wanted)
        else:
            plan = self._trimmed(transcript, wanted, limits, room)
        return self._clamped(_and_dropped(plan, clashes), room)

    def tokens(self, plan: Plan) -> int:
        """Prompt tokens of a plan, as the builder will count them."""
        blocks = for_template(blocks_of(self._instructions, plan), self._template)
        roles = [block.role for block in blocks]
        contents = sum(block_tokens(block, self._tokenizer) for block in blocks)
        return contents + scaffold_tokens(roles, self._tokenizer, self._template)

    def _draft(
        self, transcript: Transcript, past: Sequence[PastMessage], wanted: Sequence[PromptChunk], limits: Limits
    ) -> Plan:
        """The plan of these turns and chunks, without evidence."""
        kept = repaired_references(past) if self._rendering == "kept" else tuple(past)
        sent, referred, clashes = against_standing(wanted, kept if self._rendering == "kept" else ())
        return Plan(
            system=transcript.system,
            past=kept,
            rendering=self._rendering,
            chunks=ordered(sent, self._chunk_order),
            references=ordered(referred, self._chunk_order),
            evidence="",
            facts=transcript.facts,
            question=transcript.question,
            max_tokens=limits.max_tokens,
            dropped=tuple(clashes),
        )

    def _with_evidence(self, plan: Plan, wanted: Sequence[PromptChunk]) -> Plan:
        shown = {chunk.label for chunk in (*plan.chunks, *plan.references)}
        evidence = evidence_lines(
            plan.question,
            [chunk for chunk in wanted if chunk.label in shown][:EVIDENCE_CHUNKS],
            lines=self._evidence_lines,
            count=self._tokenizer.count,
        )
        return replace(plan, evidence=evidence)

    def _trimmed(self, transcript: Transcript, wanted: Sequence[PromptChunk], limits: Limits, room: "Room") -> Plan:
        self._refuse_if_too_long(self._draft(transcript, (), (), limits), room)
        groups = turns(transcript.past)

        def tokens(cut: int, chunks: int) -> int:
            return self.tokens(self._draft(transcript, flat(groups[cut:]), wanted[:chunks], limits))

        for_chunks = room.prompt_tokens - self._evidence_tokens
        cut, least_chunks = self._cut(len(groups), min(1, len(wanted)), tokens, for_chunks, room)
        chunks = least_chunks
        if least_chunks:
            # The largest number that fits: prompts only grow with the number of chunks.
            chunks += _first(len(wanted) - 1, lambda more: tokens(cut, 2 + more) > for_chunks)
        plan = self._draft(transcript, flat(groups[cut:]), wanted[:chunks], limits)
        dropped = [
            *self._dropped_chunks(wanted[chunks:], self.tokens(plan), room),
            *self._dropped_turns(groups[:cut], room),
        ]
        return self._evidence_if_it_fits(_and_dropped(plan, dropped), wanted, room)

    def _cut(
        self, turn_count: int, chunks: int, tokens: Callable[[int, int], int], for_chunks: int, room: "Room"
    ) -> tuple[int, int]:
        """How many oldest turns leave, and whether the most relevant chunk (1) or none (0) is sent."""
        if chunks and tokens(turn_count, chunks) > for_chunks:
            if tokens(turn_count, chunks) <= room.most_prompt_tokens:
                return turn_count, chunks
            chunks = 0
        most = for_chunks if chunks else room.prompt_tokens
        cut = _first(turn_count, lambda cut: tokens(cut, chunks) <= most)
        stepped = -(-cut // TURNS_PER_CUT) * TURNS_PER_CUT
        return (stepped if stepped < turn_count else cut), chunks

    def _evidence_if_it_fits(self, plan: Plan, wanted: Sequence[PromptChunk], room: "Room") -> Plan:
        without = self.tokens(plan)
        most = room.prompt_tokens if without <= room.prompt_tokens else room.most_prompt_tokens
        full = self._with_evidence(plan, wanted)
        tokens = self.tokens(full)
        if tokens <= most:
            return full
        reason = f"With evidence lines the prompt has {tokens} tokens, more than the {most} that fit."
        return _and_dropped(plan, [Dropped("evidence", "evidence", reason)])

    def _refuse_if_too_long(self, bare: Plan, room: "Room") -> None:
        tokens = self.tokens(bare)
        if tokens > room.most_prompt_tokens:
            question = self._tokenizer.count(bare.question)
            raise QuestionTooLong(question, tokens - question, room.window_tokens, room.least_answer_tokens)

    def _dropped_chunks(self, chunks: Sequence[PromptChunk], taken: int, room: "Room") -> list[Dropped]:
        """Least relevant first, as they leave."""
        dropped = []
        for chunk in reversed(chunks):
            size = len(chunk.rendered.token_ids) or self._tokenizer.count(chunk.rendered.text)
            reason = f"Its {size} tokens do not fit: {room}, and {taken} of them are taken."
            dropped.append(Dropped("chunk", chunk.label, reason))
        return dropped

    def _dropped_turns(self, groups: Sequence[Turn], room: "Room") -> list[Dropped]:
        dropped = []
        for place, turn in enumerate(groups, 1):
            size = sum(block_tokens(past_block(message, self._rendering), self._tokenizer) for message in turn)
            reason = f"Past turn {place} ({len(turn)} messages, {size} tokens) is left out: {room}."
            dropped.append(Dropped("turn", str(place), reason))
        return dropped

    def _clamped(self, plan: Plan, room: "Room") -> Plan:
        tokens = self.tokens(plan)
        left = room.window_tokens - tokens
        if plan.max_tokens is None or plan.max_tokens <= left:
            return plan
        reason = (
            f"{tokens} prompt tokens and max_tokens {plan.max_tokens} exceed the window of {room.window_tokens} "
            f"tokens: max_tokens is {left}."
        )
        return replace(_and_dropped(plan, [Dropped("max_tokens", str(plan.max_tokens), reason)]), max_tokens=left)


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens of the window.

    `prompt_tokens` are for the prompt while chunks and turns can still leave, `most_prompt_tokens` beside the least
    answer.
    """

    window_tokens: int
    prompt_tokens: int
    most_prompt_tokens: int
    least_answer_tokens: int

    @classmethod
    def of(cls, limits: Limits, window_tokens: int) -> "Room":
        asked = limits.min_answer_tokens if limits.max_tokens is None else limits.max_tokens
        least = min(asked, limits.min_answer_tokens)
        reserved = max(least, min(asked, window_tokens // 2))
        return cls(window_tokens, window_tokens - reserved, window_tokens - least, least)

    def __str__(self) -> str:
        return f"{max(0, self.prompt_tokens)} of the window's {self.window_tokens} tokens are for the prompt"


def _and_dropped(plan: Plan, dropped: Sequence[Dropped]) -> Plan:
    return replace(plan, dropped=(*plan.dropped, *dropped))


def _first(end: int, holds: Callable[[int], bool]) -> int:
    """The first number below `end` for which `holds`, which stays true from there on; else `end`."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
