"""What other budgets would allow: the steps at which one more chunk, or a larger form of one, fits."""

from prompt_builder.budget import Filling
from prompt_builder.forecast import Means
from prompt_builder.knapsack import Knapsack
from prompt_builder.material import Front
from prompt_builder.types import Alternative

MOST_ROWS = 8


def alternatives(filling: Filling, front: Front, means: Means, most_tokens: int) -> tuple[Alternative, ...]:
    """At most MOST_ROWS, by growing budget and relevance: from least to all that a request without a budget gets."""
    forms = filling.forms_beside(front)
    wanted = filling.wholes[: filling.most_chunks]
    total = sum(form.value for form in wanted) or 1.0
    room = sum(form.tokens for form in wanted)
    packed = Knapsack(forms, room, filling.most_chunks)
    smallest = sorted(min(form.tokens for form in group) for group in forms if group)[: filling.most_chunks]
    steps = {0, room}
    for sizes in (smallest, [form.tokens for form in wanted]):
        reached = 0
        for size in sizes:
            reached += size
            steps.add(min(reached, room))
    rows: list[Alternative] = []
    for step in sorted(steps):
        chosen = [form for form in packed.choice(step) if form is not None]
        filled = filling.filled(front, means, chosen, evidence=step == room)
        if filled.draft.tokens > most_tokens and rows:
            break
        row = Alternative(
            budget_s=filled.forecast.safe_ttft_s,
            chunks=len(filled.draft.shown),
            extracts=sum(chunk.form == "extract" for chunk in filled.draft.chunks),
            prompt_tokens=filled.draft.tokens,
            uncached_tokens=filled.forecast.uncached_tokens,
            relevance_kept=min(1.0, filled.draft.relevance / total),
        )
        if rows and row.relevance_kept <= rows[-1].relevance_kept:
            continue
        # A longer prompt may be cached further, and then costs less than a shorter one that holds less.
        while rows and rows[-1].budget_s >= row.budget_s:
            rows.pop()
        rows.append(row)
    return _thinned(rows)


def _thinned(rows: list[Alternative]) -> tuple[Alternative, ...]:
    """The first, the last, and those between at even distances."""
    if len(rows) <= MOST_ROWS:
        return tuple(rows)
    return tuple(rows[round(place * (len(rows) - 1) / (MOST_ROWS - 1))] for place in range(MOST_ROWS))
