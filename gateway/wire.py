"""The chat request as it comes over the wire; bad input becomes a 400 that names the field and the cure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import ApiError, ErrorKind
from retrieval.types import Filter

ENGINE_CONTROLS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template",
        "continue_final_message",
        "data_parallel_rank",
        "documents",
        "ec_transfer_params",
        "kv_transfer_params",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "priority",
        "prompt_embeds",
        "prompt_token_ids",
        "request_id",
        "return_prompt_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "vllm_xargs",
    }
)
"""Fields that steer the engine past the gateway's accounting or the tenant's bounds."""

_MAX_FILTER_DEPTH = 8


class ComparisonFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str = Field(min_length=1, max_length=64)
    value: str | bool | int | float | list[str | bool | int | float]

    def to_filter(self, depth: int = 0) -> Filter:
        listed = isinstance(self.value, list)
        if listed != (self.type in ("in", "nin")):
            raise invalid(f"Filter '{self.type}' takes {'a list' if not listed else 'one value'}.", "filters")
        return Filter(self.type, self.key, tuple(self.value) if isinstance(self.value, list) else self.value)


class CompoundFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["and", "or"]
    filters: list["ComparisonFilter | CompoundFilter"] = Field(min_length=1, max_length=32)

    def to_filter(self, depth: int = 0) -> Filter:
        if depth >= _MAX_FILTER_DEPTH:
            raise invalid(f"Filters nest at most {_MAX_FILTER_DEPTH} deep.", "filters")
        return Filter(self.type, filters=tuple(inner.to_filter(depth + 1) for inner in self.filters))


FilterModel = ComparisonFilter | CompoundFilter


class Extension(BaseModel):
    """The `headstart` object of a request."""

    model_config = ConfigDict(extra="forbid")

    vector_store_ids: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field([], max_length=16)
    top_k: int | None = Field(None, ge=1, le=50)
    filters: FilterModel | None = None
    conversation: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool = False


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The text of the content; parts that are not text are left out."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")

    @property
    def plain(self) -> bool:
        """Whether role and text are the whole message."""
        if self.role in ("tool", "function") or self.content is None:
            return False
        if self.model_extra and any(value is not None for key, value in self.model_extra.items() if key != "name"):
            return False
        return isinstance(self.content, str) or all(part.get("type") == "text" for part in self.content)


class ChatRequest(BaseModel):
    """Fields that the gateway reads; all others go to the engine as they came, in `body`."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    messages: list[ChatMessage] = Field(min_length=1, max_length=20_000)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=128)
    user: str | None = Field(None, max_length=512)
    tools: list[dict[str, Any]] | None = None
    headstart: Extension | None = None

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def parse_chat(raw: bytes) -> tuple[ChatRequest, dict[str, Any]]:
    """The request and its body as sent. Raises ApiError (400) naming the first field that is wrong."""
    body = parse_object(raw)
    refused = ENGINE_CONTROLS.intersection(body)
    if refused:
        name = min(refused)
        raise invalid(f"'{name}' is set by the gateway and not taken from requests. Remove it.", name)
    try:
        return ChatRequest.model_validate(body), body
    except ValidationError as error:
        raise from_validation(error) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            ErrorKind.INVALID, f"The request body is not valid JSON: {error.msg}.", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise ApiError(ErrorKind.INVALID, "The request body must be a JSON object.", code="invalid_json")
    return body


def from_validation(error: ValidationError) -> ApiError:
    """The first complaint, in OpenAI's shape."""
    return from_errors(error.errors(include_url=False, include_context=False, include_input=False))


def from_errors(errors: Sequence[Any]) -> ApiError:
    """The same, from a list of pydantic's error details."""
    first = errors[0]
    path = ".".join(str(part) for part in first["loc"] if part not in _UNION_TAGS)
    return invalid(f"{path or 'body'}: {first['msg']}.", path or None)


_UNION_TAGS = {"ComparisonFilter", "CompoundFilter", "str", "list[dict[str,any]]", "body"}


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(ErrorKind.INVALID, message, param=param, code="invalid_value")
