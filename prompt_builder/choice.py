"""Which candidates and which past turns a plan has to choose from."""

from collections.abc import Sequence

from prompt_builder.types import Candidate, ChunkOrder, Dropped, PastMessage, PromptChunk

Turn = Sequence[PastMessage]


def distinct(items: Sequence[Candidate], top_k: int) -> tuple[list[PromptChunk], list[Dropped]]:
    """The `top_k` most relevant chunks, most relevant first, one for each label, whatever the order of `items`."""
    ranked = sorted(items, key=lambda item: (-item.relevance, item.chunk.label, item.chunk.row_id))
    taken: dict[str, PromptChunk] = {}
    dropped = []
    for item in ranked:
        if len(taken) == top_k:
            break
        chunk = item.chunk
        twin = taken.get(chunk.label)
        if twin is None:
            taken[chunk.label] = _prompt_chunk(item)
        elif twin.rendered.text != chunk.rendered.text:
            reason = f"A more relevant chunk has the same label and other text ({twin.filename}, {chunk.filename})."
            dropped.append(Dropped("chunk", chunk.label, reason))
    return list(taken.values()), dropped


def against_standing(
    wanted: Sequence[PromptChunk], past: Sequence[PastMessage]
) -> tuple[list[PromptChunk], list[PromptChunk], list[Dropped]]:
    """Chunks to send, chunks that stand in kept past turns, and those whose label means another text there."""
    standing = {
        chunk.label: chunk.rendered.text
        for message in past
        if message.context is not None
        for chunk in message.context.chunks
    }
    sent, referred, dropped = [], [], []
    for chunk in wanted:
        text = standing.get(chunk.label)
        if text is None:
            sent.append(chunk)
        elif text == chunk.rendered.text:
            referred.append(chunk)
        else:
            reason = "A past turn in this prompt holds a chunk with the same label and other text."
            dropped.append(Dropped("chunk", chunk.label, reason))
    return sent, referred, dropped


def ordered(chunks: Sequence[PromptChunk], order: ChunkOrder) -> tuple[PromptChunk, ...]:
    """Ties in relevance go by label, so that equal sets give equal orders."""
    if order == "label":
        return tuple(sorted(chunks, key=lambda chunk: chunk.label))
    sign = 1 if order == "relevance_last" else -1
    return tuple(sorted(chunks, key=lambda chunk: (sign * chunk.relevance, chunk.label)))


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
