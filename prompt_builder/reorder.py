"""The same chunks in another order: for what a replica holds by the time a planned prompt may go there."""

from dataclasses import replace

from prompt_builder.choice import ranked
from prompt_builder.companions import Together
from prompt_builder.order import Piece, by_relevance, likely_order, resident_places
from prompt_builder.outlook import Prefix
from prompt_builder.types import Plan, Prompt


def reordered(plan: Plan, prompt: Prompt, prefix: Prefix, past: Together, pin_last: int) -> Plan:
    """The plan with its chunks in the order `reuse` for this empty prompt on a replica; itself where none is better.

    `prompt` is the plan's, with token ids. Nothing but the order of the new question's chunks changes.
    """
    sizes = {segment.label: len(segment.token_ids) for segment in prompt.segments if segment.kind == "chunk"}
    if len(plan.chunks) < 2 or len(sizes) != len(plan.chunks):
        return plan
    front: list[int] = []
    for segment in prompt.segments:
        if segment.kind == "chunk":
            break
        front += segment.token_ids
    chunks = ranked(plan.chunks)
    pieces = [
        Piece(chunk.label, chunk.rendered.token_ids, sizes[chunk.label], chunk.form == "whole") for chunk in chunks
    ]
    path = resident_places(pieces, prefix.extended(front), pin_last)
    if plan.past or plan.summary:
        rest = by_relevance(len(chunks), path, pin_last)
    else:
        rest = likely_order(pieces, path, past, pin_last)
    ordered = tuple(chunks[place] for place in (*path, *rest))
    return plan if ordered == plan.chunks else replace(plan, chunks=ordered)
