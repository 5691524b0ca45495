"""Server-sent events as bytes: split into events, never into lines of text."""

import re

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
DONE = b"data: [DONE]\n\n"


class EventTooLarge(Exception):
    """An event passed the bound of the splitter's buffer."""


class EventSplitter:
    """Feeds on network reads, gives whole events with their terminators, byte for byte as they came.

    Holds at most one unfinished event of `limit_bytes`. Bytes are never decoded here, so a character split across
    reads, or U+2028 in a value, cannot break anything.
    """

    __slots__ = ("_buffer", "_limit_bytes", "_scanned")

    def __init__(self, limit_bytes: int = 8 * 2**20) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Raises EventTooLarge."""
        buffer = self._buffer
        buffer += data
        events: list[bytes] = []
        start = 0
        # A terminator may have begun in the bytes that were scanned before.
        for match in _END.finditer(buffer, max(0, self._scanned - 3)):
            events.append(bytes(buffer[start : match.end()]))
            start = match.end()
        if start:
            del buffer[:start]
        self._scanned = len(buffer)
        if len(buffer) > self._limit_bytes:
            raise EventTooLarge
        return events

    @property
    def empty(self) -> bool:
        return not self._buffer

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not finished."""
        return bytes(self._buffer)


def split_events(data: bytes) -> list[bytes]:
    """Whole events that came together, one by one."""
    if data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
        return [data]
    events, start = [], 0
    for match in _END.finditer(data):
        events.append(data[start : match.end()])
        start = match.end()
    return events


def event_data(event: bytes) -> bytes:
    """The payload: its `data` lines joined. Empty for comments and keep-alives."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def is_usage_only(event: bytes) -> bool:
    """Whether it is the closing usage event: `choices` is empty. Inside a JSON string the quotes are escaped."""
    return _NO_CHOICES.search(event) is not None


def data_event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
