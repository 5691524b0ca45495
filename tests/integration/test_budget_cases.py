"""TTFT budgets over HTTP: what is planned to them, what is refused, what is told."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply, read_reply
from latency.model import PrefillModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Slow enough for its times to stand out of the machine's noise: 1,000 tokens take about a second.
ENGINE = PrefillModel(fixed_s=0.01, per_token_s=0.001, per_pair_s=1e-7)
TOPICS = ("ferry", "mooring", "galley", "lifeboat", "cargo", "engine", "bridge", "anchor")
QUESTION = "What does the manual say about the ferry, the mooring and the galley?"


def manual(topic: str) -> str:
    """About 150 tokens, of which one sentence names the number."""
    filler = " ".join(f"The {topic} is checked on day {day} of the month by the watch." for day in range(1, 11))
    return f"# {topic}\n\nThe {topic} number is {len(topic)}41. {filler}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim(model_dir: Path) -> AsyncIterator[EngineSim]:
    config = SimConfig(model_dir=model_dir, prefill=ENGINE, decode_tokens_per_s=200.0, answer_words=8, answer="words")
    async with EngineSim(config) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    sim: EngineSim, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    """Calibrated."""
    settings = settings_for(tmp_path_factory.mktemp("gateway"), sim.url, tokenizer=str(model_dir), calibrate=True)
    async with run_gateway(settings) as gateway:
        await gateway.until_calibrated()
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(gateway: RunningGateway) -> str:
    return await gateway.make_store("manual", {f"{topic}.md": manual(topic) for topic in TOPICS})


class Asking:
    """Asks questions that share the gateway's own instructions alone: nothing of the chunks is resident."""

    def __init__(self, gateway: RunningGateway, store: str) -> None:
        self._gateway = gateway
        self._store = store
        self._run = secrets.token_hex(4)
        self._asked = 0

    async def __call__(self, path: str = "/v1/chat/completions", **fields: Any) -> Reply:
        headers = fields.pop("headers", {})
        model = fields.pop("model", f"sim-model@{self._store}")
        self._asked += 1
        body = {
            "model": model,
            "messages": [
                {"role": "system", "content": f"{self._run} {self._asked}: answer briefly."},
                {"role": "user", "content": fields.pop("question", QUESTION)},
            ],
            "max_tokens": 8,
            "stream": True,
            **fields,
        }
        async with self._gateway.session() as session:
            session.headers.update(headers)
            return await read_reply(session, body, path)


@pytest.fixture
def ask(gateway: RunningGateway, store: str) -> Asking:
    return Asking(gateway, store)


