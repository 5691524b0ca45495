"""One request's stay on a replica: its turn to prefill, the blocks it takes there, and what it teaches."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cache.late_hashes import LateHashes
from cache.residency import FIRST_STEP_TOKENS, Lease, Residency
from gateway.answer_ids import NamedAnswer, name_soon
from gateway.queueing import Prefill
from gateway.tickets import Ticket
from gateway.timings import EngineUsage
from latency.speed import Forecast

MANY_BLOCKS = 1000
"""To hash more of them takes half a millisecond and longer."""


class Lessons(Protocol):
    """Who learns from requests that have been answered. Tokens and seconds."""

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None: ...

    def observe_decode(self, output_tokens: int, seconds: float) -> None: ...


class Onlooker(Protocol):
    """Who is told of each run: when it began, of its first token, and once of its end.

    `usage` is what the engine reported, None for a run that was not answered. Must not raise.
    """

    def began(self, run: "Run") -> None: ...

    def first_token(self, run: "Run") -> None: ...

    def ended(self, run: "Run", usage: EngineUsage | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of a replica. `token_ids` is None where only the engine knows them.

    `hashes` are those of the ids' blocks, in whichever block size the prompt was rendered for. `forecast` is None
    where the replica's speed is not known. `deadline_s` is on the monotonic clock.
    """

    tokens: int
    token_ids: tuple[int, ...] | None
    hashes: Sequence[bytes]
    forecast: Forecast | None
    deadline_s: float | None
    choices: int = 1


