"""What an event stream that passes unread has said: counted as it goes by, put together when it is over."""

import re

import orjson

MOST_BYTES = 2**20
"""An answer with more bytes of events is not put together."""

_TOKEN = b'"delta":{'
_ENDED = b'"finish_reason":"'
_CONTENT = re.compile(rb'"delta":\{"content":("(?:[^"\\]|\\.)*")')
_FINISH = re.compile(rb'"finish_reason":"(\w+)"')


class PassingTokens:
    """Counts a stream's tokens. The engine sends an event for each, and one before them that names the role."""

    def __init__(self) -> None:
        self.tokens = -1

    def add(self, data: bytes) -> int:
        """The tokens that have come by now, and the one that the engine is at where the answer is not over."""
        self.tokens += data.count(_TOKEN)
        return self.tokens + (_ENDED not in data)


class StreamedText(PassingTokens):
    """The one answer of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self._reads: list[bytes] = []
        self._bytes = 0

    def add(self, data: bytes) -> int:
        self._bytes += len(data)
        if self._bytes <= MOST_BYTES:
            self._reads.append(data)
        return super().add(data)

    def text(self) -> str | None:
        """None where it was too long, or where it is not text alone."""
        data = b"".join(self._reads)
        if self._bytes > MOST_BYTES or b'"tool_calls":[{' in data:
            return None
        try:
            parts: list[str] = orjson.loads(b"[%b]" % b",".join(_CONTENT.findall(data)))
        except orjson.JSONDecodeError:
            return None
        return "".join(parts)

    def finish_reason(self) -> str | None:
        """Why the answer ended, as the last event says that does."""
        for read in reversed(self._reads[-4:]):
            if found := _FINISH.findall(read):
                return str(found[-1], "ascii")
        return None
