"""`headstart key`: makes an API key for a tenant."""

from typing import Annotated

import typer

from gateway.cli.terminal import USAGE, CliError
from gateway.tenants import KeyFileError, key_digest, load_tenants, new_key


def key(tenant: Annotated[str, typer.Argument(help="Name of the tenant: letters, digits, '_', '.', '-'.")]) -> None:
    """Make an API key. It is shown once; the gateway only ever sees its hash."""
    secret = new_key()
    try:
        load_tenants(f"{tenant}:{key_digest(secret)}", None, b"")
    except KeyFileError as error:
        raise CliError(
            "A tenant's name has 1 to 64 letters, digits, '_', '.' or '-' and begins with a letter or a digit.", USAGE
        ) from error
    typer.echo("The key, for the client; it is not kept anywhere:")
    typer.echo(f"  {secret}")
    typer.echo("The line for the file that HEADSTART_API_KEYS_FILE names:")
    typer.echo(f"{tenant} {key_digest(secret)}")
    typer.echo("The same as an entry of HEADSTART_API_KEYS:")
    typer.echo(f"{tenant}:{key_digest(secret)}")
