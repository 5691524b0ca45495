"""Which candidates and which past turns a plan has to choose from."""

from collections.abc import Mapping, Sequence

from prompt_builder.types import Candidate, ChunkOrder, Dropped, PastMessage, PromptChunk

Turn = Sequence[PastMessage]


def distinct(items: Sequence[Candidate], top_k: int) -> tuple[list[PromptChunk], list[Dropped]]:
    """All chunks, most relevant first, one for each label, whatever the order of `items`.

    Told as dropped are those whose label a chunk of the `top_k` most relevant has taken before these were complete.
    """
    ranked = sorted(items, key=lambda item: (-item.relevance, item.chunk.label, item.chunk.row_id))
    taken: dict[str, PromptChunk] = {}
    dropped = []
    for item in ranked:
        chunk = item.chunk
        twin = taken.get(chunk.label)
        if twin is None:
            taken[chunk.label] = _prompt_chunk(item)
        elif len(taken) < top_k and twin.rendered.text != chunk.rendered.text:
            reason = f"A more relevant chunk has the same label and other text ({twin.filename}, {chunk.filename})."
            dropped.append(Dropped("chunk", chunk.label, reason))
    return list(taken.values()), dropped


def against_standing(
    wanted: Sequence[PromptChunk], standing: Mapping[str, Mapping[str, str]]
) -> tuple[list[PromptChunk], list[PromptChunk], list[Dropped]]:
    """Chunks to send, chunks that stand in kept past turns, and those whose label means another chunk there.

    `standing` is what `standing_texts` tells of these turns.
    """
    sent, referred, dropped = [], [], []
    for chunk in wanted:
        there = standing.get(chunk.label)
        if there is None or (chunk.rendered.text not in there and chunk.body in there.values()):
            sent.append(chunk)
        elif chunk.rendered.text in there:
            referred.append(chunk)
        else:
            reason = "A past turn in this prompt holds a chunk with the same label and other text."
            dropped.append(Dropped("chunk", chunk.label, reason))
    return sent, referred, dropped


def standing_texts(past: Sequence[PastMessage]) -> dict[str, dict[str, str]]:
    """For each label in kept past turns, what stands there: rendered text to the body that it was taken from."""
    standing: dict[str, dict[str, str]] = {}
    for message in past:
        if message.context is not None:
            for chunk in message.context.chunks:
                standing.setdefault(chunk.label, {})[chunk.rendered.text] = chunk.body
    return standing


def ordered(
    chunks: Sequence[PromptChunk], order: ChunkOrder, pin_last: int = 0, first: Sequence[str] = ()
) -> tuple[PromptChunk, ...]:
    """The chunks labelled `first`, in that order; the others as `order` says; of these the `pin_last` best last.

    Ties in relevance go by label, so that equal sets give equal orders. `reuse` is `relevance_last` here: what is
    resident, and what others ask for, is known later (`order`).
    """
    if order in ("reuse", "relevance_last"):
        order, pin_last = "relevance_last", 0
    by_label = {chunk.label: chunk for chunk in chunks}
    rest = ranked([chunk for chunk in chunks if chunk.label not in first])
    pinned = rest[:pin_last][::-1]
    free = rest[pin_last:]
    if order == "label":
        free.sort(key=lambda chunk: chunk.label)
    elif order == "relevance_last":
        free.sort(key=lambda chunk: (chunk.relevance, chunk.label))
    return (*(by_label[label] for label in first), *free, *pinned)


def ranked(chunks: Sequence[PromptChunk]) -> list[PromptChunk]:
    """Most relevant first, ties by label."""
    return sorted(chunks, key=lambda chunk: (-chunk.relevance, chunk.label))


def turns(past: Sequence[PastMessage]) -> list[Turn]:
    """Groups that begin with a user message, so that what remains after a cut begins with one too.

    Messages before the first user message are a group of their own.
    """
    groups: list[list[PastMessage]] = []
    for message in past:
        if message.role == "user" or not groups:
            groups.append([])
        groups[-1].append(message)
    return list(groups)


def flat(groups: Sequence[Turn]) -> list[PastMessage]:
    return [message for turn in groups for message in turn]


def _prompt_chunk(item: Candidate) -> PromptChunk:
    chunk = item.chunk
    return PromptChunk(
        label=chunk.label,
        file_id=chunk.file_id,
        filename=chunk.filename,
        title=chunk.title,
        relevance=item.relevance,
        body=chunk.text,
        rendered=chunk.rendered,
    )
