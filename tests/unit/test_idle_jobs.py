import asyncio
from collections.abc import Awaitable, Callable

from gateway.idle_jobs import MOST_JOBS, IdleJobs, Job

Work = Callable[[Job], Awaitable[None]]


class Works:
    """Jobs by name that begin at once or wait, and say that they ended."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()

    def named(self, name: str, *, running: bool = False) -> Work:
        async def work(job: Job) -> None:
            job.running = running
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            self.done.append(name)

        return work


async def begun() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_later_job_takes_the_place_of_one_that_waits() -> None:
    works = Works()
    async with IdleJobs() as jobs:
        jobs.add("chat", works.named("old"))
        await begun()
        jobs.add("chat", works.named("new"))
        works.go.set()
        await begun()
        assert (works.done, works.cancelled, len(jobs), jobs.skipped) == (["new"], ["old"], 0, 0)


async def test_what_is_running_goes_on_and_the_later_job_is_skipped() -> None:
    works = Works()
    async with IdleJobs() as jobs:
        jobs.add("chat", works.named("old", running=True))
        await begun()
        jobs.add("chat", works.named("new"))
        works.go.set()
        await begun()
        assert (works.done, works.cancelled, jobs.skipped) == (["old"], [], 1)


async def test_of_more_than_may_wait_the_longest_waiting_leaves() -> None:
    works = Works()
    async with IdleJobs() as jobs:
        for number in range(MOST_JOBS + 1):
            jobs.add(str(number), works.named(str(number), running=number == 0))
            await begun()
        assert (len(jobs), works.cancelled, jobs.skipped) == (MOST_JOBS, ["1"], 1)


async def test_where_all_are_running_nothing_is_added() -> None:
    works = Works()
    async with IdleJobs() as jobs:
        for number in range(MOST_JOBS):
            jobs.add(str(number), works.named(str(number), running=True))
        await begun()
        jobs.add("one more", works.named("one more"))
        works.go.set()
        await begun()
        assert (len(works.done), "one more" in works.done, jobs.skipped) == (MOST_JOBS, False, 1)


async def test_leaving_cancels_what_is_not_done_also_what_has_not_begun() -> None:
    works = Works()
    async with IdleJobs() as jobs:
        jobs.add("begun", works.named("begun"))
        await begun()
        jobs.add("not begun", works.named("not begun"))
    assert (works.cancelled, works.done, len(jobs)) == (["begun"], [], 0)
