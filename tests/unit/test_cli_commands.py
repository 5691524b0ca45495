"""The commands against a small gateway that speaks the HTTP interface over a real socket."""

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from gateway.cli.ask import budget_line
from gateway.cli.files import find_documents
from gateway.cli.main import app
from gateway.cli.terminal import CliError, counted, printable

ANSWER = ["Clar", "ence\u2028is ", "its name [k7f2]. \U0001f6df"]
EXTENSION = {
    "citations": [
        {
            "label": "k7f2",
            "file_id": "file-1",
            "filename": "drills.md",
            "title": "Drills > Dummy",
            "text": "...",
            "score": 0.91,
            "named": True,
        }
    ],
    "plan": {"dropped": [{"what": "chunk", "name": "a1b2", "reason": "It did not fit the window."}]},
    "timings": {
        "retrieve_ms": 11.4,
        "plan_ms": 1.2,
        "queue_ms": None,
        "prefill_ms": 1240.0,
        "ttft_ms": 1260.0,
        "total_ms": 1900.0,
        "prompt_tokens": 1312,
        "cached_tokens": None,
        "output_tokens": 7,
        "decode_tokens_per_s": 33.21,
    },
}


@dataclass
class Gateway:
    """Keeps what it was sent. Files whose text holds FAIL fail."""

    url: str = ""
    key: str = ""
    stores: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    store_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    polls: dict[str, int] = field(default_factory=dict)
    uploads_now: int = 0
    uploads_most: int = 0
    chats: list[dict[str, Any]] = field(default_factory=list)
    stream: str = "whole"

    def app(self) -> web.Application:
        application = web.Application(middlewares=[self.guard])
        application.add_routes(
            [
                web.get("/v1/models", self.list_models),
                web.get("/v1/calls", self.list_calls),
                web.get("/v1/replicas", self.list_replicas),
                web.post("/v1/files", self.create_file),
                web.delete("/v1/files/{file}", self.delete_file),
                web.get("/v1/vector_stores", self.list_stores),
                web.post("/v1/vector_stores", self.create_store),
                web.delete("/v1/vector_stores/{store}", self.delete_store),
                web.get("/v1/vector_stores/{store}/files", self.list_store_files),
                web.post("/v1/vector_stores/{store}/files", self.attach),
                web.get("/v1/vector_stores/{store}/files/{file}", self.store_file),
                web.delete("/v1/vector_stores/{store}/files/{file}", self.detach),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        return application

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Unknown API key."}}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}, {"id": "small@handbook"}]})

    async def list_calls(self, request: web.Request) -> web.Response:
        call = {"id": "req-1", "created": 1.0, "model": "small", "status": 200, "timings": EXTENSION["timings"]}
        failed = {
            "id": "req-2",
            "created": 2.0,
            "model": "small",
            "status": 503,
            "error": "engine_unavailable",
            "timings": None,
        }
        return web.json_response({"object": "list", "data": [failed, call][: int(request.query["limit"])]})

    async def list_replicas(self, request: web.Request) -> web.Response:
        queue = {"waiting": 3, "in_flight": 2, "predicted_wait_ms": 1240.0}
        cache = {"resident_blocks": 50, "capacity_blocks": 200, "evictions": 7}
        hits = {"exact": 90, "over": 9, "under": 1, "reported_tokens": 4096, "predicted_tokens": 4128}
        well = {"name": "left", "state": "ok", "error": None, "model": "small"}
        refused = {"name": "right", "state": "refused", "error": "it serves other, not small", "model": "other"}
        unknown: dict[str, Any] = {"queue": queue, "cache": None, "hits": None}
        known = {"queue": queue, "cache": cache, "hits": hits}
        return web.json_response({"object": "list", "data": [well | known, refused | unknown]})

    async def create_file(self, request: web.Request) -> web.Response:
        self.uploads_now += 1
        self.uploads_most = max(self.uploads_most, self.uploads_now)
        form = await request.post()
        await asyncio.sleep(0.01)
        self.uploads_now -= 1
        upload = form["file"]
        assert isinstance(upload, web.FileField)
        assert form["purpose"] == "assistants"
        file_id = f"file-{len(self.files) + 1}"
        self.files[file_id] = (upload.filename, upload.file.read())
        return web.json_response({"id": file_id})

    async def delete_file(self, request: web.Request) -> web.Response:
        self.files.pop(request.match_info["file"])
        return web.json_response({"deleted": True})

    async def list_stores(self, request: web.Request) -> web.Response:
        return page(request, [self.store(store_id) for store_id in self.stores])

    async def create_store(self, request: web.Request) -> web.Response:
        store_id = f"vs_{len(self.stores) + 1}"
        self.stores[store_id] = (await request.json())["name"]
        return web.json_response(self.store(store_id))

    async def delete_store(self, request: web.Request) -> web.Response:
        del self.stores[request.match_info["store"]]
        return web.json_response({"deleted": True})

    async def list_store_files(self, request: web.Request) -> web.Response:
        return page(request, list(self.store_files.values()))

    async def attach(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.store_files[body["file_id"]] = {
            "id": body["file_id"],
            "status": "in_progress",
            "last_error": None,
            "attributes": body["attributes"],
        }
        return web.json_response(self.store_files[body["file_id"]])

    async def store_file(self, request: web.Request) -> web.Response:
        file_id = request.match_info["file"]
        self.polls[file_id] = self.polls.get(file_id, 0) + 1
        entry = self.store_files[file_id]
        if self.polls[file_id] >= 2:
            broken = b"FAIL" in self.files[file_id][1]
            entry["status"] = "failed" if broken else "completed"
            entry["last_error"] = {"code": "empty_file", "message": "The file is empty."} if broken else None
        return web.json_response(entry)

    async def detach(self, request: web.Request) -> web.Response:
        self.store_files.pop(request.match_info["file"])
        return web.json_response({"deleted": True})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.chats.append(await request.json())
        if self.stream == "refused":
            return web.json_response({"error": {"message": "The engine is not there."}}, status=503)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in ANSWER
        ]
        last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}], "headstart": EXTENSION}
        if self.stream == "error":
            last = {"error": {"message": "The engine ended."}}
        events += [] if self.stream == "cut" else [last]
        data = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events).encode()
        if self.stream == "whole":
            data += b"data: [DONE]\n\n"
        for start in range(0, len(data), 7):  # characters and events are split anywhere
            await response.write(data[start : start + 7])
        return response

    def store(self, store_id: str) -> dict[str, Any]:
        counts = {"completed": 3, "in_progress": 0, "failed": 1}
        return {
            "id": store_id,
            "name": self.stores[store_id],
            "created_at": int(store_id[3:]),
            "file_counts": counts,
            "usage_bytes": 2**20,
        }


