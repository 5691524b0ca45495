"""The chat request as it comes over the wire; bad input becomes a 400 that names the field and the cure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

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
        "echo",
        "kv_transfer_params",
        "media_io_kwargs",
        "mm_payload",
        "mm_processor_kwargs",
        "priority",
        "prompt_embeds",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "return_mm_kwargs",
        "return_prompt_text",
        "return_prompt_token_ids",
        "return_token_ids",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "routed_experts_prompt_start",
        "session_id",
        "truncate_prompt_tokens",
        "truncation_side",
        "vllm_xargs",
    }
)
"""Fields that steer the engine past the gateway's accounting or the tenant's bounds."""

TEMPLATE_FIELDS = ("chat_template_kwargs", "reasoning_effort")
"""Fields that change what the engine's chat template writes, which only the engine's own rendering honours."""

_NESTED_OBJECTS = ("chat_template_kwargs", "extra_body", "headstart", "stream_options")
"""Objects in which a control may hide: clients send the wrapper itself, or engines merge it into the request."""

_TEMPLATE_CONTROLS = frozenset({"tokenize", "tools", "messages", "conversation"})
"""Arguments of the template call itself, beside ENGINE_CONTROLS."""

_MAX_FILTER_DEPTH = 8
_MAX_TOKENS = 2**31 - 1
_SHOWN_CHARS = 300
MOST_BUDGET_MS = 3_600_000.0

BudgetMs = Annotated[float, Field(gt=0, le=MOST_BUDGET_MS, strict=True, allow_inf_nan=False)]

Comparison = Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
Compound = Literal["and", "or"]


class ComparisonFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Comparison
    key: str = Field(min_length=1, max_length=64)
    value: str | bool | int | float | list[str | bool | int | float]

    def to_filter(self, depth: int = 0) -> Filter:
        listed = isinstance(self.value, list)
        if listed != (self.type in ("in", "nin")):
            raise invalid(f"Filter '{self.type}' takes {'a list' if not listed else 'one value'}.", "filters")
        return Filter(self.type, self.key, tuple(self.value) if isinstance(self.value, list) else self.value)


class CompoundFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Compound
    filters: list["FilterModel"] = Field(min_length=1, max_length=32)

    def to_filter(self, depth: int = 0) -> Filter:
        if depth >= _MAX_FILTER_DEPTH:
            raise invalid(f"Filters nest at most {_MAX_FILTER_DEPTH} deep.", "filters")
        return Filter(self.type, filters=tuple(inner.to_filter(depth + 1) for inner in self.filters))


FilterModel = Annotated[ComparisonFilter | CompoundFilter, Field(discriminator="type")]
CompoundFilter.model_rebuild()


class Extension(BaseModel):
    """The `headstart` object of a request."""

    model_config = ConfigDict(extra="forbid")

    vector_store_ids: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field([], max_length=16)
    top_k: int | None = Field(None, ge=1, le=50, strict=True)
    filters: FilterModel | None = None
    conversation: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    ttft_budget_ms: BudgetMs | None = None
    total_budget_ms: BudgetMs | None = None
    policy: Literal["best_effort", "strict"] | None = None
    chunk_order: Literal["reuse", "relevance_last", "relevance_first", "label"] | None = None
    pin_last: int | None = Field(None, ge=0, le=2, strict=True)
    evidence_lines: int | None = Field(None, ge=0, le=10, strict=True)

    @property
    def budgeted(self) -> bool:
        return self.ttft_budget_ms is not None or self.total_budget_ms is not None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = Field(False, strict=True)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The text of the content; parts that are not text are left out."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part["text"] for part in self.content if is_text(part))

    @property
    def plain(self) -> bool:
        """Whether role and text are the whole message."""
        if self.role in ("tool", "function") or self.content is None:
            return False
        if self.model_extra and any(value is not None for key, value in self.model_extra.items() if key != "name"):
            return False
        return isinstance(self.content, str) or all(map(is_text, self.content))


def is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


class ChatRequest(BaseModel):
    """Fields that the gateway reads; all others go to the engine as they came, in `body`."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    messages: list[ChatMessage] = Field(min_length=1, max_length=20_000)
    stream: bool | None = Field(False, strict=True)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS, strict=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS, strict=True)
    n: int | None = Field(None, ge=1, le=128, strict=True)
    user: str | None = Field(None, max_length=512)
    tools: list[dict[str, Any]] | None = None
    headstart: Extension | None = None

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


def parse_chat(raw: bytes) -> tuple[ChatRequest, dict[str, Any]]:
    """The request and its body as sent. Raises ApiError (400) naming the first field that is wrong."""
    body = parse_object(raw)
    _refuse_controls(body)
    try:
        return ChatRequest.model_validate(body), body
    except ValidationError as error:
        raise from_validation(error) from None


def _refuse_controls(body: Mapping[str, Any]) -> None:
    refused = sorted(ENGINE_CONTROLS.intersection(body))
    for name in _NESTED_OBJECTS:
        nested = body.get(name)
        if isinstance(nested, dict):
            controls = ENGINE_CONTROLS | _TEMPLATE_CONTROLS if name == "chat_template_kwargs" else ENGINE_CONTROLS
            refused += [f"{name}.{field}" for field in sorted(controls.intersection(nested))]
    if refused:
        raise invalid(f"'{refused[0]}' is set by the gateway and not taken from requests. Remove it.", refused[0])


def to_json(value: Any) -> bytes:
    """JSON bytes of what a client sent. Raises ApiError (400) where it nests deeper than can be written again."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise ApiError(
            ErrorKind.INVALID, "The request body nests too deep: 250 levels are taken.", code="invalid_json"
        ) from None


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
    path = ".".join(str(part) for part in first["loc"] if part not in _UNION_TAGS)[:_SHOWN_CHARS]
    return invalid(f"{path or 'body'}: {first['msg'][:_SHOWN_CHARS]}.", path or None)


_UNION_TAGS = {*get_args(Comparison), *get_args(Compound), "str", "list[dict[str,any]]", "body"}


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(ErrorKind.INVALID, message, param=param, code="invalid_value")
