"""The documentation against the code: links, commands, settings, modules, metrics, snippets."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from gateway.cli.main import app
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
PACKAGES = ("bench", "cache", "gateway", "latency", "prompt_builder", "retrieval")
CLIENT_VARIABLES = {"HEADSTART_URL", "HEADSTART_API_KEY"}
TEST_VARIABLES = {f"HEADSTART_{name}" for name in ("SHARED_DIR", "TEST_DATA", "TEST_ENGINE_URL", "TEST_MODEL_DIR")}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4}|\t).+$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(r"(?<![\w/.-])(?:\.venv/bin/)?headstart ([a-z]+)(?: ([a-z]+))?([^|\n#]*)")
OPTION = re.compile(r"(?<!\S)--[a-z-]+")
VARIABLE = re.compile(r"\bHEADSTART_[A-Z][A-Z_]*[A-Z]\b")
MODULE = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|deploy)/[\w/]*(?:\.py|/))`")
BENCH = re.compile(r"python -m (bench\.\w+)")
TARGET = re.compile(r"\bmake ([a-z]+)\b")
METRIC = re.compile(r"\bheadstart_[a-z_]+[a-z]\b")

page = pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])


@page
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    broken = []
    for target in LINK.findall(without_code(path.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@page
def test_every_command_that_is_named_exists_with_its_options(path: Path) -> None:
    wrong = []
    for line in code(path.read_text("utf-8")):
        for first, second, rest in COMMAND.findall(line):
            command = typer.main.get_group(app).commands.get(first)
            if command is None:
                wrong.append(f"headstart {first}")
                continue
            command = getattr(command, "commands", {}).get(second, command)
            known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
            wrong += [f"headstart {first} {option}" for option in OPTION.findall(rest) if option not in known]
    assert not wrong


@page
def test_every_variable_that_is_named_is_a_setting(path: Path) -> None:
    settings = {f"HEADSTART_{name.upper()}" for name in Settings.model_fields}
    unknown = set(VARIABLE.findall(path.read_text("utf-8"))) - settings - CLIENT_VARIABLES - TEST_VARIABLES
    assert not unknown


def test_every_setting_is_documented_as_it_is() -> None:
    rows = (ROOT / "docs" / "settings.md").read_text("utf-8").splitlines()
    for name, field in Settings.model_fields.items():
        row = next(row for row in rows if row.startswith(f"| `HEADSTART_{name.upper()}` |"))
        assert field.description is not None
        assert row.endswith(f"| {field.description} |")
        if isinstance(field.default, str | int | float) and field.default not in ("", True, False):
            assert f"| `{field.default}` |" in row


@page
def test_every_module_that_is_named_exists(path: Path) -> None:
    assert not [name for name in MODULE.findall(path.read_text("utf-8")) if not (ROOT / name).exists()]


def test_every_module_has_its_place_in_the_architecture() -> None:
    """By its own name, or by that of a folder below its package."""
    named = set(MODULE.findall((ROOT / "docs" / "architecture.md").read_text("utf-8")))
    packages = [package for package in PACKAGES if package != "bench"]
    modules = [file.relative_to(ROOT) for package in packages for file in (ROOT / package).rglob("*.py")]
    homeless = [
        str(module)
        for module in modules
        if module.name != "__init__.py" and not {str(module), *(f"{each}/" for each in module.parents)} & named
    ]
    assert not homeless


@page
def test_every_bench_that_is_named_can_be_run(path: Path) -> None:
    assert not [name for name in BENCH.findall(path.read_text("utf-8")) if importlib.util.find_spec(name) is None]


@page
def test_every_make_target_that_is_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {name for line in code(path.read_text("utf-8")) for name in TARGET.findall(line)}
    assert not named - targets


def test_metrics_and_their_documentation_agree() -> None:
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "gateway").rglob("*.py"))
    exported = set(re.findall(r'"(headstart_[a-z_]+)"', sources)) - {"headstart_request_id"}
    documented = set(METRIC.findall((ROOT / "docs" / "operations.md").read_text("utf-8")))
    assert documented == exported


def test_the_index_of_decisions_lists_them_all_in_order() -> None:
    folder = ROOT / "docs" / "adr"
    pages = sorted(file.name for file in folder.glob("[0-9]*.md"))
    assert LINK.findall((folder / "README.md").read_text("utf-8")) == pages
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))


@page
def test_snippets_are_whole(path: Path) -> None:
    for language, snippet in FENCE.findall(path.read_text("utf-8")):
        if language == "python":
            compile(snippet, str(path), "exec")
        elif language == "json":
            json.loads(snippet)


def code(text: str) -> Iterator[str]:
    """Code spans, and the lines of code blocks."""
    for _, block in FENCE.findall(text):
        yield from block.splitlines()
    prose = FENCE.sub("", text)
    yield from INDENTED.findall(prose)
    yield from SPAN.findall(prose)


def without_code(text: str) -> str:
    return SPAN.sub("", FENCE.sub("", text))


def anchors(file: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = HEADING.findall(FENCE.sub("", file.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
