"""One arm of `bench.routing` under its requests: a fleet in virtual time, and what became of each request."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.routed_arms import Rule
from bench.routed_engine import Address, EngineGone
from bench.routed_places import PROBE_S, Place, usage_of
from bench.routed_traffic import Asked
from bench.virtual_time import VirtualTimeLoop
from gateway.runs import Work


@dataclass(frozen=True, slots=True)
class Arm:
    """`pictured`: the rule asks what replicas hold; `paced`: prefills wait in the gateway for their turn."""

    name: str
    rule: Callable[[], Rule]
    pictured: bool = False
    paced: bool = False


@dataclass(frozen=True, slots=True)
class Death:
    """One replica dies and comes back empty. Seconds from the beginning."""

    at_s: float
    back_s: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ttft_s` from the arrival, retries included; None where no answer began. `lost`: the answer broke off."""

    at_s: float
    prompt_tokens: int
    ttft_s: float | None
    cached_tokens: int = 0
    foreseen_tokens: int = 0
    retries: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What an arm made of all requests, in the order in which they came."""

    outcomes: tuple[Outcome, ...]

    def behind(self, share: float) -> "Served":
        """Without the first share of the requests, which meet empty caches."""
        return Served(self.outcomes[int(share * len(self.outcomes)) :])

    @property
    def ttfts_s(self) -> np.ndarray:
        return np.array([one.ttft_s for one in self.outcomes if one.ttft_s is not None])

    def ttft_ms(self, percent: float) -> float:
        return float(np.percentile(self.ttfts_s, percent)) * 1000

    @property
    def hit(self) -> float:
        """Percent of the prompt tokens."""
        return 100 * sum(one.cached_tokens for one in self.outcomes) / sum(one.prompt_tokens for one in self.outcomes)

    @property
    def exact(self) -> float:
        """Percent of the requests whose cached tokens were foreseen when they were sent."""
        return 100 * float(np.mean([one.cached_tokens == one.foreseen_tokens for one in self.outcomes]))


def serve(arm: Arm, asked: Sequence[Asked], replicas: int, death: Death | None = None) -> Served:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_serve(arm, asked, replicas, death))


async def _serve(arm: Arm, asked: Sequence[Asked], replicas: int, death: Death | None) -> Served:
    addresses = [Address() for _ in range(replicas)]
    for address in addresses:
        address.start()
    places = [
        Place(number, address, pictured=arm.pictured, paced=arm.paced) for number, address in enumerate(addresses)
    ]
    gateway = _Gateway(arm.rule(), places)
    around = []
    if death is not None:
        around = [asyncio.create_task(_die(addresses, death)), asyncio.create_task(_probe(places))]
    answers = [asyncio.create_task(gateway.answer(one)) for one in asked]
    outcomes = await asyncio.gather(*answers)
    for task in around:
        task.cancel()
    for address in addresses:
        address.kill()
    return Served(tuple(outcomes))


async def _die(addresses: Sequence[Address], death: Death) -> None:
    await asyncio.sleep(death.at_s)
    addresses[death.number].kill()
    await asyncio.sleep(death.back_s - death.at_s)
    addresses[death.number].start()


async def _probe(places: Sequence[Place]) -> None:
    while True:
        await asyncio.sleep(PROBE_S)
        for place in places:
            if place.health.state == "down":
                place.probe()


class _Gateway:
    """The same for all arms but for the rule: each request once to a replica, again where none of it has come."""

    def __init__(self, rule: Rule, places: Sequence[Place]) -> None:
        self._rule = rule
        self._places = places

    async def answer(self, asked: Asked) -> Outcome:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, asked.at_s - loop.time()))
        tried: set[int] = set()
        count = len(asked.ids)
        work: Work | None = None
        while True:
            places = [place for place in self._places if place.health.takes_requests and place.number not in tried]
            if not places:
                return Outcome(asked.at_s, count, None, retries=len(tried))
            place, work = await self._rule.choose(asked, places, work)
            assert work.token_ids is not None
            run = await place.enter(work)
            try:
                answering = place.address.ask(work.token_ids, asked.output_tokens)
                await answering.first
            except EngineGone:
                run.close()
                place.health.failed("gone")
                tried.add(place.number)
                continue
            ttft_s = loop.time() - asked.at_s
            run.first_token()
            place.health.succeeded()
            lost = False
            try:
                await answering.last
                run.answered(usage_of(work, asked.output_tokens, answering))
            except EngineGone:
                place.health.failed("broke off")
                lost = True
            run.close()
            return Outcome(
                asked.at_s, count, ttft_s, answering.cached_tokens, run.cached_tokens or 0, len(tried), lost
            )
