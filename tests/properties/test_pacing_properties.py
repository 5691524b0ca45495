"""What holds of every queue: nothing is lost, nothing starves, limits and deadlines are kept, waits are foretold."""

import asyncio
from collections.abc import Coroutine
from itertools import permutations
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.virtual_time import VirtualTimeLoop
from gateway.pacing import Pacer, Prefill, Ticket
from gateway.queueing import OVERTAKING, Queued, limit_tokens, most_on_time, released, turn_order
from latency.model import CPU_135M, PrefillModel
from latency.speed import SpeedEstimate

SPEED = SpeedEstimate(CPU_135M, factor=1.1, quantile=0.95, samples=50, source="learned")
FAST = SpeedEstimate(PrefillModel(0.008, 31e-6, 1.3e-9), factor=1.1, quantile=0.95, samples=50, source="learned")

tokens = st.integers(1, 3000)
deadlines = st.none() | st.floats(0.0, 12.0)
jobs = st.tuples(tokens, deadlines, st.floats(0.0, 4.0))


def a_queue(drawn: list[tuple[int, float | None, float]], speed: SpeedEstimate = SPEED) -> list[Queued]:
    """Prefills that came in the four seconds before 0 s."""
    queue = [
        Queued(Prefill(size, 0, speed.predict_s(size), deadline_s), -age_s, number)
        for number, (size, deadline_s, age_s) in enumerate(drawn)
    ]
    return sorted(queue, key=lambda queued: queued.turn)


def on_time(order: list[Queued]) -> int:
    now_s, kept = 0.0, 0
    for queued in order:
        now_s += queued.job.seconds
        kept += queued.job.deadline_s is not None and now_s <= queued.job.deadline_s
    return kept


@settings(deadline=None)
@given(st.lists(jobs, max_size=12), st.floats(0.0, 3.0))
def test_an_order_holds_every_prefill_once(drawn: list[tuple[int, float | None, float]], passed_s: float) -> None:
    queue = a_queue(drawn)
    order = turn_order(queue, 0.0, passed_s)
    assert sorted(queued.number for queued in order) == list(range(len(drawn)))


@settings(deadline=None)
@given(st.lists(jobs, max_size=12))
def test_without_deadlines_at_risk_the_order_is_that_of_the_turns(
    drawn: list[tuple[int, float | None, float]],
) -> None:
    queue = a_queue([(size, None if at is None else 1e6, age_s) for size, at, age_s in drawn])
    assert turn_order(queue, 0.0) == queue


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs, max_size=6))
def test_no_order_keeps_more_deadlines_than_those_chosen_to_be_kept(
    drawn: list[tuple[int, float | None, float]],
) -> None:
    queue = a_queue(drawn)
    best = max(on_time(list(order)) for order in permutations(queue))
    chosen = most_on_time(queue, 0.0)
    assert len(chosen) == on_time(chosen) == best


@settings(deadline=None)
@given(st.lists(jobs, min_size=1, max_size=12))
def test_deadlines_that_can_all_be_kept_are_kept_unless_the_one_in_turn_has_let_enough_pass(
    drawn: list[tuple[int, float | None, float]],
) -> None:
    queue = a_queue(drawn)
    order = turn_order(queue, 0.0)
    work_s = sum(queued.job.seconds for queued in queue)
    if work_s <= OVERTAKING * min(queued.job.seconds for queued in queue):
        assert on_time(order) >= len(most_on_time(queue, 0.0))


@settings(deadline=None)
@given(st.lists(jobs, min_size=1, max_size=20), st.floats(0.0, 20.0))
def test_urgent_prefills_pass_the_one_in_turn_for_a_bounded_time(
    drawn: list[tuple[int, float | None, float]], passed_s: float
) -> None:
    queue = a_queue(drawn)
    order = turn_order(queue, 0.0, passed_s)
    head = queue[0]
    before = order[: order.index(head)]
    work_s = passed_s + sum(queued.job.seconds for queued in before)
    # One that is longer than the bound itself may go first, if nothing else has.
    assert work_s <= max(OVERTAKING * head.job.seconds, passed_s, before[0].job.seconds if before else 0.0) + 1e-9


@settings(deadline=None)
@given(st.lists(jobs, min_size=1, max_size=20), st.integers(0, 4000), st.sampled_from([None, SPEED, FAST]))
def test_what_is_released_keeps_to_the_limit_unless_it_is_alone(
    drawn: list[tuple[int, float | None, float]], in_flight: int, speed: SpeedEstimate | None
) -> None:
    order = a_queue(drawn)
    limit = limit_tokens(speed, sum(size for size, _, _ in drawn))
    for is_due in (True, False):
        count = released(order, in_flight, limit, is_due=is_due)
        sent = sum(queued.job.uncached_tokens for queued in order[:count])
        if is_due:
            assert count >= 1
            assert count == 1 or sent <= limit
        else:
            assert count == 0 or in_flight + sent <= limit


