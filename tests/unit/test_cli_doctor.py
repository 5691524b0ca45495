"""Each finding of the doctor from the facts that cause it, and the local checks on real parts."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gateway.backends.facts import EngineFacts
from gateway.cli.doctor import check_alike
from gateway.cli.doctor_checks import (
    Finding,
    check_block,
    check_cache_salt,
    check_engine,
    check_model,
    check_prompt_details,
    check_request_metrics,
    check_token_ids,
    check_tokenizer,
    check_window,
)
from gateway.cli.doctor_local import StoredData, compare_embeddings, read_data, redis_finding, storage_finding
from gateway.cli.main import app
from retrieval.database import Database
from retrieval.snapshots import Snapshot, write_snapshot

GOOD = EngineFacts(
    reachable=True,
    model="small",
    models=("small",),
    max_model_len=8192,
    block_size=32,
    num_blocks=1456,
    version="0.32.0",
    prompt_tokens_details=True,
    token_ids_accepted=True,
    tokenize=True,
    cache_salt=True,
    per_request_metrics=True,
)


def all_findings(facts: EngineFacts, stable_tokens: int | None = 70, tenants: int = 2) -> list[Finding]:
    return [
        check_engine(facts),
        check_model(facts),
        check_window(facts),
        check_block(facts, stable_tokens),
        check_token_ids(facts),
        check_prompt_details(facts),
        check_request_metrics(facts),
        check_cache_salt(facts, tenants),
    ]


def test_a_complete_engine_misses_nothing() -> None:
    assert {finding.state for finding in all_findings(GOOD)} == {"ok"}


@pytest.mark.parametrize(
    "facts",
    [
        EngineFacts(reachable=False, error="cannot connect"),
        EngineFacts(reachable=True, model="bare", models=("bare",)),
        replace(GOOD, prompt_tokens_details=False, token_ids_accepted=False, per_request_metrics=False),
        replace(GOOD, model=None, error="the engine does not serve 'large'"),
    ],
)
def test_every_miss_says_what_it_costs_and_how_to_cure_it(facts: EngineFacts) -> None:
    misses = [finding for finding in all_findings(facts) if finding.state != "ok"]
    assert misses
    assert all(finding.cost and finding.cure for finding in misses)


def test_only_a_missing_engine_or_model_is_a_failure() -> None:
    bare = EngineFacts(reachable=True, model="bare", models=("bare",))
    assert "fail" not in {finding.state for finding in all_findings(bare)}
    assert check_engine(EngineFacts(reachable=False)).state == "fail"
    assert check_model(replace(GOOD, model=None)).state == "fail"


def test_a9_a_block_larger_than_the_stable_prefix_is_a_warning_with_the_numbers() -> None:
    finding = check_block(replace(GOOD, block_size=528), stable_tokens=70)
    assert finding.state == "warn"
    assert "528 tokens, larger than the stable prefix of 70 tokens" in finding.detail
    assert "--block-size of 64" in finding.cure
    assert "64 of 70 tokens" in check_block(GOOD, stable_tokens=70).detail
    assert check_block(replace(GOOD, block_size=70), stable_tokens=70).state == "ok"


def test_a_salt_that_may_be_ignored_matters_only_with_several_tenants() -> None:
    unproven = replace(GOOD, cache_salt=None)
    assert check_cache_salt(unproven, tenants=1).state == "ok"
    assert check_cache_salt(unproven, tenants=2).state == "warn"


def test_b4_a_tokenizer_that_differs_from_the_engines_is_a_failure_with_the_place() -> None:
    finding = check_tokenizer("tiktoken", True, [1, 2, 3], [1, 2, 4])
    assert finding.state == "fail"
    assert "part at number 2" in finding.detail
    assert "part at number 3" in check_tokenizer("tiktoken", True, [1, 2, 3], [1, 2, 3, 4]).detail
    assert check_tokenizer("tiktoken", True, [1, 2], [1, 2]).state == "ok"
    assert check_tokenizer("estimate", False, None, [1, 2]).state == "warn"
    assert check_tokenizer("tiktoken", True, [1, 2], None).state == "warn"


async def test_redis_that_answers_is_named_with_its_version(redis_url: str) -> None:
    finding = await redis_finding(redis_url)
    assert finding.state == "ok"
    assert finding.detail.startswith("version ")


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:9/0", "http://secret"])
async def test_h4_redis_that_is_lost_is_a_warning_that_never_shows_its_password(url: str) -> None:
    finding = await redis_finding(url)
    assert finding.state == "warn"
    assert "secret" not in str(finding)


def test_a_sound_database_is_counted_without_being_changed(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.bind_embedding_model("model", 384)
    stored = read_data(tmp_path / "headstart.db")
    assert stored == StoredData(stores=0, files=0, chunks=0, unfinished=0, model="model", dimension=384)
    assert storage_finding(tmp_path, "flat").state == "ok"
    database.close()


def test_an_empty_folder_is_no_miss_and_nothing_is_made_in_it(tmp_path: Path) -> None:
    assert storage_finding(tmp_path, "flat").state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_e8_a_foreign_database_file_is_a_failure_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "headstart.db").write_bytes(b"not a database, and longer than its header" * 100)
    finding = storage_finding(tmp_path, "flat")
    assert finding.state == "fail"
    assert finding.cure


def test_e8_an_index_snapshot_that_cannot_be_used_is_a_warning_because_it_is_built_again(tmp_path: Path) -> None:
    Database(tmp_path).close()
    snapshot = Snapshot("vs_1", "flat", 3, {"rows": np.arange(4)})
    path = tmp_path / "indexes" / "vs_1" / "snapshot.bin"
    write_snapshot(path, snapshot)
    assert storage_finding(tmp_path, "flat").state == "ok"
    assert "is of kind 'flat', not 'hnsw'" in storage_finding(tmp_path, "hnsw").detail
    path.write_bytes(path.read_bytes()[:-1])
    finding = storage_finding(tmp_path, "flat")
    assert finding.state == "warn"
    assert "vs_1" in finding.detail


def test_a_database_of_another_program_is_a_failure(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "headstart.db") as other:
        other.execute("CREATE TABLE things (x)")
    assert "no such table" in storage_finding(tmp_path, "flat").detail


def test_e9_embeddings_of_another_model_are_a_failure_that_names_both() -> None:
    stored = StoredData(stores=1, files=1, chunks=12, unfinished=0, model="old", dimension=384)
    finding = compare_embeddings(stored, "new", 768)
    assert finding.state == "fail"
    assert "new with 768" in finding.detail
    assert "old with 384" in finding.detail
    assert compare_embeddings(stored, "old", 384).state == "ok"


def test_doctor_without_an_engine_reports_the_rest_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--engine-url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "✗ engine" in result.stdout
    assert "cure:  start one with 'headstart engine'" in result.stdout
    assert "all-MiniLM-L6-v2, 384 dimensions" in result.stdout
    assert "127.0.0.1" not in result.stdout


def test_an_engine_that_cannot_stand_in_for_another_is_a_failure_with_its_name() -> None:
    other = replace(GOOD, model="large", models=("large",))
    (finding,) = check_alike("far", other, [GOOD])
    assert finding.state == "fail"
    assert finding.name == "far: replica"
    assert "serves large, not small" in finding.detail
    assert check_alike("far", GOOD, [GOOD]) == []
    assert check_alike("near", GOOD, []) == []


def test_two_engines_are_examined_by_name(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    urls = f"near=http://127.0.0.1:{free_port},far=http://127.0.0.1:9"
    result = CliRunner().invoke(app, ["doctor", "--json", "--engine-url", urls])
    assert result.exit_code == 1
    assert {"near: engine", "far: engine"} <= {finding["name"] for finding in json.loads(result.stdout)}
