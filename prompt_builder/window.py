"""What leaves a prompt that its context window is too small for, and in which order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prompt_builder.drafts import Draft, Drafts
from prompt_builder.knapsack import Form
from prompt_builder.material import Front
from prompt_builder.types import Dropped, Limits, QuestionTooLong, Rendering, Tokenizer

# History that must be cut is cut in steps of this many turns, so that the prompts of the next turns keep their
# front; a cut of one turn a time would move it at every turn.
TURNS_PER_CUT = 4


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


class Window:
    """Fits one request's drafts, in one rendering of the past, to the room of its window.

    Chunks leave first, least relevant first, down to one; then whole turns, oldest first, in steps of TURNS_PER_CUT
    (room that a step leaves over goes to chunks again); then evidence and the last chunk.
    """

    def __init__(self, drafts: Drafts, rendering: Rendering, room: Room, tokenizer: Tokenizer) -> None:
        self._drafts = drafts
        self._rendering: Rendering = rendering
        self._room = room
        self._tokenizer = tokenizer
        self._turns = len(drafts.material.turns)
        self._for_chunks = room.prompt_tokens - drafts.evidence_tokens

    def holds(self, draft: Draft) -> bool:
        """Whether a draft without evidence fits, evidence included."""
        return draft.tokens <= self._for_chunks

    def front(self, forms: Sequence[Form]) -> Front:
        """The past with as many turns as there is room for, beside the first of the forms where that fits."""
        return self._cut(forms)[0]

    def trimmed(self, forms: Sequence[Form]) -> tuple[Draft, list[Dropped]]:
        """The largest draft of wholes, most relevant first, and what left; raises QuestionTooLong."""
        front, least = self._cut(forms)
        count = least
        if least:
            # The largest number that fits: prompts only grow with the number of chunks.
            count += _first(
                len(forms) - 1, lambda more: self._drafts.draft(front, forms[: 2 + more]).tokens > self._for_chunks
            )
        draft = self._drafts.draft(front, forms[:count])
        dropped = [*self._dropped_chunks(forms[count:], draft.tokens), *self.dropped_turns(front.cut)]
        return self._with_evidence(draft, forms[:count], dropped)

    def refuse_if_too_long(self) -> None:
        """Raises QuestionTooLong when system text and question alone exceed the window."""
        bare = self._drafts.draft(self._front(self._turns), ())
        if bare.tokens > self._room.most_prompt_tokens:
            question = self._tokenizer.count(self._drafts.bare.question)
            room = self._room
            raise QuestionTooLong(question, bare.tokens - question, room.window_tokens, room.least_answer_tokens)

    def dropped_turns(self, cut: int) -> list[Dropped]:
        dropped = []
        material = self._drafts.material
        for place in range(cut):
            size, count = material.turn_tokens(place, self._rendering), len(material.turns[place])
            reason = f"Past turn {place + 1} ({count} messages, {size} tokens) is left out: {self._room}."
            dropped.append(Dropped("turn", str(place + 1), reason))
        return dropped

    def _front(self, cut: int) -> Front:
        return self._drafts.material.front(cut, self._turns if self._rendering == "stripped" else 0)

    def _cut(self, forms: Sequence[Form]) -> tuple[Front, int]:
        """The front, and whether the most relevant chunk (1) or none (0) is sent with it."""
        self.refuse_if_too_long()
        fronts: dict[int, Front] = {}

        def tokens(cut: int, chunks: int) -> int:
            if cut not in fronts:
                fronts[cut] = self._front(cut)
            return self._drafts.draft(fronts[cut], forms[:chunks]).tokens

        chunks = min(1, len(forms))
        if chunks and tokens(self._turns, chunks) > self._for_chunks:
            if tokens(self._turns, chunks) <= self._room.most_prompt_tokens:
                return fronts[self._turns], chunks
            chunks = 0
        most = self._for_chunks if chunks else self._room.prompt_tokens
        cut = _first(self._turns, lambda cut: tokens(cut, chunks) <= most)
        stepped = -(-cut // TURNS_PER_CUT) * TURNS_PER_CUT
        cut = stepped if stepped < self._turns else cut
        return self._front(cut), chunks

    def _with_evidence(
        self, draft: Draft, forms: Sequence[Form], dropped: list[Dropped]
    ) -> tuple[Draft, list[Dropped]]:
        room = self._room
        most = room.prompt_tokens if draft.tokens <= room.prompt_tokens else room.most_prompt_tokens
        full = self._drafts.draft(draft.front, forms, evidence=True)
        if full.tokens <= most:
            return full, dropped
        reason = f"With evidence lines the prompt has {full.tokens} tokens, more than the {most} that fit."
        return draft, [*dropped, Dropped("evidence", "evidence", reason)]

    def _dropped_chunks(self, forms: Sequence[Form], taken: int) -> list[Dropped]:
        """Least relevant first, as they leave."""
        return [self.too_large(form, taken) for form in reversed(forms)]

    def too_large(self, form: Form, taken: int) -> Dropped:
        reason = f"Its {form.tokens} tokens do not fit: {self._room}, and {taken} of them are taken."
        return Dropped("chunk", form.label, reason)


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
