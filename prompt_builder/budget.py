"""The most relevant prompt that a budget allows on one replica, in one rendering of the past."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.resident_prefix import ResidentPrefix, resident_path
from latency.speed import Forecast
from prompt_builder.choice import standing_texts
from prompt_builder.drafts import Draft, Drafts
from prompt_builder.extracts import Extracts
from prompt_builder.forecast import Means
from prompt_builder.knapsack import Form, Knapsack
from prompt_builder.material import Front
from prompt_builder.outlook import Prefix

# Evidence lines may take the place of this share of the relevance, no more. They are worth most beside whole chunks
# (answer words found on the packaged model 0.58 instead of 0.42) and little beside extracts, which are evidence.
EVIDENCE_SHARE = 0.05

# A prompt that is late whatever is left out still gets its best extract where that adds at most this share to its
# TTFT: the budget is missed anyway, and an answer from no passage at all would be late and worthless.
LATE_SHARE = 0.1

_TIES = 1e-9


@dataclass(frozen=True, slots=True)
class Filled:
    """A draft with its exact forecast."""

    draft: Draft
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class _Space:
    """Room in tokens behind a beginning of which `first` chunks are resident already."""

    first: tuple[Form, ...]
    room: int


class Filling:
    """Fills fronts for one request.

    `wholes` are all candidates, most relevant first; at most `most_chunks` of them are sent.
    """

    def __init__(self, drafts: Drafts, extracts: Extracts, wholes: Sequence[Form], most_chunks: int) -> None:
        self._drafts = drafts
        self._extracts = extracts
        self._ranked = [form.chunk for form in wholes]
        self._wholes = wholes
        self._most = most_chunks
        self._forms: list[tuple[Form, ...]] | None = None

    def everything(self, front: Front, means: Means) -> Filled:
        """The most relevant chunks whole, with evidence."""
        return self.filled(front, means, self._wholes[: self._most], evidence=True)

    def fill(self, front: Front, means: Means, most_tokens: int) -> Filled:
        """The draft with the most relevance that keeps the budget in a prompt of at most `most_tokens`.

        Not less than the best run of whole chunks in order of relevance that fits. Without any chunk where none fits.
        """
        best = self.everything(front, means)
        if _fits(best, most_tokens):
            return best
        best = self._best_run(front, means, most_tokens)
        forms = self.forms_beside(front)
        for space in self._spaces(front, means, most_tokens):
            taken = {form.chunk.label for form in space.first}
            rest = [() if chunk.label in taken else group for chunk, group in zip(self._ranked, forms, strict=True)]
            packed = Knapsack(rest, space.room, self._most - len(space.first))
            best = self._better(best, front, means, most_tokens, space, packed)
        return best

    def least(self, front: Front, means: Means) -> Filled:
        """Without chunks; or with the one extract that is worth its time in a prompt that is late anyway."""
        bare = self.filled(front, means, (), evidence=False)
        if bare.forecast.fits:
            return bare
        most_s = bare.forecast.ttft_s * (1 + LATE_SHARE)
        extracts = [form for group in self.forms_beside(front) for form in group if form.value > 0]
        for form in sorted(extracts, key=lambda form: (-form.value, form.tokens, form.chunk.label)):
            filled = self.filled(front, means, [form], evidence=False)
            if filled.forecast.ttft_s <= most_s:
                return filled
        return bare

    @property
    def most_chunks(self) -> int:
        return self._most

    @property
    def wholes(self) -> Sequence[Form]:
        return self._wholes

    def forms(self) -> list[tuple[Form, ...]]:
        if self._forms is None:
            self._forms = self._extracts.forms(self._drafts.bare.question, self._ranked)
        return self._forms

    def _better(
        self, best: Filled, front: Front, means: Means, most_tokens: int, space: _Space, packed: Knapsack
    ) -> Filled:
        """The knapsack's choice where it beats `best`; with evidence where that costs little."""
        first = [form.chunk.label for form in space.first]
        room = space.room
        while room >= 0:
            chosen = [*space.first, *(form for form in packed.choice(room) if form is not None)]
            filled = self.filled(front, means, chosen, evidence=False, first=first)
            if _fits(filled, most_tokens):
                break
            # Tokens of a line of references are those of its parts or fewer, on all tokenizers but odd ones.
            room -= max(1, room // 8)
        else:
            return best
        least = max(best.draft.relevance, (1 - EVIDENCE_SHARE) * filled.draft.relevance)
        beside = [*space.first, *(f for f in packed.choice(room - self._drafts.evidence_tokens) if f is not None)]
        if any(form.chunk.form == "whole" for form in beside) and sum(form.value for form in beside) >= least - _TIES:
            quoted = self.filled(front, means, beside, evidence=True, first=first)
            if quoted.draft.evidence and _fits(quoted, most_tokens):
                filled = quoted
        quotes = (bool(best.draft.evidence), bool(filled.draft.evidence))
        gained = filled.draft.relevance - best.draft.relevance
        if quotes == (True, False):
            gained -= EVIDENCE_SHARE * filled.draft.relevance
        return filled if gained > _TIES or (gained > -_TIES and quotes == (False, True)) else best

    def _best_run(self, front: Front, means: Means, most_tokens: int) -> Filled:
        """The longest run of whole chunks, most relevant first, that fits; with evidence where that fits too."""
        best = self.filled(front, means, (), evidence=False)
        for count in range(1, min(self._most, len(self._wholes)) + 1):
            filled = self.filled(front, means, self._wholes[:count], evidence=False)
            if not _fits(filled, most_tokens):
                break
            best = filled
        if best.draft.shown:
            quoted = self.filled(front, means, self._wholes[: len(best.draft.shown)], evidence=True)
            if _fits(quoted, most_tokens):
                return quoted
        return best

    def _spaces(self, front: Front, means: Means, most_tokens: int) -> list[_Space]:
        """Behind the front; and behind the chunks that continue it in the replica's cache, which cost nothing."""
        start = means.prefix(front)
        spaces = [self._space(front, means, start, (), most_tokens)]
        if isinstance(start, ResidentPrefix):
            standing = standing_texts(front.past)
            pieces = [() if form.chunk.label in standing else form.chunk.rendered.token_ids for form in self._wholes]
            paths = {resident_path(start, pieces)[: self._most], resident_path(start, pieces[: self._most])}
            for path in sorted(path for path in paths if path):
                prefix: Prefix = start
                for place in path:
                    prefix = prefix.extended(pieces[place])
                first = tuple(self._wholes[place] for place in path)
                spaces.append(self._space(front, means, prefix, first, most_tokens))
        return [space for space in spaces if space.room >= 0]

    def _space(self, front: Front, means: Means, prefix: Prefix, first: tuple[Form, ...], most_tokens: int) -> _Space:
        cached = prefix.resident_tokens
        material = self._drafts.material
        closing = len(front.closing or ()) + material.asked_tokens
        if any(message.context is not None for message in front.past):
            closing += material.reference_line_tokens()
        in_time = means.most_uncached(cached) - (prefix.tokens - cached) - closing
        in_window = most_tokens - prefix.tokens - closing
        every = sum(max((form.tokens for form in group), default=0) for group in self.forms_beside(front))
        return _Space(first, min(in_time, in_window, every + self._drafts.evidence_tokens))

    def forms_beside(self, front: Front) -> list[tuple[Form, ...]]:
        """A chunk that stands in the past costs its name in a line; one whose label means another chunk is absent."""
        standing = standing_texts(front.past)
        groups: list[tuple[Form, ...]] = []
        for chunk, whole, group in zip(self._ranked, self._wholes, self.forms(), strict=True):
            there = standing.get(chunk.label)
            if there is None:
                groups.append(group)
            elif chunk.rendered.text in there:
                groups.append((Form(chunk, self._drafts.material.reference_tokens(chunk.label), whole.value),))
            else:
                groups.append(group if chunk.body in there.values() else ())
        return groups

    def filled(
        self, front: Front, means: Means, forms: Sequence[Form], *, evidence: bool, first: Sequence[str] = ()
    ) -> Filled:
        draft = self._drafts.draft(front, forms, evidence=evidence, first=first)
        return Filled(draft, means.foresee(front, draft.tail.ids))


def _fits(filled: Filled, most_tokens: int) -> bool:
    return filled.forecast.fits and filled.draft.tokens <= most_tokens
