"""Where an engine publishes its KV events: as it tells, or as the operator says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

AUTO, OFF = "auto", "off"
MOST_SOURCES = 64


@dataclass(frozen=True, slots=True)
class EventSource:
    """One data-parallel rank's publisher; `replay` is None where it keeps nothing to ask for."""

    rank: int
    endpoint: str
    replay: str | None
    topic: str = ""


def check_setting(value: str) -> str:
    """Raises ValueError for what is neither `auto`, `off` nor one or two `tcp://HOST:PORT`."""
    if value not in (AUTO, OFF):
        parts = value.split(",")
        if len(parts) > 2 or not all(map(_port, parts)):
            raise ValueError("takes auto, off, or tcp://HOST:PORT and after a comma that of the replay socket")
    return value


def stated_sources(setting: str, engine_url: str) -> tuple[EventSource, ...]:
    """Those of a setting that names addresses; `*` as the host is the engine's."""
    endpoint, _, replay = setting.partition(",")
    host = _engine_host(engine_url)
    return (EventSource(0, _at(endpoint, host), _at(replay, host) if replay else None),)


def told_sources(answer: Any, engine_url: str) -> tuple[EventSource, ...]:
    """From `/kv_event_sources`: by rank, the publisher's configuration, ports already counted up by rank.

    Only ports are taken from the engine's word, never a host. What is no source is left out.
    """
    if not isinstance(answer, Mapping):
        return ()
    found = []
    host = _engine_host(engine_url)
    for rank, config in list(answer.items())[:MOST_SOURCES]:
        if not isinstance(config, Mapping) or not str(rank).isdecimal():
            continue
        endpoint, replay, topic = config.get("endpoint"), config.get("replay_endpoint"), config.get("topic")
        if config.get("enable_kv_cache_events") is not True or config.get("publisher") != "zmq":
            continue
        if not isinstance(endpoint, str) or not _port(endpoint):
            continue
        found.append(
            EventSource(
                int(rank),
                _at(endpoint, host, always=True),
                _at(replay, host, always=True) if isinstance(replay, str) and _port(replay) else None,
                topic if isinstance(topic, str) else "",
            )
        )
    return tuple(found)


def _engine_host(engine_url: str) -> str:
    return urlsplit(engine_url).hostname or "127.0.0.1"


def _port(endpoint: str) -> int | None:
    """None where it is no TCP endpoint."""
    scheme, _, rest = endpoint.strip().partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return int(port)


def _at(endpoint: str, engine_host: str, *, always: bool = False) -> str:
    host = endpoint.strip().removeprefix("tcp://").rpartition(":")[0]
    if always or host in ("*", "0.0.0.0", "[::]", "::"):
        host = f"[{engine_host}]" if ":" in engine_host else engine_host
    return f"tcp://{host}:{_port(endpoint)}"
