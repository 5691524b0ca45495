"""The values of one chat request between the pipeline's steps."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from gateway.answers import EngineUsage, Timings, make_timings
from gateway.backends.vllm import EngineStream
from gateway.context import RequestContext
from gateway.messages import Conversation
from gateway.serving import Serving
from gateway.wire import ChatRequest
from prompt_builder.types import Plan, Prompt, Transcript
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
    transcript: Transcript
    plan: Plan
    prompt: Prompt
    retrieve_ms: float
    plan_ms: float


@dataclass(slots=True)
class StreamedAnswer:
    """`timings` is filled in when the events have ended; `close` aborts the engine's request if they have not."""

    stores: tuple[str, ...]
    server_timing: bytes
    events: AsyncGenerator[bytes]
    stream: EngineStream
    timings: Timings | None = None

    def close(self) -> None:
        self.stream.close()


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
    usage: EngineUsage, context: RequestContext, sent: float, first: float | None, *, choices: int
) -> Timings:
    return make_timings(
        usage,
        retrieve_ms=0.0,
        plan_ms=0.0,
        sent_ms=sent,
        first_ms=first,
        total_ms=elapsed_ms(context),
        choices=choices,
    )


def turn_timings(turn: Turn, usage: EngineUsage, sent: float, first: float | None) -> Timings:
    return make_timings(
        usage,
        retrieve_ms=turn.retrieve_ms,
        plan_ms=turn.plan_ms,
        sent_ms=sent,
        first_ms=first,
        total_ms=elapsed_ms(turn.context),
        choices=turn.request.n or 1,
    )


async def nothing() -> AsyncGenerator[bytes]:
    return
    yield b""
