"""`POST /v1/chat/completions` as a raw ASGI endpoint: wire in, wire out, no logic."""

import asyncio
import contextlib
import logging

from gateway.admission import Admission
from gateway.backends.sse import DONE
from gateway.backends.watchdog import Watchdog
from gateway.calls import Call, Calls, now
from gateway.context import RequestContext
from gateway.errors import ApiError, ErrorKind, translate
from gateway.http import CancelOnDisconnect, ClientGone, Headers, Receive, Scope, Send, read_body, send_bytes
from gateway.pipeline import Pipeline
from gateway.timings import Timings, server_timing
from gateway.turns import StreamedAnswer
from gateway.wire import ChatRequest, parse_chat
from retrieval.types import RetrievalError

log = logging.getLogger("headstart")

_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChatEndpoint:
    """Bypasses the framework's response classes: they cost a task group per stream.

    A client that takes nothing of its answer for `client_timeout_s` seconds counts as gone: it would hold its slot
    and the engine's request for as long as it likes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        admission: Admission,
        calls: Calls,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        client_timeout_s: float = 60.0,
    ) -> None:
        self._pipeline = pipeline
        self._admission = admission
        self._calls = calls
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        """Raises ApiError only before the response has begun; the caller turns it into a response."""
        outcome = _Outcome()
        try:
            with self._admission:
                raw = await read_body(scope, receive, self._max_body_bytes, self._body_timeout_s)
                async with CancelOnDisconnect(receive):
                    await self._answer(raw, send, context, outcome)
        except ClientGone:
            outcome.status, outcome.error = 499, "client_gone"
        except RetrievalError as error:
            refusal = translate(error)
            outcome.status, outcome.error = refusal.http_status, refusal.code
            raise refusal from error
        except ApiError as error:
            outcome.status, outcome.error = error.http_status, error.code
            if outcome.started:
                await send({"type": "http.response.body", "body": error.event_bytes()})
                return
            raise
        except Exception:
            outcome.status, outcome.error = 500, "internal"
            if not outcome.started:
                raise
            log.exception("an answer failed after it had begun")
            failure = ApiError(ErrorKind.INTERNAL, "The gateway failed. See its log.", code="internal")
            await send({"type": "http.response.body", "body": failure.event_bytes()})
        except BaseException:
            outcome.status, outcome.error = 500, "internal"
            raise
        finally:
            self._calls.add(outcome.call(context))

    async def _answer(self, raw: bytes, send: Send, context: RequestContext, outcome: "_Outcome") -> None:
        request, body = parse_chat(raw)
        outcome.request = request
        answer = await self._pipeline.answer(request, body, context)
        outcome.stores = answer.stores
        identity = (b"x-request-id", context.request_id.encode())
        if not isinstance(answer, StreamedAnswer):
            outcome.timings = answer.timings
            headers = [identity, (b"server-timing", timing_header(answer.timings))]
            try:
                async with asyncio.timeout(self._client_timeout_s):
                    await send_bytes(send, 200, answer.body, headers, b"application/json")
            except TimeoutError:
                raise ClientGone from None
            return
        try:
            headers = [*_EVENT_STREAM, identity, (b"server-timing", answer.server_timing)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            outcome.started = True
            with Watchdog(self._client_timeout_s) as watchdog:
                async with contextlib.aclosing(answer.events) as events:
                    async for data in events:
                        message = {"type": "http.response.body", "body": data, "more_body": not data.endswith(DONE)}
                        try:
                            with watchdog:
                                await send(message)
                        except TimeoutError:
                            raise ClientGone from None
        finally:
            outcome.timings = answer.timings
            answer.close()


class _Outcome:
    """How one request went, for its line in the calls."""

    __slots__ = ("error", "request", "started", "status", "stores", "timings")

    def __init__(self) -> None:
        self.status = 200
        self.error: str | None = None
        self.request: ChatRequest | None = None
        self.started = False
        self.stores: tuple[str, ...] = ()
        self.timings: Timings | None = None

    def call(self, context: RequestContext) -> Call:
        return Call(
            request_id=context.request_id,
            created=now(),
            tenant=context.tenant,
            model=self.request.model if self.request else "",
            stream=bool(self.request and self.request.stream),
            status=self.status,
            stores=self.stores,
            timings=self.timings,
            error=self.error,
        )


def timing_header(timings: Timings) -> bytes:
    return server_timing(
        retrieve=timings.retrieve_ms,
        plan=timings.plan_ms,
        queue=timings.queue_ms,
        prefill=timings.prefill_ms,
        ttft=timings.ttft_ms,
        total=timings.total_ms,
    )
