"""An idle engine waits a little for requests that are on their way."""

import asyncio

import pytest

from bench.virtual_time import VirtualTimeLoop
from gateway.arrivals import YOUNG_S, Arrivals
from gateway.pacing import Pacer, Prefill
from gateway.queueing import GATHERING_SHARE
from latency.model import CPU_135M
from latency.speed import SpeedEstimate

SPEED = SpeedEstimate(CPU_135M, factor=1.1, quantile=0.95, samples=50, source="learned")
LONG_S = SPEED.predict_s(1000)
BOUND_S = GATHERING_SHARE * LONG_S


def prefill(tokens: int, deadline_s: float | None = None) -> Prefill:
    return Prefill(tokens, 0, SPEED.predict_s(tokens), deadline_s)


class Burst:
    """Requests that come at once and enter the queue as they are planned; the times and tokens of their releases."""

    def __init__(self, *, arrivals: bool = True) -> None:
        self.clock = asyncio.get_running_loop().time
        self.arrivals = Arrivals(self.clock)
        self.pacer = Pacer(clock=self.clock)
        self.pacer.learned(SPEED)
        self.pacer.arrivals = self.arrivals if arrivals else None
        self.began_s = self.clock()
        self.released: list[tuple[int, float]] = []

    async def one(self, planning_s: float, job: Prefill, *, plain: bool = False, fails: bool = False) -> None:
        with self.arrivals.one():
            await asyncio.sleep(planning_s)
            if fails:
                return
        ticket = await self.pacer.enter(job, None if plain else lambda: job)
        self.released.append((job.uncached_tokens, self.clock() - self.began_s))
        await asyncio.sleep(job.seconds)
        ticket.first_token()
        ticket.done()


def run(*requests: tuple[float, int], arrivals: bool = True, plain: bool = False) -> list[tuple[int, float]]:
    async def main() -> list[tuple[int, float]]:
        burst = Burst(arrivals=arrivals)
        await asyncio.gather(*(burst.one(after_s, prefill(tokens), plain=plain) for after_s, tokens in requests))
        assert burst.pacer.idle
        return burst.released

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def test_the_shortest_of_those_that_come_together_goes_first_though_it_is_planned_later() -> None:
    (first, first_s), (second, _) = run((0.01, 1000), (0.01 + BOUND_S / 2, 500))
    assert (first, second) == (500, 1000)
    assert first_s == pytest.approx(0.01 + BOUND_S / 2, abs=1e-4)


def test_the_engine_is_kept_waiting_no_longer_than_a_small_part_of_the_prefill() -> None:
    (first, first_s), _ = run((0.01, 1000), (0.01 + 3 * BOUND_S, 500))
    assert first == 1000
    assert first_s == pytest.approx(0.01 + BOUND_S, abs=1e-4)


def test_one_that_comes_alone_waits_for_nobody() -> None:
    ((_, released_s),) = run((0.01, 1000))
    assert released_s == pytest.approx(0.01, abs=1e-4)


@pytest.mark.parametrize("changes", [{"arrivals": False}, {"plain": True}], ids=["several engines", "no other order"])
def test_what_gains_nothing_by_it_waits_for_nobody(changes: dict[str, bool]) -> None:
    (first, first_s), _ = run((0.01, 1000), (0.01 + BOUND_S / 2, 500), **changes)
    assert first == 1000
    assert first_s == pytest.approx(0.01, abs=1e-4)


def test_a_deadline_is_not_missed_for_others_sake() -> None:
    async def main() -> None:
        burst = Burst()
        job = prefill(1000, burst.clock() + SPEED.safe_s(1000) + BOUND_S / 4)
        await asyncio.gather(burst.one(0.0, job), burst.one(3 * BOUND_S, prefill(500)))
        first, first_s = burst.released[0]
        assert first == 1000
        assert first_s == pytest.approx(BOUND_S / 4, abs=1e-4)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_the_wait_ends_when_the_one_that_was_on_its_way_does_not_come() -> None:
    async def main() -> None:
        burst = Burst()
        await asyncio.gather(burst.one(0.0, prefill(3000)), burst.one(0.006, prefill(500), fails=True))
        ((_, released_s),) = burst.released
        assert 0.006 <= released_s <= 0.011
        assert released_s < GATHERING_SHARE * SPEED.predict_s(3000)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_one_whose_preparation_hangs_is_waited_for_by_nobody() -> None:
    async def main() -> None:
        burst = Burst()
        hanging = asyncio.create_task(burst.one(60.0, prefill(500)))
        await asyncio.sleep(YOUNG_S)
        began_s = burst.clock() - burst.began_s
        await burst.one(0.0, prefill(1000))
        assert burst.released[0][1] == pytest.approx(began_s, abs=1e-4)
        hanging.cancel()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_one_that_fails_on_its_way_is_no_longer_waited_for() -> None:
    async def main() -> None:
        burst = Burst()
        await burst.one(0.0, prefill(1000), fails=True)
        assert not burst.arrivals
        await burst.one(0.0, prefill(1000))
        ((_, released_s),) = burst.released
        assert released_s == pytest.approx(0.0, abs=1e-4)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
