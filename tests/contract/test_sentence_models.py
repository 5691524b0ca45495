"""Our own BERT encoder against the library's: the same vectors, and the library where they would differ."""

from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from retrieval.bert import BertSentences
from retrieval.embedding import packaged_folder

TEXTS = [
    "",
    " two  spaces ",
    "\x00",
    "When does the ferry leave?",
    "Giờ mở cửa của bệnh viện là mấy giờ?",
    "港は朝に開く。",
    "😀" * 300,
    *("The harbour is open. " * count for count in range(1, 70, 7)),
]


@pytest.fixture
def library() -> Any:
    return SentenceTransformer(str(packaged_folder()), device="cpu", local_files_only=True)


def test_the_packaged_model_gives_the_vectors_of_the_library(library: Any) -> None:
    own = BertSentences.of(library)
    assert own is not None
    assert own.dimension == 384
    vectors = own.embed(TEXTS)
    assert vectors.dtype == np.float32
    assert vectors == pytest.approx(library.encode(TEXTS, normalize_embeddings=True), abs=2e-6)


def test_a_first_token_is_taken_where_the_library_takes_it(library: Any) -> None:
    library[1].pooling_mode = "cls"
    own = BertSentences.of(library)
    assert own is not None
    assert own.embed(TEXTS) == pytest.approx(library.encode(TEXTS, normalize_embeddings=True), abs=2e-6)


def test_one_thread_computes_a_text_also_in_a_new_thread(library: Any) -> None:
    own = BertSentences.of(library)
    assert own is not None
    teams: list[int] = []

    def embed() -> None:
        own.embed(TEXTS)
        teams.append(torch.get_num_threads())

    torch.set_num_threads(4)
    thread = Thread(target=embed)
    thread.start()
    thread.join()
    assert teams == [1]


@pytest.mark.parametrize("field", ["hidden_act", "model_type", "position_embedding_type"])
def test_a_model_of_another_kind_is_left_to_the_library(library: Any, field: str) -> None:
    setattr(library[0].auto_model.config, field, "other")
    assert BertSentences.of(library) is None


def test_a_model_with_a_prompt_of_its_own_is_left_to_the_library(library: Any) -> None:
    library.default_prompt_name = "query"
    assert BertSentences.of(library) is None


def test_a_model_whose_vectors_differ_is_left_to_the_library(library: Any) -> None:
    library[0].auto_model.encoder.layer[3].register_forward_hook(lambda module, inputs, output: output * 1.01)
    assert BertSentences.of(library) is None
