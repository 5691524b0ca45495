"""A client that stops reading does not keep its slot, nor the engine's request."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.admission import Admission
from gateway.calls import Calls
from gateway.context import RequestContext
from gateway.http import AsgiMessage
from gateway.metrics import Metrics
from gateway.routes.chat import ChatEndpoint
from gateway.timings import EngineUsage, make_timings
from gateway.turns import StreamedAnswer, WholeAnswer

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
TIMINGS = make_timings(EngineUsage(), retrieve_ms=0, plan_ms=0, sent_ms=0, first_ms=None, total_ms=1)


class EngineStreamNote:
    """Notes that the engine's request was given up."""

    closed = False

    def close(self) -> None:
        self.closed = True


class RunNote:
    """Notes that the replica got its slot back."""

    closed = False

    def close(self) -> None:
        self.closed = True


class OneAnswer:
    """A pipeline that gives this answer."""

    def __init__(self, answer: StreamedAnswer | WholeAnswer) -> None:
        self._answer = answer

    async def answer(self, *request: object) -> StreamedAnswer | WholeAnswer:
        return self._answer


async def events() -> AsyncGenerator[bytes]:
    while True:
        yield b"data: {}\n\n"


def answer_of(kind: str, stream: Any) -> StreamedAnswer | WholeAnswer:
    if kind == "whole":
        return WholeAnswer((), b"{}", TIMINGS)
    run: Any = RunNote()
    return StreamedAnswer((), b"", events(), stream, run)


@pytest.mark.parametrize("kind", ["streamed", "whole"])
async def test_a_client_that_takes_nothing_counts_as_gone_and_frees_its_slot(kind: str) -> None:
    stream, admission, calls = EngineStreamNote(), Admission(1), Calls(10, Metrics())
    pipeline: Any = OneAnswer(answer_of(kind, stream))
    endpoint = ChatEndpoint(pipeline, admission, calls, max_body_bytes=1024, body_timeout_s=1.0, client_timeout_s=0.1)
    came = iter([{"type": "http.request", "body": BODY, "more_body": False}])

    async def receive() -> AsgiMessage:
        for message in came:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: AsgiMessage) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await endpoint({"headers": []}, receive, send, RequestContext("r", "t", "salt", 0.0))
    assert admission.in_flight == 0
    assert [(call.status, call.error) for call in calls.recent("t", 10)] == [(499, "client_gone")]
    assert stream.closed == (kind == "streamed")
