"""A smoke run of the retrieval bench: it measures, says its verdict last, and its exit status agrees."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_prints_its_verdict_last_and_writes_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "bench.retrieval", "--quick", "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    last = run.stdout.rstrip().splitlines()[-1]
    assert last.startswith(("MET retrieval", "MISSED retrieval")), run.stderr[-2_000:]
    assert (run.returncode == 0) == last.startswith("MET")
    written = json.loads(figures.read_text())
    assert written["quick"] is True
    # Times depend on what else this machine does; what is found does not.
    found = {check["name"]: check["met"] for check in written["checks"] if "p50" not in check["name"]}
    assert found
    assert all(found.values()), found