def page(request: web.Request, entries: list[dict[str, Any]], most: int = 3) -> web.Response:
    """Three entries at a time whatever was asked for, so that every list of the tests has pages."""
    ids = [entry["id"] for entry in entries]
    start = ids.index(request.query["after"]) + 1 if "after" in request.query else 0
    found = entries[start : start + most]
    return web.json_response({"data": found, "has_more": start + most < len(entries)})


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    served = Gateway()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(served.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(5)
    yield served
    loop.call_soon_threadsafe(ended.set)
    thread.join(5)
    loop.close()


def call(gateway: Gateway | str, *arguments: str) -> Result:
    url = gateway if isinstance(gateway, str) else gateway.url
    return CliRunner().invoke(app, [*arguments, "--url", url])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "handbook"
    (root / "inner").mkdir(parents=True)
    (root / ".git").mkdir()
    for number in range(9):
        (root / f"page{number}.md").write_text(f"# Page {number}")
    (root / "inner" / "Trang bệnh.HTML").write_text("<p>bệnh</p>")
    (root / "inner" / "picture.png").write_bytes(b"\x89PNG")
    (root / ".hidden.md").write_text("no")
    (root / ".git" / "config.txt").write_text("no")
    return root


def test_ingest_uploads_a_folder_once_and_says_so_the_second_time(gateway: Gateway, folder: Path) -> None:
    first = call(gateway, "ingest", str(folder), "--store", "handbook")
    assert first.exit_code == 0, first.output
    assert "10 added" in first.stdout
    assert list(gateway.stores.values()) == ["handbook"]
    assert {name for name, _ in gateway.files.values()} >= {"handbook/page0.md", "handbook/inner/Trang bệnh.HTML"}
    assert gateway.uploads_most <= 4
    digests = {entry["attributes"]["sha256"] for entry in gateway.store_files.values()}
    assert hashlib.sha256(b"# Page 3").hexdigest() in digests
    second = call(gateway, "ingest", str(folder), "--store", "handbook")
    assert second.exit_code == 0
    assert "10 unchanged" in second.stdout
    assert len(gateway.files) == 10


def test_e3_two_documents_of_one_content_are_uploaded_once(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("same")
    (tmp_path / "b.md").write_text("same")
    result = call(gateway, "ingest", str(tmp_path), "--store", "x")
    assert "1 added, 1 unchanged" in result.stdout
    assert len(gateway.files) == 1


def test_e1_a_file_that_fails_is_named_with_its_reason_and_the_others_go_on(gateway: Gateway, folder: Path) -> None:
    (folder / "broken.txt").write_text("FAIL")
    result = call(gateway, "ingest", str(folder), "--store", "x")
    assert result.exit_code == 1
    assert "10 added, 1 failed" in result.stdout
    assert "failed: handbook/broken.txt: The file is empty." in result.stderr


def test_e2_a_failed_file_is_sent_again_by_the_next_run(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "broken.txt").write_text("FAIL")
    assert call(gateway, "ingest", str(tmp_path), "--store", "x").exit_code == 1
    assert call(gateway, "ingest", str(tmp_path), "--store", "x").exit_code == 1
    assert len(gateway.store_files) == 1


def test_replace_removes_the_older_version_of_a_document_and_nothing_else(gateway: Gateway, folder: Path) -> None:
    call(gateway, "ingest", str(folder), "--store", "x")
    (folder / "page0.md").write_text("# Page 0, corrected")
    kept = call(gateway, "ingest", str(folder), "--store", "x")
    assert "1 added, 9 unchanged" in kept.stdout
    assert len(gateway.store_files) == 11
    (folder / "page0.md").write_text("# Page 0, corrected twice")
    replaced = call(gateway, "ingest", str(folder), "--store", "x", "--replace")
    assert "1 replaced, 9 unchanged" in replaced.stdout
    versions = [name for name, _ in gateway.files.values() if name == "handbook/page0.md"]
    assert len(versions) == 1
    assert len(gateway.store_files) == 10


def test_a_path_that_does_not_exist_is_named_before_anything_is_sent(gateway: Gateway, folder: Path) -> None:
    result = call(gateway, "ingest", str(folder), str(folder / "missing"), "--store", "x")
    assert result.exit_code == 2
    assert result.stderr.startswith("headstart: No file or folder")
    assert len(result.stderr.splitlines()) == 1
    assert gateway.stores == {}


def test_a_folder_without_documents_is_an_error_that_names_the_extensions(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"\.docx"):
        find_documents([tmp_path])


def test_a_named_file_is_taken_whatever_its_extension(tmp_path: Path) -> None:
    odd = tmp_path / "notes.odd"
    odd.write_text("text")
    assert [document.name for document in find_documents([odd, tmp_path / "notes.odd"])] == ["notes.odd"]


def test_ask_streams_the_answer_then_citations_and_timings(gateway: Gateway) -> None:
    gateway.stores["vs_1"] = "handbook"
    result = call(gateway, "ask", "Who?", "--store", "handbook", "--conversation", "c1", "--top-k", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("".join(ANSWER))
    assert "drills.md" in result.stdout
    assert "1.26 s" in result.stdout
    assert "1,312" in result.stdout
    assert "It did not fit the window." in result.stdout
    (sent,) = gateway.chats
    assert sent["model"] == "small"
    assert sent["headstart"] == {"vector_store_ids": ["vs_1"], "top_k": 3, "conversation": "c1"}


def test_a10_unknown_cached_tokens_are_shown_as_unknown_and_not_as_zero(gateway: Gateway) -> None:
    result = call(gateway, "ask", "Who?")
    row = result.stdout.splitlines()[-2]
    assert row.split() == [
        "1.26",
        "s",
        "?",
        "11",
        "ms",
        "1",
        "ms",
        "?",
        "1.24",
        "s",
        "1,312",
        "?",
        "?",
        "7",
        "33.2",
        "1.90",
        "s",
    ]


def test_ask_says_what_became_of_the_budget_and_which_chunk_it_cost(gateway: Gateway) -> None:
    shown = call(gateway, "ask", "Who?").stdout
    assert "budget" not in shown
    assert "left out: chunk a1b2: It did not fit the window.\n" in shown
    budgeted = {"ttft_budget_ms": 300.0, "within_budget": True, "predicted_safe_ttft_ms": 1510.0}
    assert budget_line(budgeted) == "budget of 300 ms: kept; planned for a TTFT of at most 1.51 s"
    assert budget_line({"ttft_budget_ms": 0.5, "within_budget": False}) == (
        "budget of 0.5 ms: missed; nothing was predicted"
    )


def test_ask_json_is_one_object_with_the_answer_and_all_that_came_with_it(gateway: Gateway) -> None:
    result = call(gateway, "ask", "Who?", "--json")
    body = json.loads(result.stdout)
    assert body["answer"] == "".join(ANSWER)
    assert body["citations"] == EXTENSION["citations"]
    assert "headstart" not in gateway.chats[0]


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ("refused", "The engine is not there."),
        ("error", "The engine ended."),
        ("cut", "The answer was cut off before its end."),
    ],
)
def test_d5_an_answer_that_fails_ends_with_one_line_and_status_1(gateway: Gateway, stream: str, said: str) -> None:
    gateway.stream = stream
    result = call(gateway, "ask", "Who?")
    assert result.exit_code == 1
    assert result.stderr == f"headstart: {said}\n"


def test_an_unknown_store_is_named_with_those_that_exist(gateway: Gateway) -> None:
    for number in range(1, 6):
        gateway.stores[f"vs_{number}"] = f"store{number}"
    result = call(gateway, "ask", "Who?", "--store", "nope")
    assert result.exit_code == 2
    assert result.stderr == "headstart: No store 'nope'. Known: store1, store2, store3, store4, store5.\n"
    assert gateway.chats == []


def test_the_newest_of_two_stores_with_one_name_is_taken(gateway: Gateway) -> None:
    gateway.stores.update({"vs_1": "twin", "vs_2": "twin"})
    call(gateway, "ask", "Who?", "--store", "twin")
    assert gateway.chats[0]["headstart"] == {"vector_store_ids": ["vs_2"]}


def test_stores_are_listed_with_their_counts_and_deleted_by_name(gateway: Gateway) -> None:
    gateway.stores.update({f"vs_{number}": f"store{number}" for number in range(1, 6)})
    listed = call(gateway, "stores")
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [f"store{n}" for n in range(1, 6)]
    deleted = call(gateway, "stores", "delete", "store4")
    assert deleted.exit_code == 0, deleted.output
    assert "vs_4" not in gateway.stores
    assert call(gateway, "stores", "delete", "store4").exit_code == 2


def test_calls_show_timings_and_failed_requests_without_them(gateway: Gateway) -> None:
    result = call(gateway, "calls")
    failed, answered = result.stdout.splitlines()[1:]
    assert "503 engine_unavailable" in failed
    assert "1.26 s" in answered
    assert json.loads(call(gateway, "calls", "--json", "--limit", "1").stdout)[0]["id"] == "req-2"


def test_replicas_show_what_they_hold_and_why_one_is_refused(gateway: Gateway) -> None:
    result = call(gateway, "replicas")
    left, right, reason = (line.split() for line in result.stdout.splitlines()[1:4])
    assert " ".join(left) == "left ok small 3 2 1.24 s 25% of 200 7 90% of 100 4,096 4,128"
    assert " ".join(right[:7]) == "right refused other 3 2 1.24 s"
    assert set(right[7:]) == {"?"}
    assert " ".join(reason) == "right: it serves other, not small"
    assert result.exit_code == 0
    assert call(gateway, "replicas", "--check").exit_code == 1
    assert json.loads(call(gateway, "replicas", "--json").stdout)[1]["state"] == "refused"


@pytest.mark.parametrize(
    "command", [("ask", "Who?"), ("stores",), ("calls",), ("replicas",), ("stores", "delete", "x")]
)
def test_a_gateway_that_is_down_is_one_line_and_status_1(command: tuple[str, ...]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    result = call(url, *command)
    assert result.exit_code == 1
    assert result.stderr == (
        f"headstart: No gateway answers at {url}. Start it with 'headstart serve', or give --url or HEADSTART_URL.\n"
    )


def test_ingest_with_a_gateway_that_is_down_is_one_line_and_status_1(folder: Path) -> None:
    result = call("http://127.0.0.1:9", "ingest", str(folder), "--store", "x")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_key_says_where_to_give_it_and_a_right_one_is_taken(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.key = "right"
    refused = call(gateway, "stores")
    assert refused.exit_code == 1
    assert "HEADSTART_API_KEY" in refused.stderr
    assert call(gateway, "stores", "--api-key", "right").exit_code == 0
    monkeypatch.setenv("HEADSTART_API_KEY", "right")
    assert call(gateway, "stores").exit_code == 0


def test_key_prints_a_key_whose_hash_is_the_line_for_the_file_and_the_entry_of_the_variable() -> None:
    lines = CliRunner().invoke(app, ["key", "acme"]).stdout.splitlines()
    secret, line, entry = lines[1].strip(), lines[3], lines[5]
    digest = hashlib.sha256(secret.encode()).hexdigest()
    assert line == f"acme {digest}"
    assert entry == f"acme:{digest}"
    assert CliRunner().invoke(app, ["key", "a b"]).exit_code == 2


def test_one_thing_is_told_as_one() -> None:
    assert [counted(number, "line") for number in (0, 1, 2, 1000)] == ["0 lines", "1 line", "2 lines", "1,000 lines"]


def test_text_from_a_document_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\u009bc\nd\te") == "a[2Jbc\nd\te"
