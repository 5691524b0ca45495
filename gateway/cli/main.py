"""The command `headstart`: joins the commands and turns their errors into one line and an exit status."""

import importlib.metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gateway.cli.ask import ask
from gateway.cli.calibrate import calibrate
from gateway.cli.demo import demo
from gateway.cli.doctor import doctor
from gateway.cli.embedded import engine
from gateway.cli.ingest import ingest
from gateway.cli.keys import key
from gateway.cli.lint import lint
from gateway.cli.listing import calls, stores_app
from gateway.cli.reindex import reindex
from gateway.cli.replicas import replicas
from gateway.cli.serve import serve
from gateway.cli.size import size
from gateway.cli.terminal import CliError, err
from gateway.cli.tune import tune

INTERRUPTED = 130


class Commands(TyperGroup):
    """Tells a command's CliError in one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            err().print(f"headstart: {error.message}", markup=False, soft_wrap=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="headstart",
    cls=Commands,
    help="A prefix-caching RAG gateway in front of vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, engine, ingest, ask, calls, replicas, key, reindex, doctor, calibrate, demo, size, tune, lint):
    app.command()(command)
app.add_typer(stores_app, name="stores")


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headstart {importlib.metadata.version('headstart')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A prefix-caching RAG gateway in front of vLLM."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
