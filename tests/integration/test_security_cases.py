"""Hostile requests, keys, documents and file names against the gateway as it is served."""

import ast
import asyncio
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from gateway.tenants import key_digest
from gateway.wire import ENGINE_CONTROLS

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "hs-PLANTED-CLIENT-KEY"
ENGINE_KEY = "PLANTED-ENGINE-KEY"
DOCUMENT = "PLANTED-DOCUMENT: the safe opens with four sevens."
QUESTION = "PLANTED-QUESTION: how does the safe open?"
ROOT = Path(__file__).parents[2]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim() -> AsyncIterator[EngineSim]:
    config = SimConfig(time_scale=0.01, decode_tokens_per_s=None, api_key=ENGINE_KEY)
    async with EngineSim(config) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(sim: EngineSim, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """Asks for keys, takes 1 MiB bodies, and waits a second for them."""
    settings = settings_for(
        tmp_path_factory.mktemp("gateway"),
        sim.url,
        engine_api_key=ENGINE_KEY,
        api_keys=f"acme:{key_digest(KEY)}",
        max_body_bytes=2**20,
        body_timeout_s=1.0,
    )
    async with run_gateway(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def safe(guarded: RunningGateway) -> str:
    return await guarded.make_store("safe", {"safe.txt": DOCUMENT}, KEY)


async def exchange(gateway: RunningGateway, data: bytes, limit_s: float = 5.0) -> bytes:
    """Sends raw bytes; the answer until the server closes, or as far as it came in time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    got = bytearray()
    try:
        writer.write(data)
        async with asyncio.timeout(limit_s):
            while piece := await reader.read(65_536):
                got += piece
                head, _, body = bytes(got).partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                if length and len(body) >= int(length[1]):
                    break
    except ConnectionError:
        return bytes(got) or b"(closed)"
    finally:
        writer.close()
    return bytes(got)


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    assert found, answer[:200]
    return int(found[1])


async def chat(gateway: RunningGateway, body: Any, key: str = KEY, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and JSON of one request; `body` as bytes goes as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with gateway.session(key) as session:
        sent = {"content-type": "application/json", **headers}
        async with session.post("/v1/chat/completions", data=data, headers=sent) as response:
            return response.status, response.headers, json.loads(await response.read())


def question(**extra: Any) -> dict[str, Any]:
    return {"model": "sim-model", "messages": [{"role": "user", "content": QUESTION}], **extra}


TRICKS = [
    b"/v1/vector_stores",
    b"//v1/vector_stores",
    b"///v1///vector_stores",
    b"/%76%31/vector_stores",
    b"/v1%2fvector_stores",
    b"/v1\\vector_stores",
    b"/V1/Vector_Stores",
    b"/v1/vector_stores/",
    b"/v1/./vector_stores",
    b"/healthz/../v1/vector_stores",
    b"/healthz/%2e%2e/v1/vector_stores",
    b"/healthz%2f..%2fv1/vector_stores",
    b"/healthz/%2e%2e%2fv1%2fvector_stores",
    b"/healthz%252f..%252fv1/vector_stores",
    b"/healthz/..;/v1/vector_stores",
    b"/console/../v1/calls",
    b"/v1/vector_stores?x=/healthz",
    b"/v1/vector_stores#/healthz",
    b"/v1/vector_stores;/healthz",
    b"/v1/vector_stores%00/healthz",
    b"/v1/vector_stores%20",
    b"/healthz%00",
    b"/healthz%0d%0a",
    b"/metrics",
    b"/metrics/",
    b"//metrics",
    b"/v1/calls",
    b"/v1/models",
    b"/v1/files",
    b"/openapi.json",
    b"/docs",
    b"*",
    b"http://evil.example/v1/vector_stores",
    b"http://evil.example//v1/vector_stores",
    b"http://evil.example/healthz/../v1/files",
    b"/%zz/v1/files",
]


@pytest.mark.parametrize("host", [b"gateway", b"a/?x=", b"a/healthz", b"/healthz", b"evil.example#", b""])
@pytest.mark.parametrize("target", TRICKS)
async def test_h1_no_spelling_of_a_path_or_host_passes_the_door_without_a_key(
    guarded: RunningGateway, safe: str, target: bytes, host: bytes
) -> None:
    request = b"GET %b HTTP/1.1\r\nHost: %b\r\nX-Original-URL: /healthz\r\nX-Rewrite-URL: /healthz\r\n"
    answer = await exchange(guarded, request % (target, host) + b"Connection: close\r\n\r\n")
    assert status_of(answer) in (400, 401), answer[:200]
    assert safe.encode() not in answer
    assert b"location:" not in answer.lower()


@pytest.mark.parametrize(
    "method", [b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS", b"TRACE", b"get", b"PROPFIND"]
)
async def test_h1_no_method_passes_the_door_without_a_key(guarded: RunningGateway, method: bytes) -> None:
    for target in (b"/v1/chat/completions", b"/v1/vector_stores", b"/v1/files"):
        head = b"%b %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        answer = await exchange(guarded, head % (method, target))
        assert status_of(answer) in (400, 401)


async def test_h1_open_paths_answer_without_a_key_and_tell_no_address(
    guarded: RunningGateway, sim: EngineSim
) -> None:
    for target in (
        b"/healthz",
        b"/he%61lthz",
        b"/readyz",
        b"/",
        b"/console/console.js",
        b"http://evil.example/healthz",
    ):
        answer = await exchange(guarded, b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % target)
        assert status_of(answer) == 200
        assert str(sim.port).encode() not in answer
        assert ENGINE_KEY.encode() not in answer


async def test_h1_a_path_with_a_slash_at_its_end_is_not_redirected_to_the_host_header(
    guarded: RunningGateway,
) -> None:
    head = (
        f"GET /v1/files/ HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    )
    answer = await exchange(guarded, head.encode())
    assert status_of(answer) == 404
    assert b"evil.example" not in answer


URLS = ("http://169.254.169.254/latest", "file:///etc/passwd", "//evil.example/v1", "http://127.0.0.1:1/v1")


async def test_h2_nothing_in_a_request_chooses_where_the_gateway_connects(
    guarded: RunningGateway, sim: EngineSim, safe: str
) -> None:
    for url in URLS:
        for name in (url, f"sim-model@{url}", f"{url}@{safe}", f"{url}@sim-model"):
            status, _, answer = await chat(guarded, question(model=name))
            assert (status, answer["error"]["type"]) == (404, "not_found_error")
        before = len(sim.generations)
        fields = {"base_url": url, "api_base": url, "endpoint": url, "engine_url": url, "url": url}
        status, _, answer = await chat(guarded, question(**fields), **{"x-engine-url": url, "x-forwarded-host": url})
        assert status == 200, answer
        assert len(sim.generations) == before + 1
        for extension in ({"engine_url": url}, {"url": url}, {"replica": url}):
            status, _, answer = await chat(guarded, question(headstart=extension))
            assert status == 400
            assert answer["error"]["param"] == f"headstart.{next(iter(extension))}"
        status, _, answer = await chat(guarded, question(headstart={"vector_store_ids": [url]}))
        assert status == 404


KEYS = [
    b"",
    b"wrong",
    b"' OR '1'='1",
    b'"; DROP TABLE keys; --',
    b"%s%n%x",
    b"../../etc/passwd",
    KEY.encode() + b"x",
    KEY.encode()[:-1],
    KEY.lower().encode(),
    key_digest(KEY).encode(),
    "ключ密钥🔑".encode(),
    b"\xff\xfe\xfd",
    b"k" * 60_000,
]


@pytest.mark.parametrize("key", KEYS)
async def test_h3_hostile_keys_are_refused_with_401_at_once(guarded: RunningGateway, key: bytes) -> None:
    began = time.monotonic()
    answer = await exchange(
        guarded, b"GET /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n" % key
    )
    assert time.monotonic() - began < 0.5
    assert status_of(answer) == 401
    assert b'"code":"invalid_api_key"' in answer
    assert b"www-authenticate: Bearer" in answer
    assert len(key) < 4 or key not in answer


@pytest.mark.parametrize("key", [b"a\x00b", b"k" * 2**20, b"a\r\n b"])
async def test_h3_keys_that_are_no_header_value_end_the_connection_at_once(
    guarded: RunningGateway, key: bytes
) -> None:
    began = time.monotonic()
    answer = await exchange(
        guarded, b"GET /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n" % key
    )
    assert time.monotonic() - began < 1
    assert answer == b"(closed)" or status_of(answer) in (400, 401, 431)


@pytest.mark.parametrize("scheme", ["Basic", "Token", "Bearer:", "bearerx", ""])
async def test_h3_other_schemes_are_refused(guarded: RunningGateway, scheme: str) -> None:
    head = f"GET /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: {scheme} {KEY}\r\nConnection: close\r\n\r\n"
    assert status_of(await exchange(guarded, head.encode())) == 401


async def test_h4_planted_secrets_show_in_no_log_error_metric_or_header(
    guarded: RunningGateway, sim: EngineSim, safe: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    bodies: list[Any] = [
        question(headstart={"vector_store_ids": [safe]}),
        question(headstart={"vector_store_ids": [safe]}, stream=True),
        question(stream=True),
        question(max_tokens=QUESTION),
        question(headstart={"vector_store_ids": [safe], "top_k": QUESTION}),
        question(cache_salt=QUESTION),
        json.dumps(question()).encode()[:-3],
    ]
    faults = [
        Fault("status", status=500, body=f"upstream {sim.url} failed on {DOCUMENT} with {ENGINE_KEY}"),
        Fault("status", status=503, body=QUESTION),
        Fault("status", status=401, body=json.dumps({"error": {"message": f"bad key {ENGINE_KEY}"}})),
        Fault("cut", after_chunks=None),
        Fault("cut", after_chunks=1),
    ]
    for fault in (None, *faults):
        for body in bodies if fault is None else bodies[:3]:
            if fault is not None:
                sim.set_fault(fault)
            for key in (KEY, "PLANTED-WRONG-KEY"):
                async with guarded.session(key) as session:
                    data = body if isinstance(body, bytes) else json.dumps(body).encode()
                    async with session.post("/v1/chat/completions", data=data) as response:
                        shown.append(str(response.headers))
                        text = await response.text()
                        if response.status != 200:
                            shown.append(text)
            sim.clear_faults()
    async with guarded.session(KEY) as session:
        for path in ("/metrics", "/readyz", "/v1/calls", "/v1/models", "/v1/vector_stores/PLANTED-NOT-A-STORE-X"):
            async with session.get(path) as response:
                shown += [str(response.headers)]
                shown += [await response.text()] if "NOT-A-STORE" not in path else []
    logged = "\n".join(f"{record.getMessage()} {record.exc_text} {record.__dict__}" for record in caplog.records)
    assert "chat 200" in logged
    for text in (*shown, logged):
        for secret in (KEY, ENGINE_KEY, "PLANTED", "safe opens", f":{sim.port}", "four sevens"):
            assert secret not in text, f"{secret} in {text[:300]}"


async def test_h4_an_engine_that_cannot_be_reached_is_not_named(tmp_path: Path) -> None:
    secret = "planted-engine-host.invalid"
    settings = settings_for(tmp_path, f"http://{secret}:4321/base", engine_api_key=ENGINE_KEY)
    async with run_gateway(settings) as gateway:
        status, headers, answer = await chat(gateway, question())
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        texts = [str(headers), str(answer)]
        async with gateway.session() as session:
            for path in ("/readyz", "/metrics", "/v1/models", "/v1/calls"):
                async with session.get(path) as response:
                    texts += [str(response.headers), await response.text()]
    for text in texts:
        for part in (secret, "4321", ENGINE_KEY):
            assert part not in text


async def test_h4_f6_the_process_writes_no_text_and_no_key_to_its_log(tmp_path: Path, sim: EngineSim) -> None:
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    environment = {
        **base,
        "PYTHONPATH": str(ROOT),
        "HEADSTART_ENGINE_URL": sim.url,
        "HEADSTART_ENGINE_API_KEY": ENGINE_KEY,
        "HEADSTART_API_KEYS": f"acme:{key_digest(KEY)}",
        "HEADSTART_DATA_DIR": str(tmp_path / "data"),
        "HEADSTART_CACHE_DIR": str(tmp_path / "cache"),
        "HEADSTART_LOG_LEVEL": "debug",
        "HEADSTART_LOG_FORMAT": "json",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli.main", "serve", "--port", "0",
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        gateway = RunningGateway(line.split()[-1])
        store = await gateway.make_store("safe", {"safe.txt": DOCUMENT, "more.md": f"# {DOCUMENT}"}, KEY)
        for body in (question(headstart={"vector_store_ids": [store]}), question(stream=True), question(n="x")):
            await chat_any(gateway, body)
        sim.set_fault(Fault("status", status=500, body=f"{sim.url} {DOCUMENT}"))
        await chat_any(gateway, question())
        await chat_any(gateway, question(), key="PLANTED-WRONG-KEY")
        async with gateway.session(KEY) as session:
            form = aiohttp.FormData({"purpose": "assistants"})
            form.add_field("file", b"%PDF-1.7 " + DOCUMENT.encode(), filename="PLANTED-name.pdf")
            async with session.post("/v1/files", data=form) as response:
                uploaded = (await response.json())["id"]
            async with session.post(f"/v1/vector_stores/{store}/files", json={"file_id": uploaded}) as response:
                assert response.status == 200
            await asyncio.sleep(1)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(process.communicate(), 30)
    log = (out + err).decode()
    assert '"message":"chat 200"' in log
    for secret in ("PLANTED", "four sevens", f":{sim.port}", "Traceback"):
        assert secret not in log, next(line for line in log.splitlines() if secret in line)


async def chat_any(gateway: RunningGateway, body: Any, key: str = KEY) -> None:
    async with gateway.session(key) as session, session.post("/v1/chat/completions", json=body) as response:
        await response.read()


async def test_h5_headers_travel_by_allowlist_both_ways(guarded: RunningGateway, sim: EngineSim, safe: str) -> None:
    hostile = {
        "Cookie": "session=PLANTED",
        "Accept-Encoding": "gzip, br",
        "X-Api-Key": "PLANTED",
        "OpenAI-Organization": "PLANTED",
        "X-Forwarded-For": "1.2.3.4",
        "X-Request-Id": "client-chosen-id",
        "User-Agent": "PLANTED",
        "X-Sim-Fault": '{"kind": "status", "status": 500}',
        "traceparent": "00-PLANTED-01",
        "Expect": "",
    }
    for body in (question(), question(stream=True), question(headstart={"vector_store_ids": [safe]})):
        async with (
            guarded.session(KEY) as session,
            session.post("/v1/chat/completions", json=body, headers=hostile) as response,
        ):
            assert response.status == 200
            got = {name.lower() for name in response.headers}
            await response.read()
        sent = sim.generations[-1].headers
        assert {name.lower() for name in sent} <= {
            "host", "content-type", "content-length", "authorization", "accept-encoding", "accept",
        }  # fmt: skip
        assert sent["authorization"] == f"Bearer {ENGINE_KEY}"
        assert sent.get("accept-encoding", "identity") == "identity"
        assert "PLANTED-CLIENT" not in str(sent)
        assert got <= {
            "date", "content-type", "content-length", "transfer-encoding", "cache-control", "x-accel-buffering",
            "x-request-id", "server-timing",
        }  # fmt: skip
        assert response.headers["x-request-id"] == "client-chosen-id"


@pytest.mark.parametrize("name", sorted(ENGINE_CONTROLS))
async def test_h6_an_engine_control_is_refused_by_its_name(
    guarded: RunningGateway, sim: EngineSim, name: str
) -> None:
    before = len(sim.generations)
    control: Any = {"prompt_token_ids": [1, 2, 3]} if name == "kv_transfer_params" else 1
    forms: list[tuple[dict[str, Any], str]] = [
        ({name: control}, name),
        ({name: None}, name),
        ({"extra_body": {name: control}}, f"extra_body.{name}"),
        ({"stream": True, "stream_options": {name: control}}, f"stream_options.{name}"),
        ({"headstart": {name: control}}, f"headstart.{name}"),
        ({"chat_template_kwargs": {name: control}}, f"chat_template_kwargs.{name}"),
    ]
    for extra, param in forms:
        status, _, answer = await chat(guarded, question(**extra))
        assert status == 400, extra
        assert answer["error"]["param"] == param
        assert param in answer["error"]["message"]
    assert len(sim.generations) == before


async def test_h6_the_official_clients_extra_body_cannot_carry_a_control_either(guarded: RunningGateway) -> None:
    import openai

    async with guarded.client(KEY) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                **question(), extra_body={"kv_transfer_params": {"prompt_token_ids": [1]}, "cache_salt": "a"}
            )
    assert caught.value.param in ("cache_salt", "kv_transfer_params")


SAMPLING = {
    "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "response_format", "seed", "stop", "stream", "stream_options",
    "temperature", "top_p", "tools", "tool_choice", "reasoning_effort", "thinking_token_budget", "include_reasoning",
    "parallel_tool_calls", "user", "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking",
    "length_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "logprob_token_ids", "allowed_token_ids", "bad_words",
    "chat_template_kwargs", "structured_outputs", "repetition_detection", "stream_interval",
}  # fmt: skip
"""Fields that shape the answer alone, or whose effect on the prompt the gateway knows."""


async def test_h6_every_field_of_the_installed_engine_is_known_as_harmless_or_refused() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "entrypoints" / "openai" / "chat_completion" / "protocol.py"
    (request,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ChatCompletionRequest"
    ]
    fields = {
        node.target.id
        for node in request.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    }
    assert {"kv_transfer_params", "cache_salt", "priority"} <= fields
    assert fields - SAMPLING - ENGINE_CONTROLS - {"model_config"} == set()


def with_fields(fields: bytes) -> bytes:
    return b'{"model":"sim-model","messages":[{"role":"user","content":"hi"}],%b}' % fields


def saying(content: bytes) -> bytes:
    return b'{"model":"sim-model","messages":[{"role":"user","content":"%b"}]}' % content


MALFORMED: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "not JSON": (b"hello", 400),
    "cut off": (saying(b"hi")[:-3], 400),
    "an array": (b"[]", 400),
    "a number": (b"1", 400),
    "null": (b"null", 400),
    "NaN": (with_fields(b'"temperature":NaN'), 400),
    "infinity": (with_fields(b'"temperature":1e400'), 400),
    "bad UTF-8": (saying(b"\xff\xfe"), 400),
    "a lone surrogate": (saying(b"\\ud800"), 400),
    "a raw control character": (saying(b"a\x00b"), 400),
    "UTF-16": ('{"model":"sim-model"}'.encode("utf-16"), 400),
    "gzip": (bytes.fromhex("1f8b0800") + b"x" * 50, 400),
    "deep": (b"[" * 100_000 + b"]" * 100_000, 400),
    "deep object": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    "deep field": (with_fields(b'"x":%b%b' % (b"[" * 400, b"]" * 400)), 400),
    "deep schema": (with_fields(b'"tools":[{"a":%b%b}]' % (b"[" * 900, b"]" * 900)), 400),
    "deep filter": (
        with_fields(b'"headstart":{"filters":%b%b}' % (b'{"type":"and","filters":[' * 200, b"]}" * 200)),
        400,
    ),
    "huge int": (with_fields(b'"max_tokens":' + b"9" * 400), 400),
    "huge n": (with_fields(b'"n":1000000'), 400),
    "negative": (with_fields(b'"max_tokens":-1'), 400),
    "text for a number": (with_fields(b'"max_tokens":"5"'), 400),
    "true for a number": (with_fields(b'"max_tokens":true'), 400),
    "text for a flag": (with_fields(b'"stream":"yes"'), 400),
    "no messages": (b'{"model":"sim-model"}', 400),
    "empty messages": (b'{"model":"sim-model","messages":[]}', 400),
    "unknown role": (saying(b"hi").replace(b'"user"', b'"root"'), 400),
    "content of numbers": (b'{"model":"sim-model","messages":[{"role":"user","content":[1,2]}]}', 400),
    "no model": (b'{"messages":[{"role":"user","content":"hi"}]}', 400),
    "a long user": (with_fields(b'"user":"%b"' % (b"u" * 100_000)), 400),
    "a long model": (saying(b"hi").replace(b"sim-model", b"m" * 100_000), 400),
    "a long field": (with_fields(b'"headstart":{"%b":1}' % (b"f" * 100_000)), 400),
    "2 MiB": (saying(b"x" * 2**21), 413),
}


@pytest.mark.parametrize(("raw", "expected"), MALFORMED.values(), ids=MALFORMED)
async def test_h7_a_malformed_body_is_a_clear_error_in_bounded_time(
    guarded: RunningGateway, raw: bytes, expected: int
) -> None:
    began = time.monotonic()
    status, _, answer = await chat(guarded, raw)
    assert status == expected, answer
    assert time.monotonic() - began < 1
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 1_000


@pytest.mark.parametrize("path", ["/v1/vector_stores", "/v1/vector_stores/x/search", "/v1/vector_stores/x/files"])
async def test_h7_the_document_routes_refuse_malformed_bodies_too(guarded: RunningGateway, path: str) -> None:
    for raw in (
        b"hello",
        b"[]",
        b"[" * 100_000,
        b'{"name":"\\ud800"}',
        b'{"name":NaN}',
        b'{"x":' * 500 + b"1" + b"}" * 500,
    ):
        async with guarded.session(KEY) as session, session.post(path, data=raw) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


def head_of(path: str, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


async def test_h7_a_declared_64_mib_body_is_refused_before_it_is_sent(guarded: RunningGateway) -> None:
    began = time.monotonic()
    for path in ("/v1/chat/completions", "/v1/vector_stores"):
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {64 * 2**20}\r\n\r\n"
        )
        answer = await exchange(guarded, head.encode() + b"{")
        assert status_of(answer) == 413
        assert b'"code":"body_too_large"' in answer
    assert time.monotonic() - began < 1


async def test_h7_a_64_mib_body_of_unknown_length_is_cut_at_the_limit(guarded: RunningGateway) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1024):
            yield b" " * 2**16

    began = time.monotonic()
    async with guarded.session(KEY) as session:
        try:
            async with session.post("/v1/chat/completions", data=endless()) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # the answer was given and the rest of the body not read
    assert time.monotonic() - began < 5
    assert (await chat(guarded, question()))[0] == 200


async def test_h7_a_body_that_does_not_come_is_given_up(guarded: RunningGateway) -> None:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
    )
    began = time.monotonic()
    answer = await exchange(guarded, head.encode() + b'{"model":')
    assert status_of(answer) == 408
    assert b'"code":"body_timeout"' in answer
    assert time.monotonic() - began < 3


async def test_h7_a_body_that_drips_is_given_up_too(guarded: RunningGateway) -> None:
    port = int(guarded.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n".encode())
    writer.write(b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 10000\r\n\r\n--b\r\n")
    began = time.monotonic()
    answer = asyncio.create_task(reader.readline())
    while not answer.done():
        assert time.monotonic() - began < 4
        writer.write(b"x")
        await asyncio.sleep(0.2)
    writer.close()
    assert b" 408 " in answer.result() or b" 400 " in answer.result()


async def test_h7_headers_without_end_are_refused(guarded: RunningGateway) -> None:
    began = time.monotonic()
    answer = await exchange(
        guarded, b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + b"x-filler: aaaaaaaaaaaaaaaa\r\n" * 20_000
    )
    assert answer == b"(closed)" or status_of(answer) == 431
    assert time.monotonic() - began < 2


NAMES = [
    "../../../etc/passwd",
    "..\\..\\windows\\system32\\config",
    "/etc/shadow",
    "C:\\boot.ini",
    "nul\x00byte.txt",
    "line\r\nSet-Cookie: a=b.txt",
    "x" * 5_000 + ".txt",
    "đề cương – 계획서 – 計画 – تقرير.txt",
    "<script>alert(1)</script>.txt",
    '"><img src=x onerror=alert(1)>.txt',
    "gnp.\u202etxt.exe",
    "..",
    ".",
    " ",
    "%2e%2e%2fetc%2fpasswd",
    "'; DROP TABLE files; --.txt",
    "\ufffd\U0001f6a2.txt",
]


FORM = {"content-type": "multipart/form-data; boundary=b"}


def form_of(filename: bytes, content: bytes) -> bytes:
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n--b--\r\n'
    return purpose + file % (filename, content)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_h9_hostile_file_names_are_stored_safely_and_come_back_clean(
    guarded: RunningGateway, name: str
) -> None:
    async with guarded.session(KEY) as session:
        quoted = name.replace("\\", "\\\\").replace('"', '\\"').translate({0: None, 10: None, 13: None})
        content = f"The file number {len(name)} opens at noon.".encode()
        async with session.post("/v1/files", data=form_of(quoted.encode(), content), headers=FORM) as response:
            file = await response.json()
            assert response.status == 200, file
        shown = file["filename"]
        assert 0 < len(shown) <= 255
        assert not set(shown) & set("/\x00\r\n\u202e")
        assert shown not in (".", "..")
        async with session.get(f"/v1/files/{file['id']}/content") as response:
            assert response.status == 200
            assert await response.read() == content
            assert "attachment" in response.headers["content-disposition"]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in response.headers
    store = await guarded.make_store("names", {}, KEY)
    async with guarded.client(KEY) as client:
        await client.vector_stores.files.create_and_poll(
            vector_store_id=store, file_id=file["id"], poll_interval_ms=20
        )
    status, _, answer = await chat(
        guarded,
        question(headstart={"vector_store_ids": [store]}),
    )
    assert status == 200
    for citation in answer["headstart"]["citations"]:
        assert citation["filename"] == shown


async def test_h9_a_name_with_a_raw_nul_or_line_end_forges_no_header(guarded: RunningGateway) -> None:
    for name in (b"a\x00b.txt", b"a\rSet-Cookie: a=b.txt", b"\xff\xfe.txt"):
        async with guarded.session(KEY) as session:
            async with session.post("/v1/files", data=form_of(name, b"text"), headers=FORM) as response:
                file = await response.json()
                assert response.status in (200, 400), file
            if response.status == 200:
                assert not set(file["filename"]) & set("\x00\r\n")
                async with session.get(f"/v1/files/{file['id']}/content") as response:
                    assert response.status == 200
                    assert "set-cookie" not in response.headers


async def test_h9_nothing_is_written_outside_the_data_folder(sim: EngineSim, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    settings = settings_for(inner, sim.url, engine_api_key=ENGINE_KEY)
    async with run_gateway(settings) as gateway:
        names = ("../../escape.txt", "../escape.txt", "/escape.txt")
        await gateway.make_store("escape", {name: f"Text of {name}." for name in names})
    assert os.listdir(tmp_path) == ["inner"]
    assert not [name for _, folders, files in os.walk(inner) for name in (*folders, *files) if "escape" in name]
