"""OpenAI's lists on the wire: cursors in, pages out."""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from retrieval.records import FileStatus, PageRequest

Cursor = Annotated[str, Field(min_length=1, max_length=256)]


class ListQuery(BaseModel):
    """Query parameters of a list."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: Cursor | None = None
    before: Cursor | None = None

    def page(self) -> PageRequest:
        return PageRequest(self.limit, self.order == "desc", self.after, self.before)


class FileListQuery(ListQuery):
    limit: int = Field(10_000, ge=1, le=10_000)
    purpose: str | None = Field(None, min_length=1, max_length=64)


class StoreFileListQuery(ListQuery):
    filter: FileStatus | None = None


class CallsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(50, ge=1, le=1000)


class Listed(BaseModel):
    id: str


Item = TypeVar("Item", bound=Listed)


class ListPage(BaseModel, Generic[Item]):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def list_page(data: list[Item], has_more: bool) -> ListPage[Item]:
    ends = (data[0].id, data[-1].id) if data else (None, None)
    return ListPage(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


class Deleted(BaseModel):
    id: str
    object: Literal["file", "vector_store.deleted", "vector_store.file.deleted"]
    deleted: bool = True
