"""Long conversations through the whole gateway: folded while it is idle, found again, and nobody else's."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from prompt_builder.layout import SUMMARY_MARK
from tests.conftest import RedisServer
from tests.support.chats import FILLER, INSTRUCTION_START, SUMMARY, answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIGH, LOW = 900, 450
SYSTEM = "You are the harbour's clerk.\n  Be exact. "
BUDGET = {"ttft_budget_ms": 60_000}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim(model_dir: Path) -> AsyncIterator[EngineSim]:
    config = SimConfig(
        model_dir=model_dir, time_scale=0.01, decode_tokens_per_s=None, answer=answer, recorded_requests=5000
    )
    async with EngineSim(config) as sim:
        yield sim


def history_settings(folder: Path, sim: EngineSim, model_dir: Path, **changes: Any) -> Any:
    given = {"summary": "engine", "prewarm": True, "fold_high_tokens": HIGH, "fold_low_tokens": LOW, **changes}
    return settings_for(folder, sim.url, tokenizer=str(model_dir), rendering="stripped", **given)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folding(
    sim: EngineSim, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    async with run_gateway(history_settings(tmp_path_factory.mktemp("folding"), sim, model_dir)) as gateway:
        yield gateway


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Client:
    """A client that resends its history, with the system text first."""

    def __init__(self, gateway: RunningGateway, name: str, **headstart: Any) -> None:
        self.gateway = gateway
        self.name = name
        self.headstart = headstart or dict(BUDGET)
        self.history: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]

    async def ask(self, text: str, path: str = "/v1/chat/completions") -> dict[str, Any]:
        body = {
            "model": "sim-model",
            "messages": [*self.history, user(text)],
            "user": self.name,
            "headstart": self.headstart,
        }
        async with self.gateway.session() as session, session.post(path, json=body) as response:
            found: dict[str, Any] = await response.json()
            assert response.status == 200, found
            return found

    async def say(self, text: str) -> dict[str, Any]:
        """The `headstart` object of the answer; waits for what follows in the background."""
        answered = await self.ask(text)
        self.history += [user(text), {"role": "assistant", "content": answered["choices"][0]["message"]["content"]}]
        await self.gateway.until_metric("headstart_folds_waiting", 0.0, timeout_s=10.0)
        extension: dict[str, Any] = answered["headstart"]
        return extension

    async def until_folded(self) -> None:
        for at in range(40):
            extension = await self.say(f"{self.name}, turn {at}: my berth is number {at * 7}.")
            if extension["plan"]["folded_messages"]:
                return
        raise AssertionError("nothing was folded")


def sent_for(sim: EngineSim, text: str) -> Any:
    """The engine's record of the last prompt that asks this."""
    return [r for r in sim.generations if text in r.body["messages"][-1]["content"]][-1]


def contents(record: Any) -> list[str]:
    return [message["content"] for message in record.body["messages"]]


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


async def test_a7_a8_system_text_and_tail_stay_byte_for_byte_through_folds(
    folding: RunningGateway, sim: EngineSim
) -> None:
    client = Client(folding, "a8")
    await client.until_folded()
    fronts, tail = set(), None
    for at in range(3):
        await client.say(f"Later question {at}.")
        sent = contents(sent_for(sim, f"Later question {at}."))
        assert sent[0].startswith(SYSTEM + "\n\n" + SUMMARY_MARK)
        fronts.add(sent[0])
        if tail is None:
            tail = sent[1:-1]
        elif len(fronts) == 1:
            assert sent[1 : 1 + len(tail)] == tail
    assert len(fronts) <= 2
    # What stands behind the summary is the end of what the client holds, unchanged.
    stated = [message["content"] for message in client.history]
    assert sent[1:-1] == stated[-len(sent[1:-1]) - 2 : -2]


