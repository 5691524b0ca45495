"""A limit on each of many waits."""

import asyncio
import time

import pytest

from gateway.backends.watchdog import Watchdog


async def test_d10_a_wait_over_the_limit_is_a_timeout() -> None:
    began = time.monotonic()
    with Watchdog(0.1) as watchdog, pytest.raises(TimeoutError), watchdog:
        await asyncio.sleep(5)
    assert 0.09 <= time.monotonic() - began < 1.0


async def test_d10_many_waits_below_the_limit_may_take_longer_than_it_together() -> None:
    began = time.monotonic()
    with Watchdog(0.3) as watchdog:
        for _ in range(20):
            with watchdog:
                await asyncio.sleep(0.03)
    assert time.monotonic() - began > 0.5


async def test_time_between_the_waits_does_not_count() -> None:
    with Watchdog(0.1) as watchdog:
        for _ in range(3):
            with watchdog:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.25)


async def test_a_wait_that_begins_late_still_has_its_whole_limit() -> None:
    with Watchdog(0.2) as watchdog:
        await asyncio.sleep(0.15)
        began = time.monotonic()
        with pytest.raises(TimeoutError), watchdog:
            await asyncio.sleep(5)
    assert 0.19 <= time.monotonic() - began < 1.0


async def test_a_cancellation_from_elsewhere_is_not_a_timeout() -> None:
    async def wait() -> None:
        with Watchdog(5) as watchdog, watchdog:
            await asyncio.sleep(5)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_together_with_a_timeout_stays_a_cancellation() -> None:
    async def wait() -> None:
        with Watchdog(0.05) as watchdog, watchdog:
            await asyncio.sleep(5)

    task = asyncio.create_task(wait())
    # The loop is kept busy until both are due, so that they strike in one turn.
    asyncio.get_running_loop().call_later(0.01, time.sleep, 0.1)
    asyncio.get_running_loop().call_later(0.06, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_errors_pass_through_and_nothing_strikes_later() -> None:
    with pytest.raises(KeyError), Watchdog(0.02) as watchdog, watchdog:
        raise KeyError("mine")
    await asyncio.sleep(0.05)


async def test_after_a_timeout_the_task_goes_on_as_if_never_cancelled() -> None:
    with Watchdog(0.02) as watchdog, pytest.raises(TimeoutError), watchdog:
        await asyncio.sleep(5)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.01)
