"""Which requests measure an engine's prefill best, in a few seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.backends.facts import EngineFacts

FIRST_TOKENS = 32
GROWTH = 3
LONG_ENOUGH_S = 0.8
"""A prefill of this length shows the time per token well above the noise; nothing longer is needed."""
LONGEST_S = 1.5
"""What a prompt of the ladder is meant to take at most."""
GROWTH_OF_TIME = 1.3
"""Time grows with length to this power or less: attention is a part of it."""
SUSPECT_FACTOR = 2.5
SUSPECT_S = 0.2
"""The shortest prompt is sent again when it took longer: a slow engine, or one that others used."""
MOST_UNCACHED = 16_384
DECODES = 3
DECODE_TOKENS = 9
MOST_REQUESTS = 18
GOOD_FIT = 0.03
LIMIT_S = 7.0

_CHAIN_LINKS = 3
_CHAIN_SHARE = 0.65
# Beyond the ladder and the chain: (share of the longest cold prompt that is new, share of the chain that is cached).
_PROBES = ((0.06, 1.0), (0.25, 1.0), (0.12, 0.5))
_MORE = ((0.5, 0.0), (0.4, 0.5), (0.06, 0.0), (0.5, 0.8), (0.2, 0.0), (0.12, 1.0))

_DEFAULT_BLOCK_TOKENS = 16

StepKind = Literal["warm", "cold", "chain", "probe", "decode"]


@dataclass(frozen=True, slots=True)
class Step:
    """One request: `shared_tokens` that the chain left in the engine, then `new_tokens` that nothing holds."""

    kind: StepKind
    shared_tokens: int
    new_tokens: int
    max_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step measured. `ttft_s` from sending to the first bytes, `decode_s` from there to the end.

    `decoding` answers of others were being decoded beside it.
    """

    step: Step
    uncached_tokens: int
    cached_tokens: int
    ttft_s: float
    output_tokens: int
    decode_s: float
    decoding: int = 0

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the engine allows. `cached_known`: it reports, or its block size tells, how much of a prompt it reuses."""

    window_tokens: int
    block_tokens: int
    cached_known: bool

    @classmethod
    def of(cls, facts: EngineFacts) -> "Bounds":
        return cls(
            window_tokens=facts.max_model_len or 2048,
            block_tokens=facts.block_size or _DEFAULT_BLOCK_TOKENS,
            cached_known=facts.prompt_tokens_details is True or facts.block_size is not None,
        )


def next_step(done: Sequence[Sample], bounds: Bounds, error: float | None) -> Step | None:
    """What to measure next, None when enough is known. `error` is the mean error of a fit to `done`, as a share.

    Cold prompts grow until one takes `LONG_ENOUGH_S` (fast engines get long prompts, slow ones short ones), then a
    chain of prompts, each with the last one as its cached part, then short ones on top of the chain, then more of all
    until the fit is good, `LIMIT_S` are spent or `MOST_REQUESTS` sent. A pure function of what was measured.
    """
    kinds = [sample.step.kind for sample in done]
    if "warm" not in kinds:
        return Step("warm", 0, FIRST_TOKENS)
    cold = [sample for sample in done if sample.step.kind == "cold"]
    if "chain" not in kinds and "probe" not in kinds and "decode" not in kinds:
        size = _next_cold(cold, bounds)
        if size is not None:
            return Step("cold", 0, size)
    longest = max(sample.uncached_tokens for sample in cold)
    if kinds.count("decode") < DECODES:
        return Step("decode", 0, FIRST_TOKENS, min(DECODE_TOKENS, bounds.window_tokens - FIRST_TOKENS))
    links = [sample for sample in done if sample.step.kind == "chain"]
    reused = bounds.cached_known and not any(s.step.shared_tokens and not s.cached_tokens for s in links)
    link = max(int(_CHAIN_SHARE * longest) // bounds.block_tokens, 1) * bounds.block_tokens
    # Room for a probe on top of the chain.
    fitting = min(_CHAIN_LINKS, (bounds.window_tokens - longest // 2 - FIRST_TOKENS) // link)
    if reused and len(links) < fitting and not any(sample.ttft_s > LONGEST_S for sample in links):
        return Step("chain", len(links) * link, link)
    chain = len(links) * link if reused else 0
    probes = [(share, depth) for share, depth in (*_PROBES, *_MORE) if chain or not depth]
    wanted = sum(1 for _, depth in _PROBES if chain or not depth)
    at = kinds.count("probe")
    if at >= len(probes):
        return None
    spent_s = sum(sample.total_s for sample in done)
    if at >= wanted and (
        len(done) >= MOST_REQUESTS or spent_s >= LIMIT_S or (error is not None and error <= GOOD_FIT)
    ):
        return None
    share, depth = probes[at]
    shared = int(depth * chain) // bounds.block_tokens * bounds.block_tokens
    return Step("probe", shared, max(FIRST_TOKENS, int(share * longest)))


def _next_cold(cold: Sequence[Sample], bounds: Bounds) -> int | None:
    """The next longer prompt; the same again when one took so long that something must have been in its way."""
    most = max(FIRST_TOKENS // 2, min(MOST_UNCACHED, bounds.window_tokens // 2))
    if not cold:
        return min(FIRST_TOKENS, most)
    last_tokens = cold[-1].uncached_tokens
    ttft_s, tries = _best(cold, last_tokens)
    shorter = [sample.uncached_tokens for sample in cold if sample.uncached_tokens < last_tokens]
    expected_s = SUSPECT_S / SUSPECT_FACTOR
    if shorter:
        expected_s = _best(cold, max(shorter))[0] * last_tokens / max(shorter)
    if tries == 1 and ttft_s > SUSPECT_FACTOR * expected_s:
        return last_tokens
    size = min(last_tokens * GROWTH, most)
    foreseen_s = ttft_s * (size / last_tokens) ** GROWTH_OF_TIME
    if foreseen_s > LONGEST_S:
        size = int(size * (LONGEST_S / foreseen_s) ** (1 / GROWTH_OF_TIME))
    if ttft_s >= LONG_ENOUGH_S or size < 1.5 * last_tokens:
        return None
    return size


def _best(cold: Sequence[Sample], tokens: int) -> tuple[float, int]:
    """(least seconds, tries) of prompts of so many tokens."""
    times = [sample.ttft_s for sample in cold if sample.uncached_tokens == tokens]
    return min(times), len(times)
