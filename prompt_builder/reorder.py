"""The same chunks in another order: for what a replica holds by the time a planned prompt may go there."""

from collections.abc import Sequence
from dataclasses import replace

from prompt_builder.choice import ranked
from prompt_builder.companions import Together
from prompt_builder.order import Piece, by_relevance, likely_order, resident_places
from prompt_builder.outlook import Prefix
from prompt_builder.types import Plan, Prompt, PromptChunk


def reordered(plan: Plan, prompt: Prompt, prefix: Prefix, past: Together, pin_last: int) -> Plan:
    """The plan with its chunks in the order `reuse` for this empty prompt on a replica; itself where none is better.

    `prompt` is the plan's, with token ids. Nothing but the order of the new question's chunks changes.
    """
    chunks = ranked(plan.chunks)
    pieces = _pieces(chunks, prompt)
    if len(pieces) < 2:
        return plan
    path = resident_places(pieces, _before_chunks(prompt, prefix), pin_last)
    if plan.past or plan.summary:
        rest = by_relevance(len(chunks), path, pin_last)
    else:
        rest = likely_order(pieces, path, past, pin_last)
    ordered = tuple(chunks[place] for place in (*path, *rest))
    return plan if ordered == plan.chunks else replace(plan, chunks=ordered)


def cached_tokens(plan: Plan, prompt: Prompt, prefix: Prefix, pin_last: int) -> int:
    """What `reordered` would find of the plan for this empty prompt on a replica, of tokens that are held there."""
    pieces = _pieces(ranked(plan.chunks), prompt)
    prefix = _before_chunks(prompt, prefix)
    for place in resident_places(pieces, prefix, pin_last):
        prefix = prefix.extended(pieces[place].token_ids)
    return min(prefix.resident_tokens, max(0, prompt.tokens - 1))


def _pieces(chunks: Sequence[PromptChunk], prompt: Prompt) -> list[Piece]:
    """The chunks as they are rendered; none where two of them have one label."""
    sizes = {segment.label: len(segment.token_ids) for segment in prompt.segments if segment.kind == "chunk"}
    if len(sizes) != len(chunks):
        return []
    return [
        Piece(chunk.label, chunk.rendered.token_ids, sizes[chunk.label], chunk.form == "whole") for chunk in chunks
    ]


def _before_chunks(prompt: Prompt, prefix: Prefix) -> Prefix:
    for segment in prompt.segments:
        if segment.kind == "chunk":
            break
        prefix = prefix.extended(segment.token_ids)
    return prefix
