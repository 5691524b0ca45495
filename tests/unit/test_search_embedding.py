"""The packaged model, for real: normalised vectors, a cache by tenant, and queries that do not wait for files."""

import asyncio
import statistics
import time
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from retrieval.embedding import ModelUnavailable, SentenceEmbedder, packaged_folder, prepare


class DictCache:
    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.ttls: list[float] = []

    async def get(self, key: str) -> bytes | None:
        return self.entries.get(key)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self.entries[key] = value
        self.ttls.append(ttl_s)


@pytest.fixture
def cache() -> DictCache:
    return DictCache()


@pytest.fixture
async def embedder(cache: DictCache) -> AsyncIterator[SentenceEmbedder]:
    embedder = SentenceEmbedder(cache=cache, cache_ttl_s=60.0)
    await embedder.start()
    yield embedder
    await embedder.aclose()


async def test_documents_come_in_their_order_as_unit_vectors(embedder: SentenceEmbedder) -> None:
    texts = [f"Sentence number {number}. " * (1 + number % 7) for number in range(40)]
    vectors = await embedder.embed_documents(texts)
    assert vectors.shape == (40, embedder.dimension) == (40, 384)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(40), abs=1e-5)
    for number in (0, 17, 39):
        alone = (await embedder.embed_query(texts[number], "t")).vector
        assert vectors[number] @ alone == pytest.approx(1.0, abs=1e-4)


async def test_no_documents_give_an_empty_matrix(embedder: SentenceEmbedder) -> None:
    assert (await embedder.embed_documents([])).shape == (0, 384)


async def test_meaning_is_near_and_other_things_are_far(embedder: SentenceEmbedder) -> None:
    vectors = await embedder.embed_documents(["When does the boat leave?", "Ferry departure times", "A cake recipe"])
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2


async def test_a_query_is_computed_once_a_tenant(embedder: SentenceEmbedder, cache: DictCache) -> None:
    first = await embedder.embed_query("hello", "a")
    again = await embedder.embed_query("hello", "a")
    other = await embedder.embed_query("hello", "b")
    assert (first.cached, again.cached, other.cached) == (False, True, False)
    assert np.array_equal(first.vector, again.vector)
    assert len(cache.entries) == 2
    assert set(cache.ttls) == {60.0}
    assert all(key.isascii() and "hello" not in key for key in cache.entries)


async def test_a_cached_vector_of_another_length_is_not_used(embedder: SentenceEmbedder, cache: DictCache) -> None:
    await embedder.embed_query("hello", "a")
    cache.entries = {key: value[:64] for key, value in cache.entries.items()}
    assert (await embedder.embed_query("hello", "a")).cached is False


async def test_e5_both_forms_of_a_letter_are_one_query(embedder: SentenceEmbedder) -> None:
    await embedder.embed_query(unicodedata.normalize("NFC", "bệnh viện"), "a")
    assert (await embedder.embed_query(unicodedata.normalize("NFD", "bệnh viện"), "a")).cached


@pytest.mark.parametrize("text", ["", " ", "\ud800 half a pair", "\x00", "😀" * 3_000])
async def test_odd_texts_are_embedded(embedder: SentenceEmbedder, text: str) -> None:
    vector = (await embedder.embed_query(text, "a")).vector
    assert np.isfinite(vector).all()
    assert vector.shape == (384,)


def test_half_a_surrogate_pair_is_replaced_and_whole_ones_stay() -> None:
    assert prepare("\ud800x") == "\ufffdx"
    assert prepare("😀") == "😀"


async def test_f1_a_query_does_not_wait_for_a_file_that_is_embedded(embedder: SentenceEmbedder) -> None:
    documents = [f"Paragraph {number} says that the harbour is open. " * 20 for number in range(64)]
    began = time.perf_counter()
    work = asyncio.create_task(embedder.embed_documents(documents))
    await asyncio.sleep(0.1)
    waits = []
    for number in range(6):
        asked = time.perf_counter()
        await embedder.embed_query(f"When does ferry {number} leave?", "a")
        waits.append(time.perf_counter() - asked)
    assert not work.done()
    await work
    assert statistics.median(waits) < (time.perf_counter() - began) / 6


async def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    embedder = SentenceEmbedder(str(tmp_path))
    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        await embedder.start()
    await embedder.aclose()


async def test_a_folder_is_a_model(cache: DictCache) -> None:
    embedder = SentenceEmbedder(str(packaged_folder()))
    assert embedder.model_id == str(packaged_folder())
    assert (await embedder.embed_documents(["x"])).shape == (1, 384)
    await embedder.aclose()
