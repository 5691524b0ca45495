"""`headstart tune`: which settings suit this engine, these documents and these questions."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.cli.client import GatewayClient
from gateway.cli.options import DEFAULT_URL, ApiKey, Url
from gateway.cli.quantities import listed, number, whole
from gateway.cli.terminal import USAGE, CliError, count, ms, out, printable, run
from gateway.cli.tune_progress import Progressing
from gateway.tuning.grid import VARIANTS, grid
from gateway.tuning.questions import read_questions
from gateway.tuning.recommend import Recommendation, Wishes
from gateway.tuning.results import Results, results
from gateway.tuning.scratch import LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS
from gateway.tuning.statistics import Summary
from gateway.tuning.sweep import Order, Outcome, sweep

INTERRUPTED = 130
JOURNAL = ".measured.jsonl"
TOP_KS = "3,5,8"
BUDGETS = "0,1000"

_SEED = 5
_MOST_BUDGET_MS = 3_600_000
_MOST_SETTINGS = 200
_UNFIT = re.compile(r"[^\w.-]+")  # for a file's name

_top_ks = listed("--k", whole("--k", most=50))
_budgets = listed("--budgets", whole("--budgets", least=0, most=_MOST_BUDGET_MS))
_sizes = listed("--chunk-tokens", whole("--chunk-tokens", least=LEAST_CHUNK_TOKENS, most=MOST_CHUNK_TOKENS))


def tune(
    questions: Annotated[Path, typer.Argument(help="JSON lines: question, document, answer.", metavar="QUESTIONS")],
    store: Annotated[str, typer.Option(help="Name or id of the store that is asked.")],
    budgets: Annotated[
        str, typer.Option(help="TTFT budgets to try, milliseconds, separated by commas; 0 is none.")
    ] = BUDGETS,
    k: Annotated[str, typer.Option("--k", help="Most chunks in the prompt, separated by commas.")] = TOP_KS,
    chunk_tokens: Annotated[
        str,
        typer.Option(
            help="Chunk sizes to try beside the store's own, by cutting its files anew into a scratch store."
        ),
    ] = "",
    variants: Annotated[
        str,
        typer.Option(help=f"Tried around the best setting, by the words of the answers: {','.join(VARIANTS)}."),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(parser=whole("--limit"), help="Ask only so many of the questions, a fixed sample.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(parser=whole("--max-tokens"), help="Longest answer, in tokens.")] = 48,
    within: Annotated[
        float, typer.Option(parser=number("--within", most=100), help="Points of recall worth a smaller TTFT.")
    ] = 1.0,
    output: Annotated[
        Path | None, typer.Option(help="Where the report goes, without extension.  [default: tune-STORE]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on with what is done.")] = False,
    model: Annotated[str | None, typer.Option(help="Served model; the first when not given.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Ask the questions under many settings, and say which to take: recall, TTFT, attainment, goodput."""
    asked = read_questions(questions)
    sizes = _sizes(chunk_tokens) if chunk_tokens.strip() else ()
    settings = grid([budget or None for budget in _budgets(budgets)], _top_ks(k), (None, *sizes))
    if len(settings) > _MOST_SETTINGS:
        raise CliError(
            f"--budgets, --k and --chunk-tokens give {len(settings)} settings; {_MOST_SETTINGS} are taken.", USAGE
        )
    stem = output if output is not None else Path("tune-" + _UNFIT.sub("_", store)[:100])
    if not stem.parent.is_dir():
        raise CliError(f"--output: no folder '{stem.parent}'.", USAGE)
    if questions.resolve() in {_beside(stem, extension).resolve() for extension in (".json", ".html", JOURNAL)}:
        raise CliError(f"--output: '{stem}' would overwrite the questions.", USAGE)
    order = Order(
        questions=asked,
        places=_places(len(asked), limit),
        store=store,
        settings=settings,
        variants=_variant_names(variants),
        model=model,
        max_tokens=max_tokens,
        wishes=Wishes(within=within / 100),
        journal=_beside(stem, JOURNAL),
        fresh=fresh,
    )
    console = out()
    outcome = run(_tune(url, api_key, order, console))
    told = results(outcome)
    print_results(told, console)
    write_results(told, stem, console)
    if outcome.interrupted:
        console.print(f"Stopped at {told.measured:,} of {told.expected:,}; the same command goes on.", markup=False)
        raise typer.Exit(INTERRUPTED)


