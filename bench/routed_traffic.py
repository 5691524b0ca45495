"""The requests of `bench.routing`: RAGPulse's prompts, and when each of them comes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from bench.datasets import shared_data
from bench.ragpulse_trace import Logged, Trace, ragpulse
from cache.blocks import block_hashes
from prompt_builder.order import Piece

BLOCK_TOKENS = 16
# So many requests, those of about an hour of the log, take the same time: its hours become parts of a second here,
# and a service with thousands of times its users has no night in each second. Distances within stay.
EVEN_REQUESTS = 20
# A turn comes after the one before by at least so much of the whole run: less than that and it would come while the
# one before is still being answered.
LEAST_GAP_SHARE = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request. `ids` is its prompt with the passages as they were retrieved, `hashes` those of its whole blocks.

    It consists of `front`, `passages`, most relevant first, and `rest`; one without passages may be given whole.
    `at_s`: seconds from the beginning.
    """

    number: int
    session: str
    ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    output_tokens: int
    at_s: float = 0.0
    front: tuple[int, ...] = ()
    passages: tuple[Piece, ...] = ()
    rest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts without times; `logged_s` are those of the log."""

    asked: tuple[Asked, ...]
    logged_s: np.ndarray = field(repr=False)

    def at_rate(self, per_s: float, every: int = EVEN_REQUESTS) -> tuple[Asked, ...]:
        """The requests at so many a second, in the order in which they come. Turns of a session keep their order.

        Every `every` requests take the same time; 1 makes all distances equal.
        """
        length_s = len(self.asked) / per_s
        times = _evened(self.logged_s, every) * length_s
        least_s = length_s * LEAST_GAP_SHARE
        latest: dict[str, float] = {}
        for place, asked in enumerate(self.asked):
            times[place] = max(times[place], latest.get(asked.session, -least_s) + least_s)
            latest[asked.session] = times[place]
        # Turns that were put off gather at the end: the rate is made even again.
        times = _evened(times, every) * length_s
        timed = [replace(asked, at_s=float(at_s)) for asked, at_s in zip(self.asked, times, strict=True)]
        return tuple(sorted(timed, key=lambda asked: asked.at_s))

    def at_once(self) -> tuple[Asked, ...]:
        return self.asked


def logged_traffic(week: int, most: int | None = None) -> Traffic:
    """The first `most` requests of one of the log's two weeks, or all of them. Raises DataMissing.

    The volatile part of the system text stands behind the passages in every arm, which no router does by itself:
    without that none of them would find anything behind the system text. A passage that was sent twice stays twice.
    """
    trace = ragpulse()
    lines = (shared_data() / "ragpulse" / "0_trace.jsonl").read_bytes().splitlines()
    logged = [orjson.loads(line) for line in lines if line.strip()]
    seconds = np.array([float(line["timestamp"]) for line in logged])
    # Each week begins at 0.
    weeks = 1 + np.cumsum(np.diff(seconds, prepend=0.0) < 0)
    numbers = [int(number) for number in np.flatnonzero(weeks == week)[:most]]
    pieces: dict[int, Piece] = {}
    asked = tuple(_asked(number, logged[number], trace.requests[number], trace, pieces) for number in numbers)
    return Traffic(asked, np.maximum.accumulate(seconds[numbers]))


def _asked(number: int, line: Any, request: Logged, trace: Trace, pieces: dict[int, Piece]) -> Asked:
    for part in request.distinct:
        if part not in pieces:
            pieces[part] = Piece(f"k{part}", trace.ids(part), len(trace.ids(part)))
    front = trace.joined(request.front)
    rest = trace.concatenated((*request.repeated, *request.volatile, *request.rest))
    ids = (*front, *trace.concatenated(request.distinct), *rest)
    return Asked(
        number,
        line["session_id"],
        ids,
        block_hashes(ids, BLOCK_TOKENS),
        max(1, int(line["output_length"])),
        front=front,
        passages=tuple(pieces[part] for part in request.distinct),
        rest=rest,
    )


def _evened(times: Sequence[float] | np.ndarray, every: int) -> np.ndarray:
    """Times from 0 to 1: every so many requests take the same time, and keep their distances within it."""
    times = np.asarray(times, dtype=float)
    ordered = np.sort(times)
    places = np.unique([*range(0, len(ordered), every), len(ordered) - 1])
    bounds, keep = np.unique(ordered[places], return_index=True)
    return np.asarray(np.interp(times, bounds, places[keep] / (len(ordered) - 1)))
