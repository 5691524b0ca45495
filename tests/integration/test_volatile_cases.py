"""System texts that change from request to request, through the whole gateway: reported, and moved where asked."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from prompt_builder.labels import FACTS_MARK

pytestmark = pytest.mark.asyncio(loop_scope="module")

FERRY = "The ferry to Pellen leaves at seven in the morning from the north pier."
WORDS = ("be", "brief", "kind", "cite", "use", "ask", "tell", "wait")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim(model_dir: Path) -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(model_dir=model_dir, time_scale=0.01, decode_tokens_per_s=None)) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["report", "move"])
async def gateway(
    request: pytest.FixtureRequest, sim: EngineSim, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningGateway, str, str]]:
    """The gateway, its mode and a store."""
    folder = tmp_path_factory.mktemp("gateway")
    settings = settings_for(folder, sim.url, tokenizer=str(model_dir), rendering="kept", volatile=request.param)
    async with run_gateway(settings) as gateway:
        yield gateway, request.param, await gateway.make_store("shelf", {"ferry.md": FERRY})


def rules(subject: str) -> list[str]:
    """The lines of an application; no two applications share a word."""
    return [" ".join(f"{subject}{WORDS[(place + line) % 8]}" for place in range(8)) for line in range(6)]


def at(time: str, subject: str) -> list[dict[str, Any]]:
    """A system text with a clock on its second line."""
    lines = rules(subject)
    return [{"role": "system", "content": "\n".join([lines[0], f"Current time: {time}", *lines[1:]])}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(gateway: RunningGateway, messages: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    path = extra.pop("path", "/v1/chat/completions")
    body = {"model": "sim-model", "messages": messages, "max_tokens": 8, **extra}
    async with gateway.session() as session, session.post(path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def sent(sim: EngineSim) -> list[dict[str, Any]]:
    messages = sim.generations[-1].body["messages"]
    assert isinstance(messages, list)
    return messages


def ids(sim: EngineSim) -> list[int]:
    found = sim.generations[-1].body["kv_transfer_params"]["prompt_token_ids"]
    assert isinstance(found, list)
    return found


async def warmed(gateway: RunningGateway, subject: str, **extra: Any) -> None:
    """Three requests of an application, a minute apart."""
    for minute in range(3):
        await ask(gateway, [*at(f"11:0{minute}:00", subject), user("When?")], **extra)


async def test_a3_the_same_request_before_and_after_the_minute_has_the_same_prefix_when_moved(
    gateway: tuple[RunningGateway, str, str], sim: EngineSim
) -> None:
    running, mode, store = gateway
    prompts = []
    await warmed(running, "minute")
    for time in ("12:00:59", "12:01:00"):
        answer = await ask(
            running,
            [*at(time, "minute"), user("When does it leave?")],
            headstart={"vector_store_ids": [store]},
        )
        prompts.append((sent(sim), ids(sim), answer["headstart"]["volatile"]))
    (first, first_ids, told), (second, second_ids, _) = prompts
    assert told["lines"] == [{"line": 2, "text": "Current time: …", "kind": "clock"}]
    assert told["moved"] == (mode == "move")
    shared = next(place for place, (one, two) in enumerate(zip(first_ids, second_ids, strict=False)) if one != two)
    if mode == "move":
        assert first[0] == second[0]
        assert "Current time" not in first[0]["content"]
        assert f"{FACTS_MARK}\nCurrent time: 12:00:59\n\n" in first[-1]["content"]
        assert first[-1]["content"].index(FERRY) < first[-1]["content"].index(FACTS_MARK)
        assert told["lost_tokens"] == 0
        assert shared > len(first_ids) - 40
    else:
        assert "Current time: 12:00:59" in first[0]["content"]
        assert told["lost_tokens"] > 20
        assert shared < len(first_ids) / 2


@pytest.mark.parametrize("retrieval", [True, False])
async def test_a3_a_clock_is_reported_in_answers_streams_and_plans(
    gateway: tuple[RunningGateway, str, str], retrieval: bool
) -> None:
    running, mode, store = gateway
    subject = f"told{retrieval}"
    extra: dict[str, Any] = {"headstart": {"vector_store_ids": [store]}} if retrieval else {}
    await warmed(running, subject, **extra)
    messages = [*at("12:00:59", subject), user("When?")]
    whole = (await ask(running, messages, **extra))["headstart"]["volatile"]
    planned = (await ask(running, messages, path="/v1/plan", **extra))["volatile"]
    assert whole["lines"] == planned["lines"] == [{"line": 2, "text": "Current time: …", "kind": "clock"}]
    body = {"model": "sim-model", "messages": messages, "stream": True, **extra}
    async with running.session() as session, session.post("/v1/chat/completions", json=body) as response:
        events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")]
    told = [event["headstart"]["volatile"]["lines"] for event in events if "headstart" in event]
    # A stream that passes through stays as it came.
    assert told == ([whole["lines"]] if retrieval or mode == "move" else [])
    assert await running.metric("headstart_volatile_texts") >= 1
    assert await running.metric("headstart_volatile_requests") >= 1


async def test_a_request_whose_system_text_does_not_change_has_no_report(
    gateway: tuple[RunningGateway, str, str], sim: EngineSim
) -> None:
    running, _, store = gateway
    for number in range(5):
        question = user(f"Question {number}?")
        told = await ask(running, [*at("noon", "still"), question], headstart={"vector_store_ids": [store]})
        assert told["headstart"]["volatile"] is None
        assert "headstart" not in await ask(running, [*at("noon", "still"), question])


async def test_a_conversation_goes_on_byte_for_byte_while_its_clock_moves(
    gateway: tuple[RunningGateway, str, str], sim: EngineSim
) -> None:
    running, mode, _ = gateway
    await warmed(running, "chat")
    history: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    for turn in range(4):
        history.append(user(f"Question {turn}?"))
        answer = await ask(running, [*at(f"12:0{turn}:30", "chat"), *history])
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages = sent(sim)
        if mode == "move":
            assert messages[: len(before)] == before
            assert messages[-1]["content"] == f"{FACTS_MARK}\nCurrent time: 12:0{turn}:30\n\nQuestion {turn}?"
        before = messages
    assert ("Current time" in before[0]["content"]) == (mode == "report")


async def test_a_request_with_tools_passes_through_and_says_why_nothing_moved(
    gateway: tuple[RunningGateway, str, str], sim: EngineSim
) -> None:
    running, mode, _ = gateway
    await warmed(running, "tools")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages = [*at("12:00:59", "tools"), user("When?")]
    told = (await ask(running, messages, tools=tools))["headstart"]["volatile"]
    assert sent(sim) == messages
    assert not told["moved"]
    assert (told["reason"] is not None) == (mode == "move")
    assert told["lost_tokens"] > 0


async def test_tools_beside_a_store_leave_the_moved_lines_before_the_question(
    gateway: tuple[RunningGateway, str, str], sim: EngineSim
) -> None:
    running, mode, store = gateway
    await warmed(running, "both")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages = [*at("12:00:59", "both"), user("When?")]
    await ask(running, messages, tools=tools, headstart={"vector_store_ids": [store]})
    assert (FACTS_MARK in sent(sim)[-1]["content"]) == (mode == "move")
    assert ("Current time" in sent(sim)[0]["content"]) == (mode == "report")


async def test_a_kept_conversation_keeps_its_whole_system_text(
    gateway: tuple[RunningGateway, str, str], sim: EngineSim
) -> None:
    running, mode, _ = gateway
    await warmed(running, "kept")
    named = {"headstart": {"conversation": f"kept-{mode}"}}
    await ask(running, [*at("12:00:59", "kept"), user("When?")], **named)
    await ask(running, [user("And then?")], **named)
    # Its system text does not change, for the client does not send it again.
    assert "Current time: 12:00:59" in sent(sim)[0]["content"]


async def test_nobody_is_shown_anothers_name(gateway: tuple[RunningGateway, str, str]) -> None:
    running, _, store = gateway
    shown = ""
    for name in ("Ada", "Bob", "Cleo", "Dora", "Evan"):
        system = "\n".join([*rules("users"), f"User: {name} of Porto"])
        answer = await ask(
            running,
            [{"role": "system", "content": system}, user("When?")],
            headstart={"vector_store_ids": [store]},
        )
        shown += json.dumps(answer["headstart"]["volatile"], ensure_ascii=False)
    assert "User: … of Porto" in shown
    assert not any(name in shown for name in ("Ada", "Bob", "Cleo", "Dora", "Evan"))
