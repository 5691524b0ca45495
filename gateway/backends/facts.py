"""What an engine offers, found out with four cheap GETs and at most two requests of one token each."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson

from gateway.backends.engine_metrics import read_cache_config, read_prefix_caching, read_started

PROBE_IDS = tuple(range(100, 197))
"""Ids that every vocabulary has; 97 is a length that no template gives to the probe's one-word message."""

PROBE_TEXT = "Naïve café, 12,345.6 ≈ π·3929; 東京 🙂\n\tdef probe(x): return x  # Hà Nội"
"""Scripts, numbers, white space: two tokenizers that agree on it are taken to be one."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One look at an engine. None means "not known": the engine was not asked, was busy, or would not tell.

    `block_size` is in tokens and `num_blocks` counts KV blocks. `cache_salt` is True only where the engine
    checks salts (a malformed one is refused by name); None where any salt is answered, honoured or not.
    `probe_ids` are the ids of PROBE_TEXT as ordinary text. `started_s` is when the engine's process began, in seconds
    since 1970: another one is another process, with an empty cache. `root` is the folder or name that the model was
    loaded from. `error` says why the engine is not usable, and never holds its address.
    """

    reachable: bool
    model: str | None = None
    models: tuple[str, ...] = ()
    root: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    version: str | None = None
    prompt_tokens_details: bool | None = None
    token_ids_accepted: bool | None = None
    tokenize: bool = False
    cache_salt: bool | None = None
    per_request_metrics: bool | None = None
    error: str | None = None
    probe_ids: tuple[int, ...] | None = None
    started_s: float | None = None
    prefix_caching: bool | None = None

    @property
    def conclusive(self) -> bool:
        """Whether the probe requests were answered; when not, asking again later may tell more."""
        return self.reachable and self.token_ids_accepted is not None

    def same_engine(self, other: "EngineFacts") -> bool:
        """Whether what the cheap questions tell is unchanged; what one of the two does not know is no change."""
        if (self.reachable, self.model, self.models, self.root) != (
            other.reachable,
            other.model,
            other.models,
            other.root,
        ):
            return False
        pairs = (
            (self.max_model_len, other.max_model_len),
            (self.version, other.version),
            (self.block_size, other.block_size),
            (self.num_blocks, other.num_blocks),
            (self.probe_ids, other.probe_ids),
            (self.started_s, other.started_s),
            (self.prefix_caching, other.prefix_caching),
        )
        return all(mine == theirs for mine, theirs in pairs if mine is not None and theirs is not None)

    def gone(self, error: str | None) -> "EngineFacts":
        """The same engine, not reachable now."""
        return replace(self, reachable=False, error=error)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer read whole; `body` is its JSON when it is JSON."""

    status: int
    text: str
    body: Any

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer came; `reason` names the cause without the address."""

    reason: str


async def probe_engine(
    session: aiohttp.ClientSession,
    url: str,
    api_key: str = "",
    *,
    model: str = "",
    chat: bool = True,
    host: str = "",
    timeout_s: float = 5.0,
    chat_timeout_s: float = 30.0,
) -> EngineFacts:
    """Never raises for what an engine does. `url` is without `/v1`; `model` empty takes the engine's first.

    `host` is the Host header where the URL holds an address instead of a name.

    Without `chat` only the GETs are done. `timeout_s` bounds each GET (they run together), `chat_timeout_s` each of
    the two requests: a busy engine answers late, and its facts then stay None.
    """
    caller = EngineCaller(session, url, api_key, host)
    listing, version, metrics = await asyncio.gather(
        caller.get("/v1/models", timeout_s), caller.get("/version", timeout_s), caller.get("/metrics", timeout_s)
    )
    facts = read_models(listing, model)
    if not facts.reachable or facts.model is None:
        return facts
    told = metrics.text if isinstance(metrics, Answer) and metrics.ok else ""
    block_size, num_blocks = read_cache_config(told)
    probe_ids = read_tokens(
        await caller.post(
            "/tokenize", {"model": facts.model, "prompt": PROBE_TEXT, "add_special_tokens": False}, timeout_s
        )
    )
    facts = replace(
        facts,
        version=read_version(version),
        block_size=block_size,
        num_blocks=num_blocks,
        tokenize=probe_ids is not None,
        probe_ids=probe_ids,
        started_s=read_started(told),
        prefix_caching=read_prefix_caching(told),
    )
    return await _probe_chat(caller, facts, chat_timeout_s) if chat else facts


