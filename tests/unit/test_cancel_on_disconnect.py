"""A client that leaves cancels what is done for it, and nothing else."""

import asyncio

import pytest

from gateway.http import AsgiMessage, CancelOnDisconnect, ClientGone


class Client:
    def __init__(self) -> None:
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> AsgiMessage:
        await self._left.wait()
        return {"type": "http.disconnect"}


async def test_d4_a_wait_ends_when_the_client_leaves() -> None:
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.leave)
    with pytest.raises(ClientGone):
        async with CancelOnDisconnect(client.receive):
            await asyncio.sleep(5)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_that_ends_leaves_no_watcher_behind() -> None:
    client = Client()
    before = asyncio.all_tasks()
    async with CancelOnDisconnect(client.receive):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    client.leave()
    await asyncio.sleep(0.01)


async def test_an_error_of_the_block_passes_through() -> None:
    with pytest.raises(KeyError):
        async with CancelOnDisconnect(Client().receive):
            raise KeyError("mine")


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def work() -> None:
        async with CancelOnDisconnect(Client().receive):
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_elsewhere_wins_over_a_client_that_leaves_at_the_same_time() -> None:
    client = Client()

    async def work() -> None:
        async with CancelOnDisconnect(client.receive):
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    client.leave()
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_d4_a_client_that_left_is_noticed_inside_a_time_limit_too() -> None:
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.leave)
    with pytest.raises(ClientGone):
        async with CancelOnDisconnect(client.receive), asyncio.timeout(5):
            await asyncio.sleep(5)
