"""Replicas as they are shown, with real parts and no engine."""

from dataclasses import dataclass, field

from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.event_sources import OFF
from gateway.health import Health
from gateway.kv_events import KvEvents
from gateway.pacing import Pacer
from gateway.serving import Missing
from latency.speed import SpeedEstimate

FACTS = EngineFacts(True, model="small", models=("small",), version="0.32.0", max_model_len=8192, block_size=4)


async def nobody() -> None:
    return None


@dataclass
class ShownSpeed:
    estimate: SpeedEstimate | None = None
    missing: tuple[Missing, ...] = ()


@dataclass
class ShownReplica:
    name: str = "one"
    facts: EngineFacts = FACTS
    health: Health = field(default_factory=Health)
    pacer: Pacer = field(default_factory=Pacer)
    residency: Residency | None = None
    speed: ShownSpeed = field(default_factory=ShownSpeed)
    events: KvEvents = field(default_factory=lambda: KvEvents(OFF, "http://engine", nobody, lambda: None))
    refused: str | None = None
    draining: bool = False
    several_engines: bool = False
    in_flight: int = 0

    @property
    def usable(self) -> bool:
        return self.health.takes_requests


@dataclass
class ShownReplicas:
    all: list[ShownReplica]
