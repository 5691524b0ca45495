"""Which chunks in which form: the most value that fits, exactly."""

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prompt_builder.types import PromptChunk
from retrieval.types import RenderedChunk

# Cells of the table (forms x counts x tokens) up to which tokens are counted one by one; half a millisecond or so.
MOST_CELLS = 700_000


# Without slots: `cached_property` needs the instance's dict.
@dataclass(frozen=True)
class Form:
    """A way to send a chunk: what it costs in the prompt, and the probability that the answer is in it.

    `extract` renders some sentences of it, when the form is first sent: most of them never are. None where the chunk
    is sent whole.
    """

    whole: PromptChunk
    tokens: int
    value: float
    extract: Callable[[], RenderedChunk] | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return self.whole.label

    @cached_property
    def chunk(self) -> PromptChunk:
        """As it is sent."""
        return self.whole if self.extract is None else replace(self.whole, rendered=self.extract(), form="extract")


Choice = tuple[Form | None, ...]


def best_forms(forms: Sequence[Sequence[Form]], room_tokens: int, most_chunks: int) -> Choice:
    """One entry for each chunk, None where it is absent; see `Knapsack.choice`."""
    return Knapsack(forms, room_tokens, most_chunks).choice(room_tokens)


class Knapsack:
    """A multiple-choice knapsack, solved by dynamic programming for every room up to `room_tokens` at once.

    `forms` holds the possible forms of each chunk, chunks in rank order; at most one form of a chunk and at most
    `most_chunks` forms are taken. Values are not negative.

    Exact while the table has at most `most_cells` cells. Beyond, tokens are counted in steps of `step_tokens`,
    rounded up for each form: a choice still never exceeds its room, is never worse than the best run of whole chunks
    in rank order that fits, and has at least the optimum of a room that is (`most_chunks` + 1) x (`step_tokens` - 1)
    smaller.
    """

    def __init__(
        self,
        forms: Sequence[Sequence[Form]],
        room_tokens: int,
        most_chunks: int,
        most_cells: int = MOST_CELLS,
    ) -> None:
        self._forms = forms
        self._most_cells = most_cells
        self._most = max(0, most_chunks)
        largest = sorted((max(form.tokens for form in chunk) for chunk in forms if chunk), reverse=True)
        # More room than this never changes an exact choice.
        self._room = max(0, min(room_tokens, sum(largest[: self._most])))
        self._asked_room = max(0, room_tokens)
        self._items = [
            (place, form) for place, chunk in enumerate(forms) for form in chunk if form.tokens <= self._room
        ]
        if self._items and self._most < len(forms):
            self._items = _not_outdone(self._items, self._most)
        by_place: dict[int, list[Form]] = {}
        for place, form in self._items:
            by_place.setdefault(place, []).append(form)
        self._places, self._by_place = list(by_place), list(by_place.values())
        # At most this many can be taken anyway: then none has to be counted.
        self._free = _Table(self._by_place, self._room, None, 1)
        self._counted: _Table | None = None

    @property
    def step_tokens(self) -> int:
        """1 while the choice is exact."""
        if self._most >= len(self._places):
            return 1
        cells = len(self._items) * (self._most + 1) * (self._room + 1)
        return max(1, -(-cells // self._most_cells))

    def value(self, room_tokens: int) -> float:
        """The sum of the values of `choice(room_tokens)`."""
        return _value(self.choice(room_tokens))

    def choice(self, room_tokens: int) -> Choice:
        """The forms with the greatest sum of values that fit `room_tokens`, at most the room of the constructor.

        Of equal sums the one with fewer tokens wins, then the one with chunks of better rank.
        """
        if room_tokens < 0:
            return (None,) * len(self._forms)
        taken = self._free.choice(room_tokens)
        if sum(form is not None for form in taken) <= self._most:
            return self._spread(taken)
        if self._counted is None:
            step = self.step_tokens
            room = min(self._asked_room, self._room + (self._most + 1) * (step - 1))
            self._counted = _Table(self._by_place, room, self._most, step)
        chosen = self._spread(self._counted.choice(room_tokens))
        if self.step_tokens == 1:
            return chosen
        whole = self._best_whole(min(room_tokens, self._asked_room))
        return whole if _value(whole) > _value(chosen) else chosen

    def _spread(self, taken: Sequence[Form | None]) -> Choice:
        chosen: list[Form | None] = [None] * len(self._forms)
        for place, form in zip(self._places, taken, strict=True):
            chosen[place] = form
        return tuple(chosen)

    def _best_whole(self, room_tokens: int) -> Choice:
        """The longest run of whole chunks in rank order that fits."""
        chosen: list[Form | None] = []
        left = room_tokens
        for chunk in self._forms[: self._most]:
            whole = next((form for form in chunk if form.extract is None), None)
            if whole is None or whole.tokens > left:
                break
            left -= whole.tokens
            chosen.append(whole)
        return (*chosen, *(None for _ in self._forms[len(chosen) :]))


class _Table:
    """Row i: the greatest value of the first i chunks, by the number of forms taken (where bounded) and tokens."""

    def __init__(
        self, chunks: Sequence[Sequence[Form]], room_tokens: int, most: int | None, step_tokens: int
    ) -> None:
        self._chunks = chunks
        self._step = step_tokens
        self._counts = most is not None
        self._most_forms = most or 0
        self._width = room_tokens // step_tokens + 1
        shape = (len(chunks) + 1, self._most_forms + 1, self._width)
        self._rows: NDArray[np.float64] = np.zeros(shape)
        room = np.empty(shape[1:])
        for at, forms in enumerate(chunks):
            before, after = self._rows[at], self._rows[at + 1]
            if self._counts:
                # Of so few chunks no more forms can be taken; rows of higher counts are never read.
                count = self._most(at + 1)
                if count > self._most(at):
                    before[count] = before[count - 1]
                after[: count + 1] = before[: count + 1]
                before, target = before[:count], after[1 : count + 1]
            else:
                np.copyto(after, before)
                target = after
            for form in forms:
                steps = self._steps(form)
                if steps >= self._width:
                    continue
                width = self._width - steps
                sums = room[: len(target), :width]
                np.add(before[:, :width], form.value, out=sums)
                np.maximum(target[:, steps:], sums, out=target[:, steps:])

    def choice(self, room_tokens: int) -> list[Form | None]:
        count = self._most(len(self._chunks))
        last = self._rows[-1, count]
        best = last[min(room_tokens // self._step, self._width - 1)]
        steps = int(np.searchsorted(last, best))
        taken: list[Form | None] = [None] * len(self._chunks)
        for at in range(len(self._chunks) - 1, -1, -1):
            count = min(count, self._most(at + 1))
            value = self._rows.item(at + 1, count, steps)
            if value == self._rows.item(at, min(count, self._most(at)), steps):
                continue
            left = count - 1 if self._counts else count
            for form in sorted(self._chunks[at], key=lambda form: form.tokens):
                cost = self._steps(form)
                if cost <= steps and self._rows.item(at, left, steps - cost) + form.value == value:
                    taken[at] = form
                    count, steps = left, steps - cost
                    break
        return taken

    def _most(self, chunks: int) -> int:
        """The most forms that can be taken of the first so many chunks."""
        return min(chunks, self._most_forms)

    def _steps(self, form: Form) -> int:
        return -(-form.tokens // self._step)


def _not_outdone(items: Sequence[tuple[int, Form]], most: int) -> list[tuple[int, Form]]:
    """Without the forms that `most` other chunks outdo: each has a form of no more tokens and no less value.

    A choice with such a form leaves one of those chunks out, which can take its place.
    """

    def standing(at: int) -> tuple[float, int, int]:
        place, form = items[at]
        # Of equals the better rank comes first, so that no two outdo each other.
        return -form.value, form.tokens, place

    kept: list[int] = []
    # Of each chunk so far the fewest tokens, and these in ascending order.
    fewest: dict[int, int] = {}
    sizes: list[int] = []
    for at in sorted(range(len(items)), key=standing):
        place, form = items[at]
        own = fewest.get(place)
        if bisect_right(sizes, form.tokens) - (own is not None and own <= form.tokens) < most:
            kept.append(at)
        if own is None or form.tokens < own:
            if own is not None:
                sizes.remove(own)
            insort(sizes, form.tokens)
            fewest[place] = form.tokens
    return [items[at] for at in sorted(kept)]


def _value(choice: Choice) -> float:
    return sum(form.value for form in choice if form is not None)
