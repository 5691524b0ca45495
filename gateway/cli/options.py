"""Options that several commands share."""

from typing import Annotated

import typer

Url = Annotated[str, typer.Option("--url", envvar="HEADSTART_URL", help="Address of the gateway.", show_default=True)]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="HEADSTART_API_KEY", help="API key, where the gateway asks for one.", metavar="KEY"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

DEFAULT_URL = "http://127.0.0.1:8080"
