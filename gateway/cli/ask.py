"""`headstart ask`: one question, the answer as it comes, then where it came from and where the time went."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.cli.client import GatewayClient
from gateway.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from gateway.cli.terminal import USAGE, CliError, count, ms, out, printable, rate, run


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer and the response's `headstart` object, empty where the gateway sent none."""

    text: str
    extension: Mapping[str, Any]

    @property
    def citations(self) -> list[Mapping[str, Any]]:
        return list(self.extension.get("citations") or [])

    @property
    def timings(self) -> Mapping[str, Any]:
        return self.extension.get("timings") or {}


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    store: Annotated[
        list[str] | None, typer.Option(help="Name or id of a store to answer from; may be given several times.")
    ] = None,
    conversation: Annotated[str | None, typer.Option(help="Id of a conversation to go on with.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, max=50, help="Most chunks in the prompt.")] = None,
    budget_ms: Annotated[
        float | None, typer.Option(min=0.001, max=3_600_000, help="TTFT budget, in milliseconds.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rather than miss the budget.")] = False,
    model: Annotated[str | None, typer.Option(help="Served model; the first when not given.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Ask a question over the documents of a store."""
    extras = {
        "top_k": top_k,
        "conversation": conversation,
        "ttft_budget_ms": budget_ms,
        "policy": "strict" if strict else None,
    }
    options = {"max_tokens": max_tokens}
    show = None if as_json else write_piece
    answer = run(_ask(url, api_key, question, store or [], model, extras, options, show))
    if as_json:
        typer.echo(orjson.dumps({"answer": answer.text, **answer.extension}, option=orjson.OPT_INDENT_2))
        return
    typer.echo()
    console = out()
    for table in (citation_table(answer), timing_table(answer.timings)):
        if table is not None:
            console.print(table)
    left_out = (answer.extension.get("plan") or {}).get("dropped") or []
    if store and not answer.citations:
        if any(dropped.get("what") == "chunk" for dropped in left_out):
            console.print("No passage fitted.", markup=False)
        else:
            console.print("No passage was found. 'headstart stores' shows what is ingested.", markup=False)
    budget = budget_line(answer.timings)
    if budget:
        console.print(budget, markup=False, soft_wrap=True)
    for dropped in left_out:
        which = f"{dropped.get('what')} {dropped.get('name')}: " if dropped.get("what") in ("chunk", "turn") else ""
        said = printable(f"{which}{dropped.get('reason', '')}")
        console.print(f"left out: {said}", markup=False, soft_wrap=True)


async def _ask(
    url: str,
    api_key: str,
    question: str,
    stores: Sequence[str],
    model: str | None,
    extras: Mapping[str, Any],
    options: Mapping[str, Any],
    show: Callable[[str], None] | None,
) -> Answer:
    if not question.strip():
        raise CliError("The question is empty.", USAGE)
    async with GatewayClient(url, api_key) as client:
        store_ids = [(await client.require_store(name)).id for name in stores]
        served = model or next(iter(await client.models()), None)
        if served is None:
            raise CliError("The gateway serves no model: its engine is not there. 'headstart doctor' says more.")
        return await ask_once(client, served, question, store_ids, show, extras=extras, options=options)


async def ask_once(
    client: GatewayClient,
    model: str,
    question: str,
    store_ids: Sequence[str],
    show: Callable[[str], None] | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Answer:
    """Streams one answer, each piece to `show`. `extras` go into the request's `headstart` object."""
    wanted: dict[str, Any] = {"vector_store_ids": list(store_ids), **(extras or {})}
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}], **(options or {})}
    extension = {name: value for name, value in wanted.items() if value not in (None, [])}
    if extension:
        body["headstart"] = extension
    pieces: list[str] = []
    told: Mapping[str, Any] = {}
    async for delta in client.chat({name: value for name, value in body.items() if value is not None}):
        pieces.append(delta.text)
        if show is not None and delta.text:
            show(delta.text)
        if delta.extension is not None:
            told = delta.extension
    return Answer("".join(pieces), told)


def write_piece(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def citation_table(answer: Answer) -> Table | None:
    """The chunks that the answer could draw on; those that it names are marked."""
    if not answer.citations:
        return None
    table = Table("", "label", "document", "passage", "score", box=None, title="Citations", title_justify="left")
    for citation in answer.citations:
        score = citation.get("score")
        table.add_row(
            "named" if citation.get("named") else "",
            _cell(citation.get("label")),
            _cell(citation.get("filename")),
            _cell(citation.get("title"), 48),
            f"{score:.2f}" if isinstance(score, int | float) else "?",
        )
    return table


def timing_table(timings: Mapping[str, Any]) -> Table | None:
    """Time to the first token with its parts, and tokens with what the cache saved."""
    if not timings:
        return None
    table = Table(box=None, title="Timings", title_justify="left")
    cells = timing_cells(timings)
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    return table


def budget_line(timings: Mapping[str, Any]) -> str:
    """What became of the budget, beside the prediction that decided; empty without a budget."""
    budget_ms = timings.get("ttft_budget_ms")
    if budget_ms is None:
        return ""
    within = timings.get("within_budget")
    kept = "not known to be kept" if within is None else "kept" if within else "missed"
    safe_ms = timings.get("predicted_safe_ttft_ms")
    foretold = "nothing was predicted" if safe_ms is None else f"planned for a TTFT of at most {ms(safe_ms)}"
    return f"budget of {budget_ms:g} ms: {kept}; {foretold}"


def timing_cells(timings: Mapping[str, Any]) -> dict[str, str]:
    return {
        "TTFT": ms(timings.get("ttft_ms")),
        "predicted": ms(timings.get("predicted_ttft_ms")),
        "retrieve": ms(timings.get("retrieve_ms")),
        "plan": ms(timings.get("plan_ms")),
        "queue": ms(timings.get("queue_ms")),
        "prefill": ms(timings.get("prefill_ms")),
        "prompt": count(timings.get("prompt_tokens")),
        "cached": count(timings.get("cached_tokens")),
        "uncached": count(timings.get("uncached_tokens")),
        "answer": count(timings.get("output_tokens")),
        "decode t/s": rate(timings.get("decode_tokens_per_s")),
        "total": ms(timings.get("total_ms")),
    }


def print_plain_timings(console: Console, timings: Mapping[str, Any]) -> None:
    """The same as sentences, for output that is not a terminal's width wide."""
    cells = timing_cells(timings)
    parts = ", ".join(f"{name} {cells[name]}" for name in ("retrieve", "plan", "queue", "prefill"))
    foretold = f", predicted {cells['predicted']}" if timings.get("predicted_ttft_ms") is not None else ""
    console.print(
        f"  TTFT {cells['TTFT']}{foretold} ({parts}); {cells['total']} in all", markup=False, soft_wrap=True
    )
    console.print(
        f"  {cells['prompt']} prompt tokens: {cells['cached']} cached, {cells['uncached']} uncached; "
        f"{cells['answer']} answer tokens at {cells['decode t/s']} per second",
        markup=False,
        soft_wrap=True,
    )


def _cell(value: object, most: int = 80) -> str:
    text = printable(str(value or "")).replace("\n", " ")
    return escape(text if len(text) <= most else text[: most - 1] + "…")
