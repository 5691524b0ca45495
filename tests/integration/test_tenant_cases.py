"""Tenants beside each other in one gateway: nothing of one shows to the other, and many clients at once."""

import asyncio
import itertools
import logging
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from gateway.tenants import key_digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, B = "hs-key-of-alder", "hs-key-of-birch"
KEYS = f"alder:{key_digest(A)},birch:{key_digest(B)}"
SECRET = "The alder vault opens with the word marmalade."
CHURN_S = float(os.environ.get("HEADSTART_TEST_CHURN_S", "10"))
"""Length of F2; the case asks for a minute, the suite for seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim() -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(time_scale=0.01, decode_tokens_per_s=None)) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(sim: EngineSim, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    settings = settings_for(tmp_path_factory.mktemp("gateway"), sim.url, api_keys=KEYS, rendering="kept")
    async with run_gateway(settings) as gateway:
        yield gateway


@dataclass(frozen=True)
class Alders:
    """What tenant A owns."""

    store: str
    file: str
    batch: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alders(shared: RunningGateway) -> Alders:
    async with shared.client(A) as client:
        file = await client.files.create(file=("marmalade.txt", SECRET.encode()), purpose="assistants")
        store = await client.vector_stores.create(name="alder-vault")
        batch = await client.vector_stores.file_batches.create_and_poll(
            vector_store_id=store.id, file_ids=[file.id], poll_interval_ms=20
        )
        assert batch.status == "completed"
    return Alders(store.id, file.id, batch.id)


async def call(gateway: RunningGateway, key: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
    async with gateway.session(key) as session, session.request(method, path, json=body) as response:
        return response.status, await response.text()


def question(text: str = "Which word opens the vault?", **extra: Any) -> dict[str, Any]:
    return {"model": "sim-model", "messages": [{"role": "user", "content": text}], **extra}


def leaks(text: str) -> list[str]:
    """What of tenant A's shows in a text."""
    return [word for word in ("marmalade", "alder-vault", "alder") if word in text]


