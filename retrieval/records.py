"""What the database hands out: files, vector stores, files in stores, and rows of chunks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.types import Attributes, RetrievalError

T = TypeVar("T")

SECONDS_PER_DAY = 86_400


class FileStatus(StrEnum):
    """OpenAI's names for where a file of a vector store stands."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An uploaded file. `size_bytes` and `sha256` are of its content; `created_at` is in Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    sha256: str
    media_type: str


@dataclass(frozen=True, slots=True)
class FileCounts:
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        return self.in_progress + self.completed + self.failed + self.cancelled


@dataclass(frozen=True, slots=True)
class VectorStore:
    """A named set of files. Times are Unix seconds. `generation` grows with every change of its chunks."""

    id: str
    tenant: str
    name: str
    metadata: Mapping[str, str]
    created_at: int
    last_active_at: int
    expires_after_days: int | None
    generation: int
    file_counts: FileCounts
    usage_bytes: int

    @property
    def expires_at(self) -> int | None:
        """Unix seconds at which the store expires unless it is used, None for never."""
        if self.expires_after_days is None:
            return None
        return self.last_active_at + self.expires_after_days * SECONDS_PER_DAY

    def status(self, now_s: float) -> str:
        """OpenAI's `status`: expired, in_progress or completed."""
        if self.expires_at is not None and now_s >= self.expires_at:
            return "expired"
        return "in_progress" if self.file_counts.in_progress else "completed"


@dataclass(frozen=True, slots=True)
class ChunkingStrategy:
    """`max_tokens` bounds a rendered chunk, `overlap_tokens` is what neighbours share."""

    max_tokens: int = 256
    overlap_tokens: int = 32


@dataclass(frozen=True, slots=True)
class FileError:
    """Why a file failed. `code` is one of OpenAI's: server_error, unsupported_file, invalid_file."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file in a vector store. `revision` changes whenever its chunks have to be made anew."""

    store_id: str
    file_id: str
    tenant: str
    filename: str
    status: FileStatus
    last_error: FileError | None
    attributes: Attributes
    created_at: int
    usage_bytes: int
    strategy: ChunkingStrategy
    revision: int


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to be stored: `prompt_text` and `token_ids` (int32 [tokens]) are its rendering.

    `embedding` is float32 of the database's dimension. Arrays, because a large file waits here as a whole.
    """

    ordinal: int
    title: str
    text: str
    label: str
    prompt_text: str
    token_ids: NDArray[np.int32]
    renderer_fingerprint: str
    text_sha256: bytes
    embedding: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ChunkText:
    row_id: int
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class FileRows:
    """The live chunks of one completed file; `row_ids` is int64, ascending."""

    file_id: str
    filename: str
    attributes: Attributes
    row_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoreChanges:
    """One consistent view for an index that holds rows up to `after_row_id`.

    `live_row_ids` (int64, ascending) are all live rows: what the index holds beyond them is deleted.
    `row_ids`, `embeddings` (float32, [n, dimension]) and `texts` are the new rows, in the same order.
    """

    generation: int
    live_row_ids: NDArray[np.int64]
    row_ids: NDArray[np.int64]
    embeddings: NDArray[np.float32]
    texts: tuple[ChunkText, ...]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """OpenAI's paging: `after` and `before` are ids that stand in the list; `descending` is newest first."""

    limit: int = 20
    descending: bool = True
    after: str | None = None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: tuple[T, ...] = field(default=())
    has_more: bool = False


class EmbeddingModelChanged(RetrievalError):
    """The stored embeddings were made by another model than the one that is configured."""

    def __init__(self, stored: str, stored_dimension: int, wanted: str, wanted_dimension: int) -> None:
        super().__init__(
            f"The data folder holds embeddings of '{stored}' ({stored_dimension} dimensions), but the configured "
            f"embedding model is '{wanted}' ({wanted_dimension} dimensions); the two cannot be compared. "
            f"Set HEADSTART_EMBEDDING_MODEL to '{stored}' again, or choose an empty HEADSTART_DATA_DIR, or run "
            f"`headstart reindex` to embed every stored file with the new model."
        )
        self.stored = stored
        self.stored_dimension = stored_dimension
        self.wanted = wanted
        self.wanted_dimension = wanted_dimension
