"""The values that flow out of retrieval. Other packages import only this module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class RenderedChunk:
    """A chunk as it stands in a prompt: the same bytes wherever it stands.

    `label` is derived from the content alone. `text` is the whole block that the prompt carries, label,
    heading path and body. `token_ids` are those of `text` by the served model's tokenizer, encoded as
    ordinary text; empty when no local tokenizer is known.
    """

    label: str
    text: str
    token_ids: tuple[int, ...]


class ChunkRenderer(Protocol):
    """Turns a chunk's body into its prompt block; implemented by `prompt_builder`."""

    @property
    def fingerprint(self) -> str:
        """Identifies tokenizer and rendering; stored token ids are valid only under an equal one."""

    def count(self, text: str) -> int:
        """Tokens of `text` by the served model's tokenizer (an upper estimate where it is not known)."""

    def render(self, title: str, text: str) -> RenderedChunk: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored chunk. `row_id` is unique in the database and never reused; it is the id in the indexes.

    `rendered.token_ids` are valid only under the renderer whose fingerprint is `renderer_fingerprint`.
    """

    row_id: int
    store_id: str
    file_id: str
    filename: str
    ordinal: int
    title: str
    text: str
    label: str
    rendered: RenderedChunk
    attributes: Attributes
    renderer_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk with its relevance to one query: 0 (none) to 1 (certain), higher is better.

    `dense_rank` and `lexical_rank` are 1-based positions in the two result lists, None where absent.
    """

    chunk: Chunk
    relevance: float
    dense_rank: int | None = None
    lexical_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """OpenAI's vector-store filter: a comparison (`key`, `value`) or a compound (`filters`).

    `type` is eq, ne, gt, gte, lt, lte, in, nin (comparison) or and, or (compound).
    """

    type: str
    key: str = ""
    value: AttributeValue | tuple[AttributeValue, ...] = ""
    filters: tuple["Filter", ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """One search. `previous_text` is the user turn before, blended into the dense query when present."""

    tenant: str
    store_ids: tuple[str, ...]
    text: str
    previous_text: str | None = None
    top_k: int = 8
    filters: Filter | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ranked, most relevant first. Timings in milliseconds."""

    items: tuple[Candidate, ...]
    embed_ms: float = 0.0
    search_ms: float = 0.0
    embedding_cached: bool = False
    dropped_duplicates: tuple[str, ...] = field(default=())


class RetrievalError(Exception):
    """Base of errors that a caller of retrieval can act on; the message is fit for a client."""


class NotFound(RetrievalError):
    """`kind` is 'vector store', 'file' or 'vector store file'; `name` is what was asked for."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"No {kind} '{name}'.")
        self.kind = kind
        self.name = name


class StoreExpired(RetrievalError):
    """The store has not been used for longer than its `expires_after`."""

    def __init__(self, store_id: str) -> None:
        super().__init__(f"The vector store '{store_id}' has expired. Update its expires_after to use it again.")


class StorageFailed(RetrievalError):
    """The data folder did not take a write: full, read-only, or locked too long. Nothing of it was stored."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The gateway could not store this: {reason}. Nothing was changed.")


class UnusableFile(RetrievalError):
    """A file that cannot be turned into chunks. `code`: unsupported_file | invalid_file | empty_file."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ByteCache(Protocol):
    """Bounded bytes with a time to live; an outage is a miss, never an error (see `cache.store`)."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None: ...
