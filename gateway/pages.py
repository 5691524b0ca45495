"""Keeps foreign web pages out of a gateway without keys, whose only guard is that it listens on loopback."""

import re

from gateway.errors import ApiError, ErrorKind
from gateway.http import Scope, header

_LOCAL = re.compile(r"(?:https?://)?(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


def refuse_foreign_pages(scope: Scope) -> None:
    """Raises ApiError (403) for a request that a page of another site makes a browser send.

    Such a page either shows in `Origin`, or has let its own name resolve to this machine, which shows in `Host`.
    """
    for name in (b"origin", b"host"):
        value = header(scope, name)
        if value is not None and not _LOCAL.fullmatch(value.decode("latin-1")):
            raise ApiError(
                ErrorKind.FORBIDDEN,
                f"A gateway without API keys answers this machine alone, and the {name.decode().title()} header "
                "names another. Use http://127.0.0.1, or set API keys, or start it with --no-auth.",
                code="foreign_page",
            )
