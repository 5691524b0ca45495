"""JSON and JSON Lines: every value named by its path, every element of a list on one line."""

from collections.abc import Iterator

import orjson

from retrieval.encodings import normalise
from retrieval.sections import Budget, Section
from retrieval.types import UnusableFile


def parse_json(text: str, budget: Budget) -> tuple[Section, ...]:
    """A list becomes one line per element, an object one line per value. Raises UnusableFile."""
    value = _load(text, "The file")
    lines = [_line(element) for element in value] if isinstance(value, list) else list(_leaves(value))
    for line in lines:
        budget.spend(line)
    return (Section((), "\n".join(line for line in lines if line), rows=True),)


def parse_json_lines(text: str, budget: Budget) -> tuple[Section, ...]:
    """Raises UnusableFile that names the first line which is not JSON."""
    lines = []
    for number, source in enumerate(text.split("\n"), start=1):
        if source.strip():
            line = _line(_load(source, f"Line {number}"))
            budget.spend(line)
            lines.append(line)
    return (Section((), "\n".join(lines), rows=True),)


def _load(text: str, what: str) -> object:
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UnusableFile(
            "invalid_file", f"{what} is not valid JSON: {error}. Correct it and upload it again."
        ) from None
    return value


def _line(value: object) -> str:
    return "; ".join(_leaves(value))


def _leaves(value: object) -> Iterator[str]:
    """`path: value` of every leaf in order; a stack of its own, because JSON may be nested deeply."""
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            prefix = f"{path}." if path else ""
            stack.extend((f"{prefix}{key}", child) for key, child in reversed(item.items()))
        elif isinstance(item, list):
            stack.extend((path, child) for child in reversed(item))
        elif item is not None and item != "":
            shown = item if isinstance(item, str) else orjson.dumps(item).decode()
            text = " ".join(normalise(shown).split())
            yield f"{path}: {text}" if path else text
