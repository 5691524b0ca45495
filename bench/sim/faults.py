"""Which request a fault strikes, and how a stream looks under it."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import orjson

from bench.sim.config import Fault
from bench.sim.http import LAST_CHUNK, Connection, chunked
from bench.sim.wire import error_body


class StreamOver(Exception):
    """The fault ended the stream: nothing more may be written to it."""


class FaultBox:
    """Faults waiting for their requests, in order; the first that fits strikes."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = list(faults)

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def clear(self) -> None:
        self._faults.clear()

    def take(self, path: str, header: str | None, *, probe: bool) -> Fault | None:
        """The fault for a request to `path`; `header` (JSON) wins; a bad one raises ValueError or TypeError."""
        if header is not None:
            return Fault(**orjson.loads(header))
        for index, fault in enumerate(self._faults):
            if path.startswith(fault.path) and (fault.probes or not probe):
                if fault.count is not None:
                    if fault.count <= 1:
                        del self._faults[index]
                    else:
                        self._faults[index] = replace(fault, count=fault.count - 1)
                return fault
        return None


async def strike_before_head(fault: Fault, connection: Connection) -> bool:
    """Faults that act before any byte of an answer; True when the request is over."""
    if fault.kind == "status":
        extra = (("retry-after", fault.retry_after),) if fault.retry_after is not None else ()
        body = fault.body.encode() if fault.body is not None else _status_body(fault)
        connection.respond(fault.status, body, fault.content_type, extra)
        return True
    if fault.after_chunks is None and fault.kind == "cut":
        connection.abort(fault.reset)
        return True
    if fault.after_chunks is None and fault.kind == "hang":
        await asyncio.Event().wait()
    return False


def _status_body(fault: Fault) -> bytes:
    kinds = {429: "rate_limit_error", 503: "ServiceUnavailableError", 500: "InternalServerError"}
    return error_body(fault.message, kinds.get(fault.status, "BadRequestError"), fault.status)


class EventWriter:
    """Server-sent events in chunked encoding, with the fault of this request worked in."""

    def __init__(self, connection: Connection, fault: Fault | None) -> None:
        self._connection = connection
        self._fault = fault
        self._written = 0

    async def event(self, payload: bytes, is_usage: bool = False) -> None:
        """Write one event. Raises StreamOver when the fault ends the stream here."""
        fault = self._fault
        if fault is not None and fault.after_chunks == self._written:
            await self._strike(fault)
        await self._emit(payload, is_usage)

    async def _emit(self, payload: bytes, is_usage: bool = False) -> None:
        fault = self._fault
        self._written += 1
        if fault is not None and fault.kind == "drip":
            await asyncio.sleep(fault.delay_s)
        end = b"\r\n\r\n" if fault is not None and fault.kind == "crlf" else b"\n\n"
        data = b"data: " + payload + end
        if fault is not None and fault.kind == "comments":
            data = b": keep-alive\n\n" + data
        if fault is not None and fault.kind == "split_usage" and is_usage:
            middle = len(data) // 2
            await self._send(data[:middle])
            await asyncio.sleep(0.02)
            await self._send(data[middle:])
        else:
            await self._send(data)

    async def end(self) -> None:
        """[DONE], unless the fault leaves it out, and the end of the body."""
        fault = self._fault
        if fault is not None and fault.after_chunks is not None and fault.after_chunks >= self._written:
            await self._strike(fault)
        if fault is None or fault.done:
            await self._emit(b"[DONE]")
        self._connection.write(LAST_CHUNK)

    async def _strike(self, fault: Fault) -> None:
        if fault.kind == "cut":
            if fault.reset:
                self._connection.abort(reset=True)
            else:
                self._connection.close()
            raise StreamOver
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "error_event":
            await self._send(b"data: " + error_body(fault.message, "InternalServerError", 500) + b"\n\n")
            if fault.done:
                await self._send(b"data: [DONE]\n\n")
            self._connection.write(LAST_CHUNK)
            raise StreamOver
        if fault.kind == "big_event":
            choice = {
                "index": 0,
                "delta": {"content": "x" * fault.big_bytes},
                "logprobs": None,
                "finish_reason": None,
            }
            payload = {"id": "chatcmpl-big", "object": "chat.completion.chunk", "created": 0, "model": "sim-model"}
            await self._send(b"data: " + orjson.dumps({**payload, "choices": [choice]}) + b"\n\n")

    async def _send(self, data: bytes) -> None:
        fault = self._fault
        if fault is None or fault.kind != "split":
            self._connection.write(chunked(data))
        else:
            # Each piece is a chunk and a write of its own; the pause lets it leave as a packet of its own.
            for start in range(0, len(data), fault.write_bytes):
                self._connection.write(chunked(data[start : start + fault.write_bytes]))
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        await self._connection.drain()
