"""`headstart engine`: the embedded engine in the foreground."""

from typing import Annotated

import typer

from gateway.cli.terminal import FAILURE, CliError, Stopped, load_settings, out, run, until_stopped
from gateway.engine.command import EngineOptions
from gateway.engine.errors import EngineError
from gateway.engine.prepare import prepare_model
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.settings import Settings, process_environment


def engine(
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Unpack the model and end.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the engine, on loopback.")] = 8000,
    kv_gib: Annotated[int, typer.Option(min=1, max=64, help="Memory for the KV cache, in GiB.")] = 1,
    block_size: Annotated[int, typer.Option(min=16, max=128, help="Block of the prefix cache, in tokens.")] = 32,
) -> None:
    """Prepare and run a real vLLM with a small model on this machine's CPU, until Ctrl-C."""
    settings = load_settings()
    try:
        if prepare_only:
            folder = prepare_model(settings.cache_dir, process_environment(), Steps(out()))
            out().print(f"The model is in {folder}", markup=False, soft_wrap=True)
        else:
            run(_run_engine(settings, EngineOptions(port=port, kv_cache_gib=kv_gib, block_size=block_size)))
    except EngineError as error:
        raise CliError(str(error), FAILURE) from error


async def _run_engine(settings: Settings, options: EngineOptions) -> None:
    console = out()
    async with EmbeddedEngine(settings.cache_dir, options, process_environment(), Steps(console)) as embedded:
        console.print(f"The engine serves {embedded.model_name} on {embedded.url}; Ctrl-C stops it.", soft_wrap=True)
        try:
            await until_stopped(embedded.wait())
        except Stopped:
            console.print("Stopping the engine.")
            return
        raise CliError(f"The engine ended by itself. Last lines of {embedded.log_path}:\n{embedded.log_tail()}")