async def test_f3_another_tenants_ids_are_unknown_in_every_endpoint(shared: RunningGateway, alders: Alders) -> None:
    own_store = await shared.make_store("birch-shelf", {"birch.txt": "Birch bark is white."}, B)
    store, file, batch = alders.store, alders.file, alders.batch
    attempts: list[tuple[str, str, Any]] = [
        ("GET", f"/v1/files/{file}", None),
        ("GET", f"/v1/files/{file}/content", None),
        ("DELETE", f"/v1/files/{file}", None),
        ("GET", f"/v1/files?after={file}", None),
        ("GET", f"/v1/files?before={file}", None),
        ("GET", f"/v1/vector_stores/{store}", None),
        ("POST", f"/v1/vector_stores/{store}", {"name": "taken"}),
        ("DELETE", f"/v1/vector_stores/{store}", None),
        ("GET", f"/v1/vector_stores?after={store}", None),
        ("GET", f"/v1/vector_stores?before={store}", None),
        ("POST", "/v1/vector_stores", {"name": "mine", "file_ids": [file]}),
        ("GET", f"/v1/vector_stores/{store}/files", None),
        ("POST", f"/v1/vector_stores/{store}/files", {"file_id": file}),
        ("POST", f"/v1/vector_stores/{own_store}/files", {"file_id": file}),
        ("GET", f"/v1/vector_stores/{store}/files/{file}", None),
        ("GET", f"/v1/vector_stores/{own_store}/files/{file}", None),
        ("GET", f"/v1/vector_stores/{own_store}/files?after={file}", None),
        ("POST", f"/v1/vector_stores/{store}/files/{file}", {"attributes": {"a": 1}}),
        ("POST", f"/v1/vector_stores/{own_store}/files/{file}", {"attributes": {"a": 1}}),
        ("DELETE", f"/v1/vector_stores/{store}/files/{file}", None),
        ("DELETE", f"/v1/vector_stores/{own_store}/files/{file}", None),
        ("POST", f"/v1/vector_stores/{store}/file_batches", {"file_ids": [file]}),
        ("POST", f"/v1/vector_stores/{own_store}/file_batches", {"file_ids": [file]}),
        ("POST", f"/v1/vector_stores/{own_store}/file_batches", {"files": [{"file_id": file}]}),
        ("GET", f"/v1/vector_stores/{store}/file_batches/{batch}", None),
        ("GET", f"/v1/vector_stores/{own_store}/file_batches/{batch}", None),
        ("POST", f"/v1/vector_stores/{store}/file_batches/{batch}/cancel", None),
        ("POST", f"/v1/vector_stores/{own_store}/file_batches/{batch}/cancel", None),
        ("GET", f"/v1/vector_stores/{store}/file_batches/{batch}/files", None),
        ("GET", f"/v1/vector_stores/{own_store}/file_batches/{batch}/files", None),
        ("POST", f"/v1/vector_stores/{store}/search", {"query": "marmalade vault"}),
        ("GET", f"/v1/models/sim-model@{store}", None),
        ("GET", "/v1/models/sim-model@alder-vault", None),
        ("POST", "/v1/chat/completions", question(headstart={"vector_store_ids": [store]})),
        ("POST", "/v1/chat/completions", question(headstart={"vector_store_ids": [own_store, store]})),
        ("POST", "/v1/chat/completions", question(headstart={"vector_store_ids": ["alder-vault"]})),
        ("POST", "/v1/chat/completions", question(model=f"sim-model@{store}")),
        ("POST", "/v1/chat/completions", question(model="sim-model@alder-vault")),
        ("POST", "/v1/chat/completions", question(model=f"sim-model@{store}", stream=True)),
    ]
    for method, path, body in attempts:
        theirs, text = await call(shared, B, method, path, body)
        assert theirs == 404, (method, path, text)
        asked = f"{path} {body}"
        assert not [word for word in leaks(text) if word not in asked], (method, path, text)
        # The answer is the one for an id that nobody has.
        swap = {store: "vs_ffffffffffffffffffffffff", file: "file-ffffffffffffffffffffffff", batch: "vsfb_none"}
        nobody = text
        for known, unknown in swap.items():
            path = path.replace(known, unknown)
            nobody = nobody.replace(known, unknown)
            body = None if body is None else _replaced(body, known, unknown)
        assert await call(shared, B, method, path, body) == (404, nobody)
    for path in ("/v1/files", "/v1/vector_stores", "/v1/models"):
        status, text = await call(shared, B, "GET", path)
        assert status == 200
        assert not [part for part in (*leaks(text), store, file, batch) if part in text]
    status, text = await call(shared, A, "GET", f"/v1/files/{file}/content")
    assert (status, text) == (200, SECRET)
    status, text = await call(shared, A, "POST", f"/v1/vector_stores/{store}/search", {"query": "vault"})
    assert "marmalade" in text


def _replaced(body: Any, known: str, unknown: str) -> Any:
    if isinstance(body, dict):
        return {name: _replaced(value, known, unknown) for name, value in body.items()}
    if isinstance(body, list):
        return [_replaced(value, known, unknown) for value in body]
    return body.replace(known, unknown) if isinstance(body, str) else body


async def test_f3_a_store_of_the_same_name_is_each_tenants_own(shared: RunningGateway, sim: EngineSim) -> None:
    await shared.make_store("handbook", {"a.txt": "The alder rule is to knock twice."}, A)
    await shared.make_store("handbook", {"b.txt": "The birch rule is to ring the bell."}, B)
    for key, own, other in ((A, "knock", "bell"), (B, "bell", "knock")):
        _, text = await call(
            shared, key, "POST", "/v1/chat/completions", question("What is the rule?", model="sim-model@handbook")
        )
        assert own in text
        assert other not in text
        assert other not in str(sim.generations[-1].body)


