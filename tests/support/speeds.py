"""Seeded requests on an engine whose speed is known, and what a learner said of each before it ran."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from latency.learner import SpeedLearner
from latency.model import CPU_135M, PrefillModel

LARGE_CARD = PrefillModel(fixed_s=0.008, per_token_s=31e-6, per_pair_s=1.3e-9)

Noise = Callable[[random.Random, float], float]


@dataclass(frozen=True, slots=True)
class Said:
    """`error` is |predicted / actual - 1|; `drifting` as it was after the request."""

    error: float
    covered: bool
    drifting: bool


def times_slower(model: PrefillModel, ratio: float) -> PrefillModel:
    return PrefillModel(model.fixed_s * ratio, model.per_token_s * ratio, model.per_pair_s * ratio)


def noisy(spread: float, stalls: float = 0.0, stall: float = 5.0) -> Noise:
    """Log-normal of this spread; a share of `stalls` takes `stall` times as long."""

    def apply(rng: random.Random, seconds: float) -> float:
        slow = stall if rng.random() < stalls else 1.0
        return seconds * math.exp(rng.gauss(0.0, spread)) * slow

    return apply


def a_size(rng: random.Random) -> tuple[int, int]:
    """30 to 1,500 uncached tokens, short ones as often as long ones; beside none or up to 2,000 cached."""
    uncached = round(math.exp(rng.uniform(math.log(30), math.log(1500))))
    return uncached, rng.choice((0, 0, rng.randrange(32, 2000)))


NOISE = noisy(0.05)


def serve(
    learner: SpeedLearner,
    count: int,
    rng: random.Random,
    engine: PrefillModel = CPU_135M,
    noise: Noise = NOISE,
    size: Callable[[random.Random], tuple[int, int]] = a_size,
) -> list[Said]:
    """Requests one after the other; what was said of each before it ran, where anything was."""
    said = []
    for _ in range(count):
        uncached, cached = size(rng)
        seconds = noise(rng, engine.predict_s(uncached, cached))
        before = learner.estimate
        learner.observe_prefill(uncached, cached, seconds)
        if before is not None:
            after = learner.estimate
            assert after is not None
            error = abs(before.predict_s(uncached, cached) / seconds - 1)
            said.append(Said(error, seconds <= before.safe_s(uncached, cached), after.drifting))
    return said


def mean_error(said: list[Said]) -> float:
    return sum(one.error for one in said) / len(said)
