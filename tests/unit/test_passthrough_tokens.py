"""How many tokens a request that passes through is taken to have before the engine has counted them."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.budgets import Budget
from gateway.context import RequestContext
from gateway.passthrough import Plain, measure, plain_prompt
from gateway.replicas import Replicas
from gateway.settings import Settings
from gateway.wire import parse_chat

LIMITS = EngineLimits(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "Say something of about thirty words, please.")],
        [("system", "You are terse.\n\n"), ("user", "Größe?  1234"), ("assistant", "日本"), ("user", "")],
        [("developer", "x" * 1000), ("user", "a b c")],
    ],
)
async def test_without_a_tokenizer_the_count_is_that_of_the_prompt_as_it_would_be_rendered(
    tmp_path: Path, messages: list[tuple[str, str]]
) -> None:
    sent: dict[str, Any] = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]}
    request, _ = parse_chat(orjson.dumps(sent))
    context = RequestContext("r", "default", "salt", asyncio.get_running_loop().time())
    async with EngineSession(LIMITS) as session:
        replicas = Replicas(Settings(data_dir=tmp_path), session, LIMITS)
        work, room, prompt = measure(replicas, request, context, Plain("m", replicas.serving, Budget()))
        rendered = plain_prompt(request, replicas.serving, "salt")
    assert rendered is not None
    assert rendered.token_ids is None
    assert work.tokens == rendered.tokens
    assert (work.token_ids, room, prompt) == (None, None, None)
