"""A chat answer exactly as it came over the wire, and what a client reads in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gateway.backends.sse import event_data, split_events

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` has lower-case names. `complete` is False when the connection broke before the body's end."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    complete: bool = True

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def payloads(self) -> list[bytes]:
        """The events' data in order, `[DONE]` included."""
        return [data for data in map(event_data, split_events(self.raw)) if data]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events that are JSON objects."""
        return [orjson.loads(data) for data in self.payloads if data != b"[DONE]"]

    @property
    def done(self) -> bool:
        return b"[DONE]" in self.payloads

    @property
    def body(self) -> dict[str, Any]:
        """Of an answer that is not streamed."""
        decoded: dict[str, Any] = orjson.loads(self.raw)
        return decoded

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices", ())]

    @property
    def text(self) -> str:
        """All content, of a streamed answer or of a whole one."""
        if self.streamed:
            return "".join(delta.get("content") or "" for delta in self.deltas)
        return "".join(choice["message"]["content"] or "" for choice in self.body["choices"])

    @property
    def finish_reasons(self) -> list[str]:
        choices = (
            [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
            if self.streamed
            else self.body["choices"]
        )
        return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of a refusal, or the last event of a stream when that is an error."""
        last = self.chunks[-1:] if self.streamed else [self.body]
        found: dict[str, Any] | None = last[0].get("error") if last else None
        return found

    @property
    def error_code(self) -> str | None:
        """The code of that error; None where there is no error."""
        return (self.error or {}).get("code")

    @property
    def extension(self) -> dict[str, Any] | None:
        """The `headstart` object, wherever it travelled."""
        bodies = self.chunks if self.streamed else [self.body]
        return next((body["headstart"] for body in bodies if "headstart" in body), None)

    @property
    def annotations(self) -> list[dict[str, Any]] | None:
        """Those of the first choice; None where the field is missing."""
        sources = self.deltas if self.streamed else [choice["message"] for choice in self.body["choices"][:1]]
        return next((source["annotations"] for source in sources if "annotations" in source), None)


async def read_reply(session: aiohttp.ClientSession, body: Mapping[str, Any], path: str = CHAT_PATH) -> Reply:
    """Sends a chat request and reads its answer to the end, broken off or not."""
    async with session.post(path, data=orjson.dumps(body), headers={"content-type": "application/json"}) as response:
        raw, complete = b"", True
        try:
            async for part in response.content.iter_any():
                raw += part
        except aiohttp.ClientError:
            complete = False
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status, headers, raw, complete)
