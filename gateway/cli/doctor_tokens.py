"""Doctor's look at tokens: is our tokenizer the engine's, and how long is the prefix that all questions share."""

import asyncio
from typing import Any

import aiohttp

from gateway.backends.facts import Answer, EngineCaller, EngineFacts
from gateway.cli.doctor_checks import PROBE_TEXT, Finding, check_tokenizer
from gateway.settings import Settings

TIMEOUT_S = 10.0


async def tokenizer_finding(session: aiohttp.ClientSession, settings: Settings, facts: EngineFacts) -> Finding:
    from gateway.serving import make_serving  # brings in the tokenizer libraries: only where they are used

    tokenizer = (await asyncio.to_thread(make_serving, settings, facts)).tokenizer
    local = await asyncio.to_thread(tokenizer.encode, PROBE_TEXT) if tokenizer.exact else None
    question = {"prompt": PROBE_TEXT, "add_special_tokens": False}
    engine = await _tokenize(session, settings, facts, question) if facts.tokenize else None
    return check_tokenizer(tokenizer.name, tokenizer.exact, local, engine)


async def stable_prefix_tokens(session: aiohttp.ClientSession, settings: Settings, facts: EngineFacts) -> int | None:
    """Tokens before the first chunk of a first question, which differ for no two questions; None if unknown.

    Two questions that share no character are templated by the engine, and their common front is counted.
    """
    if not facts.tokenize:
        return None
    fronts = []
    for text in ("alpha", "zulu"):
        messages = [{"role": "system", "content": settings.instructions}, {"role": "user", "content": text}]
        ids = await _tokenize(session, settings, facts, {"messages": messages})
        if ids is None:
            return None
        fronts.append(ids)
    pairs = zip(*fronts, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(map(len, fronts)))


async def _tokenize(
    session: aiohttp.ClientSession, settings: Settings, facts: EngineFacts, question: dict[str, Any]
) -> list[int] | None:
    caller = EngineCaller(session, settings.engine_url, settings.engine_api_key)
    answer = await caller.post("/tokenize", {"model": facts.model, **question}, TIMEOUT_S)
    if not isinstance(answer, Answer) or not answer.ok or not isinstance(answer.body, dict):
        return None
    tokens = answer.body.get("tokens")
    return [int(token) for token in tokens] if isinstance(tokens, list) else None
