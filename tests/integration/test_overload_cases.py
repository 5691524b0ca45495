"""G1: more arrivals than the engine can serve, the whole gateway before the simulated engine."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply

WORDS = (
    *("ferry", "harbour", "timetable", "winter", "lantern", "orchard", "bridge", "market", "copper", "violin"),
    *("glacier", "pepper", "anchor", "meadow", "quarry", "tunnel", "saddle", "kettle", "mirror", "puzzle"),
)
CHUNKS = 5
BUDGET_MS = 1600
QUEUED = 8
GROWTH_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and what came of it; `took_s` until the end of the answer or of the refusal."""

    reply: Reply
    took_s: float

    @property
    def refused(self) -> bool:
        return self.reply.status != 200

    @property
    def plan(self) -> dict[str, Any]:
        assert self.reply.extension is not None
        plan: dict[str, Any] = self.reply.extension["plan"]
        return plan

    @property
    def degraded(self) -> bool:
        """Whether anything of what was wanted is missing or shortened."""
        return not self.refused and (
            len(self.plan["chunks"]) < CHUNKS or any(chunk["form"] != "whole" for chunk in self.plan["chunks"])
        )

    @property
    def within_budget(self) -> bool:
        return not self.refused and self.reply.extension is not None and self.ttft_ms <= BUDGET_MS

    @property
    def ttft_ms(self) -> float:
        assert self.reply.extension is not None
        return float(self.reply.extension["timings"]["ttft_ms"])


class Crowd:
    """Asks one store new questions, none twice."""

    def __init__(self, gateway: RunningGateway, store: str) -> None:
        self.gateway = gateway
        self._model = f"sim-model@{store}"
        self._rng = random.Random(7)

    async def ask(self, top_k: int = CHUNKS, **extension: Any) -> Asked:
        question = f"{' '.join(self._rng.sample(WORDS, 4))} {self._rng.randrange(10**6)}?"
        began_s = time.perf_counter()
        reply = await self.gateway.ask(
            self._model, question, stream=True, max_tokens=4, headstart={"top_k": top_k, **extension}
        )
        return Asked(reply, time.perf_counter() - began_s)

    async def come(self, count: int, every_s: float, **extension: Any) -> list[Asked]:
        """Requests at a steady pace, whether or not the earlier ones are answered; in order of arrival."""
        asking = []
        for _ in range(count):
            asking.append(asyncio.create_task(self.ask(**extension)))
            await asyncio.sleep(every_s)
        return list(await asyncio.gather(*asking))


@asynccontextmanager
async def a_crowd(folder: Path, model_dir: Path) -> AsyncIterator[Crowd]:
    """An engine that needs about 0.4 s for five chunks, and a gateway that has learned so."""
    config = SimConfig(model_dir=model_dir, time_scale=0.8, decode_tokens_per_s=400, answer="words", answer_words=4)
    async with EngineSim(config) as sim:
        settings = settings_for(folder, sim.url, tokenizer=str(model_dir), max_queued=QUEUED)
        async with run_gateway(settings) as gateway:
            crowd = Crowd(gateway, await gateway.make_store("notices", {f"n{i}.md": notice(i) for i in range(15)}))
            for number in range(10):
                await crowd.ask(top_k=1 + number % CHUNKS)
            yield crowd


def notice(number: int) -> str:
    rng = random.Random(number)
    lines = (f"{rng.choice(WORDS)} {rng.choice(WORDS)} number {rng.randrange(1000)}." for _ in range(8))
    return f"# Notice {number}\n\n" + " ".join(lines)


def first(asked: Sequence[Asked], holds: str) -> int:
    """Number of the first request of which it holds."""
    return next(number for number, one in enumerate(asked) if getattr(one, holds))


@pytest.mark.parametrize("policy", ["best_effort", "strict"])
async def test_g1_overload_degrades_first_then_refuses_at_once_and_ends_with_the_load(
    tmp_path: Path, model_dir: Path, policy: str
) -> None:
    async with a_crowd(tmp_path, model_dir) as crowd:
        alone = await crowd.ask(ttft_budget_ms=BUDGET_MS)
        assert not alone.degraded
        process = psutil.Process()
        before = process.memory_info().rss

        asked = await crowd.come(50, 0.1, ttft_budget_ms=BUDGET_MS, policy=policy)

        refused = [one for one in asked if one.refused]
        assert refused, "three times the capacity cannot all be taken"
        if policy == "best_effort":
            assert first(asked, "degraded") < first(asked, "refused")
        for one in refused:
            assert one.reply.status in (429, 503), one.reply.body
            assert 0 < float(one.reply.headers["retry-after-ms"]) < 10_000
            assert int(one.reply.headers["retry-after"]) * 1000 >= float(one.reply.headers["retry-after-ms"])
        quickest_s = sorted(one.took_s for one in refused)[len(refused) // 2]
        assert quickest_s < 0.5, "a refusal does not wait for the engine"
        assert sum(one.within_budget for one in asked) >= 15
        assert process.memory_info().rss - before < GROWTH_BYTES

        async with asyncio.timeout(5):
            while True:
                again = await crowd.ask(ttft_budget_ms=BUDGET_MS, policy=policy)
                if not again.degraded and again.within_budget:
                    break
        for gauge in ("headstart_queued_requests", "headstart_prefill_in_flight_tokens", "headstart_chat_in_flight"):
            await crowd.gateway.until_metric(gauge, 0)
