"""Measurements on disk as they are made, so that a sweep that was interrupted goes on where it stopped."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from gateway.cli.terminal import USAGE, CliError

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. Measurements of another subject are of no use for this one."""

    questions: str
    store: str
    content: str
    model: str
    max_tokens: int

    def difference(self, other: "Subject") -> str:
        """What differs, for a person; empty when nothing does."""
        named = {
            "questions": "the questions",
            "store": "the store",
            "content": "what the store holds",
            "model": "the model",
            "max_tokens": "--max-tokens",
        }
        return ", ".join(text for name, text in named.items() if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One request under one setting. Milliseconds; shares 0 to 1; None is unknown.

    `question` is its place in the file, from 0. `ttft_ms` is the gateway's own, from arrival to first token;
    `client_ttft_ms` and `total_ms` are counted here. `forecast_ms` is the TTFT that was predicted to be kept, and
    `forecast_budget_ms` the budget it was made for. `error` tells why there is no answer.
    """

    setting: str
    question: int
    total_ms: float
    ttft_ms: float | None = None
    client_ttft_ms: float | None = None
    forecast_ms: float | None = None
    forecast_budget_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int = 0
    recall: float | None = None
    words: float | None = None
    error: str = ""


class Journal:
    """Owns the file while it is entered. One line of head, then one line a measurement, each written at once."""

    def __init__(self, path: Path, subject: Subject, run: str) -> None:
        """`run` identifies the sweep; one that goes on keeps the name it began with."""
        self._path = path
        self._subject = subject
        self.run = run
        self.done: dict[tuple[str, int], Measurement] = {}

    def __enter__(self) -> Self:
        """Raises CliError (2) when the file is of another subject or no journal; (1) when it cannot be written."""
        try:
            whole = self._read() if self._path.exists() else b""
            self._file = self._path.open("r+b" if whole else "wb")
            # A line that a kill cut off is measured again.
            self._file.seek(len(whole))
            self._file.truncate()
            if not whole:
                self._write({"format": _FORMAT, "run": self.run, **asdict(self._subject)})
        except OSError as error:
            raise CliError(f"'{self._path}' cannot be written: {error.strerror}.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, measurement: Measurement) -> None:
        self.done[measurement.setting, measurement.question] = measurement
        try:
            self._write({name: value for name, value in asdict(measurement).items() if value not in (None, "")})
        except OSError as error:
            raise CliError(f"'{self._path}' cannot be written: {error.strerror}.") from error

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(entry) + b"\n")
        self._file.flush()

    def _read(self) -> bytes:
        """Takes up what is there; returns its whole lines."""
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        head, *lines = whole.splitlines() or [b""]
        if not whole and content:
            raise self._foreign("it is not a journal of measurements")
        if not whole:
            return b""
        self._take_head(head)
        for number, line in enumerate(lines, 2):
            try:
                entry = orjson.loads(line)
                measurement = Measurement(**entry)
            except (orjson.JSONDecodeError, TypeError):
                raise self._foreign(f"line {number} is not a measurement") from None
            if not measurement.error:  # what failed is tried again
                self.done[measurement.setting, measurement.question] = measurement
        return whole

    def _take_head(self, line: bytes) -> None:
        try:
            head = orjson.loads(line)
            kept = Subject(**{field.name: head[field.name] for field in fields(Subject)})
            if head["format"] != _FORMAT:
                raise self._foreign("another version wrote it")
            self.run = str(head["run"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise self._foreign("it is not a journal of measurements") from None
        changed = self._subject.difference(kept)
        if changed:
            raise self._foreign(f"changed since: {changed}")

    def _foreign(self, why: str) -> CliError:
        return CliError(
            f"'{self._path}' cannot be gone on with: {why}. --fresh starts over, --output writes elsewhere.", USAGE
        )
