import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.report import CannotRun, Options, Report, bench_command, format_cell, parse_options


def make_report() -> tuple[Report, io.StringIO]:
    out = io.StringIO()
    return Report("demo", console=Console(file=out, soft_wrap=True)), out


def test_the_last_line_says_met_with_the_figures() -> None:
    report, out = make_report()
    report.table("Arms [brackets stay]", ("arm", "p50 ms"), [("flat [exact]", 12.34), ("hnsw", 2.1)])
    report.at_most("flat p50 ms", 12.34, 20.0)
    assert report.finish(parse_options("", [])) == 0
    text = out.getvalue()
    assert "[brackets stay]" in text
    assert "flat [exact]" in text
    assert text.splitlines()[-1] == "MET demo: flat p50 ms 12.34 <= 20.00"


def test_one_missed_figure_misses_the_bench_and_is_written_to_json(tmp_path: Path) -> None:
    report, out = make_report()
    report.at_most("a", 1.0, 2.0)
    report.at_least("b", 0.5, 0.9)
    report.note("an arm was skipped")
    target = tmp_path / "figures.json"
    assert report.finish(parse_options("", ["--json", str(target), "--quick"])) == 1
    assert out.getvalue().splitlines()[-1].startswith("MISSED demo")
    written = json.loads(target.read_text())
    assert [check["met"] for check in written["checks"]] == [True, False]
    assert written["quick"] is True
    assert written["notes"] == ["an arm was skipped"]


def test_a_bench_that_checked_nothing_is_not_met() -> None:
    report, _ = make_report()
    assert report.finish(parse_options("", [])) == 1


def test_a_requirement_without_a_figure_is_named() -> None:
    report, _ = make_report()
    report.require("best of the run", False)
    assert "best of the run: NO" in report.verdict()


def test_cells_are_rounded_to_what_a_reader_can_use() -> None:
    assert [format_cell(cell) for cell in (None, "x", 12345, 0.12345, 12.345, 123.45, 1234.5)] == [
        "-",
        "x",
        "12,345",
        "0.123",
        "12.35",
        "123.5",
        "1,234",
    ]


def test_a_bench_as_a_command_gives_its_own_status_and_what_it_adds_to_the_options() -> None:
    def run(options: Options) -> int:
        return 7 if options.quick and options.extra.week == 2 else 8

    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--week", type=int)

    assert bench_command("demo", None, run, extend, ["--quick", "--week", "2"]) == 7


def test_a_bench_that_cannot_run_says_why_and_has_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: Options) -> int:
        raise CannotRun("no trace in data/")

    figures = tmp_path / "figures.json"
    assert bench_command("demo", "Help.", run, arguments=["--json", str(figures)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["skipped: no trace in data/", "MISSED demo: nothing was checked"]
    assert json.loads(figures.read_text())["notes"] == lines[:1]
