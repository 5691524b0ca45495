"""`headstart key`: makes an API key for a tenant."""

import re
from typing import Annotated

import typer

from gateway.cli.terminal import USAGE, CliError
from gateway.tenants import key_digest, new_key

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def key(tenant: Annotated[str, typer.Argument(help="Name of the tenant: letters, digits, '_', '.', '-'.")]) -> None:
    """Make an API key. It is shown once; the gateway only ever sees its hash."""
    if not _TENANT.fullmatch(tenant):
        raise CliError("A tenant's name has 1 to 64 letters, digits, '_', '.' or '-' and begins with one.", USAGE)
    secret = new_key()
    typer.echo("The key, for the client; it is not kept anywhere:")
    typer.echo(f"  {secret}")
    typer.echo("The line for the file that HEADSTART_API_KEYS_FILE names:")
    typer.echo(f"{tenant} {key_digest(secret)}")
