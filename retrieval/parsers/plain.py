"""Plain text: one section, as it stands."""

from retrieval.sections import Budget, Section


def parse_plain(text: str, budget: Budget) -> tuple[Section, ...]:
    budget.spend("")
    return (Section((), text),)
