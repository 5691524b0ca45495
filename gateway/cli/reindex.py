"""`headstart reindex`: takes another embedding model; the files are embedded again at the next start."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.terminal import CliError, load_settings
from gateway.settings import Settings
from retrieval.types import RetrievalError


def reindex(
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the database and the files.")] = None,
) -> None:
    """Drop all embeddings and take the configured embedding model. Stop the gateway first."""
    settings = load_settings(data_dir=data_dir)
    if not (settings.data_dir / "headstart.db").is_file():
        raise CliError(f"There is no database in {settings.data_dir}.")
    try:
        files, model = asyncio.run(_forget(settings))
    except RetrievalError as error:
        raise CliError(str(error)) from error
    typer.echo(f"{files} files will be embedded with '{model}' when 'headstart serve' starts.")


async def _forget(settings: Settings) -> tuple[int, str]:
    from retrieval.database import Database
    from retrieval.embedding import SentenceEmbedder
    from retrieval.folder import owned_folder

    embedder = SentenceEmbedder(settings.embedding_model)
    try:
        await embedder.start()
        with owned_folder(settings.data_dir):
            database = await asyncio.to_thread(Database, settings.data_dir)
            try:
                files = await asyncio.to_thread(database.forget_embeddings, embedder.model_id, embedder.dimension)
            finally:
                await asyncio.to_thread(database.close)
    finally:
        await embedder.aclose()
    return files, embedder.model_id
