"""Which of many replicas are worth an exact plan."""

from collections.abc import Sequence

from cache.resident_prefix import ResidentPrefix, resident_path
from prompt_builder.forecast import Means
from prompt_builder.knapsack import Form
from prompt_builder.material import Front

MOST_MEANS = 2
"""Replicas that are planned on exactly: each takes about as long as a plan on one replica alone."""

# A path through a few chunks is found within this many steps; an exact plan looks further.
_TRIES = 32


def shortlist(
    means: Sequence[Means], front: Front, wanted: Sequence[Form], most: int = MOST_MEANS
) -> tuple[Means, ...]:
    """The `most` replicas with the least predicted TTFT for all wanted chunks behind the front, in the order given.

    Predicted from what each holds of the front and of the chunks behind it, by lookups alone where the replicas share
    a tree. Equal predictions go to the replica that comes first.
    """
    if len(means) <= most:
        return tuple(means)
    pieces = [form.whole.rendered.token_ids for form in wanted]
    tokens = front.tokens + sum(form.tokens for form in wanted)
    ranked = sorted(range(len(means)), key=lambda place: (_ttft_s(means[place], front, pieces, tokens), place))
    return tuple(means[place] for place in sorted(ranked[:most]))


def _ttft_s(means: Means, front: Front, pieces: Sequence[tuple[int, ...]], tokens: int) -> float:
    prefix = means.prefix(front)
    if isinstance(prefix, ResidentPrefix):
        for place in resident_path(prefix, pieces, _TRIES):
            prefix = prefix.extended(pieces[place])
    cached = min(prefix.resident_tokens, tokens - 1)
    return means.forecast(tokens - cached, cached).ttft_s
