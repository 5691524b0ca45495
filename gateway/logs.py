"""Log lines: one line an event, console or JSON, with the request's id where there is one."""

import logging
import sys
from contextvars import ContextVar
from typing import Any

import orjson

REQUEST_ID: ContextVar[str | None] = ContextVar("headstart_request_id", default=None)
"""Set for the time of a request; tasks that it starts inherit it."""


class RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = REQUEST_ID.get()
        return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_extras(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = self.formatTime(record, "%H:%M:%S")
        fields = " ".join(f"{name}={_short(value)}" for name, value in _extras(record).items())
        line = f"{stamp} {record.levelname.lower():7} {_one_line(record.getMessage())} {fields}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(log_format: str, log_level: str) -> None:
    """Sends the log of this process to standard error; called by commands, never by a library import."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("headstart", "uvicorn"):
        logging.getLogger(name).setLevel(log_level.upper())


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    request_id = getattr(record, "request_id", None)
    if request_id:
        extras["request_id"] = request_id
    fields = getattr(record, "fields", None)
    if isinstance(fields, dict):
        extras.update(fields)
    return extras


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else _one_line(str(value))


def _one_line(text: str) -> str:
    """Control characters escaped, so that no value can forge a line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
