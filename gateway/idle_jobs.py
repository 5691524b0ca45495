"""Background work of conversations: at most one job of each, and so many in all."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from types import TracebackType

MOST_JOBS = 64
"""Conversations that wait for an idle moment; the one that waits longest leaves, its next answer brings it back."""


class Job:
    """`running` is set by its work, once that has begun: from then on nothing takes its place."""

    __slots__ = ("running", "task")

    def __init__(self) -> None:
        self.running = False
        self.task: asyncio.Task[None] | None = None


class IdleJobs:
    """Owns the tasks, from entering to leaving, which cancels what is not done.

    `skipped` counts the jobs that found no place, their own or another's.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._jobs)

    async def __aenter__(self) -> "IdleJobs":
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._jobs):
            self._cancel(key)
        await self._group.__aexit__(None, None, None)

    def add(self, key: str, work: Callable[[Job], Awaitable[None]]) -> None:
        """`work` must not raise. It replaces what waits under the same key, but not what is running."""
        job = self._jobs.get(key)
        if job is not None:
            if job.running:
                self.skipped += 1
                return
            # What waits was for an older state of the conversation.
            self._cancel(key)
        if len(self._jobs) >= MOST_JOBS:
            waiting = next((other for other, job in self._jobs.items() if not job.running), None)
            self.skipped += 1
            if waiting is None:
                return
            self._cancel(waiting)
        job = self._jobs[key] = Job()
        job.task = self._group.create_task(self._run(key, job, work))

    def _cancel(self, key: str) -> None:
        # A task that is cancelled before it began leaves no trace of its own.
        task = self._jobs.pop(key).task
        if task is not None:
            task.cancel()

    async def _run(self, key: str, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        try:
            await work(job)
        finally:
            if self._jobs.get(key) is job:
                del self._jobs[key]
