"""A file's bytes to chunks that lack only their embeddings; synchronous and CPU-bound."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieval.chunk_rows import text_sha256
from retrieval.chunking import chunk
from retrieval.records import ChunkingStrategy, NewChunk
from retrieval.sections import Parsed
from retrieval.types import ChunkRenderer, UnusableFile


@dataclass(frozen=True, slots=True)
class PreparedChunk:
    """What is known of a chunk without its embedding; `token_ids` is int32 [tokens]."""

    ordinal: int
    title: str
    text: str
    label: str
    prompt_text: str
    token_ids: NDArray[np.int32]
    text_sha256: bytes

    @property
    def embedded_text(self) -> str:
        """Heading path and body: a passage is found by its headings too."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    def with_embedding(self, embedding: NDArray[np.float32], fingerprint: str) -> NewChunk:
        return NewChunk(
            self.ordinal,
            self.title,
            self.text,
            self.label,
            self.prompt_text,
            self.token_ids,
            fingerprint,
            self.text_sha256,
            embedding,
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """All chunks of a file, rendered under one `fingerprint`."""

    chunks: tuple[PreparedChunk, ...]
    fingerprint: str


def prepare(parsed: Parsed, renderer: ChunkRenderer, strategy: ChunkingStrategy) -> Prepared:
    """Raises UnusableFile when nothing is left to be stored."""
    while True:
        fingerprint = renderer.fingerprint
        chunks = tuple(
            PreparedChunk(
                draft.ordinal,
                draft.title,
                draft.text,
                draft.rendered.label,
                draft.rendered.text,
                np.asarray(draft.rendered.token_ids, dtype=np.int32),
                text_sha256(draft.title, draft.text),
            )
            for draft in chunk(parsed, renderer, strategy)
        )
        if not chunks:
            raise UnusableFile("empty_file", "The file holds no text. Upload a file that does.")
        # The served model may change under way; ids of two tokenizers never stand in one file.
        if renderer.fingerprint == fingerprint:
            return Prepared(chunks, fingerprint)
