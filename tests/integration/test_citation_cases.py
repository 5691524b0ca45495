"""Citations reach every client: streamed and whole alike, empty where nothing is named."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from bench.engine_sim import Answer, AnswerContext, EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply
from tests.support.sdk import asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "When does the ferry to Pellen leave?"
FILES = {
    "ferry.md": "# Ferry\n\nThe ferry to Pellen leaves at seven in the morning from the north pier.",
    "fares.txt": "A return ticket costs eleven crowns. Children under six travel free of charge.",
}


def cite_all(context: AnswerContext) -> Answer:
    """Names every label of the question's passages, the first one twice; nothing where it is told not to."""
    question = context.question()
    if "no sources" in question:
        return Answer("I cannot tell.")
    labels = sorted({word.strip("[]:") for word in question.split() if word.startswith("[k")})
    return Answer(" ".join(f"As said in [{label}]." for label in [*labels, *labels[:1]]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim() -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(time_scale=0.01, decode_tokens_per_s=None, answer=cite_all)) as sim:
        yield sim


def citations(reply: Reply) -> list[dict[str, Any]]:
    assert reply.extension is not None
    found: list[dict[str, Any]] = reply.extension["citations"]
    return found


async def test_c1_streamed_and_whole_answers_carry_the_same_citations(gateway: RunningGateway, store: str) -> None:
    model = f"sim-model@{store}"
    # The first answer leaves chunks in the engine's cache, and what is there comes first in the prompts behind it.
    await gateway.ask(model, QUESTION)
    streamed = await gateway.ask(model, QUESTION, stream=True)
    whole = await gateway.ask(model, QUESTION)
    assert streamed.text == whole.text
    assert citations(streamed) == citations(whole)
    assert streamed.annotations == whole.annotations
    assert {citation["filename"] for citation in citations(whole)} == {"ferry.md", "fares.txt", "kho.txt"}
    assert all(citation["named"] for citation in citations(whole))
    assert whole.annotations
    for annotation in whole.annotations:
        label = annotation["label"]
        assert whole.text[annotation["index"] :].startswith((label, f"[{label}"))


async def test_c1_the_extension_travels_once_on_the_chunk_with_the_finish_reason(
    gateway: RunningGateway, store: str
) -> None:
    reply = await gateway.ask(f"sim-model@{store}", QUESTION, stream=True, stream_options={"include_usage": True})
    carrying = [chunk for chunk in reply.chunks if "headstart" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in carrying] == ["stop"]
    assert carrying[0]["choices"][0]["delta"]["annotations"] == reply.annotations
    assert reply.chunks[-1]["choices"] == []


async def test_c1_every_choice_has_its_own_annotations(gateway: RunningGateway, store: str) -> None:
    streamed = await gateway.ask(f"sim-model@{store}", QUESTION, stream=True, n=2)
    whole = await gateway.ask(f"sim-model@{store}", QUESTION, n=2)
    in_stream = [delta["annotations"] for delta in streamed.deltas if "annotations" in delta]
    assert in_stream == [choice["message"]["annotations"] for choice in whole.body["choices"]]
    assert len(in_stream) == 2


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_c2_an_answer_that_names_nothing_has_an_empty_list(
    gateway: RunningGateway, store: str, stream: bool
) -> None:
    reply = await gateway.ask(f"sim-model@{store}", "Answer with no sources, please: ferry?", stream=stream)
    assert reply.annotations == []
    assert citations(reply)
    assert not any(citation["named"] for citation in citations(reply))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_c2_an_empty_store_gives_empty_lists(gateway: RunningGateway, stream: bool) -> None:
    empty = await gateway.make_store("empty", {})
    reply = await gateway.ask(f"sim-model@{empty}", QUESTION, stream=stream)
    assert reply.status == 200
    assert reply.annotations == []
    assert citations(reply) == []
    assert reply.extension is not None
    assert reply.extension["plan"]["chunks"] == []


async def sdk_answers(client: AsyncOpenAI, model: str, **fields: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """`headstart` of a streamed and of a whole answer, read with the official client alone."""
    messages = asking(QUESTION)
    stream: AsyncStream[ChatCompletionChunk] = await client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    )
    chunks = [chunk async for chunk in stream]
    extensions = [found["headstart"] for chunk in chunks if "headstart" in (found := chunk.model_extra or {})]
    assert len(extensions) == 1
    assert chunks[-1].usage is not None
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole: ChatCompletion = await client.chat.completions.create(model=model, messages=messages, **fields)
    assert whole.choices[0].message.annotations is not None
    return extensions[0], (whole.model_extra or {})["headstart"]


async def test_c3_the_official_sdk_reads_streams_with_all_extensions_on(gateway: RunningGateway, store: str) -> None:
    extension = {
        "vector_store_ids": [store],
        "top_k": 2,
        "filters": {"type": "ne", "key": "topic", "value": "none"},
        "conversation": "c3",
    }
    async with gateway.client() as client:
        first, second = await sdk_answers(client, "sim-model", extra_body={"headstart": extension})
    assert set(first) == set(second) == {"citations", "plan", "prefix", "replica", "timings", "volatile"}
    assert first["citations"]


async def test_c3_the_sdks_own_stream_helper_accumulates_the_answer(gateway: RunningGateway, store: str) -> None:
    async with (
        gateway.client() as client,
        client.chat.completions.stream(model=f"sim-model@{store}", messages=asking(QUESTION)) as stream,
    ):
        final = await stream.get_final_completion()
    whole = await gateway.ask(f"sim-model@{store}", QUESTION)
    assert final.choices[0].message.content == whole.text
    assert final.choices[0].finish_reason == "stop"


async def test_c1_c3_on_the_real_engine_streamed_and_whole_answers_carry_the_same_citations(
    engine_url: str, tmp_path: Path
) -> None:
    async with run_gateway(settings_for(tmp_path, engine_url)) as gateway:
        store = await gateway.make_store("harbour", FILES)
        async with gateway.client() as client:
            model = f"{(await client.models.list()).data[0].id}@{store}"
            streamed, whole = await sdk_answers(client, model, max_tokens=24, temperature=0)
    assert streamed["citations"] == whole["citations"]
    assert {citation["filename"] for citation in whole["citations"]} == set(FILES)
    assert streamed["plan"] == whole["plan"]
    assert whole["timings"]["prompt_tokens"] == whole["plan"]["prompt_tokens"]
