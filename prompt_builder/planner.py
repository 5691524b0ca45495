"""What goes into a prompt: chunks, turns and room for the answer, within the model's context window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_builder.evidence import evidence_lines
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
    Candidate,
    ChunkOrder,
    Dropped,
    Limits,
    PastMessage,
    Plan,
    PromptChunk,
    QuestionTooLong,
    Rendering,
    Tokenizer,
    Transcript,
)
from retrieval.types import Candidates

# History that must be cut is cut in steps of this many turns, so that the prompts of the next turns keep their
# front; a cut of one turn a time would move it at every turn.
TURNS_PER_CUT = 4

Turn = Sequence[PastMessage]


class Planner:
    """Pure: the same arguments give the same plan.

    In a window that is too small things leave in this order, each with a reason in `Plan.dropped`: chunks, least
    relevant first, down to one; then whole turns, oldest first; then `max_tokens` shrinks, down to
    `min_answer_tokens`; then evidence and the last chunk. A `max_tokens` above half of the window claims only that
    half against chunks and turns (a client that asks for everything must not lose its documents for it) and is
    cut to what is left. System text, facts and question always stay.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        instructions: str,
        *,
        rendering: Rendering = "stripped",
        chunk_order: ChunkOrder = "relevance_last",
        evidence_lines: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instructions = instructions
        self._rendering: Rendering = rendering
        self._chunk_order: ChunkOrder = chunk_order
        self._evidence_lines = evidence_lines

    def plan(self, transcript: Transcript, candidates: Candidates, limits: Limits) -> Plan:
        """The largest plan that fits `limits`; raises QuestionTooLong when not even the question does."""
        wanted, dropped = _distinct(candidates.items, limits.top_k)
        whole = self._draft(transcript, transcript.past, wanted, limits.max_tokens)
        if limits.window_tokens is None:
            return replace(whole, dropped=tuple(dropped))
        room = _Room.of(limits, limits.window_tokens)
        if self.tokens(whole) <= room.prompt_tokens:
            return self._clamped(whole, room, dropped)
        plan = self._trimmed(transcript, wanted, room, dropped)
        return self._clamped(plan, room, dropped)

    def tokens(self, plan: Plan) -> int:
        """Prompt tokens of a plan, as the builder will count them."""
        blocks = for_template(blocks_of(self._instructions, plan), self._template)
        roles = [block.role for block in blocks]
        contents = sum(block_tokens(block, self._tokenizer) for block in blocks)
        return contents + scaffold_tokens(roles, self._tokenizer, self._template)

    def _draft(
        self,
        transcript: Transcript,
        past: Sequence[PastMessage],
        wanted: Sequence[PromptChunk],
        max_tokens: int | None,
    ) -> Plan:
        kept = repaired_references(past) if self._rendering == "kept" else tuple(past)
        standing = _standing_texts(kept) if self._rendering == "kept" else {}
        sent = [chunk for chunk in wanted if chunk.label not in standing]
        referred = [chunk for chunk in wanted if standing.get(chunk.label) == chunk.rendered.text]
        ordered = _ordered(sent, self._chunk_order)
        evidence = evidence_lines(
            transcript.question, [*sent, *referred], lines=self._evidence_lines, count=self._tokenizer.count
        )
        return Plan(
            system=transcript.system,
            past=kept,
            rendering=self._rendering,
            chunks=ordered,
            references=_ordered(referred, self._chunk_order),
            evidence=evidence,
            facts=transcript.facts,
            question=transcript.question,
            max_tokens=max_tokens,
            dropped=(),
        )

    def _trimmed(
        self, transcript: Transcript, wanted: Sequence[PromptChunk], room: "_Room", dropped: list[Dropped]
    ) -> Plan:
        bare = self._draft(transcript, (), (), room.max_tokens)
        fixed_tokens = self.tokens(bare)
        if fixed_tokens > room.most_prompt_tokens:
            question_tokens = self._tokenizer.count(transcript.question)
            raise QuestionTooLong(
                question_tokens, fixed_tokens - question_tokens, room.window_tokens, room.least_answer_tokens
            )
        turns = _turns(transcript.past)
        first = wanted[:1]
        cut, chunks = self._first_cut(transcript, turns, first, room)
        past = [message for turn in turns[cut:] for message in turn]
        plan = self._draft(transcript, past, chunks, room.max_tokens)
        for more in range(len(chunks) + 1, len(wanted) + 1) if chunks else ():
            larger = self._draft(transcript, past, wanted[:more], room.max_tokens)
            if self.tokens(larger) > room.prompt_tokens:
                break
            plan, chunks = larger, wanted[:more]
        plan = self._without_evidence_if_tight(plan, room, dropped)
        self._say(plan, wanted, chunks, turns[:cut], room, dropped)
        return plan

    def _first_cut(
        self,
        transcript: Transcript,
        turns: Sequence[Turn],
        first: Sequence[PromptChunk],
        room: "_Room",
    ) -> tuple[int, Sequence[PromptChunk]]:
        """How many turns leave so that the most relevant chunk fits, and that chunk, if it can be had at all."""
        if first:
            cut = self._least_cut(transcript, turns, first, room.prompt_tokens)
            if cut is not None:
                return cut, first
            alone = self._draft(transcript, (), first, room.max_tokens)
            if self.tokens(replace(alone, evidence="")) <= room.most_prompt_tokens:
                return len(turns), first
        cut = self._least_cut(transcript, turns, (), room.prompt_tokens)
        return (len(turns) if cut is None else cut), ()

    def _least_cut(
        self, transcript: Transcript, turns: Sequence[Turn], chunks: Sequence[PromptChunk], most: int
    ) -> int | None:
        """The fewest oldest turns to leave out, in steps of TURNS_PER_CUT while any remains; None if none helps."""

        def fits(cut: int) -> bool:
            past = [message for turn in turns[cut:] for message in turn]
            return self.tokens(self._draft(transcript, past, chunks, None)) <= most

        if not fits(len(turns)):
            return None
        low, high = 0, len(turns)
        while low < high:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle + 1
        stepped = -(-low // TURNS_PER_CUT) * TURNS_PER_CUT
        return stepped if stepped < len(turns) else low

    def _without_evidence_if_tight(self, plan: Plan, room: "_Room", dropped: list[Dropped]) -> Plan:
        tokens = self.tokens(plan)
        if not plan.evidence or tokens <= room.most_prompt_tokens:
            return plan
        reason = f"With evidence lines the prompt has {tokens} tokens, over the {room.most_prompt_tokens} that fit."
        dropped.append(Dropped("evidence", "evidence", reason))
        return replace(plan, evidence="")

    def _say(
        self,
        plan: Plan,
        wanted: Sequence[PromptChunk],
        chunks: Sequence[PromptChunk],
        cut_turns: Sequence[Turn],
        room: "_Room",
        dropped: list[Dropped],
    ) -> None:
        tokens = self.tokens(plan)
        limit = f"{room.prompt_tokens} of the window's {room.window_tokens} tokens are for the prompt"
        for chunk in reversed(wanted[len(chunks) :]):
            size = len(chunk.rendered.token_ids) or self._tokenizer.count(chunk.rendered.text)
            reason = f"Its {size} tokens do not fit: {limit}, {tokens} are taken."
            dropped.append(Dropped("chunk", chunk.label, reason))
        for place, turn in enumerate(cut_turns, 1):
            size = sum(block_tokens(past_block(message, self._rendering), self._tokenizer) for message in turn)
            reason = f"Past turn {place} ({len(turn)} messages, {size} tokens) is left out: {limit}."
            dropped.append(Dropped("turn", str(place), reason))

    def _clamped(self, plan: Plan, room: "_Room", dropped: list[Dropped]) -> Plan:
        left = room.window_tokens - self.tokens(plan)
        if plan.max_tokens is None or plan.max_tokens <= left:
            return replace(plan, dropped=tuple(dropped))
        reason = (
            f"{room.window_tokens - left} prompt tokens and max_tokens {plan.max_tokens} exceed the window of "
            f"{room.window_tokens} tokens: max_tokens is {left}."
        )
        dropped.append(Dropped("max_tokens", str(plan.max_tokens), reason))
        return replace(plan, max_tokens=left, dropped=tuple(dropped))


@dataclass(frozen=True, slots=True)
class _Room:
    """Tokens of the window. `prompt_tokens`: what chunks and turns may fill; `most_prompt_tokens`: beside the
    least answer."""

    window_tokens: int
    prompt_tokens: int
    most_prompt_tokens: int
    least_answer_tokens: int
    max_tokens: int | None

    @classmethod
    def of(cls, limits: Limits, window_tokens: int) -> "_Room":
        asked = limits.min_answer_tokens if limits.max_tokens is None else limits.max_tokens
        least = min(asked, limits.min_answer_tokens)
        reserved = max(least, min(asked, window_tokens // 2))
        return cls(window_tokens, window_tokens - reserved, window_tokens - least, least, limits.max_tokens)


def _distinct(items: Sequence[Candidate], top_k: int) -> tuple[list[PromptChunk], list[Dropped]]:
    """The `top_k` most relevant chunks, most relevant first, one for each label, whatever the order of `items`."""
    ranked = sorted(items, key=lambda item: (-item.relevance, item.chunk.label, item.chunk.row_id))
    taken: dict[str, PromptChunk] = {}
    dropped = []
    for item in ranked:
        if len(taken) == top_k:
            break
        chunk = item.chunk
        twin = taken.get(chunk.label)
        if twin is None:
            taken[chunk.label] = _prompt_chunk(item)
        elif twin.rendered.text != chunk.rendered.text:
            reason = f"Another, more relevant chunk has the same label with other text ({twin.filename})."
            dropped.append(Dropped("chunk", chunk.label, reason))
    return list(taken.values()), dropped


def _prompt_chunk(item: Candidate) -> PromptChunk:
    chunk = item.chunk
    return PromptChunk(
        label=chunk.label,
        file_id=chunk.file_id,
        filename=chunk.filename,
        title=chunk.title,
        relevance=item.relevance,
        body=chunk.text,
        rendered=chunk.rendered,
    )


def _ordered(chunks: Sequence[PromptChunk], order: ChunkOrder) -> tuple[PromptChunk, ...]:
    if order == "label":
        return tuple(sorted(chunks, key=lambda chunk: chunk.label))
    sign = 1 if order == "relevance_last" else -1
    return tuple(sorted(chunks, key=lambda chunk: (sign * chunk.relevance, chunk.label)))


def _standing_texts(past: Sequence[PastMessage]) -> dict[str, str]:
    return {
        chunk.label: chunk.rendered.text
        for message in past
        if message.context is not None
        for chunk in message.context.chunks
    }


def _turns(past: Sequence[PastMessage]) -> list[list[PastMessage]]:
    """Groups that begin with a user message, so that what remains after a cut begins with one too."""
    turns: list[list[PastMessage]] = []
    for message in past:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns
