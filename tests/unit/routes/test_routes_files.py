from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.requests import Request

from gateway.errors import ApiError, ErrorKind
from gateway.http import ClientGone
from gateway.routes.dependencies import BodyLimits
from gateway.routes.uploads import FORM_BYTES, read_upload

MAX_UPLOAD_BYTES = 1 << 20


def upload(client: TestClient, name: str = "tides.txt", content: bytes = b"High water at noon.") -> dict[str, Any]:
    response = client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "assistants"})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_uploaded_file_has_openais_shape(client: TestClient) -> None:
    made = upload(client)
    assert made["id"].startswith("file-")
    assert (made["object"], made["bytes"], made["filename"]) == ("file", 19, "tides.txt")
    assert (made["purpose"], made["status"], made["expires_at"]) == ("assistants", "processed", None)
    assert client.get(f"/v1/files/{made['id']}").json() == made


def test_content_comes_back_byte_for_byte_and_never_as_a_page(client: TestClient) -> None:
    content = b"<script>alert(1)</script>\x00\xff" * 50_000
    content = content[:MAX_UPLOAD_BYTES]
    made = upload(client, "page.html", content)
    response = client.get(f"/v1/files/{made['id']}/content")
    assert response.content == content
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-disposition"].startswith("attachment")


def test_a_deleted_file_is_gone(client: TestClient) -> None:
    made = upload(client)
    assert client.delete(f"/v1/files/{made['id']}").json() == {"id": made["id"], "object": "file", "deleted": True}
    for path in ("", "/content"):
        assert made["id"] in error_of(client.get(f"/v1/files/{made['id']}{path}"), 404)["message"]
    assert made["id"] in error_of(client.delete(f"/v1/files/{made['id']}"), 404)["message"]


def test_lists_page_by_cursor_in_both_orders(client: TestClient) -> None:
    ids = [upload(client, f"{n}.txt")["id"] for n in range(5)]
    page = client.get("/v1/files?limit=2").json()
    assert [file["id"] for file in page["data"]] == [ids[4], ids[3]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[4], ids[3], True)
    page = client.get(f"/v1/files?limit=4&order=asc&after={ids[1]}").json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[2:], False)


def test_lists_can_be_narrowed_to_a_purpose(client: TestClient) -> None:
    upload(client)
    assert client.get("/v1/files?purpose=assistants").json()["data"]
    empty = client.get("/v1/files?purpose=batch").json()
    assert (empty["data"], empty["first_id"], empty["last_id"]) == ([], None, None)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "colour=red"])
def test_a_wrong_list_parameter_is_named(client: TestClient, query: str) -> None:
    assert error_of(client.get(f"/v1/files?{query}"), 400)["param"].endswith(query.partition("=")[0])


def test_e1_an_empty_file_is_refused_and_the_next_is_taken(client: TestClient) -> None:
    response = client.post("/v1/files", files={"file": ("a.txt", b"")}, data={"purpose": "assistants"})
    assert error_of(response, 400)["code"] == "empty_file"
    assert upload(client)["bytes"] == 19


def test_e10_a_file_over_the_limit_is_refused_by_its_declared_length(client: TestClient) -> None:
    content = b"x" * (MAX_UPLOAD_BYTES + FORM_BYTES + 1)
    response = client.post("/v1/files", files={"file": ("a.txt", content)}, data={"purpose": "assistants"})
    error = error_of(response, 413)
    assert str(MAX_UPLOAD_BYTES) in error["message"]
    assert error["param"] == "file"


def test_e10_a_file_of_one_byte_over_the_limit_leaves_nothing_behind(client: TestClient, tmp_path: Path) -> None:
    content = b"x" * (MAX_UPLOAD_BYTES + 1)
    response = client.post("/v1/files", files={"file": ("a.txt", content)}, data={"purpose": "assistants"})
    assert error_of(response, 413)["code"] == "file_too_large"
    assert upload(client, "b.txt", content[:-1])["bytes"] == MAX_UPLOAD_BYTES
    assert len(list((tmp_path / "files").iterdir())) == 1


Messages = list[dict[str, Any]]


def request_of(messages: Messages, headers: dict[bytes, bytes]) -> tuple[Request, Callable[[], int]]:
    """A request that is fed with `messages`, and how many of them were taken."""
    left = iter(messages)
    taken = 0

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return next(left)

    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": list(headers.items())}
    return Request(scope, receive), lambda: taken


FORM = {b"content-type": b"multipart/form-data; boundary=cut"}
PART = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'


