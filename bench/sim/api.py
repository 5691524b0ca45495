"""The endpoints: from a request's bytes to the engine and back."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import orjson

from bench.sim.answers import Script, Scripter
from bench.sim.config import Fault, SimConfig
from bench.sim.engine import Engine, EngineBusy, Sequence
from bench.sim.faults import EventWriter, FaultBox, StreamOver, strike_before_head
from bench.sim.http import LAST_CHUNK, Connection, HttpRequest, chunked
from bench.sim.metrics import EngineMetrics
from bench.sim.requests import BadRequest, parse_body, read_generation
from bench.sim.tokens import SimTokenizer
from bench.sim.wire import (
    PlainFrames,
    Shape,
    delta_event,
    error_body,
    role_event,
    usage,
    usage_event,
    whole_answer,
)

MINIMAL_PATHS = ("/v1/chat/completions", "/v1/models")


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


class Api:
    """One engine process: its cache, its metrics, its faults and what it has seen. Times are the loop's."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer, faults: FaultBox) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.faults = faults
        self.engine = Engine(config)
        self.metrics = EngineMetrics(config, self.engine)
        self.scripter = Scripter(config, tokenizer)
        self.requests: deque[RecordedRequest] = deque(maxlen=config.recorded_requests)
        self.aborted: deque[RecordedRequest] = deque(maxlen=10_000)
        self.open_streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.started = int(time.time())
        self._answers = 0
        self._frames: dict[int, tuple[Script, PlainFrames]] = {}

    async def handle(self, request: HttpRequest, connection: Connection) -> None:
        """Answer one request; a lost connection cancels it here."""
        loop = asyncio.get_running_loop()
        record = RecordedRequest(request.path, request.headers, None, loop.time())
        if not request.path.startswith("/_sim"):
            self.requests.append(record)
        try:
            await self._dispatch(request, connection, record)
            record.finished = True
        except BadRequest as error:
            connection.respond(error.status, error_body(str(error), error.kind, error.status, error.param))
        except EngineBusy as error:
            connection.respond(503, error_body(str(error), "ServiceUnavailableError", 503))
        except StreamOver:
            record.finished = True
        except asyncio.CancelledError:
            # A client may leave after [DONE] without waiting for the end of the body.
            if not record.finished:
                record.aborted_s = loop.time()
                self.aborted.append(record)
            raise

    async def _dispatch(self, request: HttpRequest, connection: Connection, record: RecordedRequest) -> None:
        path = request.path
        if path.startswith("/_sim/"):
            self._control(request, connection)
            return
        if self.config.surface == "minimal" and path not in MINIMAL_PATHS:
            connection.respond(404, b'{"detail":"Not Found"}')
            return
        if path.startswith("/v1/") and not self._authorized(request):
            connection.respond(401, b'{"error":"Unauthorized"}')
            return
        generates = request.method == "POST" and path in ("/v1/chat/completions", "/v1/completions")
        if not generates:
            await self._other(request, connection, record)
            return
        record.body = parse_body(request.body)
        self.open_streams += 1
        self.idle.clear()
        try:
            fault = self._fault(request)
            if fault is None or not await strike_before_head(fault, connection):
                await self._generate(request, connection, record, fault)
        finally:
            self.open_streams -= 1
            if not self.open_streams:
                self.idle.set()

    def _authorized(self, request: HttpRequest) -> bool:
        key = self.config.api_key
        return not key or request.headers.get("authorization") == f"Bearer {key}"

    def _fault(self, request: HttpRequest) -> Fault | None:
        header = request.headers.get("x-sim-fault") if self.config.fault_header else None
        try:
            return self.faults.take(request.path, header)
        except (ValueError, TypeError) as error:
            raise BadRequest(f"x-sim-fault: {error}") from error

    async def _other(self, request: HttpRequest, connection: Connection, record: RecordedRequest) -> None:
        fault = self._fault(request)
        if fault is not None and await strike_before_head(fault, connection):
            return
        key = (request.method, request.path)
        if key == ("GET", "/v1/models"):
            connection.respond(200, orjson.dumps({"object": "list", "data": [self._model_card()]}))
        elif key in (("GET", "/health"), ("GET", "/ping")):
            connection.respond(200, b"")
        elif key == ("GET", "/version"):
            connection.respond(200, b'{"version":"0.32.0"}')
        elif key == ("GET", "/metrics"):
            connection.respond(200, self.metrics.render(), "text/plain; version=0.0.4; charset=utf-8")
        elif key == ("GET", "/kv_event_sources"):
            connection.respond(200, b"[]")
        elif key == ("POST", "/reset_prefix_cache"):
            connection.respond(200 if self.engine.pool.reset() else 500, b"")
        elif key == ("POST", "/tokenize"):
            record.body = parse_body(request.body)
            connection.respond(200, orjson.dumps(self._tokenize(record.body)))
        elif key == ("POST", "/detokenize"):
            record.body = parse_body(request.body)
            connection.respond(200, orjson.dumps({"prompt": self.tokenizer.decode(record.body["tokens"])}))
        else:
            connection.respond(404, b'{"detail":"Not Found"}')

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self.config.model, "object": "model", "created": self.started, "owned_by": "vllm"}
        if self.config.surface == "vllm":
            card |= {"root": self.config.model, "parent": None, "max_model_len": self.config.max_model_len}
        return card

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            ids = self.tokenizer.render(body["messages"], body)
        else:
            ids = self.tokenizer.encode(str(body.get("prompt", "")))
        strings = [self.tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        return {
            "count": len(ids),
            "max_model_len": self.config.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    def _control(self, request: HttpRequest, connection: Connection) -> None:
        """Faults and state for a simulator in another process."""
        if request.path == "/_sim/fault":
            self.faults.add(Fault(**orjson.loads(request.body)))
        elif request.path == "/_sim/clear_faults":
            self.faults.clear()
        state = {"open_streams": self.open_streams, "aborted": len(self.aborted), "answers": self._answers}
        connection.respond(200, orjson.dumps(state))

    # generation

    async def _generate(
        self, request: HttpRequest, connection: Connection, record: RecordedRequest, fault: Fault | None
    ) -> None:
        chat = request.path == "/v1/chat/completions"
        wanted = read_generation(record.body, chat, self.config, self.tokenizer)
        record.prompt_token_ids = wanted.prompt_ids
        scripts = [
            self.scripter.script(self.scripter.answer(record.body, wanted.prompt_ids), record.body, wanted.max_tokens)
            for _ in range(wanted.n)
        ]
        sequences = [Sequence(wanted.prompt_ids, script.output, wanted.cache_salt) for script in scripts]
        self.engine.submit(sequences)
        self._answers += 1
        answer_id = request.headers.get("x-request-id") or f"{self._answers:032x}"
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