async def test_f3_f4_a_conversation_belongs_to_its_tenant_and_user(
    shared: RunningGateway, sim: EngineSim, alders: Alders
) -> None:
    named = {"conversation": "shared-name"}
    first = question(user="u1", headstart={"vector_store_ids": [alders.store], **named})
    status, _ = await call(shared, A, "POST", "/v1/chat/completions", first)
    assert status == 200
    for key, user in ((B, "u1"), (A, "u2"), (A, None), (B, None)):
        other = question("And what did we say?", headstart=named) | ({"user": user} if user else {})
        status, text = await call(shared, key, "POST", "/v1/chat/completions", other)
        assert status == 200
        assert "marmalade" not in text
        assert [message["role"] for message in sim.generations[-1].body["messages"]] == ["user"]
    again = question("And what did we say?", user="u1", headstart=named)
    await call(shared, A, "POST", "/v1/chat/completions", again)
    assert "marmalade" in str(sim.generations[-1].body["messages"])


async def test_f3_f4_a_resent_history_is_known_to_its_tenant_and_user_alone(
    shared: RunningGateway, sim: EngineSim, alders: Alders
) -> None:
    system = {"role": "system", "content": "Be brief."}
    asked = {"role": "user", "content": "Which word opens the vault?"}
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": system["content"]},
        {"role": "user", "content": asked["content"]},
    ]
    async with shared.client(A) as client:
        answer = await client.chat.completions.create(
            model="sim-model",
            user="u1",
            messages=messages,
            extra_body={"headstart": {"vector_store_ids": [alders.store]}},
        )
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    history = [system, asked, said, {"role": "user", "content": "Say it again."}]
    for key, user in ((B, "u1"), (A, "u2"), (A, None)):
        resent = {"model": "sim-model", "messages": history} | ({"user": user} if user else {})
        assert (await call(shared, key, "POST", "/v1/chat/completions", resent))[0] == 200
        # Unknown: it passes through, word for word.
        assert sim.generations[-1].body["messages"] == history
    await call(shared, A, "POST", "/v1/chat/completions", {"model": "sim-model", "user": "u1", "messages": history})
    assert "marmalade" in sim.generations[-1].body["messages"][1]["content"]


async def test_f4_two_users_with_the_same_first_message_go_their_own_ways(
    shared: RunningGateway, sim: EngineSim, alders: Alders
) -> None:
    extension = {"vector_store_ids": [alders.store], "conversation": "same"}
    for user in ("ann", "ben"):
        await call(shared, A, "POST", "/v1/chat/completions", question(user=user, headstart=extension))
    for turn in range(3):
        await call(
            shared, A, "POST", "/v1/chat/completions", question(f"ann says {turn}", user="ann", headstart=extension)
        )
    await call(shared, A, "POST", "/v1/chat/completions", question("ben speaks", user="ben", headstart=extension))
    sent = str(sim.generations[-1].body["messages"])
    assert "ann says" not in sent
    assert len(sim.generations[-1].body["messages"]) == 4


async def test_f5_salts_differ_between_tenants_and_fit_the_engine(shared: RunningGateway, sim: EngineSim) -> None:
    salts = {}
    for key in (A, B):
        seen = set()
        for extra in ({}, {"stream": True}, {"user": "other"}):
            await call(shared, key, "POST", "/v1/chat/completions", question(**extra))
            seen.add(sim.generations[-1].body["cache_salt"])
        (salts[key],) = seen
    assert salts[A] != salts[B]
    for salt in salts.values():
        assert re.fullmatch(r"[0-9a-f]{32,128}", salt)
        assert not {"alder", "birch"} & {salt}


async def test_f5_the_same_prompt_of_two_tenants_shares_no_cache(shared: RunningGateway, sim: EngineSim) -> None:
    long = question("The same long question of two tenants. " * 20)
    cached = []
    for key in (A, A, B, B):
        await call(shared, key, "POST", "/v1/chat/completions", long)
        cached.append(sim.generations[-1].cached_tokens or 0)
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] == 0
    assert cached[3] == cached[1]


