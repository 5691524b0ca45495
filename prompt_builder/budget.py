"""The most relevant prompt that a budget allows on one replica, in one rendering of the past."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from cache.resident_prefix import ResidentPrefix, resident_path
from latency.speed import Forecast
from prompt_builder.drafts import Draft, Drafts
from prompt_builder.extracts import Extracts
from prompt_builder.forecast import Means
from prompt_builder.knapsack import Form, Knapsack
from prompt_builder.material import Front
from prompt_builder.outlook import Prefix

# Evidence lines may take the place of this share of the relevance, no more. They are worth most beside whole chunks
# (answer words found on the packaged model 0.58 instead of 0.42) and little beside extracts, which are evidence.
EVIDENCE_SHARE = 0.02

# A prompt that is late whatever is left out still gets the best form of a chunk that takes at most this share of the
# budget: it is missed anyway, and an answer from no passage at all would be late and worthless.
LATE_SHARE = 0.1

# What is less likely than this to hold the answer is not worth any time in such a prompt.
LEAST_VALUE = 0.02

_TIES = 1e-9


@dataclass(frozen=True, slots=True)
class Filled:
    """A draft with its exact forecast."""

    draft: Draft
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class _Packed:
    """Forms that keep the budget, those labelled `first` before the others; `quotes`: with room for evidence."""

    forms: tuple[Form, ...]
    first: tuple[str, ...]
    filled: Filled
    quotes: bool


@dataclass(frozen=True, slots=True)
class _Space:
    """Room in tokens behind a beginning of which the chunks of `first` are resident already."""

    first: tuple[Form, ...]
    room: int


class Filling:
    """Fills fronts for one request.

    `wholes` are all candidates, most relevant first; at most `most_chunks` of them are sent.
    """

    def __init__(self, drafts: Drafts, extracts: Extracts, wholes: Sequence[Form], most_chunks: int) -> None:
        self._drafts = drafts
        self._extracts = extracts
        self.wholes = wholes
        self.most_chunks = most_chunks
        self._forms: list[tuple[Form, ...]] = []

    def fill(self, front: Front, means: Means, most_tokens: int) -> Filled:
        """The draft with the most relevance that keeps the budget in a prompt of at most `most_tokens`.

        Not less than the best run of whole chunks in order of relevance that fits. Without any chunk where none fits.
        """
        spaces = self._spaces(front, means, most_tokens)
        best = self._run(front, means, most_tokens, spaces)
        spaces = [space for space in spaces if space.room >= 0]
        if spaces and (len(best.forms) < min(self.most_chunks, len(self.wholes)) or not best.quotes):
            forms = self.forms_beside(front)
            for space in spaces:
                best = self._better(best, self._packed(front, means, most_tokens, space, forms))
        if best.quotes and best.forms:
            quoted = self.filled(front, means, best.forms, evidence=True, first=best.first)
            if _fits(quoted, most_tokens):
                return quoted
        return best.filled

    def least(self, bare: Filled, means: Means, most_tokens: int) -> Filled:
        """`bare` has no chunks and is late: itself, or with the one form that is worth its time."""
        front = bare.draft.front
        most_s = bare.forecast.ttft_s + LATE_SHARE * (bare.forecast.budget_s or 0.0)
        room = most_tokens - bare.draft.tokens - self._drafts.material.reference_line_tokens()
        # No form is worth more than its chunk.
        worth_chunks = sum(form.value >= LEAST_VALUE for form in self.wholes)
        forms = [
            form
            for group in self.forms_beside(front, worth_chunks)
            for form in group
            if form.value >= LEAST_VALUE and form.tokens < room
        ]
        cached, uncached = bare.forecast.cached_tokens, bare.forecast.uncached_tokens
        sizes = sorted({form.tokens for form in forms})
        # Time grows with tokens: the sizes that are in time come first.
        in_time = bisect_left(sizes, True, key=lambda size: means.forecast(uncached + size, cached).ttft_s > most_s)
        worth = [form for form in forms if in_time and form.tokens <= sizes[in_time - 1]]
        if not worth:
            return bare
        best = min(worth, key=lambda form: (-form.value, form.tokens, form.label))
        filled = self.filled(front, means, [best])
        return filled if filled.draft.tokens <= most_tokens else bare

    def forms_beside(self, front: Front, most: int | None = None) -> list[tuple[Form, ...]]:
        """Of all chunks, or of at least the `most` most relevant.

        A chunk that stands in the past costs its name in a line; one whose label means another chunk is absent.
        """
        most = len(self.wholes) if most is None else most
        if len(self._forms) < most:
            chunks = [form.whole for form in self.wholes]
            self._forms = self._extracts.forms(self._drafts.bare.question, chunks, most)
        standing = self._drafts.material.chunks_standing(front)
        if not standing:
            return self._forms
        groups: list[tuple[Form, ...]] = []
        for form, group in zip(self.wholes, self._forms, strict=False):
            chunk = form.whole
            there = standing.get(chunk.label)
            if there is None:
                groups.append(group)
            elif chunk.rendered.text in there:
                groups.append((Form(chunk, self._drafts.material.reference_tokens(chunk.label), form.value),))
            else:
                groups.append(group if chunk.body in there.values() else ())
        return groups

    def filled(
        self,
        front: Front,
        means: Means,
        forms: Sequence[Form],
        *,
        evidence: bool = False,
        first: Sequence[str] = (),
    ) -> Filled:
        draft = self._drafts.draft(front, forms, evidence=evidence, first=first)
        draft = self._drafts.behind(draft, means.prefix(front))
        return Filled(draft, means.foresee(front, draft.tail.ids))

    def _run(self, front: Front, means: Means, most_tokens: int, spaces: Sequence[_Space]) -> _Packed:
        """The longest run of whole chunks, most relevant first, that fits."""
        standing = self._drafts.material.chunks_standing(front)
        new_tokens = [0 if form.label in standing else form.tokens for form in self.wholes]
        most_room = spaces[0].room + self._drafts.material.reference_line_tokens()
        for count in range(min(self.most_chunks, len(self.wholes)), 0, -1):
            if len(spaces) == 1 and sum(new_tokens[:count]) > most_room:
                # No chunk is resident behind the front: so many tokens need not be followed to be too many.
                continue
            forms = tuple(self.wholes[:count])
            filled = self.filled(front, means, forms)
            if _fits(filled, most_tokens):
                return _Packed(forms, (), filled, self._leaves_room(filled, means, most_tokens))
        return _Packed((), (), self.filled(front, means, ()), quotes=False)

    def _packed(
        self, front: Front, means: Means, most_tokens: int, space: _Space, forms: Sequence[tuple[Form, ...]]
    ) -> _Packed | None:
        """The knapsack's choice, with room for evidence where that costs little and whole chunks stand beside it."""
        taken = {form.label for form in space.first}
        rest = [() if form.label in taken else group for form, group in zip(self.wholes, forms, strict=True)]
        # The last form of a chunk is its largest.
        largest = sorted((group[-1].tokens for group in rest if group), reverse=True)
        most_room = sum(largest[: self.most_chunks]) + self._drafts.evidence_tokens
        room = min(space.room, most_room)
        knapsack = Knapsack(rest, room, self.most_chunks - len(space.first))

        def chosen(room: int) -> tuple[Form, ...]:
            return (*space.first, *(form for form in knapsack.choice(room) if form is not None))

        most, quotes = chosen(room), False
        if self._drafts.evidence_tokens:
            beside = chosen(room - self._drafts.evidence_tokens)
            whole = any(form.extract is None for form in beside)
            if whole and _value(beside) >= (1 - EVIDENCE_SHARE) * _value(most) - _TIES:
                most, quotes = beside, True
        first = tuple(form.label for form in space.first)
        filled = self.filled(front, means, most, first=first)
        while not _fits(filled, most_tokens):
            # Tokens of a line of references are those of its parts or fewer, on all tokenizers but odd ones.
            room -= max(1, room // 8)
            if room < 0:
                return None
            most, quotes = chosen(room), False
            filled = self.filled(front, means, most, first=first)
        return _Packed(most, first, filled, quotes)

    def _better(self, best: _Packed, other: _Packed | None) -> _Packed:
        if other is None:
            return best
        gained = other.filled.draft.relevance - best.filled.draft.relevance
        if best.quotes and not other.quotes:
            gained -= EVIDENCE_SHARE * other.filled.draft.relevance
        better = gained > _TIES or (gained > -_TIES and other.quotes and not best.quotes)
        return other if better else best

    def _leaves_room(self, filled: Filled, means: Means, most_tokens: int) -> bool:
        more = self._drafts.evidence_tokens
        forecast = means.forecast(filled.forecast.uncached_tokens + more, filled.forecast.cached_tokens)
        return more > 0 and forecast.fits and filled.draft.tokens + more <= most_tokens

    def _spaces(self, front: Front, means: Means, most_tokens: int) -> list[_Space]:
        """Behind the front; and behind the chunks that continue it in the replica's cache, which cost nothing."""
        start = means.prefix(front)
        spaces = [self._space(front, means, start, (), most_tokens)]
        if isinstance(start, ResidentPrefix):
            standing = self._drafts.material.chunks_standing(front)
            pieces = [() if form.label in standing else form.whole.rendered.token_ids for form in self.wholes]
            if self._drafts.layout.order == "reuse":
                # Those that are held back for the last places continue nothing.
                pinned = min(self._drafts.layout.pin_last, len(pieces))
                pieces[:pinned] = [()] * pinned
            wanted = pieces[: self.most_chunks]
            paths = {resident_path(start, pieces)[: self.most_chunks], resident_path(start, wanted)}
            for path in sorted(path for path in paths if path):
                prefix: Prefix = start
                for place in path:
                    prefix = prefix.extended(pieces[place])
                first = tuple(self.wholes[place] for place in path)
                spaces.append(self._space(front, means, prefix, first, most_tokens))
        return spaces

    def _space(
        self,
        front: Front,
        means: Means,
        prefix: Prefix,
        first: tuple[Form, ...],
        most_tokens: int,
    ) -> _Space:
        cached = prefix.resident_tokens
        material = self._drafts.material
        closing = len(front.closing or ()) + material.asked_tokens
        if front.rendering == "kept":
            closing += material.reference_line_tokens()
        in_time = means.most_uncached(cached) - (prefix.tokens - cached) - closing
        in_window = most_tokens - prefix.tokens - closing
        return _Space(first, min(in_time, in_window))


def _fits(filled: Filled, most_tokens: int) -> bool:
    return filled.forecast.fits and filled.draft.tokens <= most_tokens


def _value(forms: Sequence[Form]) -> float:
    return sum(form.value for form in forms)