class Run:
    """From the release of a request to its end; `close` is idempotent and gives everything back.

    Taking a long prompt's blocks takes milliseconds. `soon` calls what it is given in a moment, when the request is
    on its way; without it the blocks are taken at once. They are in any case as soon as anything is asked of them.
    """

    def __init__(
        self,
        work: Work,
        ticket: Ticket,
        residency: Residency | None,
        lessons: Lessons,
        *,
        salt: str,
        decoding: int,
        closed: Callable[["Run"], None] = lambda run: None,
        onlooker: Onlooker | None = None,
        clock: Callable[[], float] = time.monotonic,
        soon: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.work = work
        self._ticket = ticket
        self._residency = residency
        self._lessons = lessons
        self._decoding = decoding
        self._closed = closed
        self._onlooker = onlooker
        self._usage: EngineUsage | None = None
        self._answer: NamedAnswer | None = None
        self._next_block_tokens = 0
        self._step_before: int | None = None
        self._clock = clock
        self._salt = salt
        self._begun = False
        self._comes_whole = False
        self._taken: Lease | None = None
        self._sent_s = clock()
        self._first_s: float | None = None
        if soon is None:
            self._begin()
        elif isinstance(work.hashes, LateHashes) and work.hashes.unmade > MANY_BLOCKS:
            soon(partial(self._hash, work.hashes, soon))
        else:
            soon(self._begin)

    def _hash(self, hashes: LateHashes, soon: Callable[[Callable[[], None]], None]) -> None:
        """In a turn of the loop of its own: it takes as long as to take the blocks."""
        if not self._begun:
            hashes.made(len(hashes))
            soon(self._begin)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        if self._residency is not None and self.work.token_ids is not None:
            self._taken = self._residency.begin(self.work.token_ids, self._salt, self.work.hashes)
        if self._comes_whole:
            self._say_whole()
        if self._onlooker is not None:
            self._onlooker.began(self)

    def _say_whole(self) -> None:
        if self._residency is not None and self._taken is not None:
            self._residency.steps.comes_whole(self._taken)

    @property
    def _lease(self) -> Lease | None:
        self._begin()
        return self._taken

    @property
    def waited_s(self) -> float:
        """Time in the gateway's queue."""
        return self._ticket.waited_s

    @property
    def cached_tokens(self) -> int | None:
        """What the replica is predicted to report of the prompt: as it was sent, or later as it began to run."""
        return self._lease.cached_tokens if self._lease is not None else None

    @property
    def prefill(self) -> Prefill:
        """Its prefill as it was predicted when it entered the queue."""
        return self._ticket.job

    @property
    def hashes(self) -> Sequence[bytes]:
        """Of the prompt's whole blocks; none where they are not known."""
        lease = self._lease
        return () if lease is None else lease.hashes[: lease.prompt_tokens // lease.block_size]

    def first_token(self) -> None:
        self._begin()
        self._first_s = self._clock()
        self._ticket.first_token()
        if self._onlooker is not None:
            self._onlooker.first_token(self)
        if self._residency is not None and self._lease is not None:
            # From now on the prompt is in the engine's cache, however the answer ends.
            self._residency.generated(self._lease, ())

    def first_token_expected(self) -> None:
        """For an answer that comes whole: its first token is taken to come when it was predicted.

        Where nothing was predicted it is taken to be there: else the answer's decode would hold up all others.
        """
        self._comes_whole = True
        if self._begun:
            self._say_whole()
        forecast = self.work.forecast
        self._ticket.first_token_expected(forecast.safe_prefill_s if forecast is not None else 0.0)

    def streamed(self, tokens: int) -> None:
        """So many tokens of the answer have come or are on their way: each block that they begin evicts another."""
        residency, lease = self._residency, self._lease
        if residency is None or lease is None:
            return
        if self.work.choices == 1:
            if self._step_before is None:
                self._step_before = residency.steps.count + 1 - tokens
            residency.steps.reached(self._step_before + tokens)
        if tokens < self._next_block_tokens:
            return
        if tokens > 0:
            residency.answered(lease, tokens)
        self._next_block_tokens = lease.next_block_tokens(tokens)
        if tokens <= FIRST_STEP_TOKENS:
            self._next_block_tokens = min(self._next_block_tokens, FIRST_STEP_TOKENS + 1)

    def answered(self, usage: EngineUsage, answer: NamedAnswer | None = None) -> None:
        """The answer is complete: what was predicted meets what the engine reports.

        `answer` is what was said, where it is text alone: its ids are found out after the run's end.
        """
        ended_s = self._clock()
        self._usage = usage
        self._answer = answer if self.work.choices == 1 else None
        self._settle(usage)
        if self._first_s is None or self.work.choices != 1:
            return
        # A prefill that shared its step with another took the time of both.
        if self._ticket.alone and usage.prompt_tokens is not None and usage.cached_tokens is not None:
            prefill_s = self._first_s - self._began_s(usage)
            uncached = usage.prompt_tokens - usage.cached_tokens
            if prefill_s > 0 and uncached > 0:
                self._lessons.observe(uncached, usage.cached_tokens, prefill_s, self._decoding)
        if usage.output_tokens is not None and usage.output_tokens > 1 and ended_s > self._first_s:
            self._lessons.observe_decode(usage.output_tokens - 1, ended_s - self._first_s)

    def _began_s(self, usage: EngineUsage) -> float:
        """When the engine came to the prefill: as it reports, or as the pacer believes."""
        if usage.queue_ms is not None:
            return self._sent_s + usage.queue_ms / 1000
        return max(self._sent_s, self._ticket.began_s)

    def close(self) -> None:
        if not self._begun:
            # Given up within two turns of the loop: nobody has heard of it, and the engine has hardly begun.
            self._begun, self._onlooker = True, None
        self._closed(self)
        self._ticket.done()
        if self._onlooker is not None:
            onlooker, self._onlooker = self._onlooker, None
            onlooker.ended(self, self._usage)
        if self._residency is not None and self._lease is not None:
            self._residency.end(self._lease)
            if self._answer is not None and self._usage is not None:
                answer, self._answer = self._answer, None
                name_soon(self._residency, self._lease, answer, self._usage)

    def _settle(self, usage: EngineUsage) -> None:
        if self._residency is None:
            return
        if self._lease is not None:
            self._residency.reconcile(self._lease, usage.cached_tokens)
            if usage.output_tokens is not None:
                self._residency.answered(self._lease, usage.output_tokens)
        elif usage.prompt_tokens is not None:
            computed = usage.prompt_tokens - (usage.cached_tokens or 0)
            self._residency.ran_unknown(computed + (usage.output_tokens or 0))
