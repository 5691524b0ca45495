"""The requests of `bench.routing`: RAGPulse's prompts, and when each of them comes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import orjson

from bench.datasets import shared_data
from bench.ragpulse_orders import Frequency
from bench.ragpulse_trace import Trace, ragpulse
from cache.blocks import block_hashes
from cache.prompt_tree import PromptTree
from cache.residency import Residency

BLOCK_TOKENS = 16
# So many requests take the same time, however many came in the same hours of the log: its hours become parts of a
# second here, and a service with thousands of times its users has no night in each second. Bursts within stay.
EVEN_REQUESTS = 20
# A turn comes after the one before by at least so much of the whole run: less than that and it would come while the
# one before is still being answered.
LEAST_GAP_SHARE = 0.02
WEEK_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request. `hashes` are those of the prompt's whole blocks, `at_s` seconds from the beginning."""

    number: int
    session: str
    ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    output_tokens: int
    at_s: float = 0.0

    def tree(self) -> PromptTree:
        """The prompt hashed already, to be followed on any number of replicas."""
        tree = PromptTree(BLOCK_TOKENS)
        tree.hashed(self.ids, self.hashes)
        return tree


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts without times; `logged_s` are those of the log."""

    asked: tuple[Asked, ...]
    logged_s: np.ndarray = field(repr=False)

    def at_rate(self, per_s: float) -> tuple[Asked, ...]:
        """The requests at so many a second, in the order in which they come. Turns of a session keep their order."""
        length_s = len(self.asked) / per_s
        times = _evened(self.logged_s) * length_s
        least_s = length_s * LEAST_GAP_SHARE
        latest: dict[str, float] = {}
        for place, asked in enumerate(self.asked):
            times[place] = max(times[place], latest.get(asked.session, -least_s) + least_s)
            latest[asked.session] = times[place]
        # Turns that were put off gather at the end: the rate is made even again.
        times = _evened(times) * length_s
        timed = [replace(asked, at_s=float(at_s)) for asked, at_s in zip(self.asked, times, strict=True)]
        return tuple(sorted(timed, key=lambda asked: asked.at_s))

    def at_once(self) -> tuple[Asked, ...]:
        return self.asked


def logged_traffic(most: int | None = None) -> Traffic:
    """The first `most` requests of the log, or all. Raises DataMissing.

    The volatile part of the system text stands behind the passages; these stand by how often they were asked for so
    far, an order that needs to know nothing of the replicas. A passage that was sent twice stays twice.
    """
    trace = ragpulse()
    logged = [
        orjson.loads(line)
        for line in (shared_data() / "ragpulse" / "0_trace.jsonl").read_bytes().splitlines()
        if line.strip()
    ][:most]
    prompts = _prompts(trace, len(logged))
    asked = tuple(
        Asked(number, line["session_id"], ids, block_hashes(ids, BLOCK_TOKENS), max(1, int(line["output_length"])))
        for number, (line, ids) in enumerate(zip(logged, prompts, strict=True))
    )
    seconds = np.array([float(line["timestamp"]) for line in logged])
    # The log is of two weeks, each of which begins at 0.
    weeks = np.cumsum(np.diff(seconds, prepend=0.0) < 0)
    return Traffic(asked, np.maximum.accumulate(seconds + weeks * WEEK_S))


def _prompts(trace: Trace, count: int) -> list[tuple[int, ...]]:
    order, nothing = Frequency(), Residency(BLOCK_TOKENS, 1).prefix()
    prompts = []
    for request in trace.requests[:count]:
        passages = (*order.order(request, nothing), *request.repeated)
        prompts.append(trace.concatenated((*request.front, *passages, *request.volatile, *request.rest)))
    return prompts


def _evened(times: Sequence[float] | np.ndarray) -> np.ndarray:
    """Times from 0 to 1: every EVEN_REQUESTS requests take the same time, and keep their distances within it."""
    times = np.asarray(times, dtype=float)
    ordered = np.sort(times)
    places = np.unique([*range(0, len(ordered), EVEN_REQUESTS), len(ordered) - 1])
    bounds, keep = np.unique(ordered[places], return_index=True)
    return np.asarray(np.interp(times, bounds, places[keep] / (len(ordered) - 1)))
