"""`headstart replicas`: how each engine is, what it holds and how well that was predicted."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from gateway.cli.client import GatewayClient
from gateway.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from gateway.cli.terminal import FAILURE, count, ms, out, printable, run


def replicas(
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 unless every replica is ok.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Show the engines behind the gateway: state, queue, cache and predictions."""
    listed = run(_replicas(url, api_key))
    if as_json:
        typer.echo(orjson.dumps(listed, option=orjson.OPT_INDENT_2))
    else:
        out().print(replica_table(listed))
        for replica in listed:
            if replica.get("error"):
                out().print(printable(f"{replica.get('name')}: {replica['error']}"), markup=False)
    if check and any(replica.get("state") != "ok" for replica in listed):
        raise typer.Exit(FAILURE)


async def _replicas(url: str, api_key: str) -> list[dict[str, Any]]:
    async with GatewayClient(url, api_key) as client:
        return await client.replicas()


def replica_table(replicas: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("replica", "state", "model", box=None)
    for heading in ("waiting", "running", "wait", "resident", "evicted", "exact", "hits", "predicted"):
        table.add_column(heading, justify="right")
    for replica in replicas:
        queue, cache, hits = (replica.get(part) or {} for part in ("queue", "cache", "hits"))
        table.add_row(
            escape(printable(str(replica.get("name") or ""))),
            escape(printable(str(replica.get("state") or ""))),
            escape(printable(str(replica.get("model") or "?"))),
            count(queue.get("waiting")),
            count(queue.get("in_flight")),
            ms(queue.get("predicted_wait_ms")),
            _share(cache.get("resident_blocks"), cache.get("capacity_blocks")),
            count(cache.get("evictions")),
            _share(hits.get("exact"), _predictions(hits)),
            count(hits.get("reported_tokens")),
            count(hits.get("predicted_tokens")),
        )
    return table


def _predictions(hits: Mapping[str, Any]) -> int | None:
    counts = [hits.get(name) for name in ("exact", "over", "under")]
    known = [number for number in counts if isinstance(number, int)]
    return sum(known) if len(known) == len(counts) else None


def _share(part: object, whole: object) -> str:
    """`part` of `whole`; `?` where either is unknown, and a share of nothing is none."""
    if not isinstance(part, int) or not isinstance(whole, int):
        return "?"
    return f"{part / whole:.0%} of {whole:,}" if whole else "-"
