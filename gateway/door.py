"""The outermost ASGI layer: request ids, authentication, the hot path, and errors in OpenAI's shape."""

import logging
import time
from collections.abc import Awaitable, Callable

from gateway.context import RequestContext, request_id_from
from gateway.errors import ApiError, ErrorKind, translate
from gateway.http import AsgiApp, AsgiMessage, ClientGone, Receive, Scope, Send, header, send_error
from gateway.logs import REQUEST_ID
from gateway.pages import refuse_foreign_pages
from gateway.tenants import SINGLE_TENANT, Tenants
from retrieval.types import RetrievalError

log = logging.getLogger("headstart")

CHAT_PATH = "/v1/chat/completions"
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/console/console.js", "/console/console.css", "/favicon.ico"})
"""The only paths that need no key, compared with the decoded path that routing uses, whole."""

ChatApp = Callable[[Scope, Receive, Send, RequestContext], Awaitable[None]]


class Door:
    """`app` answers everything but chat, which goes to `chat` directly.

    `open_door` says that the operator wants callers from anywhere although there are no keys.
    """

    def __init__(self, app: AsgiApp, chat: ChatApp, tenants: Tenants, *, open_door: bool = False) -> None:
        self._app = app
        self._chat = chat
        self._tenants = tenants
        self._guards_pages = tenants.keyless and not open_door
        self._salts: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_from(header(scope, b"x-request-id"))
        identity = (b"x-request-id", request_id.encode())
        token = REQUEST_ID.set(request_id)
        begun = ended = False

        async def send_identified(message: AsgiMessage) -> None:
            nonlocal begun, ended
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), identity]
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        try:
            context = self._admit(scope, request_id)
            if scope["path"] == CHAT_PATH:
                if scope["method"] != "POST":
                    raise ApiError(ErrorKind.METHOD, f"{CHAT_PATH} takes POST.", code="method_not_allowed")
                await self._chat(scope, receive, send, context)
            else:
                scope.setdefault("state", {})["context"] = context
                await self._app(scope, receive, send_identified)
        except ClientGone:
            log.debug("the client left before its request was read")
        except (ApiError, RetrievalError) as error:
            if begun:
                raise
            refusal = error if isinstance(error, ApiError) else translate(error)
            await send_error(send, refusal, [identity])
        except Exception:
            log.exception("a request failed")
            if ended:
                # The framework answers what it did not foresee, and then raises it all the same.
                return
            if begun:
                raise
            await send_error(send, ApiError(ErrorKind.INTERNAL, "The gateway failed. See its log."), [identity])
        finally:
            REQUEST_ID.reset(token)

    def _admit(self, scope: Scope, request_id: str) -> RequestContext:
        if self._guards_pages:
            refuse_foreign_pages(scope)
        if scope["path"] in OPEN_PATHS:
            tenant = SINGLE_TENANT
        else:
            tenant = self._tenants.authenticate(header(scope, b"authorization"))
        salt = self._salts.get(tenant)
        if salt is None:
            # Bounded by the number of keys.
            salt = self._salts[tenant] = self._tenants.cache_salt(tenant)
        return RequestContext(request_id, tenant, salt, time.monotonic(), header(scope, b"x-ttft-budget-ms"))
