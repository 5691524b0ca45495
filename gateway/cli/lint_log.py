"""Logged chat requests, read from JSON lines one at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

MOST_LINE_BYTES = 64 * 2**20
MOST_WRAPPERS = 2

_SYSTEM_ROLES = ("system", "developer")
_WRAPPERS = ("body", "request")


class Malformed(Exception):
    """The line holds no chat request; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message: who, and everything it holds as text."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """`system` joins the leading system messages; `tools` are as they were sent, each as JSON."""

    model: str
    system: str
    messages: tuple[Said, ...]
    tools: tuple[str, ...]


def logged_requests(path: Path) -> Iterator[tuple[int, LoggedRequest | Malformed]]:
    """Each line's number, from 1, and its request; empty lines are left out. Raises OSError.

    A line longer than MOST_LINE_BYTES is malformed, and is not held in memory.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MOST_LINE_BYTES):
            number += 1
            if len(raw) == MOST_LINE_BYTES and not raw.endswith(b"\n"):
                while (rest := file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, Malformed("the line is too long")
            elif raw.strip():
                try:
                    yield number, read_line(raw)
                except Malformed as error:
                    yield number, error


def read_line(raw: bytes) -> LoggedRequest:
    """Raises Malformed."""
    try:
        logged = orjson.loads(raw.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:
        raise Malformed("not JSON") from None
    body = _body(logged)
    model = body.get("model", "")
    messages = [_said(message) for message in body["messages"]]
    if not isinstance(model, str):
        raise Malformed("`model` is no text")
    if not messages:
        raise Malformed("`messages` is empty")
    leading = next((at for at, said in enumerate(messages) if said.role not in _SYSTEM_ROLES), len(messages))
    tools = body.get("tools") or ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise Malformed("`tools` is no list")
    return LoggedRequest(
        model=model,
        system="\n\n".join(said.text for said in messages[:leading]),
        messages=tuple(messages[leading:]),
        tools=tuple(_json(tool) for tool in tools),
    )


def _body(logged: object) -> Mapping[str, Any]:
    """The request itself, or what `body` or `request` of a log's record holds, as an object or as JSON text."""
    for _ in range(MOST_WRAPPERS + 1):
        if isinstance(logged, str):
            try:
                logged = orjson.loads(logged)
            except orjson.JSONDecodeError:
                raise Malformed("its request is text, and not JSON") from None
        if not isinstance(logged, dict):
            raise Malformed("not a JSON object")
        if isinstance(logged.get("messages"), list):
            return logged
        inner = next((logged[name] for name in _WRAPPERS if name in logged), None)
        if inner is None:
            break
        logged = inner
    raise Malformed("no `messages`, and no `body` or `request` that holds them")


def _said(message: object) -> Said:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Malformed("a message is no object with a `role`")
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    rest = {name: value for name, value in message.items() if name not in ("role", "name", "content")}
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        text = "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        rest["content"] = [part for part in parts if not isinstance(part.get("text"), str)]
    filled = {name: value for name, value in rest.items() if value}
    return Said(message["role"], text + _json(filled) if filled else text)


def _json(value: object) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError:
        raise Malformed("nests too deep") from None
