"""The simulated engine: admission, steps that batch waiting prefills, decode, and the clock of all that."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from bench.sim.blocks import Allocation, BlockPool
from bench.sim.config import SimConfig

QUEUE_FULL = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
BACKLOG_FULL = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
)


class EngineBusy(Exception):
    """Admission refused; the message is the engine's."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request. `ready_tokens` of its `output` have been generated."""

    prompt: list[int]
    output: tuple[int, ...]
    salt: str = ""
    allocation: Allocation | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    ready_tokens: int = 0
    arrived_s: float = 0.0
    scheduled_s: float = 0.0
    finished: bool = False
    waiter: "asyncio.Future[None] | None" = field(default=None, repr=False)

    @property
    def uncached_tokens(self) -> int:
        return len(self.prompt) - self.cached_tokens


class Engine:
    """First come, first served.

    One step computes up to `max_num_batched_tokens` of waiting prompts and one token of each running answer;
    all of a step's first tokens appear at its end. A step takes a + Σ(b·u + g·u·(c + u/2)) for its prefills and
    1/rate for its decodes. With `fixed_ttft_s` there are no steps: every request has its own clock.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, config.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission; prefilling or decoding
        self.steps = 0
        self._wake = asyncio.Event()
        self._stepping = config.fixed_ttft_s is None

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens whose prefill has not begun."""
        return sum(len(sequence.prompt) for sequence in self.waiting)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue the choices of one request. Raises EngineBusy."""
        config = self.config
        unfinished = len(self.waiting) + len(self.running)
        if config.max_num_queued_reqs is not None and unfinished + len(sequences) > config.max_num_queued_reqs:
            raise EngineBusy(QUEUE_FULL)
        if config.max_num_queued_tokens is not None and self.queued_tokens >= config.max_num_queued_tokens:
            raise EngineBusy(BACKLOG_FULL)
        now = asyncio.get_running_loop().time()
        for sequence in sequences:
            sequence.arrived_s = now
            if self._stepping:
                self.waiting.append(sequence)
            else:
                # With every request on its own clock there is no queue; without free blocks it runs uncached.
                if self._begin(sequence, now):
                    self._computes(sequence, len(sequence.prompt))
                self.running.append(sequence)
        self._wake.set()

    async def tokens_ready(self, sequence: Sequence, count: int) -> None:
        """Wait until `count` tokens of the answer are generated."""
        while sequence.ready_tokens < count:
            if not self._stepping:
                await self._own_clock(sequence)
                continue
            sequence.waiter = asyncio.get_running_loop().create_future()
            await sequence.waiter

    def release(self, sequence: Sequence) -> None:
        """The request is over, answered or abandoned; idempotent."""
        if sequence.finished:
            return
        sequence.finished = True
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.allocation is not None:
            self.pool.release(sequence.allocation)
            sequence.allocation = None
        self._wake.set()

    async def run(self) -> None:
        """Step while there is work; runs until cancelled."""
        loop = asyncio.get_running_loop()
        step_end_s = loop.time()
        while True:
            if not self.waiting and not self.running:
                self._wake.clear()
                await self._wake.wait()
                step_end_s = loop.time()
            prefills = self._schedule(loop.time())
            decoding = [s for s in self.running if s.computed_tokens == len(s.prompt)]
            if not prefills and not decoding:
                self._wake.clear()
                await self._wake.wait()
                step_end_s = loop.time()
                continue
            self.steps += 1
            # Steps follow each other on their own clock, so that late timers do not add up.
            step_end_s += self._step_s(prefills, len(decoding))
            await asyncio.sleep(max(0.0, step_end_s - loop.time()))
            for sequence, chunk_tokens in prefills:
                if sequence.finished:
                    continue
                sequence.computed_tokens += chunk_tokens
                if sequence.computed_tokens == len(sequence.prompt):
                    self._advance(sequence)
            for sequence in decoding:
                if not sequence.finished:
                    self._advance(sequence)

    def _schedule(self, now_s: float) -> list[tuple[Sequence, int]]:
        """The prefills of the next step as (sequence, tokens)."""
        chunks: list[tuple[Sequence, int]] = []
        budget = self.config.max_num_batched_tokens
        for sequence in self.running:
            remaining = len(sequence.prompt) - sequence.computed_tokens
            chunk = min(remaining, budget) if remaining else 0
            if chunk:
                chunks.append((sequence, chunk))
                self._computes(sequence, sequence.computed_tokens + chunk)
            budget -= chunk or 1
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if not self._begin(sequence, now_s):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            chunk = min(sequence.uncached_tokens, budget)
            chunks.append((sequence, chunk))
            self._computes(sequence, sequence.computed_tokens + chunk)
            budget -= chunk
        return chunks

    def _begin(self, sequence: Sequence, now_s: float) -> bool:
        allocation = self.pool.start(sequence.prompt, sequence.salt)
        if allocation is None:
            return False
        sequence.allocation = allocation
        sequence.cached_tokens = sequence.computed_tokens = allocation.cached_tokens
        sequence.scheduled_s = now_s
        return True

    def _computes(self, sequence: Sequence, tokens: int) -> None:
        """From its step on, a block can be hit: by requests of the same step too, as in the engine."""
        if sequence.allocation is not None:
            self.pool.extend(sequence.allocation, tokens)

    def _step_s(self, prefills: list[tuple[Sequence, int]], decoding: int) -> float:
        config = self.config
        model = config.prefill
        seconds = sum(model.predict_s(u, s.computed_tokens) - model.fixed_s for s, u in prefills)
        if any(s.computed_tokens == s.cached_tokens for s, _ in prefills):
            seconds += model.fixed_s
        if decoding and config.decode_tokens_per_s is not None:
            seconds += (decoding if config.decode_shared else 1) / config.decode_tokens_per_s
        return seconds * config.time_scale

    def _advance(self, sequence: Sequence) -> None:
        total = len(sequence.output)
        ready = total if self.config.decode_tokens_per_s is None else min(total, sequence.ready_tokens + 1)
        self._generated(sequence, ready)
        if ready >= total:
            self.release(sequence)
        if sequence.waiter is not None and not sequence.waiter.done():
            sequence.waiter.set_result(None)

    def _generated(self, sequence: Sequence, ready_tokens: int) -> None:
        allocation = sequence.allocation
        if allocation is not None:
            allocation.tokens.extend(sequence.output[sequence.ready_tokens : ready_tokens])
            # The newest token's keys and values are only computed when the next one is. Where no block is
            # free a real engine preempts; here the answer goes on and is not cached.
            self.pool.extend(allocation, len(sequence.prompt) + max(0, ready_tokens - 1))
        sequence.ready_tokens = ready_tokens

    async def _own_clock(self, sequence: Sequence) -> None:
        if sequence.ready_tokens == 0:
            assert self.config.fixed_ttft_s is not None
            first_token_s = sequence.arrived_s + self.config.fixed_ttft_s * self.config.time_scale
            wait_s = first_token_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
        if not sequence.finished:
            self._generated(sequence, len(sequence.output))
            self.release(sequence)
        sequence.ready_tokens = len(sequence.output)
