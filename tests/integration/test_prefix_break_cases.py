"""Why a prompt's prefix broke, as clients, the dry run and the metrics tell it."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for

SYSTEM = "You answer for the ferry office, in few words, and you are kind to dogs and to those who walk them."
# Longer than a block: of less nothing could be reused, so nothing breaks.
DOGS = "May dogs travel on the ferry with their people, and where do they have to stay while it is at sea?"
LAST = "When does the last ferry of the evening leave, and is it any earlier on Sundays and on holidays?"
DOCUMENTS = {
    "dogs.md": "# Dogs\n\nDogs travel free of charge on every ferry, on a lead, and not in the saloon. " * 3,
    "times.md": "# Times\n\nThe first ferry leaves at 6:40 and the last one at 22:15, on Sundays at 21:00. " * 3,
}


@pytest.fixture
async def sim(model_dir: Path) -> AsyncIterator[EngineSim]:
    config = SimConfig(
        model_dir=model_dir, block_size=16, fixed_ttft_s=0.0, decode_tokens_per_s=None, answer="text:On a lead."
    )
    async with EngineSim(config) as engine:
        yield engine


@pytest.fixture
async def gateway(tmp_path: Path, sim: EngineSim, model_dir: Path) -> AsyncIterator[RunningGateway]:
    settings = settings_for(tmp_path, sim.url, tokenizer=str(model_dir), evidence_lines=0, rendering="stripped")
    async with run_gateway(settings) as running:
        yield running


async def chat(gateway: RunningGateway, *messages: tuple[str, str], key: str | None = None, **fields: Any) -> Any:
    said = [{"role": role, "content": content} for role, content in messages]
    body = {"model": "sim-model", "messages": said, "max_tokens": 8, **fields}
    async with gateway.session(key) as session, session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not fields.get("stream"):
            return await response.json()
        events = [json.loads(line[6:]) for line in (await response.text()).split("\n") if line.startswith("data: {")]
        return next(event for event in events if "headstart" in event)


async def reasons(gateway: RunningGateway) -> dict[str, float]:
    async with gateway.session() as session, session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith("headstart_prefix_breaks_total{"):
            found[line.split('"')[1]] = float(line.split()[-1])
    return {reason: count for reason, count in found.items() if count}


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_tells_where_its_prefix_broke_and_why(gateway: RunningGateway, stream: bool) -> None:
    store = await gateway.make_store("ferry", dict(DOCUMENTS))
    extension = {"vector_store_ids": [store], "top_k": 2}

    async def ask(*messages: tuple[str, str]) -> Any:
        body = await chat(gateway, ("system", SYSTEM), *messages, headstart=extension, stream=stream)
        return body["headstart"]["prefix"]

    first = await ask(("user", DOGS))
    assert (first["reason"], first["kind"], first["token_offset"]) == ("first_request", "system", 0)
    second = await ask(("user", LAST))
    assert (second["reason"], second["kind"], second["reported"]) == ("new_question", "question", True)
    assert second["cached_tokens"] > 0
    assert (await ask(("user", LAST)))["reason"] == "end"
    third = await ask(("user", LAST), ("assistant", "On a lead."), ("user", "And on Sundays?"))
    assert (third["reason"], third["kind"]) == ("stripped_turn", "turn")
    edited = await ask(("user", LAST), ("assistant", "It does not."), ("user", "And on Sundays?"))
    assert (edited["reason"], edited["kind"]) == ("edited_turn", "turn")
    assert await reasons(gateway) == dict.fromkeys(
        ["first_request", "new_question", "end", "stripped_turn", "edited_turn"], 1.0
    )


async def test_the_dry_run_foretells_the_break(tmp_path: Path, model_dir: Path) -> None:
    config = SimConfig(model_dir=model_dir, block_size=16, time_scale=0.02, decode_tokens_per_s=None)
    async with EngineSim(config) as sim:
        settings = settings_for(tmp_path, sim.url, tokenizer=str(model_dir), evidence_lines=0, calibrate=True)
        async with run_gateway(settings) as gateway:
            await gateway.until_calibrated()
            store = await gateway.make_store("ferry", dict(DOCUMENTS))
            extension = {"vector_store_ids": [store], "top_k": 2}

            async def foretold(question: str) -> Any:
                said = [{"role": "user", "content": question}]
                body = {"model": "sim-model", "messages": said, "headstart": extension}
                async with gateway.session() as session, session.post("/v1/plan", json=body) as response:
                    return (await response.json())["prefix"]

            first = await foretold(DOGS)
            assert (first["reason"], first["reported"], first["cached_tokens"]) == ("first_request", False, 0)
            assert await foretold(DOGS) == first, "a dry run sends nothing"
            answered = (await chat(gateway, ("user", DOGS), headstart=extension))["headstart"]["prefix"]
            assert answered == first | {"reported": True}
            second = await foretold(LAST)
            assert (second["reason"], second["kind"]) == ("new_question", "question")
            answered = (await chat(gateway, ("user", LAST), headstart=extension))["headstart"]["prefix"]
            assert answered == second | {"reported": True}


async def test_requests_that_pass_through_are_counted(gateway: RunningGateway) -> None:
    await chat(gateway, ("system", SYSTEM), ("user", DOGS))
    await chat(gateway, ("system", SYSTEM), ("user", LAST))
    assert await reasons(gateway) == {"first_request": 1.0, "new_question": 1.0}


async def test_a_cleared_engine_is_told_apart_from_a_new_prompt(gateway: RunningGateway, sim: EngineSim) -> None:
    store = await gateway.make_store("ferry", dict(DOCUMENTS))
    extension = {"vector_store_ids": [store], "top_k": 2}
    await chat(gateway, ("user", DOGS), headstart=extension)
    async with gateway.session() as session, session.post(f"{sim.url}/reset_prefix_cache") as response:
        assert response.status == 200
    again = await chat(gateway, ("user", DOGS), headstart=extension)
    # Nobody told the gateway of the reset: what was there is gone.
    assert again["headstart"]["prefix"]["reason"] == "evicted"


async def test_f5_nothing_tells_a_tenant_that_another_sent_the_same(
    tmp_path: Path, sim: EngineSim, model_dir: Path
) -> None:
    keys = {"ada": "sk-ada", "bob": "sk-bob"}
    entries = ",".join(f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in keys.items())
    async with run_gateway(settings_for(tmp_path, sim.url, api_keys=entries, tokenizer=str(model_dir))) as gateway:

        async def figures() -> str:
            async with gateway.session("sk-bob") as session, session.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            return "\n".join(line for line in lines if line.startswith("headstart_prefix_breaks_total"))

        await chat(gateway, ("system", SYSTEM), ("user", "A secret of Ada's."), key="sk-ada")
        before = await figures()
        await chat(gateway, ("system", SYSTEM), ("user", "A secret of Ada's."), key="sk-bob")
        after = await figures()
        changed = set(after.splitlines()) - set(before.splitlines())
        assert changed == {'headstart_prefix_breaks_total{reason="first_request"} 2.0'}
        assert "tenant" not in after