@settings(deadline=None)
@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_the_limit_grows_with_the_queue(fewer: int, more: int) -> None:
    fewer, more = sorted((fewer, more))
    assert 0 < limit_tokens(FAST, fewer) <= limit_tokens(FAST, more)


class PerfectEngine:
    """Computes what it is given in steps, first come first served, exactly as predicted."""

    def __init__(self, speed: SpeedEstimate, pacer: Pacer) -> None:
        self.speed = speed
        self.pacer = pacer
        self.free_s = 0.0
        self.most_tokens = 0

    async def serve(self, job: Prefill, cancel_after_s: float | None = None) -> float:
        """Its TTFT in seconds; -1 for a request whose client left."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ticket: Ticket | None = None
        try:
            async with asyncio.timeout(cancel_after_s):
                ticket = await self.pacer.enter(job)
                self.most_tokens = max(self.most_tokens, self.pacer.in_flight_tokens)
                fixed_s = self.speed.prefill.fixed_s
                # Those that come while nothing runs share its step: the fixed cost is that of the first.
                if self.free_s <= loop.time():
                    self.free_s = loop.time() + fixed_s
                self.free_s += job.seconds - fixed_s
                await asyncio.sleep(self.free_s - loop.time())
                ticket.first_token()
                return loop.time() - began_s
        except TimeoutError:
            return -1.0
        finally:
            if ticket is not None:
                ticket.done()


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(tokens, deadlines, st.none() | st.floats(0.001, 5.0), st.floats(0, 3)), max_size=15),
    st.sampled_from([SPEED, FAST]),
)
def test_every_request_is_served_or_cancelled_once_and_the_pacer_is_idle_in_the_end(
    drawn: list[tuple[int, float | None, float | None, float]], speed: SpeedEstimate
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pacer = Pacer(clock=loop.time)
        pacer.learned(speed)
        engine = PerfectEngine(speed, pacer)

        async def request(size: int, at_s: float | None, cancel_s: float | None, arrival_s: float) -> float:
            await asyncio.sleep(arrival_s)
            return await engine.serve(Prefill(size, 0, speed.predict_s(size), at_s), cancel_s)

        ttft_s = await asyncio.gather(*(request(*one) for one in drawn))
        assert all(ttft > 0 for ttft, one in zip(ttft_s, drawn, strict=True) if one[2] is None)
        assert pacer.idle
        assert (pacer.queued, pacer.in_flight_tokens, pacer.decoding) == (0, 0, 0)
        async with asyncio.timeout(1), pacer.background():
            pass

    in_virtual_time(main())


@settings(max_examples=60, deadline=None)
@example([(1, None), (361, None), (608, 1.0)], 1624, 4.0)
@given(st.lists(st.tuples(tokens, deadlines), min_size=1, max_size=15), tokens, deadlines)
def test_the_predicted_wait_is_what_a_queue_without_newcomers_gives(
    drawn: list[tuple[int, float | None]], size: int, deadline_s: float | None
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pacer = Pacer(clock=loop.time)
        pacer.learned(SPEED)
        engine = PerfectEngine(SPEED, pacer)
        async with asyncio.TaskGroup() as group:
            for tokens_, at_s in drawn:
                group.create_task(engine.serve(Prefill(tokens_, 0, SPEED.predict_s(tokens_), at_s)))
            await asyncio.sleep(0.001)
            prefill_s = SPEED.predict_s(size)
            wait_s = pacer.wait_s(prefill_s, deadline_s)
            # A deadline may turn out to be lost by a hair: then it waits its turn.
            longest_s = max(wait_s, pacer.wait_s(prefill_s))
            ttft_s = await engine.serve(Prefill(size, 0, prefill_s, deadline_s))
        # It may share its step with others than foretold; and each step may save its fixed cost, which this engine
        # pays only when it comes out of idleness.
        step_s = SPEED.predict_s(limit_tokens(SPEED, size + sum(one[0] for one in drawn)))
        tolerance_s = step_s + SPEED.prefill.fixed_s * (len(drawn) + 1)
        assert ttft_s - prefill_s <= longest_s + tolerance_s
        if all(at_s is None for _, at_s in drawn):
            # An urgent request of the queue may turn out to have had time: then the others wait less than foretold.
            assert ttft_s - prefill_s >= wait_s - tolerance_s

    in_virtual_time(main())


def test_a_request_without_a_deadline_is_served_in_a_flood_of_urgent_ones() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pacer = Pacer(clock=loop.time)
        pacer.learned(SPEED)
        engine = PerfectEngine(SPEED, pacer)
        urgent_s = SPEED.predict_s(500)

        async def flood() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(100):
                    # Each can only be kept when it is the next.
                    job = Prefill(500, 0, urgent_s, loop.time() + 2.2 * urgent_s)
                    group.create_task(engine.serve(job))
                    await asyncio.sleep(urgent_s)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(5 * urgent_s)
        ttft_s = await engine.serve(Prefill(800, 0, SPEED.predict_s(800), None))
        assert ttft_s < (OVERTAKING + 2) * SPEED.predict_s(800) + 2 * urgent_s
        assert not flooding.done()
        await flooding

    in_virtual_time(main())
