from typing import Any

import pytest
from fastapi.testclient import TestClient

from retrieval.records import FileError, FileStatus


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def ok(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def new_file(client: TestClient, name: str = "a.txt", content: bytes = b"text") -> str:
    return str(ok(client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "assistants"}))["id"])


def new_store(client: TestClient, **fields: Any) -> str:
    return str(ok(client.post("/v1/vector_stores", json=fields))["id"])


@pytest.fixture
def store(client: TestClient) -> str:
    return new_store(client, name="handbook")


@pytest.fixture
def filled(client: TestClient, store: str, ingestion: Any) -> tuple[str, str]:
    """A store with one ingested file: (store id, file id)."""
    file_id = new_file(client, "ferry.md")
    ok(client.post(f"/v1/vector_stores/{store}/files", json={"file_id": file_id, "attributes": {"year": 2026}}))
    ingestion.complete(ingestion.submitted[-1], "The ferry leaves at nine.", "The harbour closes at ten.")
    return store, file_id


def test_a_store_has_openais_shape(client: TestClient) -> None:
    made = ok(client.post("/v1/vector_stores", json={"name": "handbook", "metadata": {"team": "deck"}}))
    assert (made["object"], made["name"], made["metadata"]) == ("vector_store", "handbook", {"team": "deck"})
    assert (made["status"], made["usage_bytes"], made["file_counts"]["total"]) == ("completed", 0, 0)
    assert (made["expires_after"], made["expires_at"]) == (None, None)
    assert ok(client.get(f"/v1/vector_stores/{made['id']}")) == made


def test_a_store_can_be_made_with_no_body_at_all(client: TestClient) -> None:
    assert ok(client.post("/v1/vector_stores"))["name"] == ""


def test_an_expiry_is_kept_told_and_dropped(client: TestClient) -> None:
    wished = {"anchor": "last_active_at", "days": 7}
    made = ok(client.post("/v1/vector_stores", json={"expires_after": wished}))
    assert made["expires_after"] == wished
    assert made["expires_at"] == made["last_active_at"] + 7 * 86_400
    path = f"/v1/vector_stores/{made['id']}"
    assert ok(client.post(path, json={"name": "new"}))["expires_after"] == wished
    changed = ok(client.post(path, json={"expires_after": None}))
    assert (changed["name"], changed["expires_after"]) == ("new", None)


def test_an_update_leaves_what_it_does_not_name(client: TestClient) -> None:
    store = new_store(client, name="a", metadata={"k": "v"})
    assert ok(client.post(f"/v1/vector_stores/{store}", json={"name": "b"}))["metadata"] == {"k": "v"}
    changed = ok(client.post(f"/v1/vector_stores/{store}", json={"metadata": {}}))
    assert (changed["name"], changed["metadata"]) == ("b", {})


def test_a_deleted_store_is_gone_and_its_files_stay(client: TestClient, filled: tuple[str, str]) -> None:
    store, file_id = filled
    deleted = ok(client.delete(f"/v1/vector_stores/{store}"))
    assert deleted == {"id": store, "object": "vector_store.deleted", "deleted": True}
    assert store in error_of(client.get(f"/v1/vector_stores/{store}"), 404)["message"]
    ok(client.get(f"/v1/files/{file_id}"))


