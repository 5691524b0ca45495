"""The recent requests, for `headstart calls`, the log and the metrics: figures and names, never text."""

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from gateway.budgets import BUSY, QUEUE_FULL, TOO_SMALL
from gateway.metrics import Metrics
from gateway.timings import Timings

log = logging.getLogger("headstart.calls")

REFUSED_FOR_TIME = frozenset({TOO_SMALL, BUSY, QUEUE_FULL})


@dataclass(frozen=True, slots=True)
class Call:
    """One chat request that has ended. `status` is the HTTP status; 499 when the client left before the end."""

    request_id: str
    created: float
    tenant: str
    model: str
    stream: bool
    status: int
    stores: tuple[str, ...]
    timings: Timings | None
    error: str | None = None

    def wire(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "created": self.created,
            "tenant": self.tenant,
            "model": self.model,
            "stream": self.stream,
            "status": self.status,
            "stores": list(self.stores),
            "error": self.error,
            "timings": self.timings.wire() if self.timings else None,
        }


class Calls:
    """Keeps the last `kept` calls of all tenants together; the oldest leaves. A tenant sees its own alone."""

    def __init__(self, kept: int, metrics: Metrics) -> None:
        self._calls: deque[Call] = deque(maxlen=kept)
        self._metrics = metrics

    def add(self, call: Call) -> None:
        self._calls.append(call)
        refused = call.error in REFUSED_FOR_TIME
        self._metrics.observe_call(call.status, bool(call.stores), call.timings, refused=refused)
        if log.isEnabledFor(logging.INFO):
            log.info("chat %s", call.status, extra={"fields": _fields(call)})

    def recent(self, tenant: str, limit: int) -> list[Call]:
        """The tenant's calls, newest first."""
        found: list[Call] = []
        for call in reversed(self._calls):
            if len(found) == limit:
                break
            if call.tenant == tenant:
                found.append(call)
        return found


def _fields(call: Call) -> dict[str, Any]:
    fields: dict[str, Any] = {"request_id": call.request_id, "tenant": call.tenant, "stream": call.stream}
    if call.error:
        fields["error"] = call.error
    if call.timings:
        fields.update({name: value for name, value in call.timings.wire().items() if value is not None})
    return fields


def now() -> float:
    """Unix time, for the record only; durations use the monotonic clock."""
    return time.time()
