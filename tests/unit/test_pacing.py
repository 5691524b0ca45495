"""The pacer on a clock that jumps: turns, limits, cancellation, background work."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from bench.virtual_time import VirtualTimeLoop
from gateway.pacing import Pacer, Prefill, QueueFull, Ticket
from gateway.queueing import LEAST_FIXED_COSTS, PATIENCE, Queued, limit_tokens
from latency.model import CPU_135M
from latency.speed import DecodeLoad, SpeedEstimate

SPEED = SpeedEstimate(CPU_135M, factor=1.1, quantile=0.95, samples=50, source="learned")


BESIDE_S = 0.04
BESIDE = replace(SPEED, beside=DecodeLoad(BESIDE_S, 0.001, 0.0, factor=1.1))


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def a_pacer(**changes: Any) -> Pacer:
    pacer = Pacer(clock=asyncio.get_running_loop().time, **changes)
    pacer.learned(SPEED)
    return pacer


def prefill(tokens: int, deadline_s: float | None = None) -> Prefill:
    return Prefill(tokens, 0, SPEED.predict_s(tokens), deadline_s)


async def served(pacer: Pacer, job: Prefill, order: list[int]) -> Ticket:
    """A request on an engine that is exactly as fast as predicted."""
    ticket = await pacer.enter(job)
    order.append(job.uncached_tokens)
    await asyncio.sleep(job.seconds)
    ticket.first_token()
    ticket.done()
    return ticket


def test_a_lone_request_is_released_at_once() -> None:
    async def main() -> None:
        pacer = a_pacer()
        assert pacer.wait_s(1.0) == 0.0
        ticket = await pacer.enter(prefill(500))
        assert ticket.waited_s == 0.0
        assert (pacer.in_flight_tokens, pacer.queued, pacer.idle) == (500, 0, False)
        ticket.first_token()
        assert (pacer.in_flight_tokens, pacer.decoding, pacer.idle) == (0, 1, True)
        ticket.done()
        ticket.done()
        assert pacer.decoding == 0

    in_virtual_time(main)


def test_a_burst_is_served_shortest_first() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        async with asyncio.TaskGroup() as group:
            for tokens in (800, 300, 500, 250, 700):
                group.create_task(served(pacer, prefill(tokens), order))
        assert order == [250, 300, 500, 700, 800]
        assert pacer.idle

    in_virtual_time(main)


def test_those_that_wait_are_served_by_what_they_would_compute_now() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        held = 0

        async def asking(tokens: int, shared: int) -> None:
            ticket = await pacer.enter(prefill(tokens), lambda: prefill(tokens - min(held, shared)))
            order.append(tokens)
            await asyncio.sleep(ticket.job.seconds)
            ticket.first_token()
            ticket.done()

        async with asyncio.TaskGroup() as group:
            first = await pacer.enter(prefill(600))
            for tokens, shared in ((700, 0), (900, 500), (800, 0)):
                group.create_task(asking(tokens, shared))
            await asyncio.sleep(0.01)
            assert pacer.queued == 3
            # What the first one leaves in the cache is most of what the longest needs.
            held = 500
            first.first_token()
            first.done()
        assert order == [900, 700, 800]
        assert pacer.idle

    in_virtual_time(main)


def test_one_that_shortens_others_goes_before_one_that_is_a_little_shorter() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        first = await pacer.enter(prefill(600))
        shared_s = {800: 0.0, 900: SPEED.predict_s(400)}

        async def waits(tokens: int) -> None:
            job = prefill(tokens)
            ticket = await pacer.enter(job, lambda: replace(job, shared_s=shared_s[tokens]))
            order.append(tokens)
            await asyncio.sleep(job.seconds)
            ticket.first_token()
            ticket.done()

        async with asyncio.TaskGroup() as group:
            for tokens in shared_s:
                group.create_task(waits(tokens))
            await asyncio.sleep(0.01)
            first.first_token()
            first.done()
        assert order == [900, 800]

    in_virtual_time(main)


def test_however_much_it_shares_a_request_counts_at_least_half_of_its_own_prefill() -> None:
    job = prefill(1000)
    turns = [Queued(replace(job, shared_s=share * job.seconds), 5.0, 1).turn[0] for share in (0.0, 0.5, 1.0, 10.0)]
    assert turns == pytest.approx([5.0 + PATIENCE * job.seconds * left for left in (1.0, 0.75, 0.5, 0.5)])


def test_one_that_leaves_the_queue_after_it_was_looked_at_again_leaves_no_trace() -> None:
    async def main() -> None:
        pacer = a_pacer()
        first = await pacer.enter(prefill(600))
        lengths = iter([900, 800, 700, 650])
        waiting = [asyncio.create_task(pacer.enter(prefill(1000), lambda: prefill(next(lengths)))) for _ in range(2)]
        await asyncio.sleep(0.01)
        first.first_token()
        first.done()
        await asyncio.sleep(0.01)
        released, left = sorted(waiting, key=lambda task: not task.done())
        left.cancel()
        await asyncio.wait([left])
        assert pacer.queued == 0
        (await released).done()
        assert pacer.idle

    in_virtual_time(main)


def test_a_full_queue_refuses_with_the_predicted_wait() -> None:
    async def main() -> None:
        pacer, order = a_pacer(max_queued=2), list[int]()
        async with asyncio.TaskGroup() as group:
            for tokens in (800, 700):
                group.create_task(served(pacer, prefill(tokens), order))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull) as refused:
                await pacer.enter(prefill(900))
            expected_s = SPEED.predict_s(800) + SPEED.predict_s(700)
            assert refused.value.wait_s == pytest.approx(expected_s, rel=0.1)

    in_virtual_time(main)


def test_a_cancelled_waiter_leaves_no_trace() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        first = await pacer.enter(prefill(500))
        waiting = asyncio.create_task(pacer.enter(prefill(400)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pacer.queued == 0
        assert pacer.in_flight_tokens == 500
        first.done()
        await served(pacer, prefill(100), order)
        assert pacer.idle

    in_virtual_time(main)


def test_a_waiter_that_is_cancelled_as_it_is_released_gives_its_slot_back() -> None:
    async def main() -> None:
        pacer = a_pacer()
        waiting = asyncio.create_task(pacer.enter(prefill(400)))
        for _ in range(10):
            if pacer.in_flight_tokens:
                break
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pacer.in_flight_tokens == 0
        assert pacer.idle

    in_virtual_time(main)


def test_a_deadline_that_can_be_kept_goes_before_shorter_prefills() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        now_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            group.create_task(served(pacer, prefill(300), order))
            group.create_task(served(pacer, prefill(400), order))
            urgent = prefill(800, now_s + SPEED.predict_s(800) + 0.1)
            group.create_task(served(pacer, urgent, order))
            group.create_task(served(pacer, prefill(600, now_s + 0.1), order))
        assert order == [800, 300, 400, 600], "the last one's deadline is lost, so it waits its turn"

    in_virtual_time(main)


def test_a_deadline_is_kept_with_the_margin_of_its_prediction() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        now_s = asyncio.get_running_loop().time()
        slack_s = SPEED.predict_s(100) + 0.02
        async with asyncio.TaskGroup() as group:
            group.create_task(served(pacer, prefill(100), order))
            urgent = prefill(800, now_s + SPEED.predict_s(800) + slack_s)
            group.create_task(served(pacer, urgent, order))
        assert order == [800, 100], "the short one would leave 20 ms, less than a tenth of the long one's prefill"

    in_virtual_time(main)


def test_urgent_requests_that_come_one_by_one_pass_the_one_in_turn_only_so_often() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        loop = asyncio.get_running_loop()
        prefill_s = SPEED.predict_s(400)
        async with asyncio.TaskGroup() as group:
            group.create_task(served(pacer, prefill(401), order))
            await asyncio.sleep(0.01)
            group.create_task(served(pacer, prefill(300), order))
            for _ in range(12):
                urgent = prefill(400, loop.time() + 2.3 * prefill_s)
                group.create_task(served(pacer, urgent, order))
                await asyncio.sleep(prefill_s)
        assert 1 < order.index(300) < 6

    in_virtual_time(main)


def test_background_work_waits_for_idleness_and_is_told_to_stop_by_a_request() -> None:
    async def main() -> None:
        pacer = a_pacer()
        ticket = await pacer.enter(prefill(500))
        entered: list[str] = []

        async def work(name: str) -> None:
            async with pacer.background() as background:
                entered.append(name)
                await background.abandoned.wait()
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            group.create_task(work("fold"))
            group.create_task(work("prewarm"))
            await asyncio.sleep(1.0)
            assert entered == []
            ticket.first_token()
            await asyncio.sleep(0.01)
            assert entered == ["fold"], "one at a time"
            second = await pacer.enter(prefill(200))
            assert second.waited_s == 0.0, "a request does not wait for background work"
            await asyncio.sleep(1.0)
            assert entered == ["fold"]
            second.done()
            await asyncio.sleep(0.1)
            assert entered == ["fold", "prewarm"]
            (await pacer.enter(prefill(100))).done()

    in_virtual_time(main)


def test_an_answer_that_is_not_streamed_counts_as_prefilled_when_expected() -> None:
    async def main() -> None:
        pacer = a_pacer()
        ticket = await pacer.enter(prefill(500))
        ticket.first_token_expected(0.6)
        await asyncio.sleep(0.5)
        assert pacer.in_flight_tokens == 500
        await asyncio.sleep(0.2)
        assert (pacer.in_flight_tokens, pacer.decoding) == (0, 1)
        ticket.done()
        assert pacer.decoding == 0

    in_virtual_time(main)


def test_small_prefills_that_share_a_step_pay_the_fixed_cost_once() -> None:
    async def main() -> None:
        pacer = a_pacer()
        entering = [asyncio.create_task(pacer.enter(prefill(20))) for _ in range(3)]
        tickets = await asyncio.gather(*entering)
        shared_s = SPEED.predict_s(20) + 2 * (SPEED.predict_s(20) - CPU_135M.fixed_s)
        assert pacer.wait_s(1.0) == pytest.approx(shared_s)
        tickets[0].done()
        assert pacer.wait_s(1.0) == pytest.approx(shared_s - SPEED.predict_s(20) + CPU_135M.fixed_s), "it left"

    in_virtual_time(main)


def test_a_step_beside_running_answers_costs_more_and_takes_more_tokens() -> None:
    alone, beside = limit_tokens(BESIDE, 0), limit_tokens(BESIDE, 0, decoding=10)
    assert alone == limit_tokens(SPEED, 0) == int(LEAST_FIXED_COSTS * CPU_135M.fixed_s / CPU_135M.per_token_s)
    assert beside == pytest.approx(alone * (CPU_135M.fixed_s + BESIDE_S + 0.01) / CPU_135M.fixed_s, rel=0.01)
    assert limit_tokens(SPEED, 0, decoding=10) == alone, "nothing is known of decoding there"


def test_the_limit_follows_the_answers_that_are_being_decoded() -> None:
    async def main() -> None:
        pacer = a_pacer()
        pacer.learned(BESIDE)
        before = pacer.limit_tokens
        ticket = await pacer.enter(prefill(100))
        ticket.first_token()
        assert pacer.limit_tokens == limit_tokens(BESIDE, 0, decoding=1) > 2 * before
        ticket.done()
        assert pacer.limit_tokens == before

    in_virtual_time(main)


def test_prefills_beside_running_answers_pay_for_these_once() -> None:
    async def main() -> None:
        pacer = a_pacer()
        pacer.learned(BESIDE)
        (await pacer.enter(prefill(20))).first_token()
        seconds = BESIDE.predict_s(20, decoding=1)
        job = Prefill(20, 0, seconds, None)
        for task in [asyncio.create_task(pacer.enter(job)) for _ in range(3)]:
            await task
        assert pacer.wait_s(1.0) == pytest.approx(seconds + 2 * (seconds - BESIDE.predict_s(0, decoding=1)))

    in_virtual_time(main)


def test_switched_off_everything_is_released_at_once_and_counted() -> None:
    async def main() -> None:
        pacer = a_pacer(enabled=False, max_queued=1)
        tickets = [await pacer.enter(prefill(500)) for _ in range(4)]
        assert pacer.in_flight_tokens == 2000
        assert pacer.wait_s(0.1) == pytest.approx(4 * SPEED.predict_s(500))
        for ticket in tickets:
            ticket.done()
        assert pacer.idle

    in_virtual_time(main)


def test_without_an_estimate_as_many_are_released_as_one_step_takes() -> None:
    async def main() -> None:
        pacer = a_pacer()
        pacer.learned(None)
        waiting = [asyncio.create_task(pacer.enter(Prefill(900, 0, 0.0, None))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert [task.done() for task in waiting] == [True, True, False]
        waiting[0].result().first_token()
        await asyncio.sleep(0.1)
        assert waiting[2].done()

    in_virtual_time(main)


def test_a_request_that_the_engine_never_answers_holds_the_others_back_for_seconds_only() -> None:
    async def main() -> None:
        pacer, order = a_pacer(), list[int]()
        await pacer.enter(prefill(100))
        started_s = asyncio.get_running_loop().time()
        await served(pacer, prefill(200), order)
        assert asyncio.get_running_loop().time() - started_s < 10

    in_virtual_time(main)


def test_a_prefill_begins_when_the_one_before_it_is_over() -> None:
    async def main() -> None:
        pacer, loop = a_pacer(), asyncio.get_running_loop()
        first = await pacer.enter(prefill(500))
        second = await pacer.enter(prefill(600))
        released_s = loop.time()
        assert released_s == pytest.approx(SPEED.predict_s(500) - CPU_135M.fixed_s, abs=0.002)
        await asyncio.sleep(0.1)
        first.first_token()
        await asyncio.sleep(0.5)
        second.first_token()
        assert (first.began_s, first.alone) == (0.0, True)
        assert second.began_s == pytest.approx(released_s + 0.1)
        assert second.alone

    in_virtual_time(main)


def test_prefills_that_share_a_step_are_not_alone() -> None:
    async def main() -> None:
        pacer = a_pacer()
        small = [asyncio.create_task(pacer.enter(prefill(20))) for _ in range(3)]
        for task in small:
            ticket = await task
            ticket.first_token()
            assert not ticket.alone
        lone = await pacer.enter(prefill(20))
        await asyncio.sleep(0.04)
        lone.first_token()
        assert lone.alone

    in_virtual_time(main)


def test_requests_released_into_the_same_step_one_after_the_other_are_not_alone() -> None:
    async def main() -> None:
        pacer = a_pacer()
        first = await pacer.enter(prefill(20))
        await asyncio.sleep(0.001)
        second = await pacer.enter(prefill(20))
        first.first_token()
        second.first_token()
        assert (first.alone, second.alone) == (False, False)

    in_virtual_time(main)
