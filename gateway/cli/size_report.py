"""What `headstart size` works out, and how it says it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.cli.terminal import USAGE, CliError
from latency.sizing import (
    GB,
    KIB,
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


def size_report(sizing: Sizing, console: Console) -> None:
    """Tables and sentences for a person."""
    if sizing.contexts:
        console.print(_contexts(sizing))
    table = Table("", "", box=None, show_header=False)
    for name, value in _lines(sizing):
        table.add_row(name, value)
    if table.row_count:
        console.print(table)
    for note in (*_missing(sizing), *sizing.model.notes):
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    if sizing.answer is not None and sizing.assumed:
        console.print(
            f"Note: the answer's time takes the ceiling of {' and '.join(sizing.assumed)} as the rate; a real engine "
            "stays below it.",
            markup=False,
            soft_wrap=True,
        )


def _missing(sizing: Sizing) -> Iterator[str]:
    """What would fill the column of question marks."""
    if any(held.fit is None for held in sizing.contexts):
        weights = "" if sizing.model.weights_bytes is not None else ", and --weights or --parameters"
        yield f"how many conversations fit needs --vram{weights}."


def _contexts(sizing: Sizing) -> Table:
    per_token = sizing.model.kv_bytes_per_token or 0.0
    title = f"KV cache: {per_token / KIB:,.4g} KiB per token"
    if sizing.model.name:
        title = f"{escape(sizing.model.name)}, {title}"
    table = Table(box=None, title=title, title_justify="left")
    headings = ["context", "KV cache", "fit beside the weights"]
    if sizing.batch is not None:
        headings.append(f"tokens/s, {sizing.batch.batch:,} of them")
    for heading in headings:
        table.add_column(heading, justify="right")
    for held in sizing.contexts:
        together = [figure(held.batch.tokens_per_s)] if held.batch is not None else []
        table.add_row(f"{held.tokens:,}", gigabytes(held.bytes), _fit(held.fit), *together)
    return table


def _fit(fit: int | None) -> str:
    if fit is None:
        return "?"
    return "the weights do not fit" if fit < 0 else f"{fit:,}"


def _lines(sizing: Sizing) -> Iterator[tuple[str, str]]:
    if sizing.model.weights_bytes is not None:
        yield "weights", gigabytes(sizing.model.weights_bytes)
    if sizing.decode_ceiling is not None:
        yield "decode ceiling, one answer", f"{figure(sizing.decode_ceiling)} tokens/s"
    if sizing.prefill_ceiling is not None:
        yield "prefill ceiling", f"{figure(sizing.prefill_ceiling)} tokens/s"
    if sizing.batch is not None:
        bound = {True: ", bound by computing", False: ", bound by reading", None: ""}[sizing.batch.compute_bound]
        yield (
            f"batch of {sizing.batch.batch:,}",
            f"{sizing.batch.tokens_per_pass:,} tokens per pass of the weights; without contexts "
            f"{figure(sizing.batch.tokens_per_s)} tokens/s together, {figure(sizing.batch.tokens_per_s_each)} "
            f"each{bound}",
        )
    if sizing.saturating_batch is not None:
        yield "batching gains up to", f"{sizing.saturating_batch:,} answers side by side, without contexts"
    if sizing.answer is not None:
        answer = sizing.answer
        yield "TTFT", f"{seconds(answer.prefill_s)} ({answer.prefill_share:.0%} of the whole)"
        yield "decode", f"{seconds(answer.decode_s)} ({answer.decode_share:.0%})"
        yield "whole answer", seconds(answer.total_s)
    if sizing.decode_rate is not None:
        said = ", ".join(f"{_span(*rate.chars_per_s(sizing.decode_rate))} {rate.language}" for rate in TEXT_RATES)
        yield f"characters/s at {figure(sizing.decode_rate)} tokens/s", f"about {said}"


def _span(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def figure(value: float) -> str:
    """Whole from 100 on, else three figures that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 0.1 else f"{value:,.2f} s"


def gigabytes(size: float) -> str:
    """Decimal GB, with a place behind the point below 10; MB below 0.1."""
    if size < GB / 10:
        return f"{size / 10**6:,.3g} MB"
    return f"{size / GB:,.1f} GB" if size < 10 * GB else f"{size / GB:,.0f} GB"
