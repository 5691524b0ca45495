"""A request on its way to an engine, and to another one where the first is gone before it has answered."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.errors import ApiError
from gateway.replica import Replica
from gateway.replicas import Replicas
from gateway.runs import Run, Work

Answer = TypeVar("Answer")

UNREACHABLE = "engine_unreachable"
CUT_OFF = "engine_cut_off"
SILENT = "engine_silent"
BUSY = "engine_busy"
FAILED = "engine_failed"

MOST_BROKEN = 2
"""A request that breaks the engines it meets must not break them all."""


async def send(
    replicas: Replicas, work: Work, salt: str, call: Callable[[Replica, Run], Awaitable[Answer]]
) -> tuple[Replica, Run, Answer]:
    """`call` sends the request and returns with its first bytes, or with a whole answer. Raises ApiError.

    Until then nothing has reached the client, so a request whose engine is gone or at its limit goes to another
    replica, once to each. Whoever got the run closes it.
    """
    tried: set[str] = set()
    broken = 0
    while True:
        replica, run = await replicas.enter(work, salt, tried)
        try:
            answer = await call(replica, run)
        except ApiError as error:
            run.close()
            if error.code in (UNREACHABLE, CUT_OFF, SILENT):
                replica.failed(error.message)
            elif error.code == FAILED:
                replica.health.faulted(error.message)
            broken += error.code in (CUT_OFF, FAILED)
            tried.add(replica.name)
            again = error.code in (UNREACHABLE, BUSY) or (error.code in (CUT_OFF, FAILED) and broken < MOST_BROKEN)
            if not again or not replicas.has_other(tried):
                raise
            continue
        except BaseException:
            run.close()
            raise
        replica.health.succeeded()
        return replica, run, answer
