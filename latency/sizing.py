"""Arithmetic before buying a card: what a model holds, how fast it can be, how many it serves. Pure functions.

Sizes are bytes, rates are per second, and a GB is 10^9 bytes, as on data sheets. Every function raises ValueError
for numbers that are not finite and positive (counts of tokens may be 0).
"""

import math
from dataclasses import dataclass

GB = 10**9
KIB = 2**10


@dataclass(frozen=True, slots=True)
class KvShape:
    """What attention keeps of each token: keys and values in `kv_heads` heads of `head_dim` numbers in each layer."""

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: float = 2.0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "bytes_per_value"):
            _positive(name, getattr(self, name))

    @property
    def bytes_per_token(self) -> float:
        """2 · layers · kv_heads · head_dim · bytes; the 2 is for keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True)
class AnswerTime:
    """Seconds of one answer on an idle engine: `prefill_s` until its first token, `decode_s` for the rest."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def prefill_share(self) -> float:
        """TTFT's part of the whole, 0 to 1."""
        return self.prefill_s / self.total_s if self.total_s else 0.0

    @property
    def decode_share(self) -> float:
        return self.decode_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class BatchRate:
    """Decoding `batch` answers side by side.

    Each pass reads the weights once and gives every answer one token: `tokens_per_pass` = batch. `pass_s` is the
    longer of reading and computing; `compute_bound` says which it is, None where the computing rate is not known.
    """

    batch: int
    pass_s: float
    compute_bound: bool | None

    @property
    def tokens_per_pass(self) -> int:
        return self.batch

    @property
    def tokens_per_s(self) -> float:
        """Of all answers together."""
        return self.batch / self.pass_s

    @property
    def tokens_per_s_each(self) -> float:
        return 1 / self.pass_s


@dataclass(frozen=True, slots=True)
class TextRate:
    """Characters per token of a language, from `low` to `high` over tokenizers."""

    language: str
    low: float
    high: float

    def chars_per_s(self, tokens_per_s: float) -> tuple[float, float]:
        """(low, high) at that rate of tokens."""
        _positive("tokens_per_s", tokens_per_s)
        return self.low * tokens_per_s, self.high * tokens_per_s


TEXT_RATES = (TextRate("English", 4.0, 4.0), TextRate("Vietnamese", 2.5, 3.5), TextRate("Korean", 1.0, 1.5))
"""For tokenizers of 100,000 entries and more; docs/sizing.md has the measured figures behind them."""


def kv_bytes(bytes_per_token: float, context_tokens: int) -> float:
    """Bytes of the KV cache that one conversation of so many tokens holds."""
    _positive("bytes_per_token", bytes_per_token)
    _not_negative("context_tokens", context_tokens)
    return bytes_per_token * context_tokens


def weight_bytes(parameters: float, bits_per_weight: float) -> float:
    """Bytes of the weights: parameters · bits / 8. A 4-bit quantisation with its scales has about 4.5 bits."""
    _positive("parameters", parameters)
    _positive("bits_per_weight", bits_per_weight)
    return parameters * bits_per_weight / 8


def answer_time(
    prompt_tokens: int, prefill_tokens_per_s: float, output_tokens: int, decode_tokens_per_s: float
) -> AnswerTime:
    """prompt / prefill rate + output / decode rate. Tokens that the prefix cache holds are no part of the prompt."""
    _not_negative("prompt_tokens", prompt_tokens)
    _not_negative("output_tokens", output_tokens)
    _positive("prefill_tokens_per_s", prefill_tokens_per_s)
    _positive("decode_tokens_per_s", decode_tokens_per_s)
    return AnswerTime(prompt_tokens / prefill_tokens_per_s, output_tokens / decode_tokens_per_s)


def decode_ceiling(weights_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Most tokens per second of one answer: effective bandwidth / weight bytes, as each token reads all weights.

    `weights_bytes` are those that a token reads: the active ones of a mixture of experts.
    """
    _positive("weights_bytes", weights_bytes)
    _positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    return bandwidth_bytes_per_s / weights_bytes


def conversations(memory_bytes: float, weights_bytes: float, conversation_bytes: float, share: float = 0.9) -> int:
    """How many conversations fit beside the weights: floor((share · memory - weights) / KV bytes of one).

    `share` is what the engine takes of the memory (vLLM's `--gpu-memory-utilization`). Negative when the weights
    alone do not fit: -1.
    """
    _positive("memory_bytes", memory_bytes)
    _positive("weights_bytes", weights_bytes)
    _positive("conversation_bytes", conversation_bytes)
    if not 0 < share <= 1:
        raise ValueError("share is more than 0 and at most 1")
    left = share * memory_bytes - weights_bytes
    return -1 if left < 0 else int(left // conversation_bytes)


def batch_rate(
    batch: int,
    weights_bytes: float,
    bandwidth_bytes_per_s: float,
    *,
    conversation_bytes: float = 0.0,
    parameters: float | None = None,
    flops: float | None = None,
) -> BatchRate:
    """Roofline of one decoding pass: max((weights + batch · KV) / bandwidth, batch · 2 · parameters / flops).

    `conversation_bytes`: the KV cache that each answer reads in each pass. Without `parameters` (those used for a
    token) and `flops` (effective operations per second) only reading counts.
    """
    _positive("batch", batch)
    _positive("weights_bytes", weights_bytes)
    _positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    _not_negative("conversation_bytes", conversation_bytes)
    reading_s = (weights_bytes + batch * conversation_bytes) / bandwidth_bytes_per_s
    if parameters is None or flops is None:
        return BatchRate(batch, reading_s, None)
    computing_s = batch * _token_compute_s(parameters, flops)
    return BatchRate(batch, max(reading_s, computing_s), computing_s >= reading_s)


def saturating_batch(
    weights_bytes: float,
    bandwidth_bytes_per_s: float,
    parameters: float,
    flops: float,
    conversation_bytes: float = 0.0,
) -> int | None:
    """The smallest batch at which computing takes as long as reading; a larger one gains no tokens per second.

    (weights / bandwidth) / (2 · parameters / flops - KV / bandwidth), rounded up. None when the KV cache of one
    more answer takes longer to read than its token takes to compute: then no batch saturates the computing units.
    """
    _positive("weights_bytes", weights_bytes)
    _positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    _not_negative("conversation_bytes", conversation_bytes)
    gained_s = _token_compute_s(parameters, flops) - conversation_bytes / bandwidth_bytes_per_s
    if gained_s <= 0:
        return None
    return math.ceil(weights_bytes / bandwidth_bytes_per_s / gained_s)


def prefill_ceiling(parameters: float, flops: float) -> float:
    """Most prompt tokens per second: flops / (2 · parameters), without attention, which grows with the prompt."""
    _positive("parameters", parameters)
    _positive("flops", flops)
    return flops / (2 * parameters)


def _token_compute_s(parameters: float, flops: float) -> float:
    """A token costs a multiplication and an addition for each parameter."""
    _positive("parameters", parameters)
    _positive("flops", flops)
    return 2 * parameters / flops


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is a finite number above 0, not {value}")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is a finite number, 0 or more, not {value}")