def test_stores_page_by_cursor(client: TestClient) -> None:
    ids = [new_store(client, name=str(n)) for n in range(3)]
    page = ok(client.get("/v1/vector_stores?limit=2"))
    assert ([store["id"] for store in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    rest = ok(client.get(f"/v1/vector_stores?limit=2&after={page['last_id']}"))
    assert ([store["id"] for store in rest["data"]], rest["has_more"]) == ([ids[0]], False)


def test_an_unknown_file_leaves_no_half_made_store(client: TestClient, ingestion: Any) -> None:
    known = new_file(client)
    response = client.post("/v1/vector_stores", json={"file_ids": [known, "file-unknown"]})
    assert "file-unknown" in error_of(response, 404)["message"]
    assert ok(client.get("/v1/vector_stores"))["data"] == []
    assert ingestion.submitted == []


def test_a_store_made_with_files_ingests_them(client: TestClient, ingestion: Any) -> None:
    files = [new_file(client, f"{n}.txt") for n in range(2)]
    made = ok(client.post("/v1/vector_stores", json={"file_ids": files}))
    assert (made["status"], made["file_counts"]["in_progress"]) == ("in_progress", 2)
    assert [file.file_id for file in ingestion.submitted] == files


def test_a_file_goes_from_in_progress_to_completed(client: TestClient, store: str, ingestion: Any) -> None:
    file_id = new_file(client)
    attached = ok(client.post(f"/v1/vector_stores/{store}/files", json={"file_id": file_id}))
    assert (attached["id"], attached["vector_store_id"]) == (file_id, store)
    assert (attached["object"], attached["status"]) == ("vector_store.file", "in_progress")
    assert (attached["last_error"], attached["attributes"]) == (None, {})
    sizes = {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 20}
    assert attached["chunking_strategy"] == {"type": "static", "static": sizes}
    ingestion.complete(ingestion.submitted[0], "text")
    done = ok(client.get(f"/v1/vector_stores/{store}/files/{file_id}"))
    assert done["status"] == "completed"
    assert done["usage_bytes"] > 0


def test_e2_a_failed_file_says_why_and_is_ingested_when_attached_again(
    client: TestClient, store: str, ingestion: Any
) -> None:
    file_id = new_file(client)
    path = f"/v1/vector_stores/{store}/files"
    ok(client.post(path, json={"file_id": file_id}))
    ingestion.database.store_files.fail(ingestion.submitted[0], FileError("invalid_file", "It cannot be read."))
    failed = ok(client.get(f"{path}/{file_id}"))
    assert failed["status"] == "failed"
    assert failed["last_error"] == {"code": "invalid_file", "message": "It cannot be read."}
    assert ok(client.post(path, json={"file_id": file_id}))["status"] == "in_progress"
    assert len(ingestion.submitted) == 2


def test_e3_a_completed_file_attached_again_is_not_ingested_twice(
    client: TestClient, filled: tuple[str, str], ingestion: Any
) -> None:
    store, file_id = filled
    again = ok(
        client.post(f"/v1/vector_stores/{store}/files", json={"file_id": file_id, "attributes": {"year": 2027}})
    )
    assert (again["status"], again["attributes"]) == ("completed", {"year": 2027})
    assert len(ingestion.submitted) == 1


def test_files_are_listed_by_status(client: TestClient, filled: tuple[str, str]) -> None:
    store, file_id = filled
    waiting = new_file(client)
    path = f"/v1/vector_stores/{store}/files"
    ok(client.post(path, json={"file_id": waiting}))
    assert [file["id"] for file in ok(client.get(path))["data"]] == [waiting, file_id]
    assert [file["id"] for file in ok(client.get(f"{path}?filter=completed"))["data"]] == [file_id]
    assert [file["id"] for file in ok(client.get(f"{path}?filter=failed"))["data"]] == []
    assert error_of(client.get(f"{path}?filter=done"), 400)["param"].endswith("filter")


def test_attributes_are_replaced_and_files_leave_the_store(client: TestClient, filled: tuple[str, str]) -> None:
    store, file_id = filled
    path = f"/v1/vector_stores/{store}/files/{file_id}"
    changed = ok(client.post(path, json={"attributes": {"draft": True, "size": 1.5, "lang": "vi"}}))
    assert changed["attributes"] == {"draft": True, "size": 1.5, "lang": "vi"}
    deleted = ok(client.delete(path))
    assert deleted == {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}
    assert file_id in error_of(client.get(path), 404)["message"]
    ok(client.get(f"/v1/files/{file_id}"))


def test_search_gives_openais_page(client: TestClient, filled: tuple[str, str]) -> None:
    store, file_id = filled
    page = ok(client.post(f"/v1/vector_stores/{store}/search", json={"query": "ferry leaves"}))
    assert page["object"] == "vector_store.search_results.page"
    assert (page["search_query"], page["has_more"], page["next_page"]) == (["ferry leaves"], False, None)
    (result,) = page["data"]
    assert (result["file_id"], result["filename"], result["score"]) == (file_id, "ferry.md", 1.0)
    assert result["content"] == [{"type": "text", "text": "The ferry leaves at nine."}]
    assert result["attributes"] == {"year": 2026}


def test_search_takes_several_queries_and_gives_each_chunk_once(client: TestClient, filled: tuple[str, str]) -> None:
    path = f"/v1/vector_stores/{filled[0]}/search"
    page = ok(client.post(path, json={"query": ["ferry", "harbour closes", "ferry today"]}))
    assert page["search_query"] == ["ferry", "harbour closes", "ferry today"]
    assert [result["score"] for result in page["data"]] == [1.0, 1.0]
    assert len(ok(client.post(path, json={"query": ["ferry", "harbour"], "max_num_results": 1}))["data"]) == 1


def test_search_drops_what_scores_below_the_threshold(client: TestClient, filled: tuple[str, str]) -> None:
    options = {"ranker": "auto", "score_threshold": 0.9}
    body = {"query": "ferry tomorrow", "ranking_options": options, "rewrite_query": False}
    assert ok(client.post(f"/v1/vector_stores/{filled[0]}/search", json=body))["data"] == []


def test_search_hands_filters_on(client: TestClient, filled: tuple[str, str], search: Any) -> None:
    year = {"type": "gte", "key": "year", "value": 2020}
    filters = {"type": "or", "filters": [year, {"type": "in", "key": "lang", "value": ["vi", "ko"]}]}
    ok(client.post(f"/v1/vector_stores/{filled[0]}/search", json={"query": "ferry", "filters": filters}))
    handed = search.queries[-1].filters
    assert (handed.type, [inner.type for inner in handed.filters]) == ("or", ["gte", "in"])
    assert handed.filters[1].value == ("vi", "ko")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"name": 7}, "name"),
        ("", {"colour": "red"}, "colour"),
        ("", {"metadata": {"k": 1}}, "metadata.k"),
        ("", {"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
        ("", {"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after.anchor"),
        ("", {"file_ids": "file-1"}, "file_ids"),
        ("/STORE/files", {}, "file_id"),
        ("/STORE/files", {"file_id": "f", "attributes": {"k": ["v"]}}, "attributes.k"),
        ("/STORE/files", {"file_id": "f", "attributes": {"k": "v" * 513}}, "attributes.k"),
        ("/STORE/files", {"file_id": "f", "chunking_strategy": {"type": "magic"}}, "chunking_strategy.type"),
        (
            "/STORE/files",
            {
                "file_id": "f",
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 5000, "chunk_overlap_tokens": 0},
                },
            },
            "chunking_strategy.static.max_chunk_size_tokens",
        ),
        (
            "/STORE/files",
            {
                "file_id": "f",
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51},
                },
            },
            "chunking_strategy.static",
        ),
        ("/STORE/file_batches", {"file_ids": []}, "file_ids"),
        ("/STORE/search", {}, "query"),
        ("/STORE/search", {"query": "  "}, "query.0"),
        ("/STORE/search", {"query": 5}, "query"),
        ("/STORE/search", {"query": "x", "max_num_results": 51}, "max_num_results"),
        (
            "/STORE/search",
            {"query": "x", "ranking_options": {"score_threshold": 2}},
            "ranking_options.score_threshold",
        ),
        ("/STORE/search", {"query": "x", "filters": {"type": "in", "key": "k", "value": "v"}}, "filters"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(
    client: TestClient, store: str, path: str, body: dict[str, Any], param: str
) -> None:
    response = client.post(f"/v1/vector_stores{path.replace('STORE', store)}", json=body)
    error = error_of(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b'{"name": NaN}',
        b'{"name": "\\ud800"}',
        b'{"metadata": {"\\udfff": "x"}}',
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
    ],
    ids=["cut", "list", "null", "nan", "surrogate", "surrogate key", "deep"],
)
def test_h7_a_malformed_body_is_a_clear_400(client: TestClient, body: bytes) -> None:
    response = client.post("/v1/vector_stores", content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["message"]


def test_h7_a_body_over_the_limit_is_a_413(client: TestClient) -> None:
    body = b'{"name": "' + b"x" * (1 << 16) + b'"}'
    assert error_of(client.post("/v1/vector_stores", content=body), 413)["code"] == "body_too_large"


def test_whole_numbers_beyond_64_bits_are_refused(client: TestClient, store: str) -> None:
    body = b'{"file_id": "f", "attributes": {"k": 18446744073709551615}}'
    error = error_of(client.post(f"/v1/vector_stores/{store}/files", content=body), 400)
    assert error["param"].startswith("attributes.k")


@pytest.mark.parametrize("name", ["", "x", "thực đơn", "a\x00b", "<b>bold</b>", "🛟" * 256])
def test_any_name_of_a_store_comes_back_as_it_was(client: TestClient, name: str) -> None:
    assert ok(client.get(f"/v1/vector_stores/{new_store(client, name=name)}"))["name"] == name


def test_a_batch_counts_its_files(client: TestClient, store: str, ingestion: Any) -> None:
    files = [new_file(client, f"{n}.txt") for n in range(3)]
    path = f"/v1/vector_stores/{store}/file_batches"
    batch = ok(client.post(path, json={"file_ids": files, "attributes": {"lang": "en"}}))
    assert (batch["object"], batch["status"]) == ("vector_store.files_batch", "in_progress")
    assert batch["file_counts"] == {"in_progress": 3, "completed": 0, "failed": 0, "cancelled": 0, "total": 3}
    for submitted in ingestion.submitted[:2]:
        ingestion.complete(submitted, "text")
    ingestion.database.store_files.fail(ingestion.submitted[2], FileError("invalid_file", "broken"))
    done = ok(client.get(f"{path}/{batch['id']}"))
    assert (done["status"], done["file_counts"]["completed"], done["file_counts"]["failed"]) == ("completed", 2, 1)
    listed = ok(client.get(f"{path}/{batch['id']}/files?order=asc&limit=2"))
    assert ([file["id"] for file in listed["data"]], listed["has_more"]) == (files[:2], True)
    rest = ok(client.get(f"{path}/{batch['id']}/files?order=asc&limit=2&after={listed['last_id']}"))
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (files[2:], False)
    assert [file["id"] for file in ok(client.get(f"{path}/{batch['id']}/files?filter=failed"))["data"]] == files[2:]


def test_a_batch_with_its_own_fields_per_file_can_be_cancelled(client: TestClient, store: str) -> None:
    files = [{"file_id": new_file(client, f"{n}.txt"), "attributes": {"n": n}} for n in range(2)]
    path = f"/v1/vector_stores/{store}/file_batches"
    batch = ok(client.post(path, json={"files": files}))
    cancelled = ok(client.post(f"{path}/{batch['id']}/cancel"))
    assert (cancelled["status"], cancelled["file_counts"]["cancelled"]) == ("cancelled", 2)
    second = ok(client.get(f"/v1/vector_stores/{store}/files/{files[1]['file_id']}"))
    assert (second["status"], second["attributes"]) == (FileStatus.CANCELLED, {"n": 1})


def test_a_batch_with_one_unknown_file_attaches_none(client: TestClient, store: str) -> None:
    body = {"file_ids": [new_file(client), "file-unknown"]}
    error_of(client.post(f"/v1/vector_stores/{store}/file_batches", json=body), 404)
    assert ok(client.get(f"/v1/vector_stores/{store}/files"))["data"] == []


def test_f3_another_tenants_store_does_not_exist(
    client: TestClient, other_client: TestClient, filled: tuple[str, str], search: Any
) -> None:
    store, file_id = filled
    batch = ok(client.post(f"/v1/vector_stores/{store}/file_batches", json={"file_ids": [file_id]}))["id"]
    theirs = new_file(other_client)
    path = f"/v1/vector_stores/{store}"
    before = ok(client.get(path))
    attempts: list[tuple[str, str, dict[str, Any] | None]] = [
        ("GET", path, None),
        ("POST", path, {"name": "taken"}),
        ("DELETE", path, None),
        ("GET", f"{path}/files", None),
        ("POST", f"{path}/files", {"file_id": theirs}),
        ("POST", f"{path}/files", {"file_id": file_id}),
        ("GET", f"{path}/files/{file_id}", None),
        ("POST", f"{path}/files/{file_id}", {"attributes": {}}),
        ("DELETE", f"{path}/files/{file_id}", None),
        ("POST", f"{path}/file_batches", {"file_ids": [theirs]}),
        ("GET", f"{path}/file_batches/{batch}", None),
        ("POST", f"{path}/file_batches/{batch}/cancel", None),
        ("GET", f"{path}/file_batches/{batch}/files", None),
        ("POST", f"{path}/search", {"query": "ferry"}),
        ("GET", f"/v1/vector_stores?after={store}", None),
        ("GET", f"/v1/vector_stores?before={store}", None),
        ("POST", "/v1/vector_stores", {"name": "mine", "file_ids": [file_id]}),
    ]
    for method, url, body in attempts:
        response = other_client.request(method, url, json=body)
        text = error_of(response, 404)["message"]
        assert "ferry" not in text, (method, url)
    own = new_store(other_client, name="own")
    for url in (f"/v1/vector_stores/{own}/files", f"/v1/vector_stores/{own}/file_batches"):
        body = {"file_id": file_id} if url.endswith("files") else {"file_ids": [file_id]}
        error_of(other_client.post(url, json=body), 404)
    error_of(other_client.get(f"/v1/vector_stores/{own}/files?after={file_id}"), 404)
    assert [store["id"] for store in ok(other_client.get("/v1/vector_stores"))["data"]] == [own]
    assert ok(client.get(path)) == before
