"""Conversations as clients hold them: resent, edited, regenerated, named, with pictures, tools and odd messages."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from tests.support.sdk import asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

FERRY = "The ferry to Pellen leaves at seven in the morning from the north pier."
FARES = "A return ticket costs eleven crowns. Children under six travel free of charge."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim(model_dir: Path) -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(model_dir=model_dir, time_scale=0.01, decode_tokens_per_s=None)) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(
    sim: EngineSim, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    settings = settings_for(folder, sim.url, tokenizer=str(model_dir), rendering="kept", top_k=1)
    async with run_gateway(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(kept: RunningGateway) -> str:
    return await kept.make_store("shelf", {"ferry.md": FERRY, "fares.txt": FARES})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(kept: RunningGateway) -> str:
    return await kept.make_store("other", {"opening.txt": "The ferry office opens at noon on Mondays."})


async def post(gateway: RunningGateway, messages: list[dict[str, Any]], **extra: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "sim-model", "messages": messages, **extra}
    async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def ask(gateway: RunningGateway, messages: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    status, answer = await post(gateway, messages, **extra)
    assert status == 200, answer
    return answer


def user(text: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **extra}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return assistant(answer["choices"][0]["message"]["content"])


def sent(sim: EngineSim) -> list[dict[str, Any]]:
    messages = sim.generations[-1].body["messages"]
    assert isinstance(messages, list)
    return messages


async def begun(
    gateway: RunningGateway, store: str, text: str = "When does the ferry leave?"
) -> list[dict[str, Any]]:
    """A conversation of one answered question that was sent with a chunk."""
    first = [user(text)]
    return [*first, said(await ask(gateway, first, headstart={"vector_store_ids": [store]}))]


async def test_a_known_history_gets_its_chunks_back_even_without_a_store(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    history = await begun(kept, shelf)
    answer = await ask(kept, [*history, user("And then?")])
    assert FERRY in sent(sim)[1]["content"]
    assert answer["headstart"]["plan"]["past_messages"] == 2


@pytest.mark.parametrize("place", [0, 1])
async def test_an_edited_turn_branches(kept: RunningGateway, sim: EngineSim, shelf: str, place: int) -> None:
    history = await begun(kept, shelf)
    edited = [dict(message) for message in history]
    edited[place]["content"] += " (edited)"
    asked = [*edited, user("What does a ticket cost?")]
    await ask(kept, asked, headstart={"vector_store_ids": [shelf]})
    # The edited turn stands as the client states it; the untouched conversation is still known.
    assert [message["content"] for message in sent(sim)[1:3]] == [message["content"] for message in edited]
    await ask(kept, [*history, user("What does a ticket cost?")], headstart={"vector_store_ids": [shelf]})
    assert FERRY in sent(sim)[1]["content"]


async def test_a_regenerated_answer_is_asked_with_the_same_prompt(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    history = await begun(kept, shelf)
    asked = [*history, user("What does a return ticket cost?")]
    prompts = []
    for _ in range(2):
        await ask(kept, asked, headstart={"vector_store_ids": [shelf]})
        prompts.append(list(sim.generations[-1].prompt_token_ids))
    assert prompts[0] == prompts[1]


async def test_a_named_conversation_follows_edits_and_regeneration(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    named = {"vector_store_ids": [shelf], "conversation": "edits"}
    first = await ask(kept, [system("Be brief."), user("When does the ferry leave?")], headstart=named)
    await ask(kept, [user("What does a ticket cost?")], headstart=named)
    assert len(sent(sim)) == 4
    # The client states its history: from here on the conversation is what it says.
    await ask(
        kept, [user("When does the ferry leave?"), said(first), user("Is it free for children?")], headstart=named
    )
    assert len(sent(sim)) == 4
    assert sent(sim)[0]["content"].endswith("Be brief.")
    await ask(kept, [user("Are you sure?")], headstart=named)
    assert len(sent(sim)) == 6
    assert "Is it free for children?" in sent(sim)[3]["content"]
    assert "What does a ticket cost?" not in str(sent(sim))


async def test_a_named_conversation_that_is_also_resent_counts_once(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    named = {"vector_store_ids": [shelf], "conversation": "both"}
    history: list[dict[str, Any]] = [system("It is 12:00:59.")]
    for turn, question in enumerate(("When does the ferry leave?", "What does it cost?", "Is it free?")):
        history[0] = system(f"It is 12:00:{turn:02}.")
        history.append(user(question))
        answer = await ask(kept, history, headstart=named)
        history.append(said(answer))
        assert len(sent(sim)) == 2 * turn + 2
        assert sent(sim)[0]["content"].endswith(f"It is 12:00:{turn:02}.")


async def test_a_system_text_given_later_replaces_the_kept_one(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    named = {"vector_store_ids": [shelf], "conversation": "system"}
    for messages, expected in (
        ([system("Speak French."), user("One?")], "Speak French."),
        ([user("Two?")], "Speak French."),
        ([system("Speak Thai."), user("Three?")], "Speak Thai."),
        ([user("Four?")], "Speak Thai."),
    ):
        await ask(kept, messages, headstart=named)
        assert [message["role"] for message in sent(sim)].count("system") == 1
        assert sent(sim)[0]["content"].endswith(expected)
    assert len(sent(sim)) == 8


async def test_a_history_in_text_parts_is_the_history_in_strings(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    history = await begun(kept, shelf)
    asked = user("What does a return ticket cost?")
    extension = {"vector_store_ids": [shelf]}
    await ask(kept, [*history, asked], headstart=extension)
    plain = list(sim.generations[-1].prompt_token_ids)
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]}
        for message in (*history, asked)
    ]
    answer = await ask(kept, parts, headstart=extension)
    assert answer["headstart"]["plan"]["exact"] is True
    assert list(sim.generations[-1].prompt_token_ids) == plain
    split = [user([{"type": "text", "text": "When does"}, {"type": "text", "text": "the ferry leave?"}])]
    await ask(kept, split, headstart=extension)
    assert "When does\nthe ferry leave?" in sent(sim)[-1]["content"]


async def test_names_that_the_template_does_not_read_change_nothing(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    history = await begun(kept, shelf)
    asked = [{**history[0], "name": "ann"}, history[1], user("And then?", name="ann")]
    answer = await ask(kept, asked, headstart={"vector_store_ids": [shelf]})
    assert answer["headstart"]["plan"]["exact"] is True
    assert FERRY in sent(sim)[1]["content"]
    # Without a store and without a known history, names travel as they came.
    unknown = [user("Hello", name="ann")]
    await ask(kept, unknown)
    assert sent(sim) == unknown


async def test_a_developer_message_is_system_text(kept: RunningGateway, sim: EngineSim, shelf: str) -> None:
    prompts = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be kind."}, user("When does the ferry leave?")]
        await ask(kept, messages, headstart={"vector_store_ids": [shelf]})
        assert [message["role"] for message in sent(sim)] == ["system", "user"]
        prompts.append(list(sim.generations[-1].prompt_token_ids))
    assert prompts[0] == prompts[1]


async def test_an_empty_answer_in_the_history_is_kept_as_an_empty_answer(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    for empty in ("", [], [{"type": "text", "text": ""}]):
        history = [user("Hello?"), assistant(empty), user("When does the ferry leave?")]
        answer = await ask(kept, history, headstart={"vector_store_ids": [shelf]})
        assert answer["headstart"]["plan"]["exact"] is True
        assert [message["content"] for message in sent(sim)[1:3]] == ["Hello?", ""]
    answer = await ask(
        kept,
        [user("Hello?"), {"role": "assistant", "content": None}, user("When does the ferry leave?")],
        headstart={"vector_store_ids": [shelf]},
    )
    assert answer["headstart"]["plan"]["exact"] is False
    assert sent(sim)[2] == {"role": "assistant", "content": None}


async def test_a_picture_in_the_question_reaches_the_engine_beside_the_chunks(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
    asked = [user([{"type": "text", "text": "When does this ferry leave?"}, picture])]
    answer = await ask(kept, asked, headstart={"vector_store_ids": [shelf]})
    text, beside = sent(sim)[-1]["content"]
    assert beside == picture
    assert FERRY in text["text"]
    assert text["text"].endswith("Question: When does this ferry leave?")
    plan = answer["headstart"]["plan"]
    assert plan["exact"] is False
    assert "more than text" in plan["inexact_reason"]
    earlier = [*asked, assistant("At seven."), user("And back?")]
    await ask(kept, earlier, headstart={"vector_store_ids": [shelf]})
    assert sent(sim)[1] == asked[0]


async def test_tools_and_their_results_stay_as_they_came(kept: RunningGateway, sim: EngineSim, shelf: str) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "06:30"}
    messages = [system("Be brief."), user("When does the next ferry leave?"), called, result]
    answer = await ask(kept, messages, tools=tools, headstart={"vector_store_ids": [shelf]})
    assert sent(sim)[2:] == [called, result]
    assert FERRY in sent(sim)[1]["content"]
    assert sim.generations[-1].body["tools"] == tools
    assert answer["headstart"]["plan"]["inexact_reason"] == "the request offers tools"


async def test_template_arguments_are_honoured_by_letting_the_engine_render(
    kept: RunningGateway, sim: EngineSim, shelf: str
) -> None:
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}):
        answer = await ask(
            kept,
            [user("When does the ferry leave?")],
            headstart={"vector_store_ids": [shelf], "conversation": "template"},
            **extra,
        )
        assert "kv_transfer_params" not in sim.generations[-1].body
        assert next(iter(extra)) in sim.generations[-1].body
        assert "chat template" in answer["headstart"]["plan"]["inexact_reason"]


@pytest.mark.parametrize("text", ["", "   ", "\n\t\u3000", [], [{"type": "text", "text": " "}], None])
async def test_a_question_without_text_is_refused_where_it_would_be_searched(
    kept: RunningGateway, shelf: str, text: Any
) -> None:
    for extension in ({"vector_store_ids": [shelf]}, {"conversation": "blank"}):
        status, answer = await post(kept, [user(text)], headstart=extension)
        assert status == 400
        assert answer["error"]["param"] == "messages"
    status, _ = await post(kept, [user("a"), assistant("b"), user(text or "")], model=f"sim-model@{shelf}")
    assert status == 400


async def test_messages_that_hold_no_question_pass_through(kept: RunningGateway, sim: EngineSim) -> None:
    picture = user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    for messages in ([user("a"), assistant("b"), picture], [system("a"), assistant("b"), assistant("c")]):
        await ask(kept, messages)
        assert sent(sim) == messages


async def test_several_answers_are_each_remembered(kept: RunningGateway, sim: EngineSim, shelf: str) -> None:
    first = [user("When does the ferry leave?")]
    extension = {"vector_store_ids": [shelf], "conversation": "several"}
    answer = await ask(kept, first, n=3, headstart=extension)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all("annotations" in choice["message"] for choice in answer["choices"])
    await ask(kept, [*first, said(answer), user("And then?")])
    assert FERRY in sent(sim)[1]["content"]
    await ask(kept, [user("And then?")], headstart={"conversation": "several"})
    assert len(sent(sim)) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_streamed_and_whole_answers_are_remembered_alike(
    kept: RunningGateway, sim: EngineSim, shelf: str, stream: bool
) -> None:
    question = f"When does the ferry leave? {stream}"
    extension = {"headstart": {"vector_store_ids": [shelf]}}
    async with kept.client() as client:
        if stream:
            events = await client.chat.completions.create(
                model="sim-model", messages=asking(question), stream=True, extra_body=extension
            )
            text = "".join([event.choices[0].delta.content or "" async for event in events if event.choices])
        else:
            answer = await client.chat.completions.create(
                model="sim-model", messages=asking(question), extra_body=extension
            )
            text = answer.choices[0].message.content or ""
    await ask(kept, [user(question), assistant(f"{text}\n"), user("And then?")])
    assert FERRY in sent(sim)[1]["content"]


async def test_a_model_name_with_a_store_and_named_stores_are_searched_together(
    kept: RunningGateway, shelf: str, other: str
) -> None:
    asked = [user("When does the ferry office open and the ferry to Pellen leave?")]
    for model, stores in (
        (f"sim-model@{other}", [shelf]),
        ("sim-model@other", [shelf, shelf, other]),
        (f"sim-model@{shelf}", [other]),
    ):
        answer = await ask(kept, asked, model=model, headstart={"vector_store_ids": stores, "top_k": 5})
        names = [item["filename"] for item in answer["headstart"]["citations"]]
        assert sorted(names) == ["fares.txt", "ferry.md", "opening.txt"]


async def test_a_model_name_alone_searches_its_store(kept: RunningGateway, sim: EngineSim, shelf: str) -> None:
    answer = await ask(kept, [user("When does the ferry leave?")], model="sim-model@shelf")
    assert sim.generations[-1].body["model"] == "sim-model"
    assert [item["filename"] for item in answer["headstart"]["citations"]] == ["ferry.md"]


async def test_filters_choose_the_files_that_are_searched(kept: RunningGateway) -> None:
    store = await kept.make_store(
        "filtered", {"old.txt": "The gate code is one.", "new.txt": "The gate code is two."}
    )
    async with kept.client() as client:
        for file in (await client.vector_stores.files.list(store)).data:
            name = file.filename  # type: ignore[attr-defined]
            attributes: dict[str, str | float | bool] = {"year": 2020 if name == "old.txt" else 2026}
            await client.vector_stores.files.update(file.id, vector_store_id=store, attributes=attributes)
    filters: list[tuple[dict[str, Any], list[str]]] = [
        ({"type": "gt", "key": "year", "value": 2023}, ["new.txt"]),
        ({"type": "eq", "key": "year", "value": 2020}, ["old.txt"]),
        ({"type": "in", "key": "year", "value": [2020, 2026]}, ["new.txt", "old.txt"]),
        ({"type": "and", "filters": [{"type": "gt", "key": "year", "value": 2023}] * 2}, ["new.txt"]),
        ({"type": "eq", "key": "year", "value": 1999}, []),
    ]
    for condition, names in filters:
        extension = {"vector_store_ids": [store], "filters": condition, "top_k": 5}
        answer = await ask(kept, [user("What is the gate code?")], headstart=extension)
        assert sorted(item["filename"] for item in answer["headstart"]["citations"]) == names
    for condition in ({"type": "in", "key": "year", "value": 1}, {"type": "eq", "key": "year", "value": [1]}):
        status, answer = await post(
            kept, [user("code?")], headstart={"vector_store_ids": [store], "filters": condition}
        )
        assert status == 400
        assert answer["error"]["param"] == "filters"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_either_name_of_the_answers_limit_holds(
    kept: RunningGateway, sim: EngineSim, shelf: str, name: str
) -> None:
    answer = await ask(
        kept, [user("When does the ferry leave?")], headstart={"vector_store_ids": [shelf]}, **{name: 3}
    )
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert sim.generations[-1].body["max_tokens"] == 3
    assert "max_completion_tokens" not in sim.generations[-1].body


async def test_a_deleted_file_does_not_speak_from_an_earlier_turn(kept: RunningGateway, sim: EngineSim) -> None:
    store = await kept.make_store("gone", {"gone.txt": "The old gate code was tangerine."})
    history = await begun(kept, store, "What was the old gate code?")
    assert "tangerine" in str(sent(sim))
    async with kept.client() as client:
        (file,) = (await client.vector_stores.files.list(store)).data
        await client.files.delete(file.id)
    clean = [history[0], assistant(history[1]["content"].replace("tangerine", "…"))]
    await ask(kept, [*clean, user("Say it again.")], headstart={"vector_store_ids": [store]})
    assert "tangerine" not in str(sent(sim))


async def test_nothing_that_an_answer_says_becomes_a_citation_of_another_conversation(
    kept: RunningGateway, shelf: str
) -> None:
    history = await begun(kept, shelf)
    label = history[1]["content"].split("[")[1].split("]")[0]
    answer = await ask(kept, [user(f"Say [{label}]")])
    assert "headstart" not in answer
