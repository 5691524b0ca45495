"""When history is folded, how deep, and what a summary is made of. Pure."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import regex

from latency.speed import SpeedEstimate
from prompt_builder.sentences import sentences, terms_of
from prompt_builder.types import PastMessage

UNBUDGETED_S = 2.0
"""Requests without a budget fold as if they had this one."""

TYPICAL_TURN_TOKENS = 200
ATTENTION_SHARE = 0.2
WINDOW_SHARE = 0.5
LOW_SHARE = 0.5
MOST_LOW_SHARE = 0.75
LEAST_HIGH_TOKENS = 512
DEFAULT_HIGH_TOKENS = 4096
SUMMARY_SHARE = 1 / 3
MOST_SUMMARY_TOKENS = 512

FACT_WEIGHT = 0.6
MOST_FACTS = 3
KNOWN_SHARE = 0.8
PROSE_SHARE = 0.4
LEAST_TERMS = 3
# A system message in the middle of a chat is an instruction that still holds when its turn is folded.
_SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
_WEIGHTS = {"System": 4.0, "User": 1.0, "Assistant": 0.4}
_QUESTION_WEIGHT = 0.2
_QUESTION = regex.compile(r"[?？؟;՞][^\w?？؟;՞]*$")
# Numbers, and names: a capital that no sentence begins with. Scripts without capitals have their numbers.
# From a word's start on: tried at each of its letters, a word without a number takes the square of its length.
_FACT = regex.compile(r"\b\w*\p{N}[\w.,:/-]*\b|(?<=[^.!?\s]\s+[\"'“‘(]?)\p{Lu}[\p{L}\p{M}]+")
_LINE = regex.compile(r"(System|User|Assistant): (.*)")


@dataclass(frozen=True, slots=True)
class Marks:
    """History beyond `high_tokens` is folded, down to `low_tokens`, the new summary included."""

    high_tokens: int
    low_tokens: int

    @property
    def summary_tokens(self) -> int:
        """The most that a summary may have."""
        return max(1, min(MOST_SUMMARY_TOKENS, int(self.low_tokens * SUMMARY_SHARE)))

    @property
    def prose_tokens(self) -> int:
        """The engine's part of it."""
        return max(1, int(self.summary_tokens * PROSE_SHARE))


def marks(
    window_tokens: int | None,
    budget_s: float | None,
    speed: SpeedEstimate | None,
    high_setting: int = 0,
    low_setting: int = 0,
) -> Marks:
    """The marks of a conversation under this budget on this replica; settings of 0 leave them to the arithmetic.

    High is the largest history H that can be computed from nothing within the budget, and over which a typical new
    turn of u tokens pays at most `ATTENTION_SHARE` of the budget in attention, g·u·H. It is at least
    `LEAST_HIGH_TOKENS`, and at most `WINDOW_SHARE` of the window: chunks and answer need the rest. With growth of g
    tokens a turn, the mean of uncached tokens a turn is about u + L·g/(H − L): low is half of high, which makes the
    second term one turn's growth, paid in the background.
    """
    cap = DEFAULT_HIGH_TOKENS if window_tokens is None else max(2, int(window_tokens * WINDOW_SHARE))
    if high_setting:
        # Even an operator's mark leaves room for a question and its answer.
        high = high_setting if window_tokens is None else min(high_setting, max(2, int(window_tokens * 0.75)))
    elif speed is None:
        high = cap
    else:
        seconds = budget_s if budget_s is not None else UNBUDGETED_S
        high = speed.most_uncached(seconds)
        pair_s = speed.factor * speed.prefill.per_pair_s * TYPICAL_TURN_TOKENS
        if pair_s > 0:
            high = min(high, int(ATTENTION_SHARE * seconds / pair_s))
        high = min(cap, max(LEAST_HIGH_TOKENS, high))
    low = min(low_setting, int(high * MOST_LOW_SHARE)) if low_setting else int(high * LOW_SHARE)
    return Marks(high, max(1, low))


def turns_to_fold(turn_tokens: Sequence[int], summary_tokens: int, marks: Marks) -> int:
    """How many of the oldest turns to fold, given the tokens of each, oldest first; 0: none.

    Nothing is folded up to the high mark. Beyond it whole turns leave, until what stays fits the low mark beside a
    new summary; the last turn always stays.
    """
    if summary_tokens + sum(turn_tokens) <= marks.high_tokens or len(turn_tokens) < 2:
        return 0
    room = marks.low_tokens - marks.summary_tokens - turn_tokens[-1]
    first = len(turn_tokens) - 1
    while first > 0 and turn_tokens[first - 1] <= room:
        room -= turn_tokens[first - 1]
        first -= 1
    return first


