"""`headstart doctor`: what this installation can do, what it misses, what that costs and how to cure it."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import aiohttp
import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.backends.facts import probe_engine
from gateway.cli.doctor_checks import (
    Finding,
    check_block,
    check_cache_salt,
    check_engine,
    check_model,
    check_prompt_details,
    check_request_metrics,
    check_token_ids,
    check_window,
)
from gateway.cli.doctor_local import embedding_finding, redis_finding, storage_finding
from gateway.cli.doctor_tokens import stable_prefix_tokens, tokenizer_finding
from gateway.cli.options import AsJson
from gateway.cli.terminal import FAILURE, USAGE, CliError, load_settings, out, printable, run
from gateway.engine.progress import Steps
from gateway.settings import Settings
from gateway.tenants import KeyFileError, load_tenants

MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def doctor(
    engine_url: Annotated[str | None, typer.Option(help="Base URL of the engine, without /v1.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check engine, tokenizer, Redis, embedding model and data. Exits with 1 when something must be cured."""
    settings = load_settings(engine_url=engine_url)
    console = Console(stderr=True, highlight=False) if as_json else out()
    with Steps(console).step("examining"):
        findings = run(examine(settings))
    if as_json:
        typer.echo(orjson.dumps([asdict(finding) for finding in findings], option=orjson.OPT_INDENT_2))
    else:
        show(console, findings)
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(FAILURE)


async def examine(settings: Settings) -> list[Finding]:
    """All findings; the engine's own are left out where there is no engine to ask."""
    try:
        tenants = len(set(load_tenants(settings.api_keys, settings.api_keys_file, b"").tenants_by_digest.values()))
    except KeyFileError as error:
        raise CliError(str(error), USAGE) from error
    local = asyncio.gather(
        redis_finding(settings.redis_url),
        embedding_finding(settings),
        asyncio.to_thread(storage_finding, settings.data_dir, settings.index),
    )
    engine = await engine_findings(settings, tenants)
    redis, embedding, storage = await local
    return [*engine, embedding, storage, redis]


async def engine_findings(settings: Settings, tenants: int) -> list[Finding]:
    async with aiohttp.ClientSession() as session:
        facts = await probe_engine(session, settings.engine_url, settings.engine_api_key, model=settings.model)
        first = [check_engine(facts)]
        if not facts.reachable:
            return first
        first.append(check_model(facts))
        if facts.model is None:
            return first
        return [
            *first,
            check_window(facts),
            check_block(facts, await stable_prefix_tokens(session, settings, facts)),
            await tokenizer_finding(session, settings, facts),
            check_token_ids(facts),
            check_prompt_details(facts),
            check_request_metrics(facts),
            check_cache_salt(facts, tenants),
        ]


def show(console: Console, findings: Sequence[Finding]) -> None:
    table = Table("", "check", "found", box=None)
    for finding in findings:
        table.add_row(MARKS[finding.state], finding.name, escape(printable(finding.detail)))
    console.print(table)
    misses = [finding for finding in findings if finding.state != "ok"]
    for finding in misses:
        console.print(f"\n{MARKS[finding.state]} [bold]{finding.name}[/]")
        console.print(f"  costs: {escape(printable(finding.cost))}")
        console.print(f"  cure:  {escape(printable(finding.cure))}")
    if not misses:
        console.print("\nNothing is missing.")
