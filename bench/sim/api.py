"""The endpoints of one engine process: who answers what."""

import asyncio
import time
from collections import deque
from typing import Any

import orjson

from bench.sim.config import Fault, SimConfig
from bench.sim.engine import Engine, EngineBusy
from bench.sim.faults import FaultBox, StreamOver, strike_before_head
from bench.sim.generation import Generator, RecordedRequest
from bench.sim.http import Connection, HttpRequest
from bench.sim.metrics import EngineMetrics
from bench.sim.requests import BadRequest, parse_body
from bench.sim.tokens import SimTokenizer
from bench.sim.wire import error_body

MINIMAL_PATHS = ("/v1/chat/completions", "/v1/models")


class Api:
    """One engine process: its cache, its metrics, its faults and what it has seen. Times are the loop's."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer, faults: FaultBox) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.faults = faults
        self.engine = Engine(config)
        self.metrics = EngineMetrics(config, self.engine)
        self.generator = Generator(config, tokenizer, self.engine, self.metrics)
        self.requests: deque[RecordedRequest] = deque(maxlen=config.recorded_requests)
        self.aborted: deque[RecordedRequest] = deque(maxlen=10_000)
        self.open_streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.started = int(time.time())

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
            fault = self._fault(request, probe=record.body.get("max_tokens") == 1)
            if fault is None or not await strike_before_head(fault, connection):
                await self.generator.answer(request, connection, record, fault)
        finally:
            self.open_streams -= 1
            if not self.open_streams:
                self.idle.set()

    def _authorized(self, request: HttpRequest) -> bool:
        key = self.config.api_key
        return not key or request.headers.get("authorization") == f"Bearer {key}"

    def _fault(self, request: HttpRequest, *, probe: bool) -> Fault | None:
        header = request.headers.get("x-sim-fault") if self.config.fault_header else None
        try:
            return self.faults.take(request.path, header, probe=probe)
        except (ValueError, TypeError) as error:
            raise BadRequest(f"x-sim-fault: {error}") from error

    async def _other(self, request: HttpRequest, connection: Connection, record: RecordedRequest) -> None:
        fault = self._fault(request, probe=request.method == "GET")
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
        state = {"open_streams": self.open_streams, "aborted": len(self.aborted), "answers": self.generator.answers}
        connection.respond(200, orjson.dumps(state))
