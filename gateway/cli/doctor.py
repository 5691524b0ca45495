"""`headstart doctor`: what this installation can do, what it misses, what that costs and how to cure it."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated

import aiohttp
import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.backends.facts import EngineFacts, probe_engine
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
from gateway.endpoints import parse_endpoints
from gateway.engine.progress import Steps
from gateway.replica_facts import why_refused
from gateway.settings import Settings
from gateway.tenants import KeyFileError, load_tenants

MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def doctor(
    engine_url: Annotated[
        str | None, typer.Option(help="Base URL of the engine, without /v1; several separated by commas.")
    ] = None,
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
    """Of every engine by itself, named where there are several, and whether they are replicas of each other."""
    endpoints = parse_endpoints(settings.engine_url)
    findings: list[Finding] = []
    met: list[EngineFacts] = []
    async with aiohttp.ClientSession() as session:
        for endpoint in endpoints:
            facts = await probe_engine(session, endpoint.url, settings.engine_api_key, model=settings.model)
            own = settings.model_copy(update={"engine_url": endpoint.url})
            found = await _findings_of(session, own, facts, tenants)
            if len(endpoints) > 1:
                found = [replace(finding, name=f"{endpoint.name}: {finding.name}") for finding in found]
                found += check_alike(endpoint.name, facts, met)
            findings += found
            met.append(facts)
    return findings


def check_alike(name: str, facts: EngineFacts, met: Sequence[EngineFacts]) -> list[Finding]:
    """Whether an engine can take the requests of those met before it."""
    reference = next((other for other in met if other.model is not None), None)
    refused = why_refused(facts, reference) if reference is not None and facts.reachable else None
    if refused is None:
        return []
    cost, cure = "no request goes there", "serve the same model on all engines of engine_url"
    return [Finding(f"{name}: replica", "fail", refused, cost, cure)]


async def _findings_of(
    session: aiohttp.ClientSession, settings: Settings, facts: EngineFacts, tenants: int
) -> list[Finding]:
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
