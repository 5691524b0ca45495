"""The whole gateway for a test module: started once, with the simulated engine behind it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim() -> AsyncIterator[EngineSim]:
    """A fast engine; tests that use it with `loop_scope="module"` may set faults on it."""
    async with EngineSim(SimConfig(time_scale=0.01, decode_tokens_per_s=None)) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(sim: EngineSim, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """One gateway with single-tenant defaults in front of `sim`."""
    folder = tmp_path_factory.mktemp("gateway")
    async with run_gateway(settings_for(folder, sim.url)) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(gateway: RunningGateway) -> str:
    """Id of a vector store with three short files."""
    return await gateway.make_store(
        "harbour",
        {
            "ferry.md": "# Ferry\n\nThe ferry to Pellen leaves at seven in the morning from the north pier.",
            "fares.txt": "A return ticket costs eleven crowns. Children under six travel free of charge.",
            "kho.txt": "Kho lạnh ở Pellen mở cửa lúc tám giờ sáng và đóng cửa lúc năm giờ chiều.",
        },
    )


@pytest.fixture(params=["plain", "retrieval"])
def model(request: pytest.FixtureRequest, store: str) -> str:
    """A request that passes through, and one that retrieves."""
    return "sim-model" if request.param == "plain" else f"sim-model@{store}"


@pytest.fixture(params=[True, False], ids=["streamed", "whole"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
