"""`headstart stores` and `headstart calls`: what the gateway holds and what it did."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from gateway.cli.client import GatewayClient, Store
from gateway.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from gateway.cli.terminal import count, ms, out, printable, rate, run

_TIMES = {
    "TTFT": "ttft_ms",
    "predicted": "predicted_ttft_ms",
    "retrieve": "retrieve_ms",
    "plan": "plan_ms",
    "queue": "queue_ms",
    "prefill": "prefill_ms",
    "total": "total_ms",
}

stores_app = typer.Typer(help="Vector stores: list them, or 'stores delete NAME'.", invoke_without_command=True)


@stores_app.callback()
def stores(
    context: typer.Context,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """List the stores with their numbers of files."""
    if context.invoked_subcommand is not None:
        return
    listed = run(_stores(url, api_key))
    if as_json:
        rows = [{"id": store.id, "name": store.name, "files": dict(store.files)} for store in listed]
        typer.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
    elif listed:
        out().print(store_table(listed))
    else:
        typer.echo("No stores. Make one with 'headstart ingest PATH --store NAME'.")


@stores_app.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="Name or id of the store.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Delete a store and what was indexed in it. The uploaded files stay."""
    store = run(_delete(url, api_key, name))
    typer.echo(f"Deleted store {printable(store.name)} ({store.id}).")


def calls(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most requests to show.")] = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Show recent chat requests with their timings, newest first."""
    recent = run(_calls(url, api_key, limit))
    if as_json:
        typer.echo(orjson.dumps(recent, option=orjson.OPT_INDENT_2))
    elif recent:
        out().print(call_table(recent))
    else:
        typer.echo("No requests yet.")


async def _stores(url: str, api_key: str) -> list[Store]:
    async with GatewayClient(url, api_key) as client:
        return await client.stores()


async def _delete(url: str, api_key: str, name: str) -> Store:
    async with GatewayClient(url, api_key) as client:
        store = await client.require_store(name)
        await client.delete_store(store.id)
        return store


async def _calls(url: str, api_key: str, limit: int) -> list[dict[str, Any]]:
    async with GatewayClient(url, api_key) as client:
        return await client.calls(limit)


def store_table(stores: Sequence[Store]) -> Table:
    table = Table("name", "id", box=None)
    for heading in ("files", "in progress", "failed", "size"):
        table.add_column(heading, justify="right")
    for store in stores:
        table.add_row(
            escape(printable(store.name)),
            store.id,
            count(store.files.get("completed", 0)),
            count(store.files.get("in_progress", 0)),
            count(store.files.get("failed", 0)),
            f"{store.usage_bytes / 2**20:.1f} MiB",
        )
    return table


def call_table(calls: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("time", "status", "model", box=None)
    for heading in (*_TIMES, "prompt", "cached", "answer", "t/s"):
        table.add_column(heading, justify="right")
    for call in calls:
        timings = call.get("timings") or call
        table.add_row(
            _clock(call.get("created")),
            escape(printable(" ".join(str(call[key]) for key in ("status", "error") if call.get(key)))),
            escape(printable(str(call.get("model") or ""))),
            *(ms(timings.get(key)) for key in _TIMES.values()),
            *(count(timings.get(f"{part}_tokens")) for part in ("prompt", "cached", "output")),
            rate(timings.get("decode_tokens_per_s")),
        )
    return table


def _clock(created: object) -> str:
    return datetime.fromtimestamp(created).strftime("%H:%M:%S") if isinstance(created, int | float) else "?"
