"""Answering one generation request: the engine does the work, this writes it down."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from bench.sim.answers import Script, Scripter
from bench.sim.config import Fault, SimConfig
from bench.sim.engine import Engine, Sequence
from bench.sim.faults import EventWriter
from bench.sim.http import LAST_CHUNK, Connection, HttpRequest, chunked
from bench.sim.metrics import EngineMetrics
from bench.sim.requests import read_generation
from bench.sim.tokens import SimTokenizer
from bench.sim.wire import PlainFrames, Shape, delta_event, role_event, usage, usage_event, whole_answer


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """A request as it arrived. `prompt_token_ids` and `cached_tokens` are filled when the engine has it."""

    path: str
    headers: dict[str, str]
    body: Any
    at_s: float
    prompt_token_ids: list[int] = field(default_factory=list, repr=False)
    cached_tokens: int | None = None
    first_token_s: float | None = None
    aborted_s: float | None = None
    finished: bool = False


class Generator:
    """Streams and whole answers of one engine process. `answers` counts those begun."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer, engine: Engine, metrics: EngineMetrics) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engine = engine
        self.metrics = metrics
        self.scripter = Scripter(config, tokenizer)
        self.answers = 0
        self._frames: dict[int, tuple[Script, PlainFrames]] = {}

    async def answer(
        self, request: HttpRequest, connection: Connection, record: RecordedRequest, fault: Fault | None
    ) -> None:
        """Answer a request whose parsed body is `record.body`. Raises BadRequest, EngineBusy and StreamOver."""
        chat = request.path == "/v1/chat/completions"
        wanted = read_generation(record.body, chat, self.config, self.tokenizer)
        record.prompt_token_ids = wanted.prompt_ids
        scripts = [
            self.scripter.script(self.scripter.answer(record.body, wanted.prompt_ids), record.body, wanted.max_tokens)
            for _ in range(wanted.n)
        ]
        sequences = [Sequence(wanted.prompt_ids, script.output, wanted.cache_salt) for script in scripts]
        self.engine.submit(sequences)
        self.answers += 1
        answer_id = request.headers.get("x-request-id") or f"{self.answers:032x}"
        shape = Shape(
            chat,
            ("chatcmpl-" if chat else "cmpl-") + answer_id,
            int(time.time()),
            self.config.model,
            wanted.return_token_ids,
            wanted.logprobs,
            wanted.include_usage,
        )
        reason = "abort"
        try:
            if not wanted.stream:
                await self._answer_whole(connection, shape, scripts, sequences, record, fault)
            elif fault is None and chat and wanted.plain and scripts[0].plain:
                await self._stream_plain(connection, shape, scripts[0], sequences[0], record)
            else:
                await self._stream(connection, shape, scripts, sequences, record, fault)
            reason = scripts[0].finish_reason
        finally:
            for sequence in sequences:
                self.engine.release(sequence)
            self.metrics.finished(sum(s.ready_tokens for s in sequences), reason)

    async def _first_token(self, sequence: Sequence, record: RecordedRequest) -> None:
        await self.engine.tokens_ready(sequence, 1)
        record.cached_tokens = sequence.cached_tokens
        record.first_token_s = asyncio.get_running_loop().time()
        self.metrics.first_token(sequence, record.first_token_s)

    def _usage(self, wanted_prompt: int, scripts: list[Script], sequence: Sequence) -> dict[str, Any]:
        completion = sum(len(script.output) for script in scripts)
        if not self.config.prompt_tokens_details or self.config.surface == "minimal":
            return usage(wanted_prompt, completion, None, None)
        size = self.config.block_size
        created = wanted_prompt // size * size - sequence.cached_tokens
        return usage(wanted_prompt, completion, sequence.cached_tokens, created)

    async def _answer_whole(
        self,
        connection: Connection,
        shape: Shape,
        scripts: list[Script],
        sequences: list[Sequence],
        record: RecordedRequest,
        fault: Fault | None,
    ) -> None:
        await self._first_token(sequences[0], record)
        for sequence, script in zip(sequences, scripts, strict=True):
            await self.engine.tokens_ready(sequence, len(script.output))
        used = self._usage(len(sequences[0].prompt), scripts, sequences[0])
        prompt_ids = sequences[0].prompt
        body = whole_answer(shape, scripts, prompt_ids, used, self.tokenizer, self.config.reasoning_field)
        if fault is not None and fault.kind == "hang":
            await asyncio.Event().wait()
        if fault is not None and fault.kind == "cut":
            connection.respond(200, body, send_bytes=len(body) // 2)
            connection.close()
            return
        connection.respond(200, body)

    async def _stream_plain(
        self, connection: Connection, shape: Shape, script: Script, sequence: Sequence, record: RecordedRequest
    ) -> None:
        """The stream that benchmarks measure: its events are encoded ahead."""
        known = self._frames.get(id(script))
        if known is None:
            if len(self._frames) >= 1000:
                self._frames.clear()
            known = self._frames[id(script)] = (script, PlainFrames(script, shape.model))
        connection.start_stream()
        await self._first_token(sequence, record)
        coalesced: list[bytes] = []
        pause_s = self.config.inter_chunk_s * self.config.time_scale if self.config.fixed_ttft_s is not None else 0.0
        last = len(script.deltas)
        for index, (ready, frame) in enumerate(known[1].for_answer(shape.answer_id, shape.created)):
            if sequence.ready_tokens < ready:
                await self.engine.tokens_ready(sequence, ready)
            if self.config.coalesce:
                coalesced.append(frame)
                continue
            connection.write(frame)
            if connection.congested:
                await connection.drain()
            if index < last:
                await asyncio.sleep(pause_s if index else 0)
        tail = chunked(b"data: [DONE]\n\n") + LAST_CHUNK
        if shape.include_usage:
            event = usage_event(shape, self._usage(len(sequence.prompt), [script], sequence))
            tail = chunked(b"data: " + event + b"\n\n") + tail
        connection.write(b"".join(coalesced) + tail)

    async def _stream(
        self,
        connection: Connection,
        shape: Shape,
        scripts: list[Script],
        sequences: list[Sequence],
        record: RecordedRequest,
        fault: Fault | None,
    ) -> None:
        writer = EventWriter(connection, fault)
        connection.start_stream()
        prompt_ids = sequences[0].prompt
        pause_s = self.config.inter_chunk_s * self.config.time_scale if self.config.fixed_ttft_s is not None else 0.0
        await self._first_token(sequences[0], record)
        if shape.chat:
            for index in range(len(scripts)):
                await writer.event(role_event(shape, index, prompt_ids))
        finish = fault is None or fault.kind != "no_finish"
        for position in range(max(len(script.deltas) for script in scripts)):
            for index, (script, sequence) in enumerate(zip(scripts, sequences, strict=True)):
                if position >= len(script.deltas):
                    continue
                delta = script.deltas[position]
                await self.engine.tokens_ready(sequence, delta.tokens_ready)
                if not finish and delta.finish_reason is not None and not delta.ids:
                    continue
                ids = prompt_ids if position == 0 else None
                await writer.event(delta_event(shape, index, delta, self.tokenizer, ids, finish))
            if pause_s:
                await asyncio.sleep(pause_s)
        if shape.include_usage:
            used = self._usage(len(prompt_ids), scripts, sequences[0])
            await writer.event(usage_event(shape, used), is_usage=True)
        record.finished = fault is None or fault.kind != "hang"
        await writer.end()
