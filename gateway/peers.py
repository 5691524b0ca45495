"""Workers of one machine behind one port: whoever is asked for figures asks the others too."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

log = logging.getLogger("headstart.workers")

ANSWER_S = 1.0
MOST_ANSWER_BYTES = 32 * 2**20
_MOST_QUESTION_BYTES = 64 * 2**10

Answer = Callable[[Mapping[str, Any]], bytes]


@dataclass(frozen=True, slots=True)
class Worker:
    """One of `count` workers, numbered from 1. `folder` holds their sockets and is open to this user alone."""

    number: int
    count: int
    folder: Path

    def socket(self, number: int) -> str:
        return str(self.folder / f"{number}.sock")


class Peers:
    """Answers the other workers and asks them; use it with `async with`. Without a worker there are no others.

    A question is one of `answers` by name with its fields. A worker that is away, or silent for `ANSWER_S`, is
    left out.
    """

    def __init__(self, worker: Worker | None, answers: Mapping[str, Answer]) -> None:
        self._worker = worker
        self._answers = answers
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Peers":
        if self._worker is not None:
            # In place of the socket of a former worker of this number, which may have been killed.
            path = self._worker.socket(self._worker.number)
            self._server = await asyncio.start_unix_server(self._serve, path, limit=_MOST_QUESTION_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()

    async def ask_all(self, question: str, **fields: Any) -> dict[int, bytes]:
        """Each worker's answer by its number, in order; this one's own is among them."""
        own = self._answers[question](fields)
        worker = self._worker
        if worker is None:
            return {1: own}
        others = [number for number in range(1, worker.count + 1) if number != worker.number]
        line = orjson.dumps({"question": question, **fields}) + b"\n"
        answers = await asyncio.gather(*(_asked(worker.socket(number), line) for number in others))
        found = {number: answer for number, answer in zip(others, answers, strict=True) if answer is not None}
        return dict(sorted({worker.number: own, **found}.items()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                asked = orjson.loads(await reader.readline())
                writer.write(self._answers[asked.pop("question")](asked))
                await writer.drain()
        except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            log.warning("another worker's question was not answered: %s", type(error).__name__)
        finally:
            writer.close()


async def _asked(path: str, line: bytes) -> bytes | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(line)
                answer = await _read_all(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        log.info("another worker did not answer: %s", type(error).__name__)
        return None
    return answer or None


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    pieces, length = [], 0
    while piece := await reader.read(2**16):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_ANSWER_BYTES:
            raise OSError("too long an answer")
    return b"".join(pieces)


def merged_metrics(expositions: Mapping[int, bytes]) -> bytes:
    """Several workers' metrics as one page: each sample once for each worker, told apart by the label `worker`.

    Nothing is added up here: a sum of counters, a mean of gauges and a quantile of histograms are the reader's.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for number, exposition in expositions.items():
        head: list[bytes] = []
        samples: list[bytes] = []
        new = False
        for line in exposition.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                new = name not in families
                head, samples = families.setdefault(name, ([], []))
            if line.startswith(b"#"):
                if new:
                    head.append(line)
            elif line:
                samples.append(_labelled(line, number))
    return b"".join(b"\n".join([*head, *samples, b""]) for head, samples in families.values())


def _labelled(sample: bytes, number: int) -> bytes:
    label = b'worker="%d"' % number
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
    name, _, value = sample.partition(b" ")
    return name + b"{" + label + b"} " + value
