"""One replica as a router of `bench.routing` knows it: the gateway's own parts, without HTTP."""

import asyncio
from dataclasses import replace
from functools import partial

from bench.routed_engine import KV_TOKENS, SPEED, Address, Answering
from bench.routed_traffic import BLOCK_TOKENS
from cache.prompt_tree import PromptTree
from cache.residency import Residency
from gateway.health import Health
from gateway.pacing import Pacer, Prefill
from gateway.queueing import ROUTED_PATIENCE
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
        self.pacer.patience = ROUTED_PATIENCE
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

    async def enter(self, work: Work) -> Run:
        """Its turn to prefill; with what the picture says now where nothing was foreseen."""
        forecast = work.forecast or foreseen(work, self.outlook(tree_of(work)))
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
            closed=partial(self._left, self.health.began()),
            clock=self._clock,
        )
        self.runs.add(run)
        return run

    def _left(self, trial: int, run: Run) -> None:
        self.runs.discard(run)
        self.health.left(trial)


def tree_of(work: Work) -> PromptTree:
    """The prompt hashed already, to be followed on any number of replicas."""
    tree = PromptTree(BLOCK_TOKENS)
    if work.token_ids is not None:
        tree.hashed(work.token_ids, work.hashes)
    return tree


def usage_of(work: Work, output_tokens: int, answering: Answering) -> EngineUsage:
    return EngineUsage(prompt_tokens=work.tokens, cached_tokens=answering.cached_tokens, output_tokens=output_tokens)
