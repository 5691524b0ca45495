"""`headstart lint`: what keeps logged chat requests from reusing the prefixes of the ones before them."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.cli.lint_log import Malformed, logged_requests
from gateway.cli.lint_prefix import CURES, VOLATILE_CURE, Findings, Linter
from gateway.cli.options import AsJson
from gateway.cli.terminal import FAILURE, USAGE, CliError, count, counted, err, out, printable
from prompt_builder.tokenizer import EstimateTokenizer, NoTokenizer, load_tokenizer

MOST_MALFORMED_TOLD = 20
MOST_TEXTS_SHOWN = 20


def lint(
    file: Annotated[Path, typer.Argument(help="Logged requests, one JSON object a line.", metavar="FILE.jsonl")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the served model, to count its tokens; else they are estimated.", metavar="FOLDER"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what ends prefix reuse in logged requests: changing system texts, edited histories, moving tools.

    A line is a chat request in OpenAI's form, or an object whose `body` or `request` holds one. Exit 0 when nothing
    is found, 1 when something is, 2 when the file cannot be used.
    """
    linter = Linter(_counter(tokenizer))
    malformed = 0
    told: list[tuple[int, str]] = []
    try:
        for number, logged in logged_requests(file):
            if not isinstance(logged, Malformed):
                linter.take(number, logged)
                continue
            malformed += 1
            if len(told) < MOST_MALFORMED_TOLD:
                told.append((number, str(logged)))
    except OSError as error:
        raise CliError(f"{printable(str(file))} cannot be read: {error.strerror or error}.", USAGE) from error
    findings = linter.findings
    if not as_json:
        for number, reason in told:
            err().print(f"line {number:,}: {reason}; left out", markup=False, soft_wrap=True)
        if malformed > len(told):
            err().print(f"{counted(malformed - len(told), 'more line')} left out", markup=False, soft_wrap=True)
    if not findings.requests:
        raise CliError(
            f"{printable(str(file))} holds no chat request ({counted(malformed, 'line')} left out).", USAGE
        )
    if as_json:
        wire = {
            **findings.wire(),
            "exact_tokens": tokenizer is not None,
            "malformed": malformed,
            "malformed_lines": [{"line": number, "reason": reason} for number, reason in told],
        }
        typer.echo(orjson.dumps(wire, option=orjson.OPT_INDENT_2))
    else:
        _show(findings, malformed, tokenizer is not None, out())
    if findings.any:
        raise typer.Exit(FAILURE)


def _counter(folder: Path | None) -> Callable[[str], int]:
    if folder is None:
        return EstimateTokenizer().count
    try:
        return load_tokenizer(folder).count
    except NoTokenizer as error:
        raise CliError(f"--tokenizer: {error}.", USAGE) from error


def _show(findings: Findings, malformed: int, exact: bool, console: Console) -> None:
    for place, found in enumerate(findings.volatile_by_loss()[:MOST_TEXTS_SHOWN]):
        if not place:
            console.print("[bold]System texts that change from request to request[/bold]")
        model = f" of {escape(printable(found.model))}" if found.model else ""
        console.print(
            f"\n{counted(found.requests, 'request')}{model}, from line {count(found.line)} on: "
            f"{count(found.lost_tokens)} tokens behind the first change were not reused"
        )
        table = Table("line", "kind", "text", box=None)
        for line in found.report.lines:
            table.add_row(str(line.line), line.kind, escape(printable(line.text)))
        console.print(table)
    if findings.volatile:
        console.print(f"\nCure: {VOLATILE_CURE}\n", markup=False, soft_wrap=True)
    if findings.breaks:
        table = Table("", "requests", "tokens lost", "first lines", box=None, title_justify="left")
        table.title = "Conversations whose prefix broke"
        for kind, broken in findings.breaks_by_loss():
            first = ", ".join(f"{line:,}" for line in broken.lines)
            table.add_row(kind.replace("_", " "), count(broken.requests), count(broken.lost_tokens), first)
        console.print(table)
        for kind, _ in findings.breaks_by_loss():
            console.print(f"Cure for {kind.replace('_', ' ')}: {CURES[kind]}", markup=False, soft_wrap=True)
        console.print()
    said = "tokens" if exact else "tokens (estimated; --tokenizer counts them)"
    console.print(
        f"{counted(findings.requests, 'request')}, {count(findings.prompt_tokens)} {said} in their prompts; "
        f"{count(findings.reusable_tokens)} could have been reused, as sent {count(findings.reused_tokens)}.",
        markup=False,
        soft_wrap=True,
    )
    if malformed:
        console.print(f"{counted(malformed, 'line')} left out.", markup=False, soft_wrap=True)
    if not findings.any:
        console.print("Nothing found.", markup=False)
