"""The labels that an answer names."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prompt_builder.labels import LABEL_PATTERN


@dataclass(frozen=True, slots=True)
class NamedLabel:
    """`start` and `end` are character positions of the label in the answer, brackets not included."""

    label: str
    start: int
    end: int


# A bracket that a model forgot to close, or in which it said more than the label, still names it.
_BRACKET = re.compile(r"[\[(【（]([^\[\](){}【】（）\n]{0,200})")
_LABEL = re.compile(rf"(?<![0-9A-Za-z]){LABEL_PATTERN}(?![0-9A-Za-z])", re.IGNORECASE)


def named_labels(answer: str, labels: Iterable[str]) -> tuple[NamedLabel, ...]:
    """Every place where `answer` names one of `labels` in brackets, in order.

    `[k7f2a]`, `(k7f2a)` and `[k7f2a, k0c4d]` count, in either case of letters; labels that are not in `labels`
    (invented, or of other prompts) do not. A pure function of the whole answer, streamed or not.
    """
    known = frozenset(labels)
    if not known:
        return ()
    return tuple(
        NamedLabel(match.group().lower(), match.start(), match.end())
        for bracket in _BRACKET.finditer(answer)
        for match in _LABEL.finditer(answer, bracket.start(1), bracket.end(1))
        if match.group().lower() in known
    )


def cited(answer: str, labels: Iterable[str]) -> tuple[str, ...]:
    """The labels that `answer` names, each once, in the order in which it first names them."""
    return tuple(dict.fromkeys(named.label for named in named_labels(answer, labels)))
