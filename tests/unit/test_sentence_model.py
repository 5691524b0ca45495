"""A sentence model gives the library's own vectors, however it is run."""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from transformers import AutoTokenizer, BertConfig, BertModel, ModernBertConfig, ModernBertModel

from retrieval.embedding import packaged_folder
from retrieval.sentence_model import SentenceModel

TEXTS = (
    "",
    " ",
    "\x00",
    "ferry",
    "When does the first ferry leave?",
    "Khi nào chuyến phà đầu tiên rời bến?",
    "😀" * 30,
    *(f"On day {days} the harbour is open. " * days for days in (3, 9, 20, 31)),
    "word " * 3_000,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_a_text() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packaged() -> SentenceTransformer:
    return SentenceTransformer(str(packaged_folder()), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def model(packaged: SentenceTransformer) -> SentenceModel:
    return SentenceModel(packaged)


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of chance, for texts of up to 1,024 tokens."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = AutoTokenizer.from_pretrained(packaged_folder())
    torch.manual_seed(1)
    shape = BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=1_024,
    )
    BertModel(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_same(model: SentenceModel, library: SentenceTransformer) -> None:
    wanted = np.concatenate([library.encode([text], normalize_embeddings=True) for text in TEXTS])
    found = model.embed(list(TEXTS))
    assert found.dtype == np.float32
    assert found == pytest.approx(wanted, abs=1e-5)


def test_the_packaged_model_runs_as_a_graph_to_the_same_vectors(
    model: SentenceModel, packaged: SentenceTransformer
) -> None:
    assert model.as_graph
    assert model.dimension == 384
    assert_same(model, packaged)


def test_several_threads_at_once_get_their_own_vectors(model: SentenceModel) -> None:
    texts = [f"When does ferry {number} leave? " * (1 + number % 9) for number in range(48)]
    alone = [model.embed([text]) for text in texts]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda text: model.embed([text]), texts))
    assert np.array_equal(together, alone)


def test_the_first_question_of_a_length_takes_no_longer(model: SentenceModel) -> None:
    def took_s(text: str) -> float:
        began = time.thread_time()
        model.embed([text])
        return time.thread_time() - began

    texts = ["boat " * words for words in range(11, 51)]
    first, again = [took_s(text) for text in texts], [took_s(text) for text in texts]
    assert statistics.median(first) < 2 * statistics.median(again)


@pytest.mark.parametrize("pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_other_poolings_and_layers_run_as_graphs(small_bert: Path, pooling: str) -> None:
    torch.manual_seed(2)
    modules = [Transformer(str(small_bert)), Pooling(64, pooling_mode=pooling), Dense(64, 32), Normalize()]
    library = SentenceTransformer(modules=modules, device="cpu")
    model = SentenceModel(library)
    assert model.as_graph
    assert_same(model, library)


def test_a_text_longer_than_graphs_take_goes_to_the_library(small_bert: Path) -> None:
    library = SentenceTransformer(modules=[Transformer(str(small_bert)), Pooling(64)], device="cpu")
    library.max_seq_length = 1_024
    model = SentenceModel(library)
    assert model.as_graph
    assert_same(model, library)


def test_attention_in_a_window_is_not_fixed_at_the_length_of_one_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(packaged_folder())
    torch.manual_seed(3)
    shape = ModernBertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=1_024,
        local_attention=32,
        pad_token_id=0,
    )
    ModernBertModel(shape).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    library = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(64)], device="cpu")
    assert_same(SentenceModel(library), library)


def test_a_model_that_puts_a_prompt_before_each_text_stays_with_the_library() -> None:
    library = SentenceTransformer(
        str(packaged_folder()),
        device="cpu",
        local_files_only=True,
        prompts={"search": "search: "},
        default_prompt_name="search",
    )
    model = SentenceModel(library)
    assert not model.as_graph
    assert_same(model, library)


def test_a_model_that_is_no_transformer_stays_with_the_library() -> None:
    tokenizer = AutoTokenizer.from_pretrained(packaged_folder())
    library = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=32)], device="cpu")
    model = SentenceModel(library)
    assert not model.as_graph
    assert_same(model, library)
