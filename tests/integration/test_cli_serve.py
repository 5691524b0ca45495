"""`headstart serve` as a process of its own, without an engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.tenants import key_digest

HEADSTART = (sys.executable, "-m", "gateway.cli.main")
ROOT = Path(__file__).parents[2]


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """Nothing of the machine's own settings, an engine that is not there, data below `folder`."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    return {
        **base,
        "PYTHONPATH": str(ROOT),
        "HEADSTART_ENGINE_URL": "http://127.0.0.1:9",
        "HEADSTART_DATA_DIR": str(folder / "data"),
        "HEADSTART_CACHE_DIR": str(folder / "cache"),
        **settings,
    }


def serve(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a `serve` that is expected to end by itself."""
    return subprocess.run(
        [*HEADSTART, "serve", *arguments],
        env=environment(folder, **settings),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [*HEADSTART, "serve", "--port", "0"],
        env=environment(folder, **settings),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Headstart listens on http://127.0.0.1:"), process.communicate(timeout=10)[1]
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate(timeout=10)


def get(url: str, key: str = "") -> tuple[int, object]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_without_keys_an_address_other_than_loopback_is_refused_with_2(tmp_path: Path, host: str) -> None:
    result = serve(tmp_path, "--host", host)
    assert result.returncode == 2
    assert result.stderr.startswith(f"headstart: Refusing to listen on {host} without API keys")
    assert len(result.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_one_clear_line_and_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = serve(tmp_path, "--port", port)
    assert result.returncode == 1
    assert result.stderr == (
        f"headstart: Cannot listen on 127.0.0.1:{port}: Address already in use. "
        "Stop what uses it, or give another --port.\n"
    )


def test_a_key_file_that_is_broken_is_named_with_its_line_and_2(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme not-a-hash\n")
    result = serve(tmp_path, HEADSTART_API_KEYS_FILE=str(keys))
    assert result.returncode == 2
    assert "Entry 1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_database_that_cannot_be_used_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "headstart.db").write_bytes(b"something else entirely\n" * 100)
    result = serve(tmp_path, "--port", "0")
    assert result.returncode == 1
    assert "headstart: The gateway cannot start: " in result.stderr
    assert "Traceback" not in result.stderr


def test_it_answers_without_an_engine_and_ends_with_0_when_told(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        assert get(f"{url}/healthz") == (200, {"status": "ok"})
        assert get(f"{url}/readyz")[0] == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_keys_are_asked_for_and_ctrl_c_ends_it_with_0(tmp_path: Path) -> None:
    with serving(tmp_path, HEADSTART_API_KEYS=f"acme:{key_digest('hs-right')}") as (process, url):
        assert get(f"{url}/v1/vector_stores")[0] == 401
        assert get(f"{url}/v1/vector_stores", "hs-right")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
