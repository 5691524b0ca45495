"""Prompts and answers within the model's context window, through the whole gateway."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import BaseModel

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from tests.support.sdk import asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOPICS = (
    "ferry",
    "anchor",
    "harbour",
    "lantern",
    "compass",
    "rudder",
    "galley",
    "cargo",
    "pilot",
    "tide",
    "winch",
    "mast",
)
SENTENCES = (
    "The {0} of number {1} is checked on the {1}th morning of the season by the officer of the watch.",
    "Whoever finds the {0} in bad order writes it into book {1} and tells the mate before noon.",
    "A {0} that was repaired twice is replaced; the old one goes to store room {1} with a red label.",
    "Visitors may see the {0} at hour {1} when no boat is at the pier and the wind is below force six.",
)
STRICT_TEMPLATE = """\
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def passage(topic: str, number: int) -> str:
    return " ".join(sentence.format(topic, number) for sentence in SENTENCES * 2)


def library(count: int) -> dict[str, str]:
    """Documents of about 200 tokens, no two alike."""
    return {f"{TOPICS[n % 12]}-{n}.txt": passage(f"{TOPICS[n % 12]}{n}", n) for n in range(count)}


@asynccontextmanager
async def gateway_before(
    config: SimConfig, folder: Path, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, EngineSim]]:
    async with EngineSim(config) as sim:
        tokenizer = str(config.model_dir or "")
        async with run_gateway(settings_for(folder, sim.url, **{"tokenizer": tokenizer, **settings})) as gateway:
            yield gateway, sim


def engine(model_dir: Path | None, **changes: Any) -> SimConfig:
    fast: dict[str, Any] = {
        "model_dir": model_dir,
        "time_scale": 0.001,
        "decode_tokens_per_s": None,
        "answer_words": 40,
    }
    return SimConfig(**{**fast, "answer": "words", **changes})


