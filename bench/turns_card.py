"""The conversations of `bench.turns` on a large card, by arithmetic: prompts and blocks, but no engine."""

from collections.abc import Sequence

import numpy as np

from bench.datasets import ConversationTurn
from bench.report import Report
from bench.turn_arms import AskedTurn, Ours, Sight
from cache.residency import Residency
from gateway.serving import Serving
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.types import Limits, Message
from retrieval.types import Candidates

# A model of 8 billion parameters on a card of the data centre: attention over a cached token costs a twentieth of
# what it costs on the CPU engine, relative to a token's own work.
CARD = PrefillModel(fixed_s=0.008, per_token_s=31e-6, per_pair_s=1.3e-9)
CARD_SPEED = SpeedEstimate(CARD, factor=1.1, quantile=0.95, samples=100, source="learned")
# Such a model's window. In one of 8,192 kept turns do less work than the others: their chunks are left out.
CARD_WINDOW = 32_768
CARD_BLOCK = 16
BLOCKS = 10**6

MOST_OF_BEST = 1.02


async def print_card(
    report: Report,
    servings: Sequence[tuple[str, Serving]],
    conversations: Sequence[Sequence[tuple[ConversationTurn, Candidates]]],
    min_answer_tokens: int,
    top_k: int,
) -> None:
    """`servings` are those of our arms, each fixed one before the last, which chooses. Cached tokens are exact."""
    rows, medians = [], []
    for name, serving in servings:
        sight = Sight(CARD_SPEED, Residency(CARD_BLOCK, BLOCKS))
        arm = Ours(name, serving, Limits(CARD_WINDOW, 1, min_answer_tokens, top_k), sight)
        found = np.array([await _turn(arm, sight, turn) for turn in _asked(conversations)])
        ttft_ms, tokens, uncached, left_out = found.T
        medians.append(float(np.median(ttft_ms)))
        rows.append(
            (
                name,
                medians[-1],
                float(np.percentile(ttft_ms, 95)),
                float(ttft_ms.mean()),
                float(np.median(tokens)),
                float(np.median(uncached)),
                int((left_out > 0).sum()),
            )
        )
    columns = (
        "arm",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "TTFT mean ms",
        "prompt tokens p50",
        "uncached p50",
        "cut to the window",
    )
    title = f"The same on a card of {CARD.per_token_s * 1e6:g} µs a token (arithmetic), window {CARD_WINDOW:,}"
    report.table(title, columns, rows)
    report.at_most("card: median TTFT of (v) / best fixed arm", medians[-1] / min(medians[:-1]), MOST_OF_BEST)


def _asked(conversations: Sequence[Sequence[tuple[ConversationTurn, Candidates]]]) -> list[AskedTurn]:
    asked = []
    for number, turns in enumerate(conversations):
        past: tuple[Message, ...] = ()
        for turn, candidates in turns:
            asked.append(AskedTurn(past, turn.user, candidates, turn.answer, f"card{number}"))
            past = (*past, Message("user", turn.user), Message("assistant", turn.answer))
    return asked


async def _turn(arm: Ours, sight: Sight, turn: AskedTurn) -> tuple[float, int, int, int]:
    """TTFT in milliseconds, prompt tokens, uncached tokens, what was left out."""
    built = await arm.build(turn)
    cached = sight.cached_tokens(built.prompt, turn.salt)
    sight.computed(built.prompt, turn.salt)
    uncached = built.prompt.tokens - cached
    return CARD.predict_s(uncached, cached) * 1000, built.prompt.tokens, uncached, built.left_out
