"""What a request carries with it from the door to the log line."""

import os
import re
from dataclasses import dataclass

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`started_s` is the monotonic clock when the request arrived; deadlines and timings count from it.

    `budget_header` is `X-TTFT-Budget-Ms` as it came.
    """

    request_id: str
    tenant: str
    cache_salt: str
    started_s: float
    budget_header: bytes | None = None


def request_id_from(header: bytes | None) -> str:
    """The client's id when it is 1 to 128 characters of `A-Za-z0-9._-`, else a new one."""
    if header is not None and _REQUEST_ID.fullmatch(header):
        return header.decode()
    return f"req-{os.urandom(12).hex()}"
