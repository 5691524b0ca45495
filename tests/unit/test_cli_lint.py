"""`headstart lint`: what it finds in logged requests, what it reads, and what it refuses."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.lint_log import LoggedRequest, Malformed, Said, logged_requests, read_line
from gateway.cli.lint_prefix import CURES, Linter
from gateway.cli.main import app

SYSTEM = "\n".join(f"Rule {number}: be kind and brief." for number in range(20))
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "weather")]


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["lint", *arguments])


def write(folder: Path, requests: Sequence[object]) -> str:
    path = folder / "log.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in requests))
    return str(path)


def chat(*said: str, system: str = SYSTEM, **fields: Any) -> dict[str, Any]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return {"model": "m", "messages": [{"role": "system", "content": system}, *messages], **fields}


def found(folder: Path, *requests: object) -> dict[str, Any]:
    shown = run(write(folder, requests), "--json")
    told: dict[str, Any] = json.loads(shown.stdout)
    assert shown.exit_code == (1 if told["volatile"] or told["breaks"] else 0)
    return told


def kinds(told: dict[str, Any]) -> list[str]:
    return [each["kind"] for each in told["breaks"]]


def test_a3_a_clock_in_logged_system_texts_is_found(tmp_path: Path) -> None:
    told = found(tmp_path, *(chat(f"q{at}", system=f"Time: 12:0{at}\n{SYSTEM}") for at in range(6)))
    volatile = told["volatile"][0]
    assert volatile["lines"] == [{"line": 1, "text": "Time: …", "kind": "clock"}]
    assert (volatile["first_line"], volatile["requests"]) == (3, 4)
    assert volatile["lost_tokens"] == told["reusable_tokens"] - told["reused_tokens"] > 0


def test_a_sound_log_has_no_findings(tmp_path: Path) -> None:
    requests = [chat("a"), chat("a", "b", "c"), chat("x"), chat("a", "b", "c", "d", "e")]
    told = found(tmp_path, *requests)
    assert (told["volatile"], told["breaks"]) == ([], [])
    assert told["reusable_tokens"] == told["reused_tokens"] > 0
    shown = run(write(tmp_path, requests))
    assert "Nothing found." in shown.stdout
    assert "4 requests" in shown.stdout


def test_an_edited_question_that_goes_on_is_a_branch_and_no_finding(tmp_path: Path) -> None:
    assert not kinds(
        found(tmp_path, chat("a"), chat("a", "b", "c"), chat("a", "b", "C!"), chat("a", "b", "C!", "d", "e"))
    )


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (chat("a", "b", "c"), chat("a", "B!", "c", "d", "e"), "history_edited"),
        (chat("a", "b", "c"), chat("A!", "b", "c", "d", "e"), "first_message"),
        (chat("a", "b", "c", "d", "e"), chat("c", "d", "e", "f", "g"), "history_shortened"),
        (chat("a", "b", "c"), chat("c", "d", "e"), "history_shortened"),
        (chat("a"), chat("a", "b", "c", system="Other."), "system_changed"),
        (chat("a", tools=TOOLS), chat("a", "b", "c", tools=TOOLS[::-1]), "tools_order"),
        (chat("a", tools=TOOLS), chat("a", "b", "c", tools=TOOLS[:1]), "tools_changed"),
    ],
)
def test_a_broken_prefix_is_found_with_its_cause_and_cure(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], kind: str
) -> None:
    told = found(tmp_path, before, after)
    assert [(each["kind"], each["lines"]) for each in told["breaks"]] == [(kind, [2])]
    assert told["breaks"][0]["lost_tokens"] == told["reusable_tokens"] - told["reused_tokens"] > 0
    shown = run(write(tmp_path, [before, after]))
    assert shown.exit_code == 1
    assert CURES[kind] in shown.stdout  # type: ignore[index]


def test_models_are_told_apart(tmp_path: Path) -> None:
    told = found(tmp_path, chat("a", "b", "c"), {**chat("a", "B!", "c", "d", "e"), "model": "other"})
    assert not kinds(told)


def test_a_request_is_read_bare_or_from_body_or_request_as_object_or_text(tmp_path: Path) -> None:
    bare = chat("a")
    told = found(tmp_path, bare, {"body": bare}, {"request": {"body": bare}}, {"id": 1, "request": json.dumps(bare)})
    assert (told["requests"], told["malformed"]) == (4, 0)


def test_malformed_lines_are_counted_and_named(tmp_path: Path) -> None:
    lines = [
        "{",
        "[1]",
        "{}",
        '{"messages": [3]}',
        '{"messages": []}',
        '{"body": "x"}',
        '{"body": {"body": {"body": {}}}}',
    ]
    told = found(tmp_path, *lines, "", chat("a"), '{"messages": [{"role": "user"}], "tools": 3}')
    assert told["malformed"] == 8
    assert [each["line"] for each in told["malformed_lines"]] == [1, 2, 3, 4, 5, 6, 7, 10]
    shown = run(write(tmp_path, [*lines, chat("a")]))
    assert shown.exit_code == 0
    assert "line 1: not JSON; left out" in shown.stderr
    assert "7 lines left out" in shown.stdout


@pytest.mark.parametrize("lines", [[], ["nothing"], ['{"a": 1}']])
def test_a_file_without_requests_is_refused(tmp_path: Path, lines: list[str]) -> None:
    shown = run(write(tmp_path, lines))
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "holds no chat request" in shown.stderr


def test_a_file_that_is_not_there_and_a_tokenizer_that_is_none_are_refused(tmp_path: Path) -> None:
    assert run(str(tmp_path / "none.jsonl")).exit_code == 2
    shown = run(write(tmp_path, [chat("a")]), "--tokenizer", str(tmp_path))
    assert (shown.exit_code, "tokenizer.json" in shown.stderr) == (2, True)


def test_a_tokenizer_counts_exactly(tmp_path: Path, model_dir: Path) -> None:
    shown = run(write(tmp_path, [chat("hello")]), "--json", "--tokenizer", str(model_dir))
    told = json.loads(shown.stdout)
    assert told["exact_tokens"]
    assert 0 < told["prompt_tokens"] < found(tmp_path, chat("hello"))["prompt_tokens"]


def test_parts_that_are_not_text_and_tool_calls_count_as_what_they_hold() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": "u"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    request = read_line(json.dumps({"messages": [message, called]}).encode())
    assert [said.text for said in request.messages] == [
        'see{"content":[{"image_url":"u","type":"image_url"}]}',
        '{"tool_calls":[{"id":"1"}]}',
    ]


def test_hostile_lines_are_malformed_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b"\xff\xfe\x00\n" + b"[" * 5000 + b"\n" + b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n'
    )
    assert all(isinstance(read, Malformed) for _, read in logged_requests(path))


def test_memory_is_bounded_however_many_requests_come() -> None:
    linter = Linter(len)
    tracemalloc.start()
    try:
        for number in range(3000):
            said = tuple(Said("user", f"{number} {place} " * 50) for place in range(20))
            linter.take(number, LoggedRequest("m", f"{number} " * 100, said, ()))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Of 3,000 requests, 27 MB of text, digests alone are held.
    assert grown < 8_000_000
