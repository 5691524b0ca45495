"""Vector stores, their files and searches on the wire."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gateway.routes.wire_lists import Listed, ListPage, list_page
from gateway.wire import FilterModel
from retrieval.records import ChunkingStrategy, FileCounts, FileStatus, Page, StoreFile, VectorStore
from retrieval.types import Candidate

Id = Annotated[str, Field(min_length=1, max_length=256)]
MetaKey = Annotated[str, Field(min_length=1, max_length=64)]
Metadata = Annotated[dict[MetaKey, Annotated[str, Field(max_length=512)]], Field(max_length=16)]
QueryText = Annotated[str, Field(min_length=1, max_length=32_768, pattern=r"\S")]
BATCH_FILES = 2000


def _bounded(value: str | bool | int | float) -> str | bool | int | float:
    if isinstance(value, str) and len(value) > 512:
        raise ValueError("a text has at most 512 characters")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has at most 64 bits")
    return value


AttributeModel = Annotated[str | bool | int | float, AfterValidator(_bounded)]
AttributesModel = Annotated[dict[MetaKey, AttributeModel], Field(max_length=16)]


class WireRequest(BaseModel):
    """Unknown fields are refused by name, so that no wish of a client is dropped in silence."""

    model_config = ConfigDict(extra="forbid")


class StaticSizes(WireRequest):
    max_chunk_size_tokens: int = Field(ge=32, le=4096)
    chunk_overlap_tokens: int = Field(ge=0)

    @model_validator(mode="after")
    def overlap_is_at_most_half(self) -> "StaticSizes":
        if 2 * self.chunk_overlap_tokens > self.max_chunk_size_tokens:
            raise ValueError("chunk_overlap_tokens must not exceed half of max_chunk_size_tokens")
        return self


class Strategy(WireRequest):
    type: Literal["auto", "static"]
    static: StaticSizes | None = None

    @model_validator(mode="after")
    def sizes_belong_to_static(self) -> "Strategy":
        if (self.type == "static") != (self.static is not None):
            raise ValueError("type 'static' takes the sizes in 'static', type 'auto' takes none")
        return self


class ExpiresAfter(WireRequest):
    anchor: Literal["last_active_at"] = "last_active_at"
    days: int = Field(ge=1, le=365)


class CreateStore(WireRequest):
    name: str | None = Field(None, max_length=256)
    metadata: Metadata | None = None
    file_ids: list[Id] = Field([], max_length=BATCH_FILES)
    expires_after: ExpiresAfter | None = None
    chunking_strategy: Strategy | None = None


class UpdateStore(WireRequest):
    """A field that is absent stays as it is; `expires_after: null` means never."""

    name: str | None = Field(None, max_length=256)
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | None = None


class AttachFile(WireRequest):
    file_id: Id
    attributes: AttributesModel | None = None
    chunking_strategy: Strategy | None = None


class UpdateAttributes(WireRequest):
    attributes: AttributesModel | None


class CreateBatch(WireRequest):
    """Either `file_ids`, with attributes and strategy for all, or `files`, each with its own."""

    file_ids: list[Id] | None = Field(None, min_length=1, max_length=BATCH_FILES)
    files: list[AttachFile] | None = Field(None, min_length=1, max_length=BATCH_FILES)
    attributes: AttributesModel | None = None
    chunking_strategy: Strategy | None = None

    @model_validator(mode="after")
    def one_list_is_given(self) -> "CreateBatch":
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("give either file_ids or files")
        return self

    def attachments(self) -> list[AttachFile]:
        if self.files is not None:
            return self.files
        return [
            AttachFile(file_id=file_id, attributes=self.attributes, chunking_strategy=self.chunking_strategy)
            for file_id in self.file_ids or ()
        ]


class RankingOptions(WireRequest):
    """There is one ranker; `score_threshold` drops results below it, 0 to 1."""

    ranker: Literal["none", "auto", "default-2024-11-15"] = "auto"
    score_threshold: float = Field(0.0, ge=0, le=1)


def _listed(query: object) -> object:
    return [query] if isinstance(query, str) else query


class SearchRequest(WireRequest):
    """`query` is one text or a list of them. `rewrite_query` changes nothing: a query is searched as it stands."""

    query: Annotated[list[QueryText], BeforeValidator(_listed), Field(min_length=1, max_length=16)]
    max_num_results: int = Field(10, ge=1, le=50)
    filters: FilterModel | None = None
    ranking_options: RankingOptions = RankingOptions()
    rewrite_query: bool = False


class Counts(BaseModel):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class VectorStoreObject(Listed):
    object: Literal["vector_store"] = "vector_store"
    created_at: int
    name: str
    usage_bytes: int
    file_counts: Counts
    status: str
    expires_after: ExpiresAfter | None
    expires_at: int | None
    last_active_at: int
    metadata: dict[str, str]


class LastError(BaseModel):
    code: str
    message: str


class StoreFileObject(Listed):
    object: Literal["vector_store.file"] = "vector_store.file"
    created_at: int
    usage_bytes: int
    vector_store_id: str
    status: FileStatus
    last_error: LastError | None
    attributes: dict[str, str | bool | int | float]
    chunking_strategy: Strategy
    filename: str
    """Not OpenAI's: it spares a client one request per file."""


