"""Which files a folder offers for ingestion, and what identifies their content."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.cli.terminal import USAGE, CliError

EXTENSIONS = frozenset(
    {".txt", ".text", ".log", ".rst", ".md", ".markdown", ".html", ".htm", ".xhtml", ".pdf", ".docx"}
    | {".csv", ".tsv", ".json", ".jsonl", ".ndjson"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """A file to ingest. `name` is its path below the folder that was named, with that folder's own name in front."""

    path: Path
    name: str


def find_documents(paths: Iterable[Path]) -> list[Document]:
    """Named files as they are, folders searched for known extensions; sorted, each file once.

    Hidden files and folders are left out of a search, and links to folders are not followed. Raises CliError (2)
    for a path that does not exist and when there is nothing to ingest.
    """
    found: dict[Path, Document] = {}
    for path in paths:
        if not path.exists():
            raise CliError(f"No file or folder '{path}'.", USAGE)
        for document in _below(path) if path.is_dir() else [Document(path, path.name)]:
            found.setdefault(document.path.resolve(), document)
    if not found:
        raise CliError(f"No document with a known extension ({', '.join(sorted(EXTENSIONS))}) there.", USAGE)
    return sorted(found.values(), key=lambda document: document.name)


def _below(folder: Path) -> Iterator[Document]:
    base = folder.resolve()
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent) / name
            if not name.startswith(".") and path.suffix.lower() in EXTENSIONS and path.is_file():
                below = path.relative_to(folder)
                yield Document(path, str(Path(base.name) / below) if base.name else str(below))


def content_digest(path: Path) -> str:
    """SHA-256 of the content, in hex; reads in pieces. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
