"""What every bench prints: tables of its arms, then one last line that says whether the figures were met.

report = Report("retrieval")
report.table("Search, 100,000 chunks", ("arm", "p50 ms"), [("flat", 12.3), ("hnsw", 2.1)])
report.at_most("flat p50 ms", 12.3, 20.0)
report.at_least("hnsw recall@10", 0.98, 0.95)
return report.finish(options)

A bench as a command is `sys.exit(bench_command("retrieval", __doc__, run))`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Cell = str | int | float | None

# Wider than any table here: a log file has no width of its own, and a cut figure is a lost figure.
TABLE_WIDTH = 240


class CannotRun(Exception):
    """Something that the bench needs is not here; the message says what."""


@dataclass(frozen=True, slots=True)
class Options:
    """`quick` asks for a smoke run; `json_file` is where the figures go, or None."""

    quick: bool
    json_file: Path | None
    extra: argparse.Namespace


@dataclass(frozen=True, slots=True)
class Check:
    """One required figure. `relation` is the one that must hold: `<=`, `>=` or `holds`."""

    name: str
    value: float
    limit: float
    relation: str
    met: bool

    def __str__(self) -> str:
        if self.relation == "holds":
            return f"{self.name}: {'yes' if self.met else 'NO'}"
        mark = "" if self.met else " (MISSED)"
        return f"{self.name} {format_cell(self.value)} {self.relation} {format_cell(self.limit)}{mark}"


@dataclass(frozen=True, slots=True)
class PrintedTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(slots=True)
class Report:
    """Collects tables, checks and notes of one bench; prints tables as they come, the verdict last."""

    name: str
    console: Console = field(
        default_factory=lambda: Console(file=sys.stdout, highlight=False, soft_wrap=True, width=TABLE_WIDTH)
    )
    tables: list[PrintedTable] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table. Numbers are right-aligned and rounded to what a reader can use."""
        kept = PrintedTable(title, tuple(columns), tuple(tuple(row) for row in rows))
        self.tables.append(kept)
        rendered = Table(title=escape(title), title_justify="left")
        for index, column in enumerate(kept.columns):
            numeric = any(isinstance(row[index], int | float) for row in kept.rows)
            rendered.add_column(escape(column), justify="right" if numeric else "left", no_wrap=True)
        for row in kept.rows:
            rendered.add_row(*(escape(format_cell(cell)) for cell in row))
        self.console.print(rendered)

    def note(self, text: str) -> None:
        """Print and keep a sentence, for example why an arm was skipped."""
        self.notes.append(text)
        self.console.print(text, markup=False)

    def at_most(self, name: str, value: float, limit: float) -> None:
        self.checks.append(Check(name, value, limit, "<=", value <= limit))

    def at_least(self, name: str, value: float, limit: float) -> None:
        self.checks.append(Check(name, value, limit, ">=", value >= limit))

    def require(self, name: str, holds: bool) -> None:
        self.checks.append(Check(name, float(holds), 1.0, "holds", holds))

    @property
    def met(self) -> bool:
        """True when every check holds; a bench that checked nothing has not met anything."""
        return bool(self.checks) and all(check.met for check in self.checks)

    def verdict(self) -> str:
        figures = "; ".join(str(check) for check in self.checks) or "nothing was checked"
        return f"{'MET' if self.met else 'MISSED'} {self.name}: {figures}"

    def finish(self, options: Options) -> int:
        """Write the JSON file where asked, print the verdict as the last line, return the exit status."""
        if options.json_file is not None:
            document = {
                "bench": self.name,
                "quick": options.quick,
                "met": self.met,
                "checks": [asdict(check) for check in self.checks],
                "tables": [asdict(table) for table in self.tables],
                "notes": self.notes,
            }
            options.json_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.console.print(self.verdict(), markup=False)
        return 0 if self.met else 1


def bench_command(
    name: str,
    description: str | None,
    run: Callable[[Options], int],
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """A bench as a command: its exit status; a bench that cannot run says why on the line of its verdict.

    The time that it took goes to standard error. `extend` and `arguments` are as those of `parse_options`.
    """
    options = parse_options(description or name, arguments, extend)
    began_s = time.monotonic()
    try:
        status = run(options)
    except CannotRun as reason:
        report = Report(name)
        report.note(f"skipped: {reason}")
        return report.finish(options)
    print(f"{time.monotonic() - began_s:.0f} s, {time.process_time():.0f} s of a processor", file=sys.stderr)
    return status


def parse_options(
    description: str,
    arguments: Sequence[str] | None = None,
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """`--quick` and `--json FILE`, and what `extend` adds to the parser (found in `Options.extra`)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small inputs, the same checks")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures to FILE")
    if extend is not None:
        extend(parser)
    parsed = parser.parse_args(arguments)
    return Options(quick=parsed.quick, json_file=parsed.json, extra=parsed)


def format_cell(cell: Cell) -> str:
    """Four significant figures for what is small, thousands separators for what is large."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if cell != cell or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    if abs(cell) >= 100:
        return f"{cell:.1f}"
    if abs(cell) >= 10:
        return f"{cell:.2f}"
    return f"{cell:.3f}"
