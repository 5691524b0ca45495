"""The engines of `bench.routing`: the simulator's, in this process and in virtual time, one to an address."""

import asyncio
from dataclasses import dataclass

from bench.routed_traffic import BLOCK_TOKENS
from bench.sim.config import SimConfig
from bench.sim.engine import Engine, Sequence
from latency.model import PrefillModel
from latency.speed import DecodeLoad, SpeedEstimate

# A model of 8 billion parameters on a card of the data centre.
CARD = PrefillModel(fixed_s=0.008, per_token_s=31e-6, per_pair_s=1.3e-9)
DECODE_STEP_S = 0.010
KV_TOKENS = 400_000
# What a gateway has learned of such an engine: a prefill waits for half a step on the average, and shares its own.
SPEED = SpeedEstimate(
    CARD,
    factor=1.1,
    quantile=0.95,
    samples=100,
    source="learned",
    token_s=DECODE_STEP_S,
    beside=DecodeLoad(fixed_s=1.5 * DECODE_STEP_S, per_answer_s=0.0, per_answer_token_s=0.0, factor=1.1),
)


class EngineGone(Exception):
    """The engine cannot be reached, or went before the answer was complete."""


@dataclass(slots=True, eq=False)
class Answering:
    """A request in an engine. `cached_tokens` is right once the first token has come."""

    sequence: Sequence
    first: "asyncio.Future[None]"
    last: "asyncio.Future[None]"

    @property
    def cached_tokens(self) -> int:
        return self.sequence.cached_tokens


class Card(Engine):
    """The simulator's engine, which tells of an answer's first token and of its end."""

    def __init__(self) -> None:
        super().__init__(
            SimConfig(
                block_size=BLOCK_TOKENS,
                num_gpu_blocks=KV_TOKENS // BLOCK_TOKENS + 1,
                prefill=CARD,
                decode_tokens_per_s=1 / DECODE_STEP_S,
            )
        )
        self._answering: dict[Sequence, Answering] = {}

    def ask(self, ids: tuple[int, ...], output_tokens: int) -> Answering:
        loop = asyncio.get_running_loop()
        # The ids of an answer are its own: no prompt has them.
        output = tuple(range(-output_tokens, 0))
        sequence = Sequence(list(ids), output)
        sequence.waiter = first = loop.create_future()
        answering = self._answering[sequence] = Answering(sequence, first, loop.create_future())
        self.submit([sequence])
        return answering

    def _advance(self, sequence: Sequence) -> None:
        """As the simulator's, but blocks are looked at only where one begins or is full."""
        output, prompt_tokens = sequence.output, len(sequence.prompt)
        sequence.ready_tokens = ready = sequence.ready_tokens + 1
        computed = prompt_tokens + ready - 1
        is_first, is_last = ready == 1, ready == len(output)
        if not (is_first or is_last) and computed % BLOCK_TOKENS > 1:
            return
        if (allocation := sequence.allocation) is not None:
            allocation.tokens.extend(output[len(allocation.tokens) - prompt_tokens : ready])
            self.pool.extend(allocation, computed)
        if is_last:
            self.release(sequence)
        if is_first and sequence.waiter is not None and not sequence.waiter.done():
            sequence.waiter.set_result(None)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        answering = self._answering.pop(sequence, None)
        if answering is not None and not answering.last.done():
            answering.last.set_result(None)

    def die(self) -> None:
        for answering in self._answering.values():
            for future in (answering.first, answering.last):
                if not future.done():
                    future.set_exception(EngineGone())
                    # Nobody may be waiting for the last token yet.
                    future.exception()
        self._answering.clear()


class Address:
    """Where one engine is. One that dies leaves nothing; the next one here is empty."""

    def __init__(self) -> None:
        self.engine: Card | None = None
        self.starts = 0
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.engine = Card()
        self.starts += 1
        self._running = asyncio.create_task(self.engine.run(), name="engine")

    def kill(self) -> None:
        if self._running is not None:
            self._running.cancel()
        engine, self.engine, self._running = self.engine, None, None
        if engine is not None:
            engine.die()

    def ask(self, ids: tuple[int, ...], output_tokens: int) -> Answering:
        """Raises EngineGone."""
        if self.engine is None:
            raise EngineGone
        return self.engine.ask(ids, output_tokens)
