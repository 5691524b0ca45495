"""Prompts of 100,000 tokens through the gateway, exactly tokenized. Quiet figures come from `bench.long_prompts`."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson

from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.processes import Server, simulator
from bench.reply import CHAT_PATH
from prompt_builder.tokenizer import load_tokenizer

WORDS = 75_000
TRIES = 4
# Other tests may have the cores: limits are so many times what this machine takes to tokenize such a text just now.
MOST_OF_TOKENIZING = 4.0


def text(seed: int) -> str:
    draw = random.Random(seed)
    common = [" ferry", " harbour", " captain", " at", " nine", " leaves", " the", " ticket", " weather", " 24", ","]
    return "".join(draw.choices(common, k=WORDS + WORDS // 3))


def body(system: str, turns: int = 0) -> bytes:
    history = [
        {"role": role, "content": f"{turn}: {role} says that the ferry leaves at nine."}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": system}, *history, {"role": "user", "content": "When?"}]
    return orjson.dumps({"model": "sim-model", "messages": messages, "stream": True, "max_tokens": 4})


@asynccontextmanager
async def scene(folder: Path, model_dir: Path) -> AsyncIterator[tuple[Server, RunningGateway]]:
    """An engine in a process of its own, and a gateway in this one."""
    sizes = ("--max-model-len", "1000000", "--fixed-ttft-ms", "10", "--decode-tokens-per-s", "0")
    async with (
        simulator(*sizes, "--answer", "text:Aye.") as engine,
        run_gateway(settings_for(folder, engine.url, tokenizer=str(model_dir))) as gateway,
    ):
        yield engine, gateway


def tokenizing_s(model_dir: Path) -> float:
    tokenizer = load_tokenizer(model_dir, cache_bytes=0)
    taken = []
    for seed in range(100, 100 + TRIES):
        long = text(seed)
        began_s = time.perf_counter()
        tokenizer.encode(long)
        taken.append(time.perf_counter() - began_s)
    return min(taken)


async def ttft_s(session: aiohttp.ClientSession, raw: bytes) -> float:
    began_s = time.perf_counter()
    async with session.post(CHAT_PATH, data=raw, headers={"content-type": "application/json"}) as response:
        assert response.status == 200
        await response.content.readany()
        took_s = time.perf_counter() - began_s
        await response.read()
    return took_s


async def added_s(engine: Server, gateway: RunningGateway, bodies: list[bytes]) -> float:
    """The least that the gateway added to one of them: noise only adds."""
    async with aiohttp.ClientSession(engine.url) as direct, gateway.session() as ours:
        await ttft_s(ours, bodies[0])
        straight = [await ttft_s(direct, raw) for raw in bodies[1:]]
        through = [await ttft_s(ours, raw) for raw in bodies[1:]]
    return min(through) - min(straight)


async def test_g4_a_new_text_of_100_000_tokens_costs_about_its_tokenization(tmp_path: Path, model_dir: Path) -> None:
    async with scene(tmp_path, model_dir) as (engine, gateway):
        added = await added_s(engine, gateway, [body(text(seed)) for seed in range(TRIES + 1)])
    assert added < MOST_OF_TOKENIZING * tokenizing_s(model_dir)


async def test_g4_a_long_history_that_is_sent_again_costs_less_than_a_new_one(
    tmp_path: Path, model_dir: Path
) -> None:
    system = text(0)
    async with scene(tmp_path, model_dir) as (engine, gateway):
        added = await added_s(engine, gateway, [body(system, turns) for turns in range(TRIES + 1)])
    assert added < MOST_OF_TOKENIZING / 2 * tokenizing_s(model_dir)


async def test_g4_other_requests_are_answered_while_a_long_prompt_is_prepared(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        scene(tmp_path, model_dir) as (_, gateway),
        gateway.session() as long,
        gateway.session() as short,
    ):
        await ttft_s(long, body(text(0)))
        taken: list[float] = []
        sending = [asyncio.create_task(ttft_s(long, body(text(seed)))) for seed in range(1, 4)]
        while not all(task.done() for task in sending):
            began_s = time.perf_counter()
            async with short.get("/healthz") as response:
                assert response.status == 200
            taken.append(time.perf_counter() - began_s)
            await asyncio.sleep(0.002)
    assert len(taken) > 5
    assert sorted(taken)[len(taken) // 2] < 0.1
