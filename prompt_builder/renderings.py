"""What a rendering of the past costs, now and in the turns to come.

To strip past turns of their chunks is to compute once what follows them; from then on every turn attends over less,
but chunks that stood there must be sent again where they are wanted again. Whether that pays depends on how many
turns will follow. Nothing is known of that but how many there were: of conversations that had n turns the share
n / (n + j) is taken to have j more (Lindy's estimate), and as many turns are looked ahead as there were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from latency.speed import Forecast, SpeedEstimate
from prompt_builder.choice import Turn
from prompt_builder.drafts import Draft, Drafts
from prompt_builder.forecast import Means
from prompt_builder.knapsack import Form

LEAST_TURNS = 4
MOST_TURNS = 16

# A switch must promise to save this share of what the turn takes: what is to come is guessed from few turns, and what
# was stripped stays so.
SWITCH_MARGIN = 0.25

# How often the turns to come may be stripped: every turn, every second, fourth, eighth, or never again.
PERIODS = (1, 2, 4, 8, MOST_TURNS + 1)

# Turns that keep their chunks when the ones before them are stripped.
TURNS_KEPT = (0, 2)


def boundaries(turn_count: int, stripped: int) -> tuple[int, ...]:
    """How many leading turns may be stripped now: as many as are, all, all but the last few."""
    options = {max(stripped, turn_count - kept) for kept in TURNS_KEPT}
    return (stripped, *sorted(options - {stripped}, reverse=True))


@dataclass(frozen=True, slots=True)
class Habits:
    """What a conversation has shown of itself. Tokens are means over its turns.

    `said_tokens`: a question with its answer. `sent_tokens`: a question with its chunks, were all of them sent.
    `fresh_tokens`: of the history, what a turn that changes nothing has to compute (the last answer, where the engine
    does not hold it). `lags[d]`: the share of wanted chunks that were wanted last d turns before.
    """

    said_tokens: float
    sent_tokens: float
    fresh_tokens: float
    turns: int
    lags: tuple[float, ...]

    def standing(self, turns: int) -> float:
        """The share of a turn's chunks that stand in that many turns before it."""
        return sum(self.lags[1 : turns + 1])


@dataclass(frozen=True, slots=True)
class State:
    """A conversation after the new turn: tokens in all, tokens with every turn stripped, tokens before the first kept
    turn, and the number of turns that are kept."""

    tokens: float
    stripped_tokens: float
    before_kept_tokens: float
    kept_turns: int


def lags_of(wanted: Sequence[frozenset[str]]) -> tuple[float, ...]:
    """From the labels that each turn wanted: the share that was wanted last 1, 2, ... turns before (index 0 is 0)."""
    last: dict[str, int] = {}
    counts = [0] * (len(wanted) + 1)
    total = 0
    for turn, labels in enumerate(wanted):
        for label in labels:
            if label in last:
                counts[turn - last[label]] += 1
            last[label] = turn
        # The first turn cannot repeat anything: it says nothing about repetition.
        total += len(labels) if turn else 0
    return tuple(count / total if total else 0.0 for count in counts)


def wanted_labels(turn: Turn) -> frozenset[str]:
    return frozenset(
        label
        for message in turn
        if message.context is not None
        for label in (*(chunk.label for chunk in message.context.chunks), *message.context.references)
    )


def coming_s(speed: SpeedEstimate, state: State, habits: Habits, window_tokens: int | None) -> float:
    """Predicted prefill seconds of the turns to come, under the best of PERIODS."""
    count = max(LEAST_TURNS, min(habits.turns, MOST_TURNS))
    shares = [habits.standing(turns) for turns in range(state.kept_turns + count + 1)]
    return min(_period_s(speed, state, habits, window_tokens, shares, count, period) for period in PERIODS)


def _period_s(
    speed: SpeedEstimate,
    state: State,
    habits: Habits,
    window_tokens: int | None,
    shares: Sequence[float],
    count: int,
    period: int,
) -> float:
    tokens, before, kept = state.tokens, state.before_kept_tokens, state.kept_turns
    stripped = state.stripped_tokens
    window = float("inf") if window_tokens is None else window_tokens
    total_s = 0.0
    for turn in range(1, count + 1):
        chance = habits.turns / (habits.turns + turn)
        new = habits.sent_tokens * (1 - shares[kept])
        if turn % period == 0 or tokens + new > window:
            new = habits.sent_tokens
            total_s += chance * speed.predict_s(round(stripped - before + new), round(before))
            tokens, before, kept = stripped + new, stripped, 1
        else:
            total_s += chance * speed.predict_s(round(habits.fresh_tokens + new), round(tokens - habits.fresh_tokens))
            tokens, kept = tokens + new, kept + 1
        tokens += habits.fresh_tokens
        stripped += habits.said_tokens
    return total_s


class Horizon:
    """Prices the drafts of one request: what they take now, and what they leave to the turns to come."""

    def __init__(
        self, drafts: Drafts, wanted: Sequence[Form], window_tokens: int | None, stripped_turns: int
    ) -> None:
        material = drafts.material
        count = len(material.turns)
        self._window = window_tokens
        self.stripped_turns = stripped_turns
        self._asked = material.asked_tokens
        self._head = material.front(count, count).tokens
        self._all_stripped = material.front(0, count).tokens
        said = (self._all_stripped - self._head) / count if count else float(self._asked)
        before = list(accumulate((material.turn_tokens(turn, "stripped") for turn in range(count)), initial=0))
        self._said_before = [tokens / max(1, before[-1]) for tokens in before]
        self._said = max(said, float(self._asked))
        self._sizes = {form.label: form.tokens for form in wanted}
        labels = [wanted_labels(turn) for turn in material.turns]
        self._lags = lags_of([*labels, frozenset(self._sizes)])
        self._count = count

    def price_s(self, draft: Draft, means: Means, forecast: Forecast) -> float:
        """Seconds, from this turn's queue on."""
        cut, stripped_turns = draft.front.cut, draft.front.stripped_turns
        history = self._all_stripped - self._head
        answer = max(0.0, self._said - self._asked)
        before = self._head + history * (self._said_before[stripped_turns] - self._said_before[cut])
        stripped = self._head + history * (1 - self._said_before[cut]) + self._said
        fresh = draft.front.tokens - means.prefix(draft.front).resident_tokens
        habits = Habits(
            said_tokens=self._said,
            sent_tokens=draft.tail.tokens + sum(self._sizes.get(chunk.label, 0) for chunk in draft.references),
            fresh_tokens=min(float(fresh), answer),
            turns=self._count + 1,
            lags=self._lags,
        )
        state = State(draft.tokens + answer, stripped, before, self._count - stripped_turns + 1)
        now_s = forecast.queue_s + forecast.prefill_s
        margin = 0.0 if stripped_turns <= self.stripped_turns else SWITCH_MARGIN
        return now_s * (1 + margin) + coming_s(means.speed, state, habits, self._window)
