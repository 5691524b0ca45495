"""Several gateways in front of the same two simulated engines, and conversations that go from one to the other."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for

SECRET = "the same for all"
ENGINES = 2
TALKS = 12
TURNS = 6
_LATEST_CALLS = 1000


@dataclass(frozen=True, slots=True)
class Share:
    """Cached tokens as predicted and as reported, over prompt tokens."""

    predicted: float
    reported: float

    @property
    def points(self) -> float:
        return 100 * abs(self.predicted - self.reported)


class Fleet:
    """Engines whose caches hold a third of what is asked of them, and gateways before all of them."""

    def __init__(self, stack: AsyncExitStack, folder: Path, sims: Sequence[EngineSim], **settings: Any) -> None:
        self._stack = stack
        self._folder = folder
        self.sims = sims
        self._settings = settings
        self.gateways: list[RunningGateway] = []

    @property
    def engine_urls(self) -> str:
        """As a gateway is told them."""
        return ",".join(f"engine-{place}={sim.url}" for place, sim in enumerate(self.sims))

    async def add(self) -> RunningGateway:
        settings = settings_for(
            self._folder / f"gateway-{len(self.gateways)}", self.engine_urls, salt_secret=SECRET, **self._settings
        )
        gateway = await self._stack.enter_async_context(run_gateway(settings))
        self.gateways.append(gateway)
        return gateway


@asynccontextmanager
async def fleet(folder: Path, model_dir: Path, **settings: Any) -> AsyncIterator[Fleet]:
    config = SimConfig(time_scale=0.02, model_dir=model_dir, num_gpu_blocks=600, answer="words", answer_words=12)
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(EngineSim(config)) for _ in range(ENGINES)]
        yield Fleet(stack, folder, sims, tokenizer=str(model_dir), **settings)


def text(seed: int, words: int) -> str:
    source = random.Random(seed)
    return " ".join(source.choice(("tide", "ferry", "rope", "anchor", "gull", "pier", "sail")) for _ in range(words))


async def talk(gateways: Sequence[RunningGateway], number: int, turns: int = TURNS) -> None:
    """A conversation that goes on at one gateway after the other, as behind a load balancer."""
    source = random.Random(number)
    messages = [{"role": "system", "content": f"{text(number % 4, 220)}"}]
    for turn in range(turns):
        question = {"role": "user", "content": f"{number} {turn} {text(100 * number + turn, 60)}"}
        gateway = gateways[source.randrange(len(gateways))]
        body = {"model": "sim-model", "messages": [*messages, question], "max_tokens": 16}
        async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = (await response.json())["choices"][0]["message"]["content"]
        messages += [question, {"role": "assistant", "content": answer}]
        await asyncio.sleep(source.random() * 0.05)


async def talks(gateways: Sequence[RunningGateway], first: int = 0, count: int = TALKS, at_once: int = 4) -> None:
    slots = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with slots:
            await talk(gateways, number)

    await asyncio.gather(*(one(first + number) for number in range(count)))


async def share(gateways: Sequence[RunningGateway]) -> Share:
    """Over all calls that the gateways remember."""
    predicted = reported = prompts = 0
    for gateway in gateways:
        query = {"limit": _LATEST_CALLS}
        async with gateway.session() as session, session.get("/v1/calls", params=query) as response:
            calls = (await response.json())["data"]
        for timings in (call["timings"] for call in calls):
            predicted += timings["predicted_cached_tokens"]
            reported += timings["cached_tokens"]
            prompts += timings["prompt_tokens"]
    return Share(predicted / prompts, reported / prompts)
