"""`headstart doctor` against the real engine with the flags of `headstart engine`, and against a bare one."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app


@pytest.fixture
def alone(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but the tokenizer, and an empty data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADSTART_TOKENIZER", str(model_dir))


@pytest.fixture
def bare_engine_url() -> Iterator[str]:
    """An engine with `/v1/models` and `/v1/chat/completions` and nothing else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.engine_sim", "--port", str(port), "--surface", "minimal"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.communicate()


def states(url: str) -> tuple[int, dict[str, str]]:
    result = CliRunner().invoke(app, ["doctor", "--json", "--engine-url", url])
    return result.exit_code, {finding["name"]: finding["state"] for finding in json.loads(result.stdout)}


@pytest.mark.usefixtures("alone")
def test_b4_the_embedded_engine_misses_nothing_and_tokenizes_as_we_do(engine_url: str) -> None:
    exit_code, found = states(engine_url)
    assert exit_code == 0
    assert set(found.values()) == {"ok"}
    assert {"tokenizer", "token-exact prompts", "cached tokens", "prefix block", "embedding model"} <= set(found)


@pytest.mark.usefixtures("alone")
def test_a_bare_engine_is_usable_and_what_it_lacks_is_said(bare_engine_url: str) -> None:
    exit_code, found = states(bare_engine_url)
    assert exit_code == 0
    assert {name for name, state in found.items() if state == "warn"} == {
        "context window",
        "prefix block",
        "tokenizer",
        "token-exact prompts",
        "cached tokens",
        "request metrics",
    }
