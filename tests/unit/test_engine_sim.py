"""The simulated engine against the rules that a real one follows."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from bench.engine_sim import Answer, EngineSim, Fault, SimConfig, ToolCall
from bench.sim.blocks import BlockPool
from latency.model import PrefillModel

FAST = SimConfig(prefill=PrefillModel(0.0, 0.0, 0.0), decode_tokens_per_s=None)
MESSAGES = [{"role": "user", "content": "Passage [k7f2] says so.\nIs it \u2028 so? 😀"}]


def question(**more: Any) -> dict[str, Any]:
    return {"model": "sim-model", "messages": MESSAGES, **more}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield session


async def chat(http: aiohttp.ClientSession, sim: EngineSim, **more: Any) -> dict[str, Any]:
    async with http.post(f"{sim.url}/v1/chat/completions", json=question(**more)) as response:
        assert response.status == 200, await response.text()
        parsed: dict[str, Any] = await response.json()
        return parsed


async def raw_stream(http: aiohttp.ClientSession, sim: EngineSim, **more: Any) -> bytes:
    async with http.post(f"{sim.url}/v1/chat/completions", json=question(stream=True, **more)) as response:
        assert response.status == 200
        return await response.read()


async def read_into(received: bytearray, response: aiohttp.ClientResponse) -> None:
    async for data in response.content.iter_any():
        received += data


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line for line in raw.decode().replace("\r\n", "\n").split("\n\n") if line and line[0] != ":"]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_in(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


class PlainLru:
    """The rule in words: a queue of whole blocks, each known by all tokens up to its end."""

    def __init__(self, blocks: int, size: int) -> None:
        self.capacity, self.size = blocks - 1, size
        self.queue: list[tuple[int, ...]] = []

    def request(self, prompt: list[int], output: list[int]) -> int:
        size, held = self.size, []  # type: int, list[tuple[int, ...]]
        for end in range(size, len(prompt), size):
            if tuple(prompt[:end]) not in self.queue:
                break
            held.append(tuple(prompt[:end]))
        for block in held:
            self.queue.remove(block)
        cached = len(held) * size
        computed = (prompt + output)[: len(prompt) + len(output) - 1]
        wanted = -(-len(computed) // size) - len(held)
        while self.capacity - len(self.queue) - len(held) < wanted:
            self.queue.pop(0)
        held += [tuple(computed[:end]) for end in range(cached + size, len(computed) + 1, size)]
        self.queue += reversed(held)
        return cached


def test_cached_tokens_equal_a_brute_force_lru_of_whole_blocks() -> None:
    chance = random.Random(7)
    size, blocks = 4, 24
    pool, plain = BlockPool(blocks, size), PlainLru(blocks, size)
    hits = 0
    past: list[list[int]] = [[0]]
    for _ in range(3000):
        prompt = chance.choice(past)[: chance.randrange(1, 60)] + [chance.randrange(3) for _ in range(9)]
        output = [chance.randrange(3) for _ in range(chance.randrange(1, 15))]
        allocation = pool.start(prompt)
        assert allocation is not None
        allocation.tokens.extend(output)
        assert pool.extend(allocation, len(prompt) + len(output) - 1)
        assert allocation.cached_tokens == plain.request(prompt, output)
        hits += allocation.cached_tokens > 0
        pool.release(allocation)
        past = [*past[-20:], prompt + output]
    assert hits > 500
    assert pool.evictions > 1000
    assert pool.used_blocks == 0


def test_a_pool_refuses_what_does_not_fit_beside_running_requests() -> None:
    pool = BlockPool(5, 4)
    first = pool.start(list(range(12)))
    assert first is not None
    assert pool.start(list(range(100, 108))) is None
    assert pool.extend(first, 8)
    shared = pool.start([*range(8), 99])
    assert shared is not None
    assert shared.cached_tokens == 8
    pool.release(first)
    pool.release(shared)
    assert pool.used_blocks == 0


async def test_usage_shows_cached_tokens_of_prompt_and_answer(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        first = await chat(http, sim)
        second = await chat(http, sim)
        tokens = first["usage"]["prompt_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // 16 * 16
        answer = sim.tokenizer.encode(first["choices"][0]["message"]["content"])
        longer = [*sim.requests[0].prompt_token_ids, *answer, 1, 2, 3]
        third = await chat(http, sim, kv_transfer_params={"prompt_token_ids": longer})
        assert third["usage"]["prompt_tokens"] == len(longer)
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] > tokens
        salted = await chat(http, sim, cache_salt="abcd")
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await sim.restart()
        assert (await chat(http, sim))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a10_without_the_flag_cached_tokens_are_null(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, prompt_tokens_details=False)) as sim:
        await chat(http, sim)
        assert (await chat(http, sim))["usage"]["prompt_tokens_details"] is None


async def test_ttft_follows_the_prefill_model(http: aiohttp.ClientSession) -> None:
    model = PrefillModel(0.02, 0.0005, 1e-6)
    async with EngineSim(replace(FAST, prefill=model, max_num_batched_tokens=128)) as sim:
        for prompt, cached in ((list(range(300)), 0), ([*range(300), *range(200)], 288)):
            started = time.perf_counter()
            answer = await chat(http, sim, kv_transfer_params={"prompt_token_ids": prompt})
            took_s = time.perf_counter() - started
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            expected_s = model.predict_s(len(prompt) - cached, cached)
            assert expected_s - 0.002 <= took_s <= expected_s * 1.3 + 0.08


async def test_prefills_that_wait_together_get_their_first_token_together(http: aiohttp.ClientSession) -> None:
    config = replace(FAST, prefill=PrefillModel(0.01, 0.001, 0.0))
    prompts = [[index] * 50 for index in range(1, 5)]

    async def first_tokens_s(sim: EngineSim) -> list[float]:
        await asyncio.gather(*(chat(http, sim, kv_transfer_params={"prompt_token_ids": p}) for p in prompts))
        return sorted((r.first_token_s or 0) - sim.requests[0].at_s for r in sim.requests)

    async with EngineSim(config) as sim:
        together = await first_tokens_s(sim)
    async with EngineSim(replace(config, max_num_batched_tokens=50)) as sim:
        in_turn = await first_tokens_s(sim)
    # The first has the engine to itself; the other three arrive during its step and share the next.
    assert together[1] == pytest.approx(0.22, abs=0.08)
    assert together[3] - together[1] < 0.02
    assert in_turn[3] - in_turn[1] > 0.08


async def test_an_abandoned_prefill_leaves_only_what_was_computed(http: aiohttp.ClientSession) -> None:
    config = replace(FAST, prefill=PrefillModel(0.0, 0.001, 0.0), max_num_batched_tokens=64)
    async with EngineSim(config) as sim:
        prompt = {"prompt_token_ids": list(range(640))}
        task = asyncio.create_task(chat(http, sim, kv_transfer_params=prompt))
        await asyncio.sleep(0.3)
        task.cancel()
        await sim.wait_until_idle()
        again = await chat(http, sim, kv_transfer_params=prompt)
        assert 128 <= again["usage"]["prompt_tokens_details"]["cached_tokens"] <= 384


async def test_decode_runs_at_its_rate_and_is_shared_when_told(http: aiohttp.ClientSession) -> None:
    config = replace(FAST, decode_tokens_per_s=100, answer="text:" + "x" * 20)
    for shared, low_s, high_s in ((False, 0.15, 0.6), (True, 0.65, 2.0)):
        async with EngineSim(replace(config, decode_shared=shared)) as sim:
            started = time.perf_counter()
            await asyncio.gather(*(raw_stream(http, sim) for _ in range(4)))
            assert low_s < time.perf_counter() - started < high_s


async def test_a_stream_carries_role_text_finish_and_usage(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        chunks = events(await raw_stream(http, sim, stream_options={"include_usage": True}))
        whole = await chat(http, sim)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        expected = "According to [k7f2]: Is it \u2028 so? 😀"
        assert text_in(chunks) == whole["choices"][0]["message"]["content"] == expected
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert not any("usage" in c for c in events(await raw_stream(http, sim)))


async def test_token_ids_choices_logprobs_stop_and_length_are_answered(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, answer="text:one two three")) as sim:
        chunks = events(await raw_stream(http, sim, return_token_ids=True, n=2, logprobs=True))
        assert chunks[0]["prompt_token_ids"] == sim.requests[0].prompt_token_ids
        for index in (0, 1):
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            ids = [i for choice in choices for i in choice.get("token_ids") or []]
            assert sim.tokenizer.decode(ids[:-1]) == "one two three"
            assert choices[1]["logprobs"]["content"][0]["token"] == "o"
        stopped = (await chat(http, sim, stop=[" three"]))["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("one two", "stop")
        cut = await chat(http, sim, max_tokens=5)
        assert cut["choices"][0]["message"]["content"] == "one t"
        assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 5)


async def test_tool_calls_and_reasoning_stream_in_pieces(http: aiohttp.ClientSession) -> None:
    answer = Answer("", "let me see", (ToolCall("look_up", '{"query": "ferry times"}'),))
    async with EngineSim(replace(FAST, answer=answer, chunk_chars=4)) as sim:
        choices = [c for chunk in events(await raw_stream(http, sim)) for c in chunk["choices"]]
        calls = [c["delta"]["tool_calls"][0] for c in choices if c["delta"].get("tool_calls")]
        assert "".join(c["delta"].get("reasoning", "") for c in choices) == "let me see"
        assert calls[0]["function"]["name"] == "look_up"
        assert len(calls) > 4
        arguments = "".join(c["function"].get("arguments", "") for c in calls)
        assert json.loads(arguments) == {"query": "ferry times"}
        assert choices[-1]["finish_reason"] == "tool_calls"
        message = (await chat(http, sim))["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "look_up"


async def test_a_prompt_over_the_window_is_refused_with_the_numbers(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, max_model_len=100)) as sim:
        long = [{"role": "user", "content": "x" * 200}]
        for body in (question(messages=long), question(max_tokens=60)):
            async with http.post(f"{sim.url}/v1/chat/completions", json=body) as response:
                assert response.status == 400
                message = (await response.json())["error"]["message"]
                assert "maximum context length is 100 tokens" in message


async def test_tokenize_agrees_with_the_prompt_that_is_computed(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, bytes_per_token=3)) as sim:
        await chat(http, sim)
        async with http.post(f"{sim.url}/tokenize", json={"messages": MESSAGES}) as response:
            tokens = (await response.json())["tokens"]
        assert tokens == sim.requests[0].prompt_token_ids
        async with http.post(f"{sim.url}/detokenize", json={"tokens": tokens}) as response:
            assert MESSAGES[0]["content"] in (await response.json())["prompt"]


async def test_metrics_count_queries_hits_and_cache_size(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        usages = [(await chat(http, sim))["usage"] for _ in range(2)]
        async with http.get(f"{sim.url}/metrics") as response:
            text = await response.text()
        labels = '{engine="0",model_name="sim-model"}'
        assert f"vllm:prefix_cache_queries_total{labels} {usages[0]['prompt_tokens'] * 2:.1f}" in text
        hits = usages[1]["prompt_tokens_details"]["cached_tokens"]
        assert f"vllm:prefix_cache_hits_total{labels} {hits:.1f}" in text
        assert 'block_size="16"' in text
        assert 'num_gpu_blocks="65536"' in text
        assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text


async def test_the_minimal_surface_has_chat_and_models_alone(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, surface="minimal")) as sim:
        for path in ("/tokenize", "/metrics", "/health", "/version", "/v1/completions"):
            async with http.get(sim.url + path) as response:
                assert response.status == 404
        async with http.get(f"{sim.url}/v1/models") as response:
            assert "max_model_len" not in (await response.json())["data"][0]
        ignored = await chat(http, sim, kv_transfer_params={"prompt_token_ids": [1]}, return_token_ids=True)
        assert ignored["usage"]["prompt_tokens"] > 1
    async with EngineSim(replace(FAST, surface="minimal", reject_unknown_fields=True)) as sim:
        body = question(kv_transfer_params={"prompt_token_ids": [1]})
        async with http.post(f"{sim.url}/v1/chat/completions", json=body) as response:
            assert response.status == 400


async def test_a_full_engine_answers_503(http: aiohttp.ClientSession) -> None:
    config = replace(FAST, prefill=PrefillModel(0.2, 0.0, 0.0), max_num_queued_reqs=1)
    async with EngineSim(config) as sim:
        waiting = asyncio.create_task(chat(http, sim))
        await asyncio.sleep(0.05)
        async with http.post(f"{sim.url}/v1/chat/completions", json=question()) as response:
            assert response.status == 503
        await waiting


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_noticed_and_its_blocks_are_freed(
    http: aiohttp.ClientSession, stream: bool
) -> None:
    config = replace(FAST, decode_tokens_per_s=5.0)
    async with EngineSim(config) as sim:
        task = asyncio.create_task(raw_stream(http, sim) if stream else chat(http, sim))
        await asyncio.sleep(0.1)
        assert sim.open_streams == 1
        task.cancel()
        left_s = asyncio.get_running_loop().time()
        await sim.wait_until_idle()
        assert len(sim.aborted) == 1
        assert (sim.aborted[0].aborted_s or 0) - left_s < 0.1
        assert sim.api.engine.pool.used_blocks == 0


async def test_a_cut_stream_breaks_before_done(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        for after_chunks in (0, 3):
            sim.set_fault(Fault("cut", after_chunks=after_chunks))
            async with http.post(f"{sim.url}/v1/chat/completions", json=question(stream=True)) as response:
                received = bytearray()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await read_into(received, response)
                assert received.count(b"data: ") == after_chunks
        sim.set_fault(Fault("cut", after_chunks=None))
        with pytest.raises(aiohttp.ClientConnectionError):
            await raw_stream(http, sim)
        sim.set_fault(Fault("cut"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await chat(http, sim)
        assert text_in(events(await raw_stream(http, sim)))


@pytest.mark.parametrize("after_chunks", [None, 0, 2])
async def test_a_hanging_engine_sends_nothing_more(http: aiohttp.ClientSession, after_chunks: int | None) -> None:
    async with EngineSim(FAST) as sim:
        sim.set_fault(Fault("hang", after_chunks=after_chunks))
        received = bytearray()

        async def ask() -> None:
            async with http.post(f"{sim.url}/v1/chat/completions", json=question(stream=True)) as response:
                await read_into(received, response)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(), 0.2)
        assert received.count(b"data: ") == (after_chunks or 0)
        await sim.wait_until_idle()
        assert len(sim.aborted) == 1


async def test_error_statuses_come_with_their_body_and_retry_after(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        sim.set_fault(Fault("status", status=429, retry_after="3"))
        sim.set_fault(Fault("status", status=503, retry_after="1"))
        sim.set_fault(Fault("status", status=500))
        sim.set_fault(Fault("status", status=500, body="<html>oops</html>", content_type="text/html"))
        seen = []
        for _ in range(4):
            async with http.post(f"{sim.url}/v1/chat/completions", json=question(stream=True)) as response:
                seen.append((response.status, response.headers.get("retry-after"), response.content_type))
        json_type = "application/json"
        assert seen == [
            (429, "3", json_type),
            (503, "1", json_type),
            (500, None, json_type),
            (500, None, "text/html"),
        ]


async def test_a_fault_spares_what_a_gateway_asks_by_itself_unless_it_says_so(http: aiohttp.ClientSession) -> None:
    async def statuses(sim: EngineSim) -> list[int]:
        async with http.get(f"{sim.url}/v1/models") as response:
            seen = [response.status]
        for body in (question(max_tokens=1), question(max_tokens=2)):
            async with http.post(f"{sim.url}/v1/chat/completions", json=body) as response:
                seen.append(response.status)
        return seen

    async with EngineSim(FAST) as sim:
        sim.set_fault(Fault("status", status=500))
        assert await statuses(sim) == [200, 200, 500]
        sim.set_fault(Fault("status", status=500, count=2, probes=True))
        assert await statuses(sim) == [500, 500, 200]


async def test_an_error_event_ends_the_stream_without_a_finish(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        sim.set_fault(Fault("error_event", after_chunks=3))
        chunks = events(await raw_stream(http, sim))
        assert "error" in chunks[3]
        assert not any(c["finish_reason"] for chunk in chunks[:3] for c in chunk["choices"])


@pytest.mark.parametrize("kind", ["split", "comments", "crlf", "drip", "split_usage"])
async def test_a_disturbed_stream_carries_the_same_events(http: aiohttp.ClientSession, kind: Any) -> None:
    async with EngineSim(FAST) as sim:
        options = {"include_usage": True}
        calm = events(await raw_stream(http, sim, stream_options=options))
        sim.set_fault(Fault(kind, after_chunks=None, delay_s=0.005))
        disturbed = await raw_stream(http, sim, stream_options=options)
        assert text_in(events(disturbed)) == text_in(calm)
        assert [e["choices"] for e in events(disturbed)] == [e["choices"] for e in calm]
        assert (b"\r\n\r\n" in disturbed) == (kind == "crlf")
        assert (b": keep-alive" in disturbed) == (kind == "comments")


async def test_split_writes_arrive_as_single_bytes(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        sim.set_fault(Fault("split", after_chunks=None))
        async with http.post(f"{sim.url}/v1/chat/completions", json=question(stream=True)) as response:
            sizes = [len(data) async for data, _ in response.content.iter_chunks() if data]
        assert max(sizes) == 1


async def test_a_big_event_and_a_missing_finish_can_be_asked_for_by_header(http: aiohttp.ClientSession) -> None:
    async with EngineSim(FAST) as sim:
        url, body = f"{sim.url}/v1/chat/completions", question(stream=True)
        header = {"x-sim-fault": json.dumps({"kind": "big_event", "after_chunks": 2})}
        async with http.post(url, json=body, headers=header) as response:
            chunks = events(await response.read())
        assert max(len(c["choices"][0]["delta"]["content"]) for c in chunks) == 2**20
        async with http.post(url, json=body, headers={"x-sim-fault": '{"kind": "no_finish"}'}) as response:
            assert not any(c["choices"][0]["finish_reason"] for c in events(await response.read()))
        async with http.post(url, json=body, headers={"x-sim-fault": "nonsense"}) as response:
            assert response.status == 400


async def test_a_stopped_engine_refuses_and_a_deaf_one_never_connects() -> None:
    sim = EngineSim(FAST)
    async with sim:
        await sim.stop_accepting()
        timeout = aiohttp.ClientTimeout(sock_connect=0.2)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            with pytest.raises(aiohttp.ConnectionTimeoutError):
                await http.get(f"{sim.url}/health")
            await sim.stop()
            with pytest.raises(aiohttp.ClientConnectorError):
                await http.get(f"{sim.url}/health")
            await sim.start()
            async with http.get(f"{sim.url}/health") as response:
                assert response.status == 200


async def test_a_client_that_reads_slowly_is_not_buffered_without_bound(http: aiohttp.ClientSession) -> None:
    text = "word " * 200_000
    async with EngineSim(replace(FAST, answer=f"text:{text}", max_model_len=1_040_000)) as sim:
        reader, writer = await asyncio.open_connection(sim.host, sim.port, limit=1024)
        body = json.dumps(question(stream=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readexactly(1)
        for _ in range(300):
            await asyncio.sleep(0.1)
            if sim.buffered_bytes:
                break
        await asyncio.sleep(0.5)
        assert sim.open_streams == 1
        assert 0 < sim.buffered_bytes < 500_000
        writer.transport.abort()
        await sim.wait_until_idle()
        assert len(sim.aborted) == 1


async def test_scripted_answers_are_given_in_turn_and_callables_see_the_prompt(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, answer=["text:first", "text:second"])) as sim:
        said = [(await chat(http, sim))["choices"][0]["message"]["content"] for _ in range(3)]
        assert said == ["first", "second", "second"]
    async with EngineSim(replace(FAST, answer=lambda seen: Answer(seen.question().upper()))) as sim:
        assert "PASSAGE [K7F2]" in (await chat(http, sim))["choices"][0]["message"]["content"]


async def test_requests_are_recorded_within_a_bound(http: aiohttp.ClientSession) -> None:
    async with EngineSim(replace(FAST, recorded_requests=3)) as sim:
        for index in range(5):
            await chat(http, sim, user=f"user-{index}")
        assert [r.body["user"] for r in sim.requests] == ["user-2", "user-3", "user-4"]
        assert sim.requests[-1].headers["content-type"] == "application/json"
