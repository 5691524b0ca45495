"""Every bench runs to its verdict with `--quick`, those of the real engine on the real engine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280


def quick_run(
    name: str, tmp_path: Path, *arguments: str, data: Path | None = None
) -> tuple[int, str, dict[str, Any]]:
    """Status, output and JSON of `python -m bench.NAME --quick`."""
    figures = tmp_path / "figures.json"
    environment = dict(os.environ)
    if data is not None:
        environment["HEADSTART_SHARED_DIR"] = str(data)
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--quick", "--json", str(figures), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert figures.is_file(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads(figures.read_text())


def assert_verdict(name: str, status: int, output: str, figures: dict[str, Any]) -> None:
    """The last line says MET or MISSED with figures, and status and JSON say the same."""
    last = output.rstrip().splitlines()[-1]
    verdict = re.match(rf"(MET|MISSED) {name}: .+", last)
    assert verdict, output
    met = verdict.group(1) == "MET"
    assert status == (0 if met else 1)
    assert figures["met"] is met
    assert figures["quick"] is True
    assert figures["tables"]
    assert figures["checks"]


def check_of(figures: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in figures["checks"] if name in check["name"])


@pytest.mark.parametrize("name", ["overhead", "retrieval", "plan", "overload", "sharing"])
def test_a_bench_without_an_engine_reaches_its_verdict(name: str, tmp_path: Path, shared_data: Path) -> None:
    """Its figures are those of a busy machine here, so that MISSED is no failure of this test."""
    assert_verdict(name, *quick_run(name, tmp_path, data=shared_data))


def test_turns_predicts_every_prompt_and_reports_five_arms(
    tmp_path: Path, shared_data: Path, engine_url: str
) -> None:
    status, output, figures = quick_run("turns", tmp_path, "--engine-url", engine_url, data=shared_data)
    assert_verdict("turns", status, output, figures)
    table = figures["tables"][0]
    assert len(table["rows"]) == 5
    exact = table["columns"].index("predicted = reported")
    assert [row[exact] for row in table["rows"]] == [1.0] * 5
    assert check_of(figures, "predicted = reported")["met"]
    cached = table["columns"].index("cached share")
    shares = [row[cached] for row in table["rows"]]
    assert shares[2] > shares[3] > shares[0], "kept turns are all cached, stripped ones more than chunks in front"
    assert check_of(figures, "card: median TTFT of (v) / best fixed arm")["value"] > 0


def test_evidence_scores_four_arms_on_the_same_questions(tmp_path: Path, shared_data: Path, engine_url: str) -> None:
    status, output, figures = quick_run("evidence", tmp_path, "--engine-url", engine_url, data=shared_data)
    assert_verdict("evidence", status, output, figures)
    table = figures["tables"][0]
    assert len(table["rows"]) == 4
    found, tokens = table["columns"].index("answer words found"), table["columns"].index("prompt tokens")
    assert all(0 <= row[found] <= 1 for row in table["rows"])
    assert table["rows"][3][tokens] > table["rows"][2][tokens], "evidence lines are in the prompt of the last arm"


def test_prefix_smoke_computes_at_most_a_block_when_asked_again(tmp_path: Path, engine_url: str) -> None:
    status, output, figures = quick_run("prefix_smoke", tmp_path, "--engine-url", engine_url)
    assert_verdict("prefix_smoke", status, output, figures)
    assert figures["met"], output


def test_predict_foretells_on_an_idle_engine_and_under_four_clients(tmp_path: Path, engine_url: str) -> None:
    status, output, figures = quick_run("predict", tmp_path, "--engine-url", engine_url)
    assert_verdict("predict", status, output, figures)
    calibration, idle, at_once = figures["tables"]
    assert calibration["rows"][0][calibration["columns"].index("requests")] >= 10
    assert idle["rows"][0][0] == "ours, learning"
    assert len(idle["rows"]) == 3
    assert len(at_once["rows"]) == 4


@pytest.mark.parametrize("name", ["pacing", "history", "residency", "volatile"])
def test_a_bench_of_the_real_engine_reaches_its_verdict(name: str, tmp_path: Path, engine_url: str) -> None:
    """Its figures are those of a busy machine here, so that MISSED is no failure of this test."""
    assert_verdict(name, *quick_run(name, tmp_path, "--engine-url", engine_url))
