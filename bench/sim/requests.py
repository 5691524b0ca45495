"""Reading a generation request as the engine does, and refusing it in the engine's words."""

from dataclasses import dataclass
from typing import Any

import orjson
from jinja2 import TemplateError

from bench.sim.config import SimConfig
from bench.sim.tokens import SimTokenizer

ENGINE_CONTROLS = ("kv_transfer_params", "cache_salt", "return_token_ids", "priority")


class BadRequest(Exception):
    """Answered with `status` and an error of `kind` in the engine's shape."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a request asks of the engine. `max_tokens` is already bounded by the context window."""

    prompt_ids: list[int]
    max_tokens: int
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    cache_salt: str

    @property
    def plain(self) -> bool:
        """One choice with nothing but text."""
        return self.n == 1 and not self.return_token_ids and not self.logprobs


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises BadRequest."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"Invalid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadRequest("The body must be a JSON object.")
    return parsed


def read_generation(
    body: dict[str, Any], chat: bool, config: SimConfig, tokenizer: SimTokenizer
) -> GenerationRequest:
    """A chat or plain completion request. Raises BadRequest with the engine's message."""
    if body.get("model") not in (None, config.model):
        message = f"The model `{body['model']}` does not exist."
        raise BadRequest(message, "model", 404, "NotFoundError")
    minimal = config.surface == "minimal"
    if minimal and config.reject_unknown_fields:
        for name in ENGINE_CONTROLS:
            if name in body:
                raise BadRequest(f"Unrecognized request argument supplied: {name}", name)
    prompt_ids = _prompt_ids(body, chat, config, tokenizer)
    if not prompt_ids:
        raise BadRequest("The prompt is empty.", "prompt")
    options = body.get("stream_options") or {}
    if options and not body.get("stream"):
        raise BadRequest("Stream options can only be defined when `stream=True`.", "stream_options")
    return GenerationRequest(
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(body, chat, config, len(prompt_ids)),
        n=int(body.get("n") or 1),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")) and not minimal,
        logprobs=bool(body.get("logprobs")),
        cache_salt="" if minimal else _cache_salt(body),
    )


def _prompt_ids(body: dict[str, Any], chat: bool, config: SimConfig, tokenizer: SimTokenizer) -> list[int]:
    if not chat:
        prompt = body.get("prompt", "")
        return [int(i) for i in prompt] if isinstance(prompt, list) else tokenizer.encode(str(prompt))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a non-empty list is required.", "messages")
    if config.surface == "vllm":
        transfer = body.get("kv_transfer_params") or {}
        if "prompt_token_ids" in transfer:
            return [int(i) for i in transfer["prompt_token_ids"]]
    try:
        return tokenizer.render(messages, body)
    except (TemplateError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{error}", "messages") from error


def _max_tokens(body: dict[str, Any], chat: bool, config: SimConfig, prompt_tokens: int) -> int:
    window = config.max_model_len
    asked = body.get("max_completion_tokens") if chat else None
    asked = asked if asked is not None else body.get("max_tokens")
    if asked is None and not chat:
        asked = 16
    if asked is not None and asked < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    room = window - prompt_tokens
    if room < 1:
        raise BadRequest(
            f"This model's maximum context length is {window} tokens. However, your prompt contains {prompt_tokens} "
            f"input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt.",
            "input_tokens",
        )
    if asked is not None and asked > window:
        raise BadRequest(
            f"max_tokens={asked} cannot be greater than max_model_len={window}. Please request fewer output tokens.",
            "max_tokens",
        )
    if asked is not None and asked > room and config.context_overflow == "reject":
        raise BadRequest(
            f"This model's maximum context length is {window} tokens. However, you requested {prompt_tokens + asked} "
            f"tokens ({prompt_tokens} in the messages, {asked} in the completion). Please reduce the length of the "
            f"messages or completion.",
            "max_tokens",
        )
    return room if asked is None else min(int(asked), room)


def _cache_salt(body: dict[str, Any]) -> str:
    salt = body.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt or len(salt) > 128 or any(c in salt for c in "@/\\\0"):
        raise BadRequest("cache_salt must be 1 to 128 characters without @, /, \\ or NUL.", "cache_salt")
    return salt
