"""A request on its way to an engine, and to another one where the first is gone before it has answered."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.backends.sse import split_events
from gateway.backends.vllm import EngineStream
from gateway.errors import ApiError, ErrorKind
from gateway.payload import EngineRequest
from gateway.relay import first_place, reported_error
from gateway.replica import Replica, Waiting
from gateway.replicas import Replicas
from gateway.runs import Run, Work

Answer = TypeVar("Answer")

UNREACHABLE = "engine_unreachable"
CUT_OFF = "engine_cut_off"
SILENT = "engine_silent"
BUSY = "engine_busy"
FAILED = "engine_failed"
ERROR = "engine_error"
REFUSED = "engine_refused"

BROKEN = (CUT_OFF, FAILED, ERROR)
MOST_BROKEN = 2
"""A request that breaks the engines it meets must not break them all."""


async def begin(replica: Replica, request: EngineRequest) -> EngineStream:
    """A streamed answer with its first bytes. Raises ApiError, also where these tell that the engine failed.

    An error that is the request's own comes through the stream: no other engine would do better.
    """
    stream = await replica.backend.stream(request.to(replica.facts))
    if first_place(stream.first, b'"error"') < 0:
        return stream
    failure = next(filter(None, map(reported_error, split_events(stream.first)[:1])), None)
    if failure is None or (failure.engine_status or 500) < 500:
        return stream
    stream.close()
    raise failure


async def send(
    replicas: Replicas,
    work: Work,
    salt: str,
    call: Callable[[Replica, Run], Awaitable[Answer]],
    waiting: Waiting | None = None,
) -> tuple[Replica, Run, Answer]:
    """`call` sends the request and returns with its first bytes, or with a whole answer. Raises ApiError.

    Until then nothing has reached the client, so a request whose engine is gone, at its limit or without the model
    goes to another replica, once to each. Whoever got the run closes it.
    """
    tried: set[str] = set()
    broken = 0
    while True:
        replica, run = await replicas.enter(work, salt, tried, waiting)
        try:
            answer = await call(replica, run)
        except ApiError as error:
            run.close()
            if error.code in (UNREACHABLE, CUT_OFF, SILENT):
                replica.failed(error.message)
            elif error.code in (FAILED, ERROR):
                replica.health.faulted(error.message)
            # The model was checked before: since the last probe the engine serves another one.
            other_model = error.code == REFUSED and error.kind is ErrorKind.NOT_FOUND
            if other_model:
                replica.probe_soon()
            broken += error.code in BROKEN
            tried.add(replica.name)
            again = other_model or error.code in (UNREACHABLE, BUSY)
            again |= error.code in BROKEN and broken < MOST_BROKEN
            if not again or not replicas.has_other(tried):
                raise
            continue
        except BaseException:
            run.close()
            raise
        replica.health.succeeded()
        return replica, run, answer