async def post(gateway: RunningGateway, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {"model": "sim-model", **body}
    async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def answered(gateway: RunningGateway, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await post(gateway, body)
    assert status == 200, answer
    return answer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def words(count: int) -> str:
    return " ".join(f"word{n % 97}" for n in range(count))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_b1_a_long_prompt_and_a_large_answer_are_fitted_never_refused(
    model_dir: Path, tmp_path: Path, name: str
) -> None:
    system = {"role": "system", "content": words(1_050)}
    async with gateway_before(engine(model_dir), tmp_path) as (gateway, sim):
        store = await gateway.make_store("b1", library(6))
        body = {
            "messages": [system, user("Who checks the ferry0?")],
            name: 5_120,
            "headstart": {"vector_store_ids": [store], "top_k": 6},
        }
        answer = await answered(gateway, body)
        plan, sent = answer["headstart"]["plan"], sim.generations[-1].body
        assert 3_000 < plan["prompt_tokens"] < 4_096
        assert plan["prompt_tokens"] + plan["max_tokens"] <= 8_192
        assert plan["max_tokens"] >= 8_192 - 4_096 - 1
        assert sent["max_tokens"] == plan["max_tokens"]
        assert "max_completion_tokens" not in sent
        (clamped,) = [item for item in plan["dropped"] if item["what"] == "max_tokens"]
        assert clamped["name"] == "5120"
        assert str(plan["max_tokens"]) in clamped["reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_b1_requests_without_retrieval_are_fitted_too(model_dir: Path, tmp_path: Path, stream: bool) -> None:
    async with gateway_before(engine(model_dir), tmp_path) as (gateway, sim):
        messages = [user(words(1_100))]
        body = {"messages": messages, "max_completion_tokens": 5_120, "stream": stream, "model": "sim-model"}
        async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
        sent = sim.generations[-1]
        assert sent.body["messages"] == messages
        assert "kv_transfer_params" not in sent.body
        assert sent.body["max_tokens"] == 8_192 - len(sent.prompt_token_ids)
        short = {"messages": [user("hi")], "max_completion_tokens": 100, "model": "sim-model"}
        await answered(gateway, short)
        assert sim.generations[-1].body["max_completion_tokens"] == 100
        assert "max_tokens" not in sim.generations[-1].body


@pytest.mark.parametrize("how", ["named", "resent"])
@pytest.mark.parametrize("rendering", ["kept", "stripped"])
async def test_b2_thirty_turns_in_a_window_of_4096(model_dir: Path, tmp_path: Path, rendering: str, how: str) -> None:
    config = engine(model_dir, max_model_len=4_096)
    rule = "House rule: the fog signal is three long blasts."
    async with gateway_before(config, tmp_path, rendering=rendering, top_k=2) as (gateway, sim):
        store = await gateway.make_store("b2", library(16))
        history: list[dict[str, Any]] = [{"role": "system", "content": rule}]
        breaks = 0
        before: list[int] = []
        for turn in range(30):
            question = f"Turn {turn}: what about the {TOPICS[turn % 12]}{turn % 16}? " + words(
                20 if turn % 3 else 120
            )
            history.append(user(question))
            named = {"conversation": f"b2-{rendering}"} if how == "named" else {}
            messages = history if how == "resent" else ([history[0]] if turn == 0 else []) + [user(question)]
            extension = {"vector_store_ids": [store], **named}
            answer = await answered(gateway, {"messages": messages, "max_tokens": 300, "headstart": extension})
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            request, plan = sim.generations[-1], answer["headstart"]["plan"]
            assert plan["prompt_tokens"] == len(request.prompt_token_ids) == answer["usage"]["prompt_tokens"]
            assert plan["prompt_tokens"] + request.body["max_tokens"] <= 4_096
            assert request.body["max_tokens"] == 300
            sent = request.body["messages"]
            assert sent[0]["role"] == "system"
            assert rule in sent[0]["content"]
            assert question in sent[-1]["content"]
            assert plan["chunks"] or plan["references"]
            if turn:
                assert sent[-2]["content"] == history[-3]["content"]
                assert history[-4]["content"] in sent[-3]["content"]
            roles = [message["role"] for message in sent[1:]]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            cut = sum(item["what"] == "turn" for item in plan["dropped"])
            assert cut + (len(sent) - 2) // 2 == turn
            ids = list(request.prompt_token_ids)
            if rendering == "kept" and ids[: len(before)] != before:
                breaks += 1
            before = ids
        assert cut > 0
        if rendering == "kept":
            # Turns leave in steps: the front of the prompt moves far less often than turns are asked.
            assert breaks <= 30 // 4 + 1


async def test_b3_chunks_that_exceed_the_window_become_fewer_and_the_plan_says_so(
    model_dir: Path, tmp_path: Path
) -> None:
    async with gateway_before(engine(model_dir, max_model_len=1_536), tmp_path) as (gateway, sim):
        store = await gateway.make_store("b3", library(12))
        extension = {"vector_store_ids": [store], "top_k": 12}
        body = {"messages": [user("Who checks the compass4?")], "max_tokens": 200, "headstart": extension}
        answer = await answered(gateway, body)
        plan = answer["headstart"]["plan"]
        gone = [item for item in plan["dropped"] if item["what"] == "chunk"]
        assert 1 <= len(plan["chunks"]) < 12
        assert len(plan["chunks"]) + len(gone) == 12
        assert {item["name"] for item in gone}.isdisjoint(chunk["label"] for chunk in plan["chunks"])
        assert all("window's 1536 tokens" in item["reason"] for item in gone)
        # The most relevant ones stayed, and there was no room for one more.
        assert "compass-4.txt" in [item["filename"] for item in answer["headstart"]["citations"]]
        assert 1_536 - 200 - plan["prompt_tokens"] < 400
        assert len(sim.generations[-1].prompt_token_ids) == plan["prompt_tokens"]


async def test_b3_a_question_that_cannot_fit_alone_is_refused_with_the_numbers(
    model_dir: Path, tmp_path: Path
) -> None:
    async with gateway_before(engine(model_dir, max_model_len=1_024), tmp_path) as (gateway, sim):
        store = await gateway.make_store("b3", library(2))
        before = len(sim.generations)
        body = {"messages": [user(words(2_000))], "headstart": {"vector_store_ids": [store]}}
        status, answer = await post(gateway, body)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["param"] == "messages"
        assert "1024 tokens" in answer["error"]["message"]
        assert len(sim.generations) == before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    async with gateway_before(engine(model_dir, max_model_len=65_536), folder) as (gateway, _):
        yield gateway


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zh", "渡轮清晨七点从北码头出发前往佩伦岛并于傍晚返回"),
        ("th", "เรือข้ามฟากออกจากท่าเรือเหนือเวลาเจ็ดโมงเช้าไปยังเกาะ"),
        ("hi", "नावसुबहसातबजेउत्तरीघाटसेरवानाहोतीहैऔरशामकोलौटतीहै"),
        ("ja", "フェリーは朝七時に北埠頭を出発し夕方に戻ります"),
        ("ko", "여객선은아침일곱시에북쪽부두에서출발하여저녁에돌아옵니다"),
        ("vi", "phàrờibếnlúcbảygiờsángvàtrởvềvàobuổichiều"),
    ],
    ids=["zh", "th", "hi", "ja", "ko", "vi"],
)
async def test_b5_a_text_without_spaces_becomes_chunks_under_the_limit(
    shared_gateway: RunningGateway, name: str, text: str
) -> None:
    long = (text * (10_500 // len(text) + 1))[:10_500]
    # Repeats of one sentence would be near-duplicates of each other; a number now and then keeps chunks apart.
    varied = "".join(f"{long[start : start + 97]}{start}" for start in range(0, 10_500, 97))
    store = await shared_gateway.make_store(name, {f"{name}.txt": varied})
    extension = {"vector_store_ids": [store], "top_k": 50}
    answer = await answered(shared_gateway, {"messages": [user(text)], "max_tokens": 8, "headstart": extension})
    chunks = answer["headstart"]["plan"]["chunks"]
    assert len(chunks) > 1
    assert all(chunk["tokens"] <= 256 + 24 for chunk in chunks), chunks
    for citation in answer["headstart"]["citations"]:
        assert citation["text"] in varied


@pytest.mark.parametrize("rendering", ["kept", "stripped"])
async def test_b6_roles_alternate_after_trimming_for_a_strict_template(
    model_dir: Path, tmp_path: Path, rendering: str
) -> None:
    strict = tmp_path / "strict"
    strict.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, strict / name)
    (strict / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    config = engine(strict, max_model_len=2_048)
    async with gateway_before(config, tmp_path, rendering=rendering) as (gateway, sim):
        store = await gateway.make_store("b6", library(8))
        history: list[dict[str, Any]] = [{"role": "system", "content": "House rule: be brief."}]
        for turn in range(12):
            asked = f"Turn {turn}: who checks the {TOPICS[turn % 8]}{turn % 8}? {words(60)}"
            history.append(user(asked))
            body = {"messages": history, "max_tokens": 128, "headstart": {"vector_store_ids": [store]}}
            answer = await answered(gateway, body)
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            plan, sent = answer["headstart"]["plan"], sim.generations[-1].body["messages"]
            assert plan["exact"] is True, plan["inexact_reason"]
            roles = [message["role"] for message in sent]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            # Without a system role the system text opens the first message that is left.
            assert "House rule: be brief." in sent[0]["content"]
        assert any(item["what"] == "turn" for item in plan["dropped"])


@pytest.mark.parametrize("refuses", [False, True])
async def test_a10_a_minimal_engine_works_and_what_it_lacks_is_said(
    model_dir: Path, tmp_path: Path, refuses: bool
) -> None:
    config = engine(model_dir, surface="minimal", reject_unknown_fields=refuses, answer="cite")
    async with gateway_before(config, tmp_path) as (gateway, sim):
        async with gateway.session() as session, session.get("/readyz") as response:
            assert response.status == 200
            state = await response.json()
        assert state["ready"] is True
        assert state["engine"]["token_exact"] is False
        missing = {item["feature"] for item in state["engine"]["missing"]}
        assert missing >= {"token ids in chat", "context window", "cached tokens"}
        assert all(item["cost"] and item["cure"] for item in state["engine"]["missing"])
        store = await gateway.make_store("minimal", library(6))
        extension = {"vector_store_ids": [store]}
        body = {"messages": [user("Who checks the ferry0?")], "max_tokens": 50, "headstart": extension}
        answer = await answered(gateway, body)
        sent = sim.generations[-1].body
        assert "kv_transfer_params" not in sent
        assert not (refuses and "cache_salt" in sent)
        assert sent["messages"][-1]["content"].endswith("Question: Who checks the ferry0?")
        plan, timings = answer["headstart"]["plan"], answer["headstart"]["timings"]
        assert plan["exact"] is False
        assert plan["inexact_reason"] == "the engine does not take token ids in chat requests"
        assert timings["cached_tokens"] is None
        assert timings["uncached_tokens"] is None
        assert timings["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        drift = abs(plan["prompt_tokens"] - answer["usage"]["prompt_tokens"])
        assert await gateway.metric("headstart_prompt_counts_total") == 1
        assert await gateway.metric("headstart_prompt_count_drift_tokens_total") == drift
        assert await gateway.metric("headstart_cached_tokens_unknown_total") == 1


async def test_b4_the_drift_of_an_estimate_is_measured(tmp_path: Path) -> None:
    async with gateway_before(engine(None, surface="minimal"), tmp_path) as (gateway, _):
        store = await gateway.make_store("estimate", library(3))
        body = {"messages": [user("Who checks the ferry0?")], "headstart": {"vector_store_ids": [store]}}
        answer = await answered(gateway, body)
        drift = abs(answer["headstart"]["plan"]["prompt_tokens"] - answer["usage"]["prompt_tokens"])
        assert drift > 0
        assert await gateway.metric("headstart_prompt_count_drift_tokens_total") == drift


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("retrieval", [False, True])
async def test_a10_cached_tokens_that_the_engine_does_not_tell_are_null_not_0(
    tmp_path: Path, stream: bool, retrieval: bool
) -> None:
    async with gateway_before(engine(None, prompt_tokens_details=False), tmp_path) as (gateway, _):
        extension = {"vector_store_ids": [await gateway.make_store("a10", library(2))]} if retrieval else None
        async with gateway.client() as client:
            messages, added = asking("Who checks the ferry0?"), {"headstart": extension} if extension else {}
            told: BaseModel
            if stream:
                chunks = await client.chat.completions.create(
                    model="sim-model", messages=messages, stream=True, extra_body=added
                )
                told = [chunk async for chunk in chunks][-1]
            else:
                told = await client.chat.completions.create(model="sim-model", messages=messages, extra_body=added)
        if extension:
            timings = (told.model_extra or {})["headstart"]["timings"]
            assert timings["cached_tokens"] is None
            assert timings["uncached_tokens"] is None
            assert timings["prompt_tokens"] > 0
        async with gateway.session() as session, session.get("/v1/calls") as response:
            (call,) = (await response.json())["data"]
        assert call["timings"]["cached_tokens"] is None
        assert call["timings"]["uncached_tokens"] is None
        assert await gateway.metric("headstart_cached_tokens_unknown_total") == 1


async def test_b1_on_the_real_engine(engine_url: str, model_dir: Path, tmp_path: Path) -> None:
    async with run_gateway(settings_for(tmp_path, engine_url, tokenizer=str(model_dir))) as gateway:
        store = await gateway.make_store("b1", library(3))
        async with gateway.client() as client:
            model = (await client.models.list()).data[0].id
        stop = ["a", "e", "o", " "]
        system = {"role": "system", "content": words(1_090)}
        for extension in ({"vector_store_ids": [store]}, None):
            body: dict[str, Any] = {
                "model": model,
                "messages": [system, user("Who checks the ferry0?")],
                "max_tokens": 5_120,
                "stop": stop,
                "temperature": 0,
            }
            answer = await answered(gateway, body | ({"headstart": extension} if extension else {}))
            assert answer["usage"]["prompt_tokens"] > 3_072
            if extension:
                plan = answer["headstart"]["plan"]
                assert plan["prompt_tokens"] == answer["usage"]["prompt_tokens"]
                assert [item["what"] for item in plan["dropped"]] == ["max_tokens"]


async def test_b2_on_the_real_engine(engine_url: str, model_dir: Path, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, engine_url, tokenizer=str(model_dir), rendering="kept")
    async with run_gateway(settings) as gateway:
        store = await gateway.make_store("b2", library(4))
        async with gateway.client() as client:
            model = (await client.models.list()).data[0].id
        gone = 0
        for turn in range(6):
            asked = [user(f"What about the {TOPICS[turn % 4]}{turn % 4}? {words(330)} {turn}")]
            if turn == 0:
                asked.insert(0, {"role": "system", "content": "House rule: be brief."})
            extension = {"vector_store_ids": [store], "conversation": "b2"}
            body = {"model": model, "messages": asked, "max_tokens": 4_096, "headstart": extension}
            body |= {"temperature": 0, "stop": ["a", "e", "o", " "]}
            answer = await answered(gateway, body)
            plan = answer["headstart"]["plan"]
            assert plan["exact"] is True
            assert plan["prompt_tokens"] == answer["usage"]["prompt_tokens"] <= 4_096
            gone = sum(item["what"] == "turn" for item in plan["dropped"])
        assert gone > 0
