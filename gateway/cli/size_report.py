"""How `headstart size` says what it has worked out."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.cli.size_facts import Sizing
from latency.sizing import GB, KIB, TEXT_RATES


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