def told(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply.raw
    assert reply.extension is not None
    return reply.extension


async def test_without_a_budget_everything_wanted_is_sent_and_its_time_is_foretold(ask: Asking) -> None:
    extension = told(await ask())
    forecast, timings = extension["plan"]["forecast"], extension["timings"]
    assert [chunk["form"] for chunk in extension["plan"]["chunks"]] == ["whole"] * 5
    assert forecast["budget_ms"] is None
    assert forecast["fits"]
    assert forecast["uncached_tokens"] + forecast["cached_tokens"] == timings["prompt_tokens"]
    assert timings["predicted_ttft_ms"] == pytest.approx(timings["ttft_ms"], rel=0.25)


async def test_predicted_parts_add_up_to_the_whole(ask: Asking) -> None:
    forecast = told(await ask(headstart={"ttft_budget_ms": 600}))["plan"]["forecast"]
    parts = forecast["gateway_ms"] + forecast["queue_ms"] + forecast["prefill_ms"]
    assert forecast["ttft_ms"] == pytest.approx(parts, abs=0.01)
    assert forecast["safe_ttft_ms"] >= forecast["ttft_ms"]


async def test_a_smaller_budget_buys_a_smaller_prompt_that_keeps_it(ask: Asking) -> None:
    tokens = []
    for budget_ms in (2000, 700, 400):
        extension = told(await ask(headstart={"ttft_budget_ms": budget_ms}))
        assert extension["plan"]["forecast"]["fits"]
        # With room for what a busy machine adds to the gateway's own time.
        assert extension["timings"]["ttft_ms"] <= budget_ms + 250, extension["timings"]
        tokens.append(extension["plan"]["prompt_tokens"])
    assert tokens[0] > tokens[1] > tokens[2]


async def test_what_the_budget_leaves_out_says_why_and_what_it_would_have_cost(ask: Asking) -> None:
    plan = told(await ask(headstart={"ttft_budget_ms": 500}))["plan"]
    reasons = [dropped["reason"] for dropped in plan["dropped"] if dropped["what"] == "chunk"]
    assert reasons
    assert all("ms" in reason for reason in reasons)
    assert plan["forecast"]["next_chunk_ms"] > 0


async def test_a_budget_below_the_gateways_own_time_gets_the_smallest_prompt_by_best_effort(ask: Asking) -> None:
    extension = told(await ask(headstart={"ttft_budget_ms": 0.001}))
    assert not extension["plan"]["forecast"]["fits"]
    assert extension["timings"]["within_budget"] is False
    assert extension["plan"]["prompt_tokens"] < 250


@pytest.mark.parametrize("stream", [True, False])
async def test_a_strict_budget_that_nothing_keeps_is_refused_with_the_prediction(ask: Asking, stream: bool) -> None:
    reply = await ask(headstart={"ttft_budget_ms": 5, "policy": "strict"}, stream=stream)
    error = reply.body["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "ttft_budget_too_small", "headstart.ttft_budget_ms")
    assert error["forecast"]["safe_ttft_ms"] > 5
    assert error["forecast"]["fits"] is False
    assert "Raise the budget" in error["message"]


async def test_a_strict_budget_that_is_kept_is_answered(ask: Asking) -> None:
    assert told(await ask(headstart={"ttft_budget_ms": 3000, "policy": "strict"}))["timings"]["within_budget"]


async def test_a_strict_budget_behind_a_queue_is_refused_with_the_wait(ask: Asking) -> None:
    """A long prefill runs; an idle engine would keep the budget, this one does not."""
    long = asyncio.create_task(ask(model="sim-model", question="word " * 3000))
    await asyncio.sleep(0.4)
    reply = await ask(headstart={"ttft_budget_ms": 500, "policy": "strict"})
    await long
    assert reply.status == 429, reply.raw
    assert reply.body["error"]["code"] == "ttft_budget_busy"
    wait_ms = int(reply.headers["retry-after-ms"])
    assert 100 < wait_ms < 5000
    assert int(reply.headers["retry-after"]) * 1000 >= wait_ms


async def test_the_wait_in_the_queue_counts_against_the_budget(ask: Asking) -> None:
    long = asyncio.create_task(ask(model="sim-model", question="word " * 1500))
    await asyncio.sleep(0.2)
    busy, idle = (
        told(await ask(headstart={"ttft_budget_ms": 1900})),
        told(await ask(headstart={"ttft_budget_ms": 1900})),
    )
    await long
    assert busy["plan"]["forecast"]["queue_ms"] > 300
    assert busy["plan"]["prompt_tokens"] < idle["plan"]["prompt_tokens"]


async def test_the_header_sets_the_budget(ask: Asking) -> None:
    extension = told(await ask(headers={"X-TTFT-Budget-Ms": "450"}))
    assert extension["plan"]["forecast"]["budget_ms"] == 450


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "31536000000"])
async def test_a_header_that_is_no_budget_is_refused_by_name(ask: Asking, value: str) -> None:
    reply = await ask(headers={"X-TTFT-Budget-Ms": value})
    assert (reply.status, reply.body["error"]["param"]) == (400, "X-TTFT-Budget-Ms")


async def test_a_store_has_a_default_budget(gateway: RunningGateway, ask: Asking, store: str) -> None:
    async with gateway.session() as session:
        path = f"/v1/vector_stores/{store}"
        async with session.post(path, json={"metadata": {"ttft_budget_ms": "0"}}) as refused:
            assert refused.status == 400
            assert (await refused.json())["error"]["param"] == "metadata.ttft_budget_ms"
        async with session.post(path, json={"metadata": {"ttft_budget_ms": "650"}}) as taken:
            assert taken.status == 200
        try:
            assert told(await ask())["plan"]["forecast"]["budget_ms"] == 650
            assert told(await ask(headstart={"ttft_budget_ms": 800}))["plan"]["forecast"]["budget_ms"] == 800
        finally:
            async with session.post(path, json={"metadata": {}}):
                pass


