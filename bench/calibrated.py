"""Engines whose speed is known, calibrated as the product calibrates, and engines with flags of their own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console

from bench.real_engine import LIMITS, START_LIMIT_S, EngineUnusable, RealEngine, free_port, real_engine
from gateway.backends.vllm import EngineSession
from gateway.calibration import Calibration, Probe
from gateway.calibration_steps import Bounds
from gateway.engine.command import EngineOptions
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.settings import Settings, process_environment
from latency.speed import SpeedEstimate


async def measured_speed(engine: RealEngine) -> SpeedEstimate:
    """What a calibration finds of the engine, which must be idle. Raises EngineUnusable."""
    settings = Settings()
    async with EngineSession(LIMITS) as session:
        probe = Probe(session, engine.url, settings.engine_api_key, LIMITS, engine.facts)
        calibration = Calibration(probe, Bounds.of(engine.facts), settings.safety_quantile)
        await calibration.run()
    estimate = calibration.learned().estimate
    if estimate is None:
        raise EngineUnusable("Its speed could not be measured.")
    return estimate


@asynccontextmanager
async def embedded_engine(*extra_arguments: str) -> AsyncIterator[RealEngine]:
    """The embedded engine with flags of vLLM's own; stopped when the block ends. Raises EngineError."""
    settings = Settings()
    options = EngineOptions(port=free_port(), extra_arguments=extra_arguments)
    async with (
        EmbeddedEngine(
            settings.cache_dir, options, process_environment(), Steps(Console()), start_timeout_s=START_LIMIT_S
        ) as embedded,
        real_engine(embedded.url) as engine,
    ):
        yield engine