class EngineCaller:
    """Small JSON calls with a timeout each; errors come back as values because a probe reports them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str = "", host: str = "") -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = {"accept-encoding": "identity"}
        if host:
            self._headers["host"] = host
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def get(self, path: str, timeout_s: float) -> Answer | Unanswered:
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Answer | Unanswered:
        return await self._call("POST", path, orjson.dumps(dict(body)), timeout_s)

    async def _call(self, method: str, path: str, data: bytes | None, timeout_s: float) -> Answer | Unanswered:
        headers = self._headers if data is None else {**self._headers, "content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._url + path, data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                raw = await response.read()
                return Answer(response.status, raw.decode("utf-8", "replace"), _json(raw))
        except TimeoutError:
            return Unanswered(f"no answer within {timeout_s:g} s")
        except aiohttp.InvalidURL:
            return Unanswered("the engine's URL is not a URL")
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno or 0
            # The error's own words hold the address; those of its number do not.
            return Unanswered(f"cannot connect ({os.strerror(number) if number > 0 else 'unknown host'})")
        except aiohttp.ClientError as error:
            return Unanswered(f"not an HTTP answer ({type(error).__name__})")


async def _probe_chat(caller: EngineCaller, facts: EngineFacts, timeout_s: float) -> EngineFacts:
    plain = {
        "model": facts.model,
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 1,
        "temperature": 0,
    }
    full = await caller.post(
        "/v1/chat/completions",
        {
            **plain,
            "cache_salt": "0" * 64,
            "return_token_ids": True,
            "kv_transfer_params": {"prompt_token_ids": list(PROBE_IDS)},
        },
        timeout_s,
    )
    if isinstance(full, Unanswered) or full.status in (429, 503):
        return facts
    if full.ok:
        # A malformed salt costs nothing where salts are checked: it is refused before any token is computed.
        bad_salt = await caller.post("/v1/chat/completions", {**plain, "cache_salt": ""}, timeout_s)
        return replace(
            facts,
            token_ids_accepted=took_ids(full.body),
            prompt_tokens_details=has_prompt_details(full.body),
            per_request_metrics=isinstance(_map(full.body).get("metrics"), dict),
            cache_salt=True if _names(bad_salt, "cache_salt") else None,
        )
    bare = await caller.post("/v1/chat/completions", plain, timeout_s)
    if isinstance(bare, Unanswered) or not bare.ok:
        return replace(facts, error=_said(full))
    return replace(
        facts,
        token_ids_accepted=False,
        prompt_tokens_details=has_prompt_details(bare.body),
        per_request_metrics=isinstance(_map(bare.body).get("metrics"), dict),
        cache_salt=False,
    )


def read_models(listing: Answer | Unanswered, wanted: str) -> EngineFacts:
    """Model and window from `/v1/models`; a LoRA adapter or an alias is listed beside its base."""
    if isinstance(listing, Unanswered):
        return EngineFacts(reachable=False, error=listing.reason)
    if listing.status in (401, 403):
        return EngineFacts(reachable=False, error="the engine asks for another API key")
    entries = [_map(entry) for entry in _list(_map(listing.body).get("data"))]
    served = {str(entry["id"]): entry for entry in entries if entry.get("id")}
    if not listing.ok or not served:
        return EngineFacts(reachable=False, error=f"/v1/models answered {listing.status} and lists no model")
    names = tuple(served)
    if wanted and wanted not in served:
        return EngineFacts(
            reachable=True, models=names, error=f"the engine does not serve '{wanted}'; it serves {', '.join(names)}"
        )
    model = wanted or names[0]
    window = served[model].get("max_model_len")
    root = served[model].get("root")
    return EngineFacts(
        reachable=True,
        model=model,
        models=names,
        root=root if isinstance(root, str) else None,
        max_model_len=window if isinstance(window, int) else None,
    )


def read_tokens(answer: Answer | Unanswered) -> tuple[int, ...] | None:
    """Ids from `/tokenize`, None where it is not answered."""
    tokens = _map(answer.body).get("tokens") if isinstance(answer, Answer) and answer.ok else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        return None
    return tuple(tokens)


def read_version(answer: Answer | Unanswered) -> str | None:
    version = _map(answer.body).get("version") if isinstance(answer, Answer) and answer.ok else None
    return str(version) if version else None


def took_ids(body: Any) -> bool:
    """Whether the answer was computed from `PROBE_IDS` instead of the probe's message."""
    returned = _map(body).get("prompt_token_ids")
    if isinstance(returned, list):
        return tuple(returned) == PROBE_IDS
    return _map(_map(body).get("usage")).get("prompt_tokens") == len(PROBE_IDS)


def has_prompt_details(body: Any) -> bool | None:
    usage = _map(body).get("usage")
    if not isinstance(usage, dict):
        return None
    return isinstance(_map(usage.get("prompt_tokens_details")).get("cached_tokens"), int)


def _names(answer: Answer | Unanswered, word: str) -> bool:
    return isinstance(answer, Answer) and 400 <= answer.status < 500 and word in answer.text


def _said(answer: Answer) -> str:
    error = _map(_map(answer.body).get("error"))
    message = error.get("message") or _map(answer.body).get("message") or ""
    return f"chat answered {answer.status}" + (f": {str(message)[:200]}" if message else "")


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