async def test_e10_a_lying_length_is_found_out_while_the_upload_comes() -> None:
    piece = {"type": "http.request", "body": b"x" * 65_536, "more_body": True}
    endless = [{"type": "http.request", "body": PART, "more_body": True}, *[piece] * 1000]
    request, taken = request_of(endless, {**FORM, b"content-length": b"100"})
    with pytest.raises(ApiError) as refused:
        await read_upload(request, BodyLimits(1024, 1 << 20, 5.0))
    assert refused.value.kind is ErrorKind.TOO_LARGE
    assert taken() <= 20, "reading went on after the limit"


async def test_a_client_that_leaves_during_its_upload_is_noticed() -> None:
    messages: Messages = [
        {"type": "http.request", "body": PART, "more_body": True},
        {"type": "http.disconnect"},
    ]
    request, _ = request_of(messages, FORM)
    with pytest.raises(ClientGone):
        await read_upload(request, BodyLimits(1024, 1 << 20, 5.0))


async def test_a_form_that_is_cut_into_single_bytes_arrives_whole() -> None:
    body = PART + b"line one\r\n--cu\r\nline two\r\n--cut--\r\n"
    messages = [{"type": "http.request", "body": bytes([byte]), "more_body": True} for byte in body]
    request, _ = request_of([*messages, {"type": "http.request", "body": b""}], FORM)
    with await read_upload(request, BodyLimits(1024, 1 << 20, 5.0)) as whole:
        assert (whole.filename, whole.content.read()) == ("a.txt", b"line one\r\n--cu\r\nline two")


@pytest.mark.parametrize(
    ("content_type", "body", "param"),
    [
        ("application/json", b"{}", "file"),
        ("multipart/form-data", b"x", "file"),
        ("multipart/form-data; boundary=cut", b"", "file"),
        ("multipart/form-data; boundary=cut", b"nonsense", "file"),
        ("multipart/form-data; boundary=cut", PART + b"never ends", "file"),
        ("multipart/form-data; boundary=cut", PART + b"x\r\n--cut--\r\n", "purpose"),
        (
            "multipart/form-data; boundary=cut",
            b'--cut\r\nContent-Disposition: form-data; name="file"\r\n\r\ntext\r\n--cut--\r\n',
            "file",
        ),
        (
            "multipart/form-data; boundary=cut",
            PART + b'x\r\n--cut\r\nContent-Disposition: form-data; name="colour"\r\n\r\nred\r\n--cut--\r\n',
            "colour",
        ),
        ("multipart/form-data; boundary=cut", PART + b"x\r\n" + PART + b"y\r\n--cut--\r\n", "file"),
    ],
)
def test_a_malformed_upload_names_the_field(client: TestClient, content_type: str, body: bytes, param: str) -> None:
    response = client.post("/v1/files", content=body, headers={"content-type": content_type})
    assert error_of(response, 400)["param"] == param


def test_an_unknown_purpose_is_refused(client: TestClient) -> None:
    response = client.post("/v1/files", files={"file": ("a.txt", b"x")}, data={"purpose": "fun"})
    assert error_of(response, 400)["param"] == "purpose"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("..", "file"),
        ("<img src=x onerror=alert(1)>.md", "<img src=x onerror=alert(1)>.md"),
        ("thực đơn 메뉴 เมนู.txt", "thực đơn 메뉴 เมนู.txt"),
        ("báo-cáo.txt", "báo-cáo.txt"),
    ],
)
def test_h9_names_are_kept_for_display_only(client: TestClient, name: str, kept: str) -> None:
    assert upload(client, name)["filename"] == kept


def test_h9_control_characters_in_a_name_are_dropped(client: TestClient) -> None:
    body = PART.replace(b"a.txt", b"a\x00\x1b[31mb.txt") + b"x\r\n"
    body += b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n--cut--\r\n'
    response = client.post("/v1/files", content=body, headers={"content-type": FORM[b"content-type"].decode()})
    assert response.json()["filename"] == "a[31mb.txt"


def test_h9_a_name_of_5000_characters_is_cut_and_keeps_its_ending(client: TestClient) -> None:
    name = upload(client, "ệ" * 5000 + ".pdf")["filename"]
    assert len(name) == 255
    assert name.endswith("ệ.pdf")


def test_f3_another_tenants_file_does_not_exist(client: TestClient, other_client: TestClient) -> None:
    made = upload(client)
    path = f"/v1/files/{made['id']}"
    for response in (
        other_client.get(path),
        other_client.get(f"{path}/content"),
        other_client.delete(path),
        other_client.get(f"/v1/files?after={made['id']}"),
        other_client.get(f"/v1/files?before={made['id']}"),
    ):
        assert made["id"] in error_of(response, 404)["message"]
    assert other_client.get("/v1/files").json()["data"] == []
    assert client.get(path).json() == made


def test_a_request_without_a_key_is_refused(documents_app: Any) -> None:
    assert TestClient(documents_app).get("/v1/files").status_code == 401