class BatchObject(BaseModel):
    id: str
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"
    created_at: int
    vector_store_id: str
    status: FileStatus
    file_counts: Counts


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str


class SearchResult(BaseModel):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | int | float]
    content: list[TextContent]


class SearchPage(BaseModel):
    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool = False
    next_page: None = None


def store_object(store: VectorStore, now_s: float) -> VectorStoreObject:
    days = store.expires_after_days
    return VectorStoreObject(
        id=store.id,
        created_at=store.created_at,
        name=store.name,
        usage_bytes=store.usage_bytes,
        file_counts=counts_object(store.file_counts),
        status=store.status(now_s),
        expires_after=None if days is None else ExpiresAfter(days=days),
        expires_at=store.expires_at,
        last_active_at=store.last_active_at,
        metadata=dict(store.metadata),
    )


def counts_object(counts: FileCounts) -> Counts:
    return Counts(
        in_progress=counts.in_progress,
        completed=counts.completed,
        failed=counts.failed,
        cancelled=counts.cancelled,
        total=counts.total,
    )


def store_page(page: Page[VectorStore], now_s: float) -> ListPage[VectorStoreObject]:
    return list_page([store_object(store, now_s) for store in page.items], page.has_more)


def store_file_object(file: StoreFile) -> StoreFileObject:
    # Constructed, not validated: the operator's default sizes need not lie within a client's bounds.
    sizes = StaticSizes.model_construct(
        max_chunk_size_tokens=file.strategy.max_tokens, chunk_overlap_tokens=file.strategy.overlap_tokens
    )
    error = file.last_error
    return StoreFileObject(
        id=file.file_id,
        created_at=file.created_at,
        usage_bytes=file.usage_bytes,
        vector_store_id=file.store_id,
        status=file.status,
        last_error=None if error is None else LastError(code=error.code, message=error.message),
        attributes=dict(file.attributes),
        chunking_strategy=Strategy.model_construct(type="static", static=sizes),
        filename=file.filename,
    )


def store_file_page(page: Page[StoreFile]) -> ListPage[StoreFileObject]:
    return list_page([store_file_object(file) for file in page.items], page.has_more)


def search_page(queries: Sequence[str], candidates: Sequence[Candidate]) -> SearchPage:
    return SearchPage(
        search_query=list(queries),
        data=[
            SearchResult(
                file_id=candidate.chunk.file_id,
                filename=candidate.chunk.filename,
                score=candidate.relevance,
                attributes=dict(candidate.chunk.attributes),
                content=[TextContent(text=candidate.chunk.text)],
            )
            for candidate in candidates
        ],
    )


def chosen_strategy(wished: Strategy | None, default: ChunkingStrategy) -> ChunkingStrategy:
    if wished is None or wished.static is None:
        return default
    return ChunkingStrategy(wished.static.max_chunk_size_tokens, wished.static.chunk_overlap_tokens)
