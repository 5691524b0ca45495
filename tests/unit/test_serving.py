"""Where the served model's tokenizer comes from, and what is said when it cannot be had."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.backends.facts import EngineFacts
from gateway.serving import make_serving
from gateway.settings import Settings

FACTS = EngineFacts(reachable=True, model="m", models=("m",), max_model_len=4096, token_ids_accepted=True)


def settings(tmp_path: Path, tokenizer: str = "") -> Settings:
    return Settings(tokenizer=tokenizer, data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")


def test_a_tokenizer_that_cannot_be_fetched_leaves_an_estimate_and_says_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    serving = make_serving(settings(tmp_path, "nobody/no-such-model"), FACTS)
    assert serving.tokenizer.name == "estimate"
    assert not serving.token_exact
    assert [missing.feature for missing in serving.missing] == ["tokenizer"]
    assert "HEADSTART_TOKENIZER" in serving.missing[0].cure
    assert "nobody/no-such-model" in caplog.text


def test_a_name_that_the_engine_tells_is_never_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = EngineFacts(reachable=True, model="nobody/m", models=("nobody/m",), root="nobody/no-such-model")
    assert make_serving(settings(tmp_path), told).tokenizer.name == "estimate"
    assert "hub" not in caplog.text


def test_the_folder_that_the_engine_loaded_its_model_from_is_used(tmp_path: Path, model_dir: Path) -> None:
    told = EngineFacts(reachable=True, model="m", models=("m",), root=str(model_dir), token_ids_accepted=True)
    serving = make_serving(settings(tmp_path), told)
    assert serving.tokenizer.exact
    assert serving.token_exact


def test_a_broken_tokenizer_file_is_said_and_does_not_stop_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    serving = make_serving(settings(tmp_path, str(tmp_path)), FACTS)
    assert serving.tokenizer.name == "estimate"
    assert "cannot be used" in caplog.text


def test_a_chat_template_that_writes_the_date_is_said(tmp_path: Path, model_dir: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}"
        "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
    )
    serving = make_serving(settings(tmp_path, str(tmp_path)), FACTS)
    assert [missing.feature for missing in serving.missing] == ["date in the chat template"]


def missing(tmp_path: Path, facts: EngineFacts, tokenizer: str) -> dict[str, str]:
    serving = make_serving(settings(tmp_path, tokenizer), facts)
    return {lack.feature: f"{lack.cost} {lack.cure}" for lack in serving.missing}


def test_an_engine_without_prefix_caching_is_named_with_the_cure(tmp_path: Path, model_dir: Path) -> None:
    lacks = missing(tmp_path, replace(FACTS, prefix_caching=False), str(model_dir))
    assert "--enable-prefix-caching" in lacks["prefix caching"]
    assert "prefix caching" not in missing(tmp_path, replace(FACTS, prefix_caching=True), str(model_dir))


def test_a9_blocks_larger_than_the_stable_front_are_named_with_both_numbers(tmp_path: Path, model_dir: Path) -> None:
    lacks = missing(tmp_path, replace(FACTS, block_size=528), str(model_dir))
    assert "528 tokens" in lacks["small blocks"]
    front = int(re.findall(r"scaffolding (\d+)", lacks["small blocks"])[0])
    assert 20 < front < 528
    assert "small blocks" not in missing(tmp_path, replace(FACTS, block_size=front), str(model_dir))


def test_an_engine_that_comes_and_goes_costs_no_new_tokenizer_and_one_that_changed_is_read(
    tmp_path: Path, model_dir: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model_dir / name).is_file():
            (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    given = settings(tmp_path, str(tmp_path))
    first = make_serving(given, replace(FACTS, block_size=16))
    gone = make_serving(given, replace(FACTS, block_size=16).gone("gone"), first)
    assert gone.tokenizer is first.tokenizer
    assert gone.builder is first.builder
    assert [lack.feature for lack in gone.missing] == ["engine"]
    other_blocks = make_serving(given, replace(FACTS, block_size=32), gone)
    assert other_blocks.tokenizer is first.tokenizer
    assert other_blocks.builder.block_size == 32
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + "\n")
    assert make_serving(given, FACTS, other_blocks).tokenizer is not first.tokenizer
