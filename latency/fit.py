"""Robust, non-negative fits of a few coefficients to times that scatter in proportion to their size."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from latency.model import PrefillModel
from latency.samples import Floats, Observations

Strata = NDArray[np.int64]

PASSES = 3
STEPS = 8
HUBER = 1.345
MAD_TO_SIGMA = 1.4826
LEAST_SPREAD, MOST_SPREAD = 0.01, 1.0
OUTLIER_SPREADS = 4.0
NEVER_AN_OUTLIER = 0.25
LEAST_IN_STRATUM = 3

# What is believed of an engine before anything is known, in units of b: a from 23 tokens (a CPU) to 260 (a large
# card), g/b from 4e-5 (a large card) to 8e-4 (a CPU).
FIXED_TOKENS = 50.0
PAIRS_PER_TOKEN = 2e-4
WIDTH_UNKNOWN = 3.0
WIDTH_ANCHORED = 0.5


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """`spread` is the robust standard deviation of log(actual / predicted) within a kind of request."""

    model: PrefillModel
    spread: float


@dataclass(frozen=True, slots=True)
class Belief:
    """What is held of p coefficients before the samples speak, each as a normal distribution of this width."""

    centre: Floats
    width: Floats


def fit_prefill(
    samples: Observations, anchor: PrefillModel | None = None, start: PrefillModel | None = None
) -> PrefillFit:
    """a + b·u + g·u·(c + u/2) with a, b, g ≥ 0, for one or more samples.

    Errors are relative; beyond 1.345 spreads they count linearly (Huber 1964), and what differs from its own kind
    by more than 4 spreads and 25 % does not count. Directions that the samples do not determine keep the shape of
    `anchor`, or that of engines known so far, at the scale of the samples. `start` is where the iteration begins.
    """
    u = samples.uncached
    columns = np.stack([np.ones_like(u), u, u * (samples.cached + u / 2)], axis=1)
    belief = _belief(columns, samples.seconds, anchor)
    first = belief.centre if start is None else _coefficients(start)
    nothing = np.zeros_like(u)
    theta, spread = robust_fit(columns, samples.seconds, nothing, samples.weight, samples.stratum, belief, first)
    return PrefillFit(PrefillModel(float(theta[0]), float(theta[1]), float(theta[2])), spread)


def robust_fit(
    columns: Floats, seconds: Floats, offset: Floats, weight: Floats, stratum: Strata, belief: Belief, start: Floats
) -> tuple[Floats, float]:
    """theta ≥ 0 (p) of seconds ≈ offset + columns (n×p) · theta, and the spread; iteratively reweighted."""
    theta, spread = start, MOST_SPREAD
    for _ in range(PASSES):
        errors = _log_errors(columns, seconds, offset, theta)
        apart = np.abs(_within(errors, stratum))
        spread = float(np.clip(MAD_TO_SIGMA * np.median(apart), LEAST_SPREAD, MOST_SPREAD))
        trusted = weight * (apart <= max(OUTLIER_SPREADS * spread, NEVER_AN_OUTLIER))
        for _ in range(STEPS):
            before = theta
            theta = _step(columns, seconds, offset, trusted, spread, belief, theta)
            if np.allclose(theta, before, rtol=1e-4, atol=0):
                break
    return theta, spread


def _step(
    columns: Floats, seconds: Floats, offset: Floats, trusted: Floats, spread: float, belief: Belief, theta: Floats
) -> Floats:
    predicted = np.maximum(offset + columns @ theta, 1e-9)
    errors = np.abs(np.log(seconds / predicted))
    pull = np.sqrt(trusted * np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-12)))
    # In units of the belief's width, so that the normal equations are well conditioned.
    rows = columns * belief.width * (pull / (spread * predicted))[:, None]
    targets = (seconds - offset) * pull / (spread * predicted)
    gram = rows.T @ rows + np.eye(len(theta))
    return _nonnegative(gram, rows.T @ targets + belief.centre / belief.width) * belief.width


def _nonnegative(gram: Floats, moment: Floats) -> Floats:
    """The x ≥ 0 that minimises x·gram·x / 2 − moment·x, gram positive definite.

    Exact: the minimum is the free minimum over its own support, and with three coefficients all supports are tried.
    """
    best = np.linalg.solve(gram, moment).astype(np.float64)
    best_value = 0.0
    if (best >= 0).all():
        return best
    best = np.zeros_like(moment)
    for size in range(1, len(moment)):
        for support in combinations(range(len(moment)), size):
            chosen = list(support)
            part = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            value = -float(part @ moment[chosen]) / 2
            if (part >= 0).all() and value < best_value:
                best, best_value = np.zeros_like(moment), value
                best[chosen] = part
    return best


def _log_errors(columns: Floats, seconds: Floats, offset: Floats, theta: Floats) -> Floats:
    errors: Floats = np.log(seconds / np.maximum(offset + columns @ theta, 1e-9))
    return errors


def _within(errors: Floats, stratum: Strata) -> Floats:
    """Errors less the median of their stratum; of all, where a stratum has fewer than three."""
    order = np.lexsort((errors, stratum))
    _, first, inverse, counts = np.unique(stratum[order], return_index=True, return_inverse=True, return_counts=True)
    ordered = errors[order]
    medians = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    medians[counts < LEAST_IN_STRATUM] = np.median(errors)
    apart = np.empty_like(errors)
    apart[order] = ordered - medians[inverse]
    return apart


def _coefficients(model: PrefillModel) -> Floats:
    return np.array([model.fixed_s, model.per_token_s, model.per_pair_s])


def _shape(per_token_s: float) -> Floats:
    return per_token_s * np.array([FIXED_TOKENS, 1.0, PAIRS_PER_TOKEN])


def _belief(columns: Floats, seconds: Floats, anchor: PrefillModel | None) -> Belief:
    """A coefficient that the anchor has small or nought may still grow to what is usual."""
    shape = _shape(1.0) if anchor is None else _coefficients(anchor)
    centre = shape * float(np.median(seconds / (columns @ shape)))
    if anchor is None:
        return Belief(centre, WIDTH_UNKNOWN * centre)
    fixed_s, per_token_s, per_pair_s = centre
    usual = _shape(max(per_token_s, fixed_s / FIXED_TOKENS / 10, per_pair_s / PAIRS_PER_TOKEN / 10))
    return Belief(centre, WIDTH_ANCHORED * np.maximum(centre, usual))