async def _tune(url: str, api_key: str, order: Order, console: Console) -> Outcome:
    async with GatewayClient(url, api_key) as client:
        with Progressing(console) as progress:
            return await sweep(client, order, progress)


def _places(questions: int, limit: int | None) -> tuple[int, ...]:
    """All of them in their order, or a sample. A larger sample holds the smaller one and can go on from it."""
    places = list(range(questions))
    if limit is None or limit >= questions:
        return tuple(places)
    random.Random(_SEED).shuffle(places)
    return tuple(sorted(places[:limit]))


def _variant_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in VARIANTS:
            raise CliError(f"--variants: no '{name}'. There are {', '.join(VARIANTS)}.", USAGE)
    return names


def _beside(stem: Path, extension: str) -> Path:
    return stem.with_name(stem.name + extension)


def write_results(told: Results, stem: Path, console: Console) -> None:
    """The JSON and the HTML report. Raises CliError when they cannot be written."""
    from gateway.tuning.report import report_html  # brings in the plots' library: only where it is used

    files = {_beside(stem, ".json"): orjson.dumps(told.wire(), option=orjson.OPT_INDENT_2)}
    if told.grid:
        files[_beside(stem, ".html")] = report_html(told).encode()
    try:
        for path, content in files.items():
            path.write_bytes(content)
    except OSError as error:
        raise CliError(f"'{path}' cannot be written: {error.strerror}.") from error
    console.print(f"Written: {', '.join(str(path) for path in files)}", markup=False, soft_wrap=True)


def print_results(told: Results, console: Console) -> None:
    if not told.grid:
        console.print("No question has been asked under all settings yet: there is nothing to compare.")
        return
    title = f"{told.store}, {told.model}: {told.grid[0].questions} of {told.asked} questions"
    console.print(results_table(told.grid, title, told.recommendation))
    if told.variants:
        console.print(results_table(told.variants, "Variants", told.variant))
    for line in _sentences(told):
        console.print(printable(line), markup=False, soft_wrap=True)


def results_table(summaries: Sequence[Summary], title: str, recommended: Recommendation | None) -> Table:
    table = Table("", "setting", box=None, title=escape(printable(title)), title_justify="left")
    headings = ("recall", "answer words", "TTFT p50", "p95", "p99", "kept", "goodput/s", "prompt", "cached", "failed")
    for heading in headings:
        table.add_column(heading, justify="right")
    for summary in summaries:
        chosen = recommended is not None and summary.setting == recommended.setting
        table.add_row(
            "→" if chosen else "",
            summary.setting.name,
            share(summary.recall),
            share(summary.words) + (f" ±{100 * summary.words_error:.1f}" if summary.words_error is not None else ""),
            *(ms(value) for value in (summary.ttft_p50_ms, summary.ttft_p95_ms, summary.ttft_p99_ms)),
            share(summary.attainment),
            "-" if summary.goodput_per_s is None else f"{summary.goodput_per_s:.2f}",
            count(None if summary.prompt_tokens is None else int(summary.prompt_tokens)),
            share(summary.cached_share),
            str(summary.failed),
            style="bold" if chosen else None,
        )
    return table


def _sentences(told: Results) -> Iterator[str]:
    if told.recommendation is None:
        yield "No recommendation: no setting can be judged by the documents or answers of these questions."
    else:
        yield f"Recommended: {told.recommendation.setting.name}. {' '.join(told.recommendation.reasons)}"
    if told.variant is not None:
        yield f"Recommended beside it: {' '.join(told.variant.reasons)}"
    elif told.variants:
        yield "No variant gave better answers by more than chance."
    for name, value in told.variables().items():
        yield f"  {name}={value:g}" if isinstance(value, float) else f"  {name}={value}"
    if "HEADSTART_CHUNK_TOKENS" in told.variables():
        yield "  Another chunk size takes effect for files that are attached again."
    for note in told.notes:
        yield f"Note: {note}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
