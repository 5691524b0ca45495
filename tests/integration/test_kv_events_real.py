"""KV events of the real engine: what another gateway's requests leave in its cache is known all the same."""

import os
from pathlib import Path

import aiohttp
import pytest

from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.residency import until_told


async def predicted_and_reported(gateway: RunningGateway) -> tuple[int, int]:
    """Cached tokens of the gateway's latest answer."""
    async with gateway.session() as session, session.get("/v1/calls?limit=1") as response:
        timings = (await response.json())["data"][0]["timings"]
    return timings["predicted_cached_tokens"], timings["cached_tokens"]


async def test_what_another_gateway_had_computed_is_predicted_exactly(
    engine_url: str, model_dir: Path, tmp_path: Path
) -> None:
    async with aiohttp.ClientSession(engine_url) as session, session.get("/kv_event_sources") as response:
        if response.status != 200 or not await response.json():
            pytest.skip("this engine publishes no KV events")
    shared = {"tokenizer": str(model_dir), "salt_secret": os.urandom(16).hex(), "model": ""}
    quiet = settings_for(tmp_path / "quiet", engine_url, kv_events="off", **shared)
    told = settings_for(tmp_path / "told", engine_url, kv_events="auto", **shared)
    question = "Name the colours of the rainbow, one after the other. " * 12
    async with run_gateway(quiet) as other, run_gateway(told) as gateway:
        await until_told(gateway)
        async with gateway.session() as session, session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        first = await other.ask(model, question, max_tokens=4, temperature=0)
        assert first.status == 200
        assert (await predicted_and_reported(other))[0] == 0
        again = await gateway.ask(model, question, max_tokens=4, temperature=0)
        assert again.status == 200
        predicted, reported = await predicted_and_reported(gateway)
        assert predicted == reported > 100
        async with gateway.session() as session, session.get("/readyz") as response:
            states = (await response.json())["kv_events"]
        assert [state["state"] for state in states.values()] == ["consistent"]
