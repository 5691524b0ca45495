"""Whose prefill starts next on a replica, and how many at once: pure decisions over values, without clock or I/O."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from latency.speed import SpeedEstimate

# A request may be overtaken by shorter ones that come up to so many times the difference of their prefills later.
PATIENCE = 2.0
# The same before one of several replicas: who comes later may go elsewhere, and each came to where it was predicted
# to be first.
ROUTED_PATIENCE = 0.2
# Urgent prefills may go before the one whose turn it is for so many times its own prefill: a fifth is its share.
OVERTAKING = 4.0
# Before an idle engine a request waits for those that come with it for so much of its own prefill.
GATHERING_SHARE = 0.05
# What an engine computes in one step by default; also what may be in flight while nothing is known of it.
STEP_TOKENS = 2048
UNKNOWN_LIMIT_TOKENS = STEP_TOKENS
# A step's fixed cost is at most a ninth of it where there is work enough.
LEAST_FIXED_COSTS = 8.0
# What follows a prefill of several steps leaves in the middle of the last one: a step that has begun is not joined.
LAST_STEP_LEAD = 0.5
LEAST_LEAD_S = 0.003


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request's prefill as predicted. `deadline_s` is a time of the pacer's monotonic clock.

    `shared_s`: what others that wait have in common with it, in seconds of their prefills.
    """

    uncached_tokens: int
    cached_tokens: int
    seconds: float
    deadline_s: float | None
    shared_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A prefill that waits. `turn` orders the queue: shortest first, aged by the time of entry.

    One that shares much with others makes these shorter by going first. About half of what it shares can be reused in
    one order of chunks; for that it counts as shorter itself, down to a half.
    `margin_s` is kept before the deadline where it can be: what a prefill may take longer than predicted.
    """

    job: Prefill
    entered_s: float
    number: int
    margin_s: float = 0.0
    patience: float = PATIENCE
    turn: tuple[float, int] = field(init=False)

    def __post_init__(self) -> None:
        job = self.job
        seconds = job.seconds - min(job.shared_s, job.seconds) / 2
        object.__setattr__(self, "turn", (self.entered_s + self.patience * seconds, self.number))


def limit_tokens(speed: SpeedEstimate | None, queued_tokens: int, decoding: int = 0, queued: int = 0) -> int:
    """The most uncached tokens to have in flight together, while `queued` prefills wait.

    All prefills of a step get their first token at its end, so that each delays the others; but every step costs
    a, its `fixed_s` and what `decoding` running answers take beside it. For n prefills of u tokens in steps of m the
    mean TTFT is least at m·u = √(n·u · a/b): the longer the queue, the larger the step. It is never so small that a
    dominates. One that waits alone does not join more than a step holds: a prefill of several steps has room in its
    last, and what joins it there delays it by all of its own tokens, to save itself one fixed cost.
    """
    if speed is None:
        return UNKNOWN_LIMIT_TOKENS
    model = speed.prefill
    if model.per_token_s <= 0:
        return UNKNOWN_LIMIT_TOKENS
    fixed_tokens = speed.predict_s(0, decoding=decoding) / model.per_token_s
    best = math.sqrt(queued_tokens * fixed_tokens)
    filled = LEAST_FIXED_COSTS * fixed_tokens
    return int(max(best, filled if queued > 1 else min(filled, STEP_TOKENS)))


def lead_s(speed: SpeedEstimate | None, tokens: int, decoding: int = 0) -> float:
    """How long before the predicted end of `tokens` in flight the next batch leaves, seconds.

    Its way to the engine is part of the fixed cost. But a prefill of several steps has room in its last one: what
    comes before that has begun shares it, and makes it longer by all it can hold.
    """
    if speed is None:
        return -1.0
    fixed_s = speed.predict_s(0, decoding=decoding)
    last_tokens = tokens - STEP_TOKENS * _further_steps(tokens)
    if last_tokens == tokens:
        return fixed_s
    last_s = _decode_step_s(speed, decoding) + speed.prefill.per_token_s * last_tokens
    return min(fixed_s, max(LEAST_LEAD_S, LAST_STEP_LEAD * last_s))


def beside_s(speed: SpeedEstimate | None, tokens: int, decoding: int, *, follows: bool) -> float:
    """What `decoding` running answers add to a batch beyond its prefills' own predictions, seconds.

    They take their part of each of its steps, not of one alone, where that is not learned with the tokens already; a
    batch that `follows` another need not wait for half a decode step, on the average, as one that finds no prefill.
    """
    if speed is None or decoding <= 0:
        return 0.0
    step_s = _decode_step_s(speed, decoding)
    learned_s = 0.0 if speed.beside is None else decoding * speed.beside.per_answer_token_s * tokens
    return max(0.0, _further_steps(tokens) * step_s - learned_s) - (step_s / 2 if follows else 0.0)


def _further_steps(tokens: int) -> int:
    """Steps after the first."""
    return max(0, tokens - 1) // STEP_TOKENS


def _decode_step_s(speed: SpeedEstimate, decoding: int) -> float:
    return 0.0 if speed.token_s is None or decoding <= 0 else speed.token_s


def most_on_time(queue: Sequence[Queued], free_s: float) -> list[Queued]:
    """The most prefills that can all keep their deadlines one after the other from `free_s`, in order of deadline.

    Those without a deadline or with one that is lost are left out (Moore 1968, with Hodgson's rule: whenever a
    deadline would be missed, the longest so far goes).
    """
    longest: list[tuple[float, int, Queued]] = []
    now_s = free_s
    for queued in sorted(
        (queued for queued in queue if queued.job.deadline_s is not None),
        key=lambda queued: (queued.job.deadline_s, queued.number),
    ):
        heapq.heappush(longest, (-queued.job.seconds, queued.number, queued))
        now_s += queued.job.seconds
        assert queued.job.deadline_s is not None
        if now_s > queued.job.deadline_s:
            now_s += heapq.heappop(longest)[0]
    return sorted((entry[2] for entry in longest), key=lambda queued: (queued.job.deadline_s or 0.0, queued.number))


def turn_order(queue: Sequence[Queued], free_s: float, passed_s: float = 0.0) -> list[Queued]:
    """The queue in the order in which its prefills start, the engine being free at `free_s`.

    `queue` is sorted by `turn` and is served in that order, except that a prefill with a deadline that can still be
    kept goes first as soon as it could not wait for the next in turn. `passed_s` is the work that was let pass since
    the last in turn: at OVERTAKING times its own the one in turn goes all the same, so that nothing starves.
    """
    latest: list[tuple[float, Queued]] = []
    bound_s = math.inf
    for queued in reversed(most_on_time(queue, free_s)):
        assert queued.job.deadline_s is not None
        bound_s = min(bound_s, queued.job.deadline_s - queued.margin_s) - queued.job.seconds
        latest.append((bound_s, queued))
    if not latest:
        return list(queue)
    order: list[Queued] = []
    taken: set[int] = set()
    now_s = free_s
    for in_turn in queue:
        while latest and in_turn.number not in taken:
            start_s, urgent = latest[-1]
            if urgent.number in taken:
                latest.pop()
                continue
            if urgent is in_turn or now_s + in_turn.job.seconds <= start_s:
                break
            if passed_s + urgent.job.seconds > OVERTAKING * in_turn.job.seconds and passed_s > 0:
                break
            latest.pop()
            order.append(urgent)
            taken.add(urgent.number)
            now_s += urgent.job.seconds
            passed_s += urgent.job.seconds
        if in_turn.number not in taken:
            order.append(in_turn)
            taken.add(in_turn.number)
            now_s += in_turn.job.seconds
            passed_s = 0.0
    return order


def released(order: Sequence[Queued], in_flight_tokens: int, limit: int, *, is_due: bool) -> int:
    """How many of `order` leave now.

    As many as the limit holds beside what is in flight. Where `is_due` says that the engine is through with that, or
    about to be, as many as the limit holds alone, and one in any case, so that it never idles.
    """
    tokens = 0 if is_due else in_flight_tokens
    for count, queued in enumerate(order):
        tokens += queued.job.uncached_tokens
        if tokens > limit and (count or not is_due):
            return count
    return len(order)


def gathering_s(queue: Sequence[Queued], now_s: float) -> float:
    """Seconds for which the queue may still wait, before an idle engine, for requests that are on their way.

    When the first of some that come together could start, the others are being planned. A little later the shortest
    of them can start, with its chunks in an order that suits the others. No deadline is missed for that.
    """
    until_s = math.inf
    for queued in queue:
        job = queued.job
        until_s = min(until_s, queued.entered_s + GATHERING_SHARE * job.seconds)
        if job.deadline_s is not None:
            until_s = min(until_s, job.deadline_s - queued.margin_s - job.seconds)
    return until_s - now_s


def batch_s(jobs: Sequence[Prefill], fixed_s: float) -> float:
    """The predicted time of prefills that share steps: the fixed cost is paid once."""
    if not jobs:
        return 0.0
    return fixed_s + sum(max(0.0, job.seconds - fixed_s) for job in jobs)


def wait_s(order: Sequence[Queued], new: Queued, rest_s: float, limit: int, fixed_s: float) -> float:
    """Seconds that `new`, one of `order`, waits: from now to the end of its batch, less its own prefill.

    `rest_s` is what the engine still has to do. The limit is held at today's, though it shrinks with the queue.
    """
    passed_s = rest_s
    left = list(order)
    while left:
        count = released(left, 0, limit, is_due=True)
        batch, left = left[:count], left[count:]
        passed_s += batch_s([queued.job for queued in batch], fixed_s)
        if any(queued is new for queued in batch):
            break
    return max(0.0, passed_s - new.job.seconds)
