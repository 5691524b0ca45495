"""The picture of the engine's prefix cache against the engine's own reports."""

import os
import random
import re
from collections.abc import Sequence

import aiohttp

from cache.residency import Residency
from gateway.engine.prepare import MODEL_NAME

REQUESTS = 60
CHUNK_TOKENS = (20, 130)


async def kv_blocks(session: aiohttp.ClientSession) -> tuple[int, int]:
    """(block size, number of blocks) as the engine states them."""
    async with session.get("/metrics") as response:
        (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\}", await response.text(), re.MULTILINE)
    stated = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return int(stated["block_size"]), int(stated["num_gpu_blocks"])


async def complete(session: aiohttp.ClientSession, prompt: Sequence[int], salt: str) -> tuple[int, list[int]]:
    """(cached tokens reported, ids generated)."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 4,
        "temperature": 0,
        "cache_salt": salt,
        "return_token_ids": True,
    }
    async with session.post("/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=60)) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]


async def test_cached_tokens_are_predicted_exactly_for_every_request(engine_url: str) -> None:
    """Chunks in any order, and conversations that go on behind their answers, under two salts of this test's own."""
    draw = random.Random(7)
    chunks = [[draw.randrange(1000, 40_000) for _ in range(draw.randint(*CHUNK_TOKENS))] for _ in range(6)]
    salts = [os.urandom(8).hex() for _ in range(2)]
    past: list[tuple[str, list[int]]] = []
    async with aiohttp.ClientSession(engine_url) as session:
        block_size, num_blocks = await kv_blocks(session)
        residency = Residency(block_size, num_blocks - 1)
        pairs = []
        for _ in range(REQUESTS):
            if past and draw.random() < 0.4:
                salt, prompt = draw.choice(past)
                prompt = prompt[: draw.randint(1, len(prompt))] if draw.random() < 0.3 else list(prompt)
            else:
                salt = draw.choice(salts)
                prompt = [i for chunk in draw.sample(chunks, draw.randint(1, 4)) for i in chunk]
            if draw.random() < 0.5:
                prompt = [*prompt, *(draw.randrange(1000, 40_000) for _ in range(draw.randint(1, 30)))]
            lease = residency.begin(prompt, salt)
            predicted = lease.cached_tokens
            reported, output = await complete(session, prompt, salt)
            residency.generated(lease, output)
            residency.reconcile(lease, reported)
            residency.end(lease)
            pairs.append((predicted, reported))
            past.append((salt, [*prompt, *output]))
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    assert not wrong, f"{len(wrong)} of {REQUESTS} predictions (predicted, reported): {wrong}"
    assert sum(reported for _, reported in pairs) > 2000
