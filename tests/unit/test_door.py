import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from gateway.app import translate_errors
from gateway.context import RequestContext
from gateway.door import CHAT_PATH, OPEN_PATHS, Door
from gateway.errors import ApiError, ErrorKind
from gateway.http import ClientGone, send_bytes
from gateway.logs import REQUEST_ID
from gateway.tenants import key_digest, load_tenants
from retrieval.types import NotFound

TENANTS = load_tenants(f"acme:{key_digest('right')},birch:{key_digest('other')}", None, b"secret")
KEYLESS = load_tenants("", None, b"secret")

App = Callable[[Any, Any, Any], Awaitable[None]]


class Behind:
    """What stands behind the door: notes who came through, and answers or raises."""

    def __init__(self, raises: BaseException | None = None, after_start: bool = False) -> None:
        self.contexts: list[RequestContext] = []
        self.raises = raises
        self.after_start = after_start

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer(send, scope["state"]["context"])

    async def chat(self, scope: Any, receive: Any, send: Any, context: RequestContext) -> None:
        await self._answer(send, context)

    async def _answer(self, send: Any, context: RequestContext) -> None:
        self.contexts.append(context)
        assert REQUEST_ID.get() == context.request_id
        if self.after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.raises is not None:
            raise self.raises
        await send_bytes(send, 200, b"through", [], b"text/plain")


class Answer:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")

    @property
    def error(self) -> dict[str, Any]:
        error = orjson.loads(self.body)["error"]
        assert isinstance(error, dict)
        return error


async def knock(behind: Behind, path: str, method: str = "GET", tenants: Any = TENANTS, **headers: str) -> Answer:
    answer = Answer()
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": named}
    await Door(behind.app, behind.chat, tenants)(scope, receive, answer.send)
    assert REQUEST_ID.get() is None
    return answer


async def receive() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_open_paths_need_no_key(path: str) -> None:
    assert (await knock(Behind(), path)).body == b"through"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "//",
        "/healthz/",
        "//healthz",
        "/Healthz",
        "/healthz\x00",
        "/healthz/../v1/files",
        "/console",
        "/metrics",
        CHAT_PATH,
    ],
)
async def test_h1_every_other_path_needs_one(path: str) -> None:
    behind = Behind()
    answer = await knock(behind, path, method="POST")
    assert (answer.status, behind.contexts) == (401, [])
    assert answer.headers[b"www-authenticate"] == b"Bearer"


async def test_a_key_leads_to_its_tenant_and_that_tenants_salt() -> None:
    behind = Behind()
    for path in ("/v1/files", CHAT_PATH):
        await knock(behind, path, "POST", authorization="Bearer right")
        await knock(behind, path, "POST", authorization="bearer  other ")
    assert [context.tenant for context in behind.contexts] == ["acme", "birch"] * 2
    salts = [context.cache_salt for context in behind.contexts]
    assert salts[0] == salts[2] != salts[1] == salts[3]


async def test_without_keys_everybody_is_one_tenant() -> None:
    behind = Behind()
    await knock(behind, "/v1/files", tenants=KEYLESS)
    await knock(behind, "/v1/files", tenants=KEYLESS, authorization="Bearer whatever")
    assert {context.tenant for context in behind.contexts} == {"default"}


@pytest.mark.parametrize(
    "key",
    ["Bearer ", "Bearer", "", "Basic right", "right", "Bearer\tright", "Bearer right right", "Bearer " + "k" * 2**20],
)
async def test_h3_what_is_no_known_key_gets_401(key: str) -> None:
    answer = await knock(Behind(), "/v1/files", authorization=key)
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert "right" not in answer.error["message"]


async def test_chat_takes_post_alone() -> None:
    behind = Behind()
    answer = await knock(behind, CHAT_PATH, "GET", authorization="Bearer right")
    assert (answer.status, behind.contexts) == (405, [])


@pytest.mark.parametrize("given", ["abc-1.2_3", "x" * 128])
async def test_a_request_id_is_echoed(given: str) -> None:
    behind = Behind()
    answer = await knock(behind, "/healthz", x_request_id=given)
    assert answer.headers[b"x-request-id"] == given.encode()
    assert behind.contexts[0].request_id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\nb", "é", "<script>"])
async def test_a_request_id_that_could_forge_a_line_is_replaced(given: str) -> None:
    answer = await knock(Behind(), "/healthz", x_request_id=given)
    assert answer.headers[b"x-request-id"].startswith(b"req-")


async def test_every_refusal_carries_the_request_id() -> None:
    answer = await knock(Behind(), "/v1/files", x_request_id="mine")
    assert (answer.status, answer.headers[b"x-request-id"]) == (401, b"mine")


async def test_errors_leave_in_openais_shape() -> None:
    for error, status in (
        (ApiError(ErrorKind.CONFLICT, "taken", param="name", code="c"), 409),
        (NotFound("file", "f1"), 404),
    ):
        answer = await knock(Behind(error), CHAT_PATH, "POST", authorization="Bearer right")
        assert answer.status == status
        assert set(answer.error) == {"message", "type", "param", "code"}


async def test_h4_an_unforeseen_error_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answer = await knock(Behind(RuntimeError("inner secret")), CHAT_PATH, "POST", authorization="Bearer right")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert "a request failed" in caplog.text


async def test_a_client_that_left_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer = await knock(Behind(ClientGone()), "/v1/files", authorization="Bearer right")
    assert (answer.status, caplog.text) == (0, "")


async def test_an_error_after_the_answer_began_ends_the_connection() -> None:
    with pytest.raises(RuntimeError):
        await knock(Behind(RuntimeError("late"), after_start=True), "/v1/files", authorization="Bearer right")


async def test_h4_an_unforeseen_error_of_a_route_has_openais_shape_and_keeps_the_connection() -> None:
    app = FastAPI()
    translate_errors(app)

    @app.get("/v1/files")
    async def fail() -> None:
        raise RuntimeError("inner secret")

    async def chat(scope: Any, receive: Any, send: Any, context: RequestContext) -> None: ...

    answer = Answer()
    scope = {
        "type": "http",
        "path": "/v1/files",
        "method": "GET",
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }
    await Door(app, chat, KEYLESS)(scope, receive, answer.send)
    assert answer.status == 500
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert b"secret" not in answer.body
