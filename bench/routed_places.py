"""One replica as a router of `bench.routing` knows it: the gateway's own parts, without HTTP."""

import asyncio
from dataclasses import replace

from bench.routed_engine import KV_TOKENS, SPEED, Address, Answering
from bench.routed_traffic import BLOCK_TOKENS, Asked
from cache.prompt_tree import PromptTree
from cache.residency import Residency
from gateway.health import Health
from gateway.pacing import Pacer, Prefill
from gateway.routing import foreseen
from gateway.runs import Run, Work
from gateway.timings import EngineUsage
from prompt_builder.outlook import NothingHeld, Outlook

PROBE_S = 0.25


class NoLessons:
    """The speed is given (a Lessons)."""

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None: ...

    def observe_decode(self, output_tokens: int, seconds: float) -> None: ...


class Place:
    """What `gateway.replica.Replica` is, its engine being at an address in this process.

    `pictured`: whether the router follows what the replica holds; `paced`: whether prefills wait for their turn.
    """

    def __init__(self, number: int, address: Address, *, pictured: bool, paced: bool) -> None:
        clock = asyncio.get_running_loop().time
        self.number = number
        self.name = f"engine-{number}"
        self.address = address
        self.pacer = Pacer(enabled=paced, max_queued=100_000, clock=clock)
        self.pacer.learned(SPEED)
        self.health = Health(clock)
        self.runs: set[Run] = set()
        self._clock = clock
        self._pictured = pictured
        self._starts = 0
        self.residency: Residency | None = None
        self.probe()

    @property
    def outstanding(self) -> int:
        """Requests that were given to it and are not over."""
        return len(self.runs) + self.pacer.queued

    @property
    def waiting(self) -> int:
        """Those without a first token."""
        return self.outstanding - self.pacer.decoding

    def probe(self) -> None:
        """As the gateway's: an engine that is another process holds nothing."""
        gone = self.address.engine is None
        self.health.probed("not reachable" if gone else None)
        if not gone and self.address.starts != self._starts:
            self._starts = self.address.starts
            self.residency = Residency(BLOCK_TOKENS, KV_TOKENS // BLOCK_TOKENS) if self._pictured else None

    def outlook(self, tree: PromptTree) -> Outlook:
        prefix = NothingHeld() if self.residency is None else self.residency.prefix(tree=tree)
        return Outlook(self.name, SPEED, self.pacer.wait_s, prefix, self.pacer.decoding)

    def cached_tokens(self, asked: Asked) -> int:
        """What it is believed to hold of the prompt."""
        return self.outlook(asked.tree()).prefix.extended(asked.ids).cached_tokens()

    async def enter(self, asked: Asked, work: Work) -> Run:
        """Its turn to prefill; with what the picture says now where nothing was foreseen."""
        forecast = work.forecast or foreseen(work, self.outlook(asked.tree()))
        assert forecast is not None
        job = Prefill(forecast.uncached_tokens, forecast.cached_tokens, forecast.prefill_s, work.deadline_s)
        ticket = await self.pacer.enter(job)
        run = Run(
            replace(work, forecast=forecast),
            ticket,
            self.residency,
            NoLessons(),
            salt="",
            decoding=self.pacer.decoding,
            closed=self._left,
            clock=self._clock,
        )
        self.runs.add(run)
        self.health.began()
        return run

    def _left(self, run: Run) -> None:
        self.runs.discard(run)
        self.health.left()


def work_of(asked: Asked) -> Work:
    return Work(len(asked.ids), asked.ids, asked.hashes, None, None)


def usage_of(asked: Asked, answering: Answering) -> EngineUsage:
    return EngineUsage(
        prompt_tokens=len(asked.ids), cached_tokens=answering.cached_tokens, output_tokens=asked.output_tokens
    )