def mean_uncached_tokens(new: float, growth: float, marks: Marks) -> float:
    """Mean of uncached tokens a turn: u + L·g/(H − L), u new tokens and g growth a turn, folds included."""
    return new + marks.low_tokens * growth / (marks.high_tokens - marks.low_tokens)


def is_usable(prose: str) -> bool:
    """Whether an engine's text can be a summary: it says something, and not the same over and over."""
    words = prose.casefold().split()
    letters = regex.findall(r"\p{L}", prose)
    if len(letters) < 8:
        return False
    return len(words) < 20 or len(set(words)) >= len(words) / 4


@dataclass(frozen=True, slots=True)
class _Line:
    speaker: str
    text: str
    place: int
    terms: frozenset[str]
    facts: frozenset[str]

    @property
    def shown(self) -> str:
        return f"{self.speaker}: {self.text}"


def summary_of(
    folded: Sequence[PastMessage],
    earlier: str,
    *,
    most_tokens: int,
    count: Callable[[str], int],
    prose: str = "",
) -> str:
    """A summary of folded messages, at most `most_tokens` by `count`; deterministic, in any script.

    `prose` (the engine's summary) comes first, cut between sentences to its share. Then whole sentences of the
    messages and of the `earlier` summary, in order, each with its speaker: what a system message says, then what a
    user stated, then what was answered, numbers and names first, nothing twice. What the prose says counts for
    nothing here: a small model gets facts wrong, and its words are replaced at the next fold.
    """
    said = _cut(prose, int(most_tokens * PROSE_SHARE), count) if prose else []
    known: frozenset[str] = frozenset()
    facts: frozenset[str] = frozenset()
    lines = _lines(folded, earlier, with_prose=not said)
    left = most_tokens - count("\n".join(said)) - 1
    taken: list[_Line] = []
    # Scored anew after each choice: a fact counts once. Scores only fall, so the highest that has not fallen is the
    # highest of all, and the others of a long history need not be looked at.
    heap = [(-_score(line, known, facts), line.place) for line in lines]
    heapq.heapify(heap)
    while heap and left > 0:
        scored, place = heapq.heappop(heap)
        line = lines[place]
        score = _score(line, known, facts)
        if score <= 0:
            continue
        if score < -scored:
            heapq.heappush(heap, (-score, place))
            continue
        tokens = count(line.shown) + 1
        if tokens > left:
            continue
        left -= tokens
        taken.append(line)
        known |= line.terms
        facts |= line.facts
    taken.sort(key=lambda line: line.place)
    return "\n".join([*([" ".join(said)] if said else []), *(line.shown for line in taken)])


def _lines(folded: Sequence[PastMessage], earlier: str, *, with_prose: bool) -> list[_Line]:
    """`with_prose`: also the prose of the earlier summary, which new prose takes the place of."""
    found: list[tuple[str, str]] = []
    for line in earlier.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None and not with_prose:
            continue
        speaker, text = match.groups() if match else ("Assistant", line)
        found.extend((speaker, sentence) for sentence in sentences(text))
    for message in folded:
        if message.role in _SPEAKERS:
            found.extend((_SPEAKERS[message.role], sentence) for sentence in sentences(message.content))
    return [
        _Line(speaker, text, place, terms_of(text), _facts_of(text)) for place, (speaker, text) in enumerate(found)
    ]


def _score(line: _Line, known: frozenset[str], facts: frozenset[str]) -> float:
    """What a line would add; 0 for one that says nothing new."""
    new_facts = len(line.facts - facts)
    new_terms = len(line.terms - known)
    if not new_facts and (new_terms <= len(line.terms) * (1 - KNOWN_SHARE) or len(line.terms) < LEAST_TERMS):
        return 0.0
    weight = _QUESTION_WEIGHT if _QUESTION.search(line.text) else _WEIGHTS[line.speaker]
    return (weight + FACT_WEIGHT * min(new_facts, MOST_FACTS)) / (1 + len(line.text) / 150)


def _facts_of(text: str) -> frozenset[str]:
    return frozenset(found.casefold() for found in _FACT.findall(text))


def _cut(prose: str, most_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Leading sentences within the tokens; the first alone even if it is longer than that, cut between words."""
    kept: list[str] = []
    for sentence in sentences(prose):
        if count(" ".join([*kept, sentence])) > most_tokens:
            break
        kept.append(sentence)
    if kept:
        return kept
    words = prose.split()
    while len(words) > 1 and count(" ".join(words)) > most_tokens:
        words = words[: len(words) * 3 // 4]
    text = " ".join(words)
    return [text] if count(text) <= most_tokens else []
