"""`headstart demo`: engine, gateway, documents and three questions, from nothing to answers."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from gateway.cli.ask import ask_once, citation_table, print_plain_timings, write_piece
from gateway.cli.child import GatewayProcess
from gateway.cli.client import GatewayClient
from gateway.cli.demo_questions import EXAMPLES, DemoQuestion, complaint, load_questions
from gateway.cli.files import find_documents
from gateway.cli.ingest import ingest_documents, report
from gateway.cli.serve import bind
from gateway.cli.terminal import FAILURE, CliError, Stopped, load_settings, out, run, until_stopped
from gateway.engine.command import EngineOptions
from gateway.engine.errors import EngineError
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.settings import Settings, process_environment
from gateway.tenants import key_digest, new_key

STORE = "handbook"
ENGINE_PORT = 8000
ENGINE_LIMIT_S = 600.0  # it takes half a minute; on a machine that is busy with other work, many times that
MODEL_LIMIT_S = 120.0
CALIBRATION_LIMIT_S = 30.0  # it takes some ten seconds; without it the speed is learned from requests
ANSWER_TOKENS = 120


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="End after the questions; status 0 when all went well.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway, on loopback.")] = 8080,
) -> None:
    """Start everything on this machine, ask three questions over the example handbook, and stay up until Ctrl-C."""
    settings = load_settings()
    questions = load_questions()
    bind("127.0.0.1", port).close()
    try:
        complaints = run(_demo(settings, questions, port, once))
    except EngineError as error:
        raise CliError(str(error)) from error
    if once and complaints:
        raise typer.Exit(FAILURE)


async def _demo(settings: Settings, questions: Sequence[DemoQuestion], port: int, once: bool) -> list[str]:
    """Runs the whole story; returns what went wrong with the questions."""
    console = out()
    steps = Steps(console)
    async with AsyncExitStack() as owned:
        engine_url, embedded = await owned.enter_async_context(_engine(settings, steps, console))
        key = new_key()
        with steps.step("starting the gateway"):
            gateway = await owned.enter_async_context(_gateway(settings, engine_url, port, key))
        client = await owned.enter_async_context(GatewayClient(gateway.url, key))
        with steps.step("waiting for the gateway to know the model"):
            model = await _served_model(client)
        if settings.calibrate:
            with steps.step("measuring how fast the engine is"):
                await _calibrated(client)
        outcomes = await ingest_documents(client, STORE, find_documents([EXAMPLES / STORE]), console, replace=True)
        report(outcomes, STORE)
        store = await client.require_store(STORE)
        complaints = await _ask_all(client, console, model, store.id, questions)
        for line in complaints:
            console.print(f"✗ {line}", markup=False, soft_wrap=True)
        if not once:
            await _stay_up(console, gateway, embedded)
    return complaints


@asynccontextmanager
async def _engine(
    settings: Settings, steps: Steps, console: Console
) -> AsyncIterator[tuple[str, EmbeddedEngine | None]]:
    """The engine that the settings name, else the embedded one."""
    if "engine_url" in settings.model_fields_set:
        console.print("  using the engine that HEADSTART_ENGINE_URL names")
        yield settings.engine_url, None
        return
    options = EngineOptions(port=_free_port(ENGINE_PORT))
    environment = process_environment()
    async with EmbeddedEngine(
        settings.cache_dir, options, environment, steps, start_timeout_s=ENGINE_LIMIT_S
    ) as embedded:
        yield embedded.url, embedded


def _free_port(wanted: int) -> int:
    """`wanted` when it is free, else any free one."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CliError("No port is free for the embedded engine.")


def _gateway(settings: Settings, engine_url: str, port: int, key: str) -> GatewayProcess:
    """A gateway with the demo's own data folder; where it has API keys, `key` is one more of them."""
    environment = process_environment()
    if settings.api_keys or settings.api_keys_file:
        environment["HEADSTART_API_KEYS"] = ",".join(filter(None, (settings.api_keys, f"demo:{key_digest(key)}")))
    arguments = ["--engine-url", engine_url, "--data-dir", str(settings.cache_dir / "demo")]
    return GatewayProcess(port, arguments, environment, settings.cache_dir / "logs" / f"gateway-{port}.log")


async def _served_model(client: GatewayClient) -> str:
    """The engine's model, as soon as the gateway knows it."""
    deadline = asyncio.get_running_loop().time() + MODEL_LIMIT_S
    while asyncio.get_running_loop().time() < deadline:
        models = await client.models()
        if models and bool(_reachable(await client.ready())):
            return models[0]
        await asyncio.sleep(0.5)
    raise CliError(f"The engine did not answer within {MODEL_LIMIT_S:g} s. Is HEADSTART_ENGINE_URL right?")


async def _calibrated(client: GatewayClient) -> None:
    """Returns when the engine's speed is known, or could not be measured in time.

    Ingesting takes the cores that an engine on this machine computes with: measured beside it, it seems several times
    slower than it is.
    """
    deadline = asyncio.get_running_loop().time() + CALIBRATION_LIMIT_S
    while asyncio.get_running_loop().time() < deadline:
        engine = (await client.ready()).get("engine")
        if isinstance(engine, dict):
            lacks = [missing.get("feature") for missing in engine.get("missing") or []]
            if engine.get("speed") is not None or "calibration" in lacks:
                return
        await asyncio.sleep(0.5)


def _reachable(ready: Mapping[str, Any]) -> object:
    engine = ready.get("engine")
    return engine.get("reachable") if isinstance(engine, dict) else None


async def _ask_all(
    client: GatewayClient, console: Console, model: str, store_id: str, questions: Sequence[DemoQuestion]
) -> list[str]:
    """Asks in one conversation, as a person would: the second question goes on from the first."""
    extras = {"conversation": f"demo-{secrets.token_hex(6)}"}
    options = {"max_tokens": ANSWER_TOKENS, "temperature": 0}
    complaints = []
    for number, question in enumerate(questions, 1):
        console.print(f"\n[bold]Question {number}:[/] {escape(question.text)}", soft_wrap=True)
        try:
            answer = await ask_once(
                client, model, question.text, [store_id], write_piece, extras=extras, options=options
            )
        except CliError as error:
            complaints.append(f"question {number}: {error.message}")
            continue
        console.print()
        citations = citation_table(answer)
        if citations is not None:
            console.print(citations)
        print_plain_timings(console, answer.timings)
        wrong = complaint(question, answer)
        if wrong:
            complaints.append(f"question {number}: {wrong}")
    return complaints


async def _stay_up(console: Console, gateway: GatewayProcess, embedded: EmbeddedEngine | None) -> None:
    """Returns at Ctrl-C. Raises CliError when the gateway or the engine ends by itself."""
    console.print(f"\nHeadstart is up on {gateway.url}; Ctrl-C stops it and all that it started.", soft_wrap=True)
    watched = [gateway.wait()] if embedded is None else [gateway.wait(), embedded.wait()]
    try:
        ended = await until_stopped(*watched)
    except Stopped:
        console.print("Stopping.")
        return
    name, tail = (
        ("gateway", gateway.log_tail()) if ended == 0 or embedded is None else ("engine", embedded.log_tail())
    )
    raise CliError(f"The {name} ended by itself. Its last lines:\n{tail}")