async def test_a_total_budget_bounds_the_answer_by_the_learned_decode_rate(ask: Asking) -> None:
    extension = told(await ask(headstart={"total_budget_ms": 1600}, max_tokens=4000))
    plan = extension["plan"]
    assert 1 <= plan["max_tokens"] < 400
    assert any(item["what"] == "max_tokens" and "total budget" in item["reason"] for item in plan["dropped"])
    assert extension["timings"]["total_ms"] < 1600


async def test_a_strict_total_budget_that_has_no_time_for_a_token_is_refused(ask: Asking) -> None:
    reply = await ask(headstart={"total_budget_ms": 5, "policy": "strict"})
    assert (reply.status, reply.body["error"]["param"]) == (400, "headstart.total_budget_ms")


async def test_a_chat_without_documents_is_planned_to_its_budget_too(ask: Asking) -> None:
    extension = told(await ask(model="sim-model", headstart={"ttft_budget_ms": 900}))
    assert extension["plan"]["forecast"]["budget_ms"] == 900
    # Nothing speaks of passages where there are none.
    assert extension["plan"]["tokens"]["system"] < 25


async def test_a_passed_through_request_waits_its_turn_and_is_refused_by_a_strict_budget(
    sim: EngineSim, model_dir: Path, tmp_path: Path
) -> None:
    settings = settings_for(
        tmp_path, sim.url, tokenizer=str(model_dir), calibrate=True, ttft_budget_ms=300, budget_policy="strict"
    )
    async with run_gateway(settings) as gateway:
        await gateway.until_calibrated()
        short = await gateway.ask("sim-model", "hello", max_tokens=1)
        long = await gateway.ask("sim-model", "word " * 1000, max_tokens=1)
    assert short.status == 200
    assert short.extension is None
    assert (long.status, long.body["error"]["param"]) == (400, "HEADSTART_TTFT_BUDGET_MS")


async def test_a_dry_run_shows_the_prompt_the_forecast_and_what_other_budgets_buy(ask: Asking) -> None:
    reply = await ask("/v1/plan", headstart={"ttft_budget_ms": 500, "policy": "strict"})
    assert reply.status == 200, reply.raw
    found = reply.body
    assert sum(segment["tokens"] for segment in found["segments"]) == found["plan"]["prompt_tokens"]
    assert found["replicas"][0]["budget_ms"] == 500
    assert found["refusal"] is None
    rows = found["alternatives"]
    assert rows == sorted(rows, key=lambda row: (row["ttft_budget_ms"], row["relevance_kept"]))
    assert [row["relevance_kept"] for row in rows] == sorted(row["relevance_kept"] for row in rows)
    assert rows[-1]["relevance_kept"] == 1


async def test_a_dry_run_of_what_would_be_refused_says_so(ask: Asking) -> None:
    found = (await ask("/v1/plan", headstart={"ttft_budget_ms": 5, "policy": "strict"})).body
    assert found["refusal"]["error"]["code"] == "ttft_budget_too_small"


async def test_a_dry_run_of_a_plain_chat_shows_its_prompt(ask: Asking) -> None:
    found = (await ask("/v1/plan", model="sim-model")).body
    assert found["plan"] is None
    assert found["replicas"][0]["uncached_tokens"] > 0
    assert found["segments"]


async def test_a_dry_run_sends_nothing_to_the_engine(ask: Asking, sim: EngineSim) -> None:
    await sim.wait_until_idle()
    before = len(sim.requests)
    await ask("/v1/plan")
    assert [request.path for request in list(sim.requests)[before:] if "completions" in request.path] == []


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"model": 3}', b'{"model": "nobody", "messages": []}'])
async def test_a_dry_run_of_nonsense_is_refused_like_chat(gateway: RunningGateway, raw: bytes) -> None:
    async with gateway.session() as session, session.post("/v1/plan", data=raw) as response:
        assert response.status in (400, 404)
        assert (await response.json())["error"]["message"]


async def test_kept_and_missed_budgets_are_counted(gateway: RunningGateway, ask: Asking) -> None:
    before = await gateway.metric("headstart_budgeted_requests_total")
    await ask(headstart={"ttft_budget_ms": 3000})
    await ask(headstart={"ttft_budget_ms": 0.5})
    await ask(headstart={"ttft_budget_ms": 0.5, "policy": "strict"})
    await gateway.until_metric("headstart_budgeted_requests_total", before + 3)
