"""The values of one chat request between the pipeline's steps."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from gateway.backends.vllm import EngineStream
from gateway.budgets import Budget
from gateway.context import RequestContext
from gateway.messages import Conversation
from gateway.runs import Run, Work
from gateway.serving import Serving
from gateway.timings import EngineUsage, Timings, make_timings, predicted
from gateway.volatile import VolatileText
from gateway.wire import ChatRequest
from prompt_builder.outlook import Clock
from prompt_builder.types import Limits, Plan, Prompt, Transcript
from retrieval.types import Candidates, ChunkRenderer


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """What a request that does not say gets. Tokens."""

    top_k: int
    min_answer_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One question on its way: everything that was decided before the engine is called."""

    request: ChatRequest
    context: RequestContext
    serving: Serving
    served_model: str
    stores: tuple[str, ...]
    conversation: Conversation
    candidates: Candidates
    limits: Limits
    clock: Clock
    plan: Plan
    prompt: Prompt
    budget: Budget
    retrieve_ms: float
    plan_ms: float
    volatile: VolatileText | None = None

    @property
    def transcript(self) -> Transcript:
        return self.conversation.transcript

    @property
    def whole_chunks(self) -> list[tuple[str, int]]:
        """Labels and tokens of the chunks that other requests may have too: extracts are of this question alone."""
        return [(chunk.label, len(chunk.rendered.token_ids)) for chunk in self.plan.chunks if chunk.form == "whole"]

    @property
    def work(self) -> Work:
        return Work(
            tokens=self.prompt.tokens,
            token_ids=self.prompt.token_ids,
            hashes=self.prompt.block_hashes,
            forecast=self.plan.forecast,
            deadline_s=self.budget.deadline_s(self.context),
            choices=self.request.n or 1,
        )


@dataclass(slots=True)
class StreamedAnswer:
    """`timings` is filled in when the events have ended; `close` aborts the engine's request if they have not."""

    stores: tuple[str, ...]
    server_timing: bytes
    events: AsyncGenerator[bytes]
    stream: EngineStream
    run: Run
    timings: Timings | None = None

    def close(self) -> None:
        self.stream.close()
        self.run.close()


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    stores: tuple[str, ...]
    body: bytes
    timings: Timings


def rendered_by(renderer: ChunkRenderer, candidates: Candidates) -> Candidates:
    """The candidates as this renderer renders them; chunks stored under another tokenizer are rendered anew."""
    items = tuple(
        item
        if item.chunk.renderer_fingerprint == renderer.fingerprint
        else replace(item, chunk=replace(item.chunk, rendered=renderer.render(item.chunk.title, item.chunk.text)))
        for item in candidates.items
    )
    return replace(candidates, items=items)


def elapsed_ms(context: RequestContext) -> float:
    return (time.monotonic() - context.started_s) * 1000


def plain_timings(
    context: RequestContext, budget: Budget, run: Run, usage: EngineUsage, sent_ms: float, first_ms: float | None
) -> Timings:
    """The timings of a passed-through answer that has just ended."""
    return make_timings(
        usage,
        retrieve_ms=0.0,
        plan_ms=0.0,
        sent_ms=sent_ms,
        first_ms=first_ms,
        total_ms=elapsed_ms(context),
        choices=run.work.choices,
        waited_ms=run.waited_s * 1000,
        predicted=predicted(run.work.forecast, budget.ttft_s, run.cached_tokens),
    )


def turn_timings(turn: Turn, run: Run, usage: EngineUsage, sent_ms: float, first_ms: float | None) -> Timings:
    """The timings of a turn whose answer has just ended."""
    plain = plain_timings(turn.context, turn.budget, run, usage, sent_ms, first_ms)
    return replace(plain, retrieve_ms=turn.retrieve_ms, plan_ms=turn.plan_ms)


async def nothing() -> AsyncGenerator[bytes]:
    return
    yield b""
