"""Measurements that outlive an interruption."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.terminal import CliError
from gateway.tuning.journal import Journal, Measurement, Subject

SUBJECT = Subject("q1", "vs_1", "c1", "model", 48)
DONE = Measurement("k=3", 0, 120.5, ttft_ms=80.0, prompt_tokens=900, recall=1.0, chunks=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tune.jsonl"
    with Journal(path, SUBJECT, "run1") as journal:
        journal.add(DONE)
    return path


def test_what_was_measured_is_there_again_with_the_name_of_its_run(path: Path) -> None:
    with Journal(path, SUBJECT, "run2") as journal:
        assert journal.run == "run1"
        assert journal.done == {("k=3", 0): DONE}
        journal.add(replace(DONE, question=1))
    with Journal(path, SUBJECT, "run3") as journal:
        assert list(journal.done) == [("k=3", 0), ("k=3", 1)]


def test_a_line_that_a_kill_cut_off_is_measured_again(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"setting": "k=3", "quest')
    with Journal(path, SUBJECT, "run2") as journal:
        assert list(journal.done) == [("k=3", 0)]
        journal.add(replace(DONE, question=1))
    with Journal(path, SUBJECT, "run2") as journal:
        assert list(journal.done) == [("k=3", 0), ("k=3", 1)]


def test_a_head_that_a_kill_cut_off_or_an_empty_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    path.touch()
    with Journal(path, SUBJECT, "run1") as journal:
        journal.add(DONE)
    with Journal(path, SUBJECT, "run2") as journal:
        assert (journal.run, len(journal.done)) == ("run1", 1)


def test_what_failed_is_tried_again(path: Path) -> None:
    with Journal(path, SUBJECT, "run2") as journal:
        journal.add(replace(DONE, question=1, error="refused"))
        assert len(journal.done) == 2
    with Journal(path, SUBJECT, "run2") as journal:
        assert list(journal.done) == [("k=3", 0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"questions": "q2"}, "the questions"),
        ({"store": "vs_2", "content": "c2"}, "the store, what the store holds"),
        ({"content": "c2"}, "what the store holds"),
        ({"model": "other"}, "the model"),
        ({"max_tokens": 8}, "--max-tokens"),
    ],
)
def test_measurements_of_another_subject_are_refused_and_kept(path: Path, change: dict[str, Any], said: str) -> None:
    before = path.read_bytes()
    with pytest.raises(CliError, match=f"changed since: {said}. --fresh starts over") as refused:
        Journal(path, replace(SUBJECT, **change), "run2").__enter__()
    assert refused.value.exit_code == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"<html>\n", b"no line ends here", b"[]\n", b'{"format": 1}\n'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tune.jsonl"
    path.write_bytes(content)
    with pytest.raises(CliError, match="not a journal"):
        Journal(path, SUBJECT, "run1").__enter__()
    assert path.read_bytes() == content


def test_a_line_that_is_broken_is_named(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"surprise": 1}\n')
    with pytest.raises(CliError, match="line 3 is not a measurement"):
        Journal(path, SUBJECT, "run2").__enter__()


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be written"):
        Journal(tmp_path / "no" / "tune.jsonl", SUBJECT, "run1").__enter__()