async def test_a5_200_turns_of_a_named_conversation_break_the_prefix_at_most_once_a_fold(
    folding: RunningGateway, sim: EngineSim
) -> None:
    before = await folding.metric("headstart_folds")
    client = Client(folding, "a5", conversation="a5")
    breaks, last, uncached = 0, list[int](), list[int]()
    growth = 110
    for at in range(200):
        text = f"Turn {at}: what is said of berth {at * 7}?"
        client.history = client.history[:1] if at == 0 else []
        await client.say(text)
        record = sent_for(sim, text)
        ids = record.prompt_token_ids
        breaks += shared(last, ids) < len(last) - 10
        uncached.append(len(ids) - (record.cached_tokens or 0))
        last = ids
    folds = await folding.metric("headstart_folds") - before
    assert folds >= 20
    assert breaks <= folds
    assert breaks <= 200 / ((HIGH - LOW) // growth)
    # No fold is felt: what each turn computes is the turn.
    assert max(uncached) <= 2 * growth
    assert len(last) <= HIGH + 3 * growth


async def test_a6_a_title_over_a_running_chat_reads_its_prefix_and_leaves_the_chat_as_it_was(
    folding: RunningGateway, sim: EngineSim
) -> None:
    client = Client(folding, "a6")
    for at in range(4):
        await client.say(f"a6, turn {at}: nothing much.")
    last = sent_for(sim, "a6, turn 3").prompt_token_ids
    folds = await folding.metric("headstart_folds")
    plan = await client.ask("Go on.", "/v1/plan")
    await client.ask("Generate a title of three words for this chat.")
    await folding.until_metric("headstart_folds_waiting", 0.0)
    title = sent_for(sim, "Generate a title")
    assert title.prompt_token_ids[: len(last)] == last
    assert (title.cached_tokens or 0) >= len(last) - 16
    assert await folding.metric("headstart_folds") == folds
    assert (await client.ask("Go on.", "/v1/plan"))["segments"] == plan["segments"]
    await client.say("a6, the last turn.")
    after = sent_for(sim, "a6, the last turn.")
    assert after.prompt_token_ids[: len(last)] == last
    assert (after.cached_tokens or 0) >= len(last)


async def test_f4_the_same_words_of_another_user_are_not_folded(folding: RunningGateway) -> None:
    client = Client(folding, "f4")
    await client.until_folded()
    other = Client(folding, "f4 too")
    other.history = list(client.history)
    planned = await other.ask("Go on.", "/v1/plan")
    assert planned["plan"]["folded_messages"] == 0
    assert all(segment["kind"] != "summary" for segment in planned["segments"])


async def test_an_edited_folded_turn_comes_back_whole(folding: RunningGateway) -> None:
    client = Client(folding, "edit")
    await client.until_folded()
    assert (await client.ask("Go on.", "/v1/plan"))["plan"]["folded_messages"] > 0
    client.history[1] = user("Something else.")
    edited = await client.ask("Go on.", "/v1/plan")
    assert edited["plan"]["folded_messages"] == 0
    assert edited["plan"]["past_messages"] == len(client.history) - 1


async def test_a_dry_run_shows_the_summary(folding: RunningGateway) -> None:
    client = Client(folding, "plan")
    await client.until_folded()
    planned = await client.ask("Go on.", "/v1/plan")
    (summary,) = [segment for segment in planned["segments"] if segment["kind"] == "summary"]
    assert SUMMARY in summary["text"]
    assert summary["tokens"] <= LOW // 2
    assert planned["plan"]["tokens"]["summary"] == summary["tokens"]


async def test_a_fold_serves_after_a_restart_and_on_another_gateway_of_the_same_redis(
    sim: EngineSim, model_dir: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    def settings(name: str) -> Any:
        return history_settings(
            tmp_path / name, sim, model_dir, redis_url=redis_server.url, salt_secret="one for both gateways"
        )

    async with run_gateway(settings("one")) as first:
        client = Client(first, "redis")
        await client.until_folded()
        folded = (await client.ask("Go on.", "/v1/plan"))["plan"]["folded_messages"]
    async with run_gateway(settings("two")) as second:
        client.gateway = second
        assert (await client.ask("Go on.", "/v1/plan"))["plan"]["folded_messages"] == folded > 0


async def test_e6_a_summary_of_turns_with_a_deleted_file_is_not_used(folding: RunningGateway) -> None:
    store = await folding.make_store("gone", {"berths.txt": "The red boat lies in berth forty-two."})
    client = Client(folding, "e6", vector_store_ids=[store])
    await client.until_folded()
    assert (await client.ask("Go on.", "/v1/plan"))["plan"]["folded_messages"] > 0
    async with folding.client() as openai:
        (file,) = (await openai.vector_stores.files.list(vector_store_id=store)).data
        await openai.vector_stores.files.delete(file_id=file.id, vector_store_id=store)
    planned = await client.ask("Go on.", "/v1/plan")
    assert planned["plan"]["folded_messages"] == 0
    assert "forty-two" not in str(planned["segments"])


async def test_the_front_of_the_next_prompt_is_computed_while_nobody_waits(
    folding: RunningGateway, sim: EngineSim
) -> None:
    text = "The ferry leaves at seven from the north pier, and nobody knows why it is so early. " * 8
    store = await folding.make_store("ferry", {"ferry.txt": text})
    client = Client(folding, "prewarm", vector_store_ids=[store])
    before = await folding.metric("headstart_prewarms")
    await client.say("When does the ferry leave?")
    assert await folding.metric("headstart_prewarms") == before + 1
    prewarmed = sim.generations[-1]
    assert prewarmed.body["max_tokens"] == 1
    await client.ask("And from where does it leave?")
    sent = sent_for(sim, "And from where does it leave?")
    # The last turn stands without its passages now, and all of it is there already.
    front = shared(prewarmed.prompt_token_ids, sent.prompt_token_ids)
    assert FILLER.strip() in contents(sent)[2]
    assert (sent.cached_tokens or 0) >= front - 16


@pytest.mark.parametrize("rendering", ["kept", "auto"])
async def test_a_chunk_that_was_folded_away_is_sent_again_and_one_that_stands_is_named(
    sim: EngineSim, model_dir: Path, tmp_path: Path, rendering: str
) -> None:
    chunk = "The ferry leaves at seven from the north pier."
    settings = history_settings(tmp_path, sim, model_dir).model_copy(update={"rendering": rendering})
    async with run_gateway(settings) as gateway:
        store = await gateway.make_store("ferry", {"ferry.txt": chunk})
        client = Client(gateway, f"refer {rendering}", vector_store_ids=[store])
        folded = []
        for at in range(40):
            text = f"{rendering} {at}: when does the ferry leave the north pier?"
            folded.append((await client.say(text))["plan"]["folded_messages"])
            said = "\n".join(contents(sent_for(sim, text)))
            assert said.count(f"\n{chunk}\n") == 1
            if len(set(folded)) > 3:
                break
        assert len(set(folded)) > 3
        # What was computed in advance is the whole front of what the planner then sent.
        (prewarmed, sent) = _prewarmed_before(sim, text)
        front = shared(prewarmed.prompt_token_ids, sent.prompt_token_ids)
        assert front > len(prewarmed.prompt_token_ids) - 10
        assert (sent.cached_tokens or 0) >= front - 16


def _prewarmed_before(sim: EngineSim, text: str) -> tuple[Any, Any]:
    """The last front that was computed in idle time before this was asked, and what was sent then."""
    generations = list(sim.generations)
    at = max(place for place, r in enumerate(generations) if text in r.body["messages"][-1]["content"])
    fronts = [r for r in generations[:at] if r.body["messages"][-1]["content"] == "."]
    return fronts[-1], generations[at]


async def test_an_engine_that_will_not_summarise_costs_the_chat_nothing(
    sim: EngineSim, model_dir: Path, tmp_path: Path
) -> None:
    """Its window is small: without folds turns are left out, and every answer comes."""
    config = SimConfig(
        model_dir=model_dir,
        time_scale=0.01,
        decode_tokens_per_s=None,
        max_model_len=1500,
        answer=lambda context: "" if INSTRUCTION_START in context.question() else FILLER,
    )
    async with EngineSim(config) as small, run_gateway(history_settings(tmp_path, small, model_dir)) as gateway:
        client = Client(gateway, "none")
        await client.until_folded()
        assert await gateway.metric("headstart_folds_failed") == 2
        planned = await client.ask("Go on.", "/v1/plan")
        (summary,) = [segment for segment in planned["segments"] if segment["kind"] == "summary"]
        assert "my berth is number 7" in summary["text"]
