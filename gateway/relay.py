"""The engine's event stream on its way to the client: untouched where possible, completed at its end."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from gateway.answers import read_usage
from gateway.backends.sse import DONE, data_event, event_data, is_usage_only, split_events
from gateway.backends.vllm import EngineStream
from gateway.errors import ApiError, ErrorKind
from gateway.timings import EngineUsage

Finish = Callable[[Mapping[int, str], EngineUsage], Awaitable[tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]]]
"""Answers by choice and usage in; the `headstart` object and the annotations by choice out."""


async def relay_unchanged(
    stream: EngineStream,
    wants_usage: bool,
    on_usage: Callable[[EngineUsage], None],
    on_read: Callable[[bytes], object] = len,
) -> AsyncGenerator[bytes]:
    """The events byte for byte; only a usage event that the client did not ask for is kept back."""
    async with aclosing(stream.reads()) as reads:
        async for data in reads:
            on_read(data)
            if data.rfind(b'"usage"') < 0 and data.rfind(b'"error"') < 0:
                yield data
                continue
            special = _first_special(data)
            kept = [data[:special]]
            failure: ApiError | None = None
            for event in split_events(data[special:]):
                if failure := reported_error(event):
                    break
                if b'"usage"' in event and is_usage_only(event):
                    on_usage(read_usage(_object(event)))
                    if not wants_usage:
                        continue
                kept.append(event)
            if rest := b"".join(kept):
                yield rest
            if failure is not None:
                raise failure


def _first_special(data: bytes) -> int:
    """Where the first event begins that holds a usage report or an error, of data that holds one."""
    places = (first_place(data, b'"usage"'), first_place(data, b'"error"'))
    end_before = data.rfind(b"\n\n", 0, min(place for place in places if place >= 0))
    return end_before + 2 if end_before >= 0 else 0


def first_place(data: bytes, word: bytes) -> int:
    """As `data.find(word)`, for words that are rare or stand near the end: `rfind` passes JSON many times faster."""
    place = -1
    found = data.rfind(word)
    while found >= 0:
        place = found
        found = data.rfind(word, 0, place)
    return place


async def relay_completed(
    stream: EngineStream, wants_usage: bool, finish: Finish, on_read: Callable[[bytes], object] = len
) -> AsyncGenerator[bytes]:
    """The events as they came, but those with a `finish_reason` wait for the usage report and carry the extension.

    The wait is one event: the engine sends its usage right after the last choice has finished.
    """
    texts: dict[int, list[str]] = {}
    held: list[dict[str, Any]] = []
    usage_event: bytes | None = None
    usage = EngineUsage()
    last: dict[str, Any] = {}
    async with aclosing(stream.reads()) as reads:
        async for data in reads:
            on_read(data)
            for event in split_events(data):
                if event == DONE:
                    usage = replace(usage, finish_reason=_finish_reason(held))
                    answers = {index: "".join(parts) for index, parts in texts.items()}
                    extension, annotations = await finish(answers, usage)
                    # A stream may end without a `finish_reason`: a chunk without choices carries the extension then.
                    ends = held or [{**last, "choices": []}]
                    yield _completed(ends, extension, annotations) + (usage_event or b"") + DONE
                    return
                if failure := reported_error(event):
                    raise failure
                chunk = _object(event)
                choices = chunk.get("choices")
                if not isinstance(choices, list):
                    yield event
                    continue
                if not choices:
                    usage = read_usage(chunk)
                    usage_event = event if wants_usage else None
                    continue
                last, finishing = chunk, False
                for choice in choices:
                    said = texts.setdefault(choice.get("index", 0), [])
                    if content := (choice.get("delta") or {}).get("content"):
                        said.append(content)
                    finishing = finishing or choice.get("finish_reason") is not None
                if finishing:
                    held.append(chunk)
                else:
                    yield event


def _finish_reason(held: list[dict[str, Any]]) -> str | None:
    """That of the first answer."""
    reasons = [choice.get("finish_reason") for chunk in held for choice in chunk["choices"]]
    return next((reason for reason in reasons if isinstance(reason, str)), None)


def _completed(
    held: list[dict[str, Any]], extension: dict[str, Any], annotations: dict[int, list[dict[str, Any]]]
) -> bytes:
    for chunk in held:
        for choice in chunk["choices"]:
            if choice.get("finish_reason") is not None:
                delta = choice.get("delta") or {}
                choice["delta"] = {**delta, "annotations": annotations.get(choice.get("index", 0), [])}
    held[-1]["headstart"] = extension
    return b"".join(data_event(orjson.dumps(chunk)) for chunk in held)


class EngineError(ApiError):
    """An error that the engine reports where an answer should be; `engine_status` is its own number for it."""

    def __init__(self, engine_status: int | None, message: str) -> None:
        super().__init__(ErrorKind.BAD_ENGINE, message, code="engine_error")
        self.engine_status = engine_status


def reported_error(event: bytes) -> EngineError | None:
    """An error that the engine reports inside the stream ends it; nothing that looks like a good end follows."""
    if b'"error"' not in event:
        return None
    payload = _object(event)
    error = payload.get("error")
    if not error and payload.get("object") != "error":
        return None
    detail = error if isinstance(error, dict) else payload
    message, status = detail.get("message"), detail.get("code")
    return EngineError(
        status if isinstance(status, int) else None,
        f"The engine reported an error: {message}" if isinstance(message, str) else "The engine reported an error.",
    )


def _object(event: bytes) -> dict[str, Any]:
    """The event's JSON object, or an empty one: comments and foreign events pass unread."""
    try:
        payload = orjson.loads(event_data(event))
    except orjson.JSONDecodeError:
        return {}
    return payload if isinstance(payload, dict) else {}
