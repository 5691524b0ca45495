"""What `headstart size` works out from what it is told."""

from dataclasses import dataclass
from typing import Any, Self

from gateway.cli.terminal import USAGE, CliError
from latency.sizing import (
    TEXT_RATES,
    AnswerTime,
    BatchRate,
    answer_time,
    batch_rate,
    conversations,
    decode_ceiling,
    kv_bytes,
    prefill_ceiling,
    saturating_batch,
)


@dataclass(frozen=True, slots=True)
class Model:
    """Bytes; None is not known."""

    name: str
    kv_bytes_per_token: float | None
    weights_bytes: float | None
    parameters: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes, bytes per second, operations per second; None is not known. `batch`: answers decoding side by side."""

    vram_bytes: float | None
    vram_share: float
    bandwidth: float | None
    flops: float | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """One request, and the engine's rates in tokens per second; None is not known."""

    prompt_tokens: int | None
    prefill_rate: float | None
    output_tokens: int | None
    decode_rate: float | None


@dataclass(frozen=True, slots=True)
class Held:
    """A conversation of `tokens`: its KV cache, and how many fit beside the weights; -1 when those alone do not.

    `batch` is the rate of as many of them as the card's batch, whose KV caches are read in each pass too.
    """

    tokens: int
    bytes: float
    fit: int | None
    batch: BatchRate | None


@dataclass(frozen=True, slots=True)
class Sizing:
    """All that follows from what is known. `assumed` names the rates that are ceilings, not given."""

    model: Model
    card: Card
    contexts: tuple[Held, ...]
    decode_ceiling: float | None
    prefill_ceiling: float | None
    batch: BatchRate | None
    saturating_batch: int | None
    answer: AnswerTime | None
    decode_rate: float | None
    assumed: tuple[str, ...]

    @classmethod
    def of(cls, model: Model, card: Card, load: Load, contexts: tuple[int, ...]) -> Self:
        """Raises CliError (2) that names the option without which another one says nothing."""
        per_token, weights, bandwidth = model.kv_bytes_per_token, model.weights_bytes, card.bandwidth
        if card.vram_bytes is not None:
            _need("--vram", weights, "--weights or --parameters")
            _need("--vram", per_token, "--layers, --kv-heads and --head-dim, or a MODEL")
        if bandwidth is not None:
            _need("--bandwidth", weights, "--weights or --parameters")
        if card.flops is not None:
            _need("--tflops", model.parameters, "--parameters")
        ceiling = None if weights is None or bandwidth is None else decode_ceiling(weights, bandwidth)
        compute = None
        if card.flops is not None and model.parameters is not None:
            compute = prefill_ceiling(model.parameters, card.flops)
        assumed: list[str] = []
        decode = _rate(load.decode_rate, ceiling, "decode", assumed)
        if card.batch is not None:
            _need("--batch", bandwidth, "--bandwidth")
        return cls(
            model=model,
            card=card,
            contexts=tuple(_held(model, card, tokens) for tokens in contexts) if per_token is not None else (),
            decode_ceiling=ceiling,
            prefill_ceiling=compute,
            batch=_batching(model, card, 0.0),
            saturating_batch=_saturating(model, card),
            answer=_answer(load, decode, compute, assumed),
            decode_rate=decode,
            assumed=tuple(assumed),
        )

    @property
    def empty(self) -> bool:
        return not self.contexts and self.decode_rate is None and self.batch is None

    def wire(self) -> dict[str, Any]:
        """Bytes, seconds, rates per second; absent is not known."""
        per_token = self.model.kv_bytes_per_token
        entries: dict[str, Any] = {
            "model": self.model.name or None,
            "notes": list(self.model.notes) or None,
            "kv_bytes_per_token": per_token,
            "contexts": [
                {
                    "tokens": held.tokens,
                    "kv_bytes": held.bytes,
                    "conversations": held.fit,
                    "batch_tokens_per_s": held.batch.tokens_per_s if held.batch else None,
                }
                for held in self.contexts
            ]
            or None,
            "weights_bytes": self.model.weights_bytes,
            "decode_ceiling_tokens_per_s": self.decode_ceiling,
            "prefill_ceiling_tokens_per_s": self.prefill_ceiling,
            "saturating_batch": self.saturating_batch,
        }
        if self.batch is not None:
            entries["batch"] = {
                "answers": self.batch.batch,
                "tokens_per_pass": self.batch.tokens_per_pass,
                "tokens_per_s": self.batch.tokens_per_s,
                "tokens_per_s_each": self.batch.tokens_per_s_each,
                "compute_bound": self.batch.compute_bound,
            }
        if self.answer is not None:
            entries["answer"] = {
                "ttft_s": self.answer.prefill_s,
                "decode_s": self.answer.decode_s,
                "total_s": self.answer.total_s,
                "ttft_share": self.answer.prefill_share,
                "decode_share": self.answer.decode_share,
                "from_ceilings": list(self.assumed),
            }
        if self.decode_rate is not None:
            entries["characters_per_s"] = {
                rate.language: list(rate.chars_per_s(self.decode_rate)) for rate in TEXT_RATES
            }
        return {name: value for name, value in entries.items() if value is not None}


def _held(model: Model, card: Card, tokens: int) -> Held:
    per_token = model.kv_bytes_per_token or 0.0
    size = kv_bytes(per_token, tokens)
    fit = None
    if card.vram_bytes is not None and model.weights_bytes is not None:
        fit = conversations(card.vram_bytes, model.weights_bytes, size, card.vram_share)
    return Held(tokens, size, fit, _batching(model, card, size))


def _batching(model: Model, card: Card, conversation_bytes: float) -> BatchRate | None:
    if card.batch is None or model.weights_bytes is None or card.bandwidth is None:
        return None
    return batch_rate(
        card.batch,
        model.weights_bytes,
        card.bandwidth,
        conversation_bytes=conversation_bytes,
        parameters=model.parameters,
        flops=card.flops,
    )


def _saturating(model: Model, card: Card) -> int | None:
    """Of answers whose contexts are short beside the weights."""
    if None in (model.weights_bytes, card.bandwidth, model.parameters, card.flops):
        return None
    return saturating_batch(
        model.weights_bytes or 0.0, card.bandwidth or 0.0, model.parameters or 0.0, card.flops or 0.0
    )


def _answer(load: Load, decode: float | None, compute: float | None, assumed: list[str]) -> AnswerTime | None:
    if load.prompt_tokens is None and load.output_tokens is None:
        if load.prefill_rate is not None:
            raise CliError("--prefill-rate needs --prompt-tokens and --output-tokens.", USAGE)
        return None
    if load.prompt_tokens is None or load.output_tokens is None:
        there, missing = ("--output-tokens", "--prompt-tokens")[:: 1 if load.prompt_tokens is None else -1]
        raise CliError(f"{there} needs {missing} beside it (0 where there are none).", USAGE)
    prefill = _rate(load.prefill_rate, compute, "prefill", assumed)
    if prefill is None:
        raise CliError("--prompt-tokens needs --prefill-rate, or --parameters and --tflops for its ceiling.", USAGE)
    if decode is None:
        raise CliError("--output-tokens needs --decode-rate, or --weights and --bandwidth for its ceiling.", USAGE)
    return answer_time(load.prompt_tokens, prefill, load.output_tokens, decode)


def _rate(given: float | None, ceiling: float | None, name: str, assumed: list[str]) -> float | None:
    if given is None and ceiling is not None:
        assumed.append(name)
    return given if given is not None else ceiling


def _need(option: str, value: object, other: str) -> None:
    if value is None:
        raise CliError(f"{option} needs {other}.", USAGE)
