"""A streamed answer of an engine, read whole, and how much of a gold answer it holds."""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.answers import read_usage
from gateway.backends.sse import event_data, split_events

_WORDS = re.compile(r"\w+")
_ARTICLES = frozenset(("a", "an", "the"))


@dataclass(frozen=True, slots=True)
class Answer:
    """`ttft_s` runs from sending to the first bytes of the stream."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class NoUsage(Exception):
    """The stream ended without telling prompt and cached tokens."""


@dataclass(slots=True)
class AnswerReader:
    """Collects the events of one stream."""

    _texts: list[str] = field(default_factory=list)
    _last: dict[str, Any] = field(default_factory=dict)

    def feed(self, events: bytes) -> None:
        for event in split_events(events):
            data = event_data(event)
            if not data or data == b"[DONE]":
                continue
            body = orjson.loads(data)
            if body.get("usage"):
                self._last = body
            for choice in body.get("choices") or ():
                self._texts.append(choice["delta"].get("content") or "")

    def answer(self, ttft_s: float) -> Answer:
        """Raises NoUsage."""
        usage = read_usage(self._last)
        if usage.prompt_tokens is None or usage.cached_tokens is None:
            raise NoUsage("The engine did not tell how many prompt tokens were cached.")
        return Answer("".join(self._texts), ttft_s, usage.prompt_tokens, usage.cached_tokens)


def share_found(golds: Iterable[str], answer: str) -> float:
    """Share of the gold answer's words that occur in the answer, 0 to 1; the best of several gold answers.

    Words are runs of letters and digits of the NFKC text without regard to case; English articles do not count
    unless the gold answer has nothing else.
    """
    said = frozenset(_words(answer))
    shares = [0.0]
    for gold in golds:
        words = _words(gold)
        wanted = [word for word in words if word not in _ARTICLES] or words
        if wanted:
            shares.append(sum(word in said for word in wanted) / len(wanted))
    return max(shares)


def _words(text: str) -> list[str]:
    return _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())
