"""The order of chunks through the whole gateway: what the engine holds of one request serves the next."""

from pathlib import Path

import pytest

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import run_gateway, settings_for

FILES = {
    "ferry.md": "The ferry to Pellen leaves at seven in the morning from the north pier, and again at noon. " * 4,
    "fares.md": "A return ticket for the ferry costs eleven crowns; children under six travel free of charge. " * 4,
    "dogs.md": "Dogs travel on the ferry for half of the fare and wait on the deck behind the funnel. " * 4,
    "storm.md": "In a storm the ferry stays in the harbour of Pellen and tickets keep their value. " * 4,
}
QUESTIONS = (
    "When does the ferry to Pellen leave?",
    "What does a ticket for the ferry cost?",
    "Do dogs travel on the ferry?",
    "What becomes of the ferry in a storm?",
)


@pytest.mark.parametrize("order", ["reuse", "relevance_last"])
async def test_questions_that_find_the_same_chunks_share_them(order: str, model_dir: Path, tmp_path: Path) -> None:
    config = SimConfig(model_dir=model_dir, time_scale=0.01, decode_tokens_per_s=None)
    async with EngineSim(config) as sim:
        settings = settings_for(tmp_path, sim.url, tokenizer=str(model_dir), top_k=4, chunk_order=order)
        async with run_gateway(settings) as gateway:
            store = await gateway.make_store("harbour", FILES)
            orders, cached = [], []
            for question in QUESTIONS:
                reply = await gateway.ask("sim-model", question, headstart={"vector_store_ids": [store]})
                assert reply.extension is not None
                orders.append([chunk["label"] for chunk in reply.extension["plan"]["chunks"]])
                cached.append(reply.body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert {frozenset(labels) for labels in orders} == {frozenset(orders[0])}
    if order == "reuse":
        assert orders[1:] == orders[:1] * 3
        assert min(cached[1:]) > 200
    else:
        assert len(set(map(tuple, orders))) > 1