async def test_f5_on_the_real_engine_a_second_tenant_finds_no_cached_token(
    engine_url: str, model_dir: Path, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, engine_url, tokenizer=str(model_dir), api_keys=KEYS)
    text = {"vault.txt": f"{SECRET} Run {time.time()}. " + "It is kept in the cellar behind the oak door. " * 8}
    async with run_gateway(settings) as gateway:
        cached, prompts = [], []
        for key in (A, A, B, B):
            store = await gateway.make_store("vault", text, key)
            async with gateway.client(key) as client:
                model = (await client.models.list()).data[0].id
                answer = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": "Which word opens the vault?"}],
                    max_tokens=4,
                    temperature=0,
                    extra_body={"headstart": {"vector_store_ids": [store], "top_k": 1}},
                )
            cached.append(answer.headstart["timings"]["cached_tokens"])  # type: ignore[attr-defined]
            prompts.append(answer.usage.prompt_tokens if answer.usage else 0)
    assert len(set(prompts)) == 1
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] == cached[3] >= prompts[0] // 32 * 32 - 32


async def test_f6_nothing_of_a_tenant_shows_in_logs_metrics_and_the_others_errors(
    shared: RunningGateway, alders: Alders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for body in (
        question("marmalade?", headstart={"vector_store_ids": [alders.store], "conversation": "f6"}),
        question("marmalade?", stream=True, headstart={"vector_store_ids": [alders.store]}),
        question("marmalade?", headstart={"vector_store_ids": ["vs_no"]}),
        question("marmalade?", max_tokens="many"),
    ):
        await call(shared, A, "POST", "/v1/chat/completions", body)
    await call(shared, A, "POST", f"/v1/vector_stores/{alders.store}/search", {"query": "marmalade"})
    for key in (A, B):
        status, metrics = await call(shared, key, "GET", "/metrics")
        assert status == 200
        for part in ("marmalade", "alder", "birch", alders.store, alders.file, A, B, key_digest(A)):
            assert part not in metrics
    async with shared.session(B) as session, session.get("/v1/calls?limit=1000") as response:
        assert {one["tenant"] for one in (await response.json())["data"]} <= {"birch"}
    _, own = await call(shared, A, "GET", "/v1/calls?limit=1000")
    assert "marmalade" not in own
    logged = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "chat 200" in logged
    for part in ("marmalade", "vault", A, B, key_digest(A)):
        assert part not in logged


async def test_f2_adding_deleting_and_searching_at_once_gives_no_error_and_no_stale_hit(
    shared: RunningGateway,
) -> None:
    async with shared.client(A) as client:
        store = (await client.vector_stores.create(name="churn")).id
    ends = time.monotonic() + CHURN_S
    rounds = await asyncio.gather(*(_churn(shared, store, number, ends) for number in range(8)))
    assert sum(rounds) >= 8
    async with shared.client(A) as client:
        found = await client.vector_stores.search(store, query="churn word of anyone", max_num_results=50)
        assert found.data == []
        assert (await client.vector_stores.retrieve(store)).file_counts.total == 0


async def _churn(gateway: RunningGateway, store: str, number: int, ends_s: float) -> int:
    """One client: adds a file, finds it, deletes it in one of three ways, and never finds it again."""
    async with gateway.client(A) as client:
        for turn in itertools.count():
            if time.monotonic() > ends_s:
                return turn
            word = f"zq{number}x{turn}"
            text = f"The churn word {word} is of client {number} and nobody else."
            file = await client.vector_stores.files.upload_and_poll(
                vector_store_id=store, file=(f"{word}.txt", text.encode()), poll_interval_ms=20
            )
            assert file.status == "completed", file.last_error
            assert word in await _texts(client, store, word)
            if (turn + number) % 2:
                await client.files.delete(file.id)
            else:
                await client.vector_stores.files.delete(file.id, vector_store_id=store)
                await client.files.delete(file.id)
            assert word not in await _texts(client, store, word)
            with pytest.raises(openai.NotFoundError):
                await client.vector_stores.files.retrieve(file.id, vector_store_id=store)
    raise AssertionError


async def _texts(client: AsyncOpenAI, store: str, query: str) -> str:
    found = await client.vector_stores.search(store, query=query, max_num_results=50)
    return " ".join(part.text for result in found.data for part in result.content)
