"""Texts are tokenized once, and what is remembered is bounded."""

import threading

import pytest

from prompt_builder.memo import MemoTokenizer
from prompt_builder.tokenizer import EstimateTokenizer
from tests.support.prompts import ByteTokenizer


class Counting(ByteTokenizer):
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> tuple[int, ...]:
        self.encoded.append(text)
        return super().encode(text)


def test_a_text_is_tokenized_once_and_gives_the_same_ids() -> None:
    inner = Counting()
    memo = MemoTokenizer(inner)
    assert memo.encode("ferry") == memo.encode("ferry") == ByteTokenizer().encode("ferry")
    assert memo.count("ferry") == 5
    assert memo.encode_scaffold("<S>a") == memo.encode_scaffold("<S>a") == (256, 97)
    assert inner.encoded == ["ferry"]
    assert (memo.name, memo.fingerprint, memo.exact) == ("bytes", "bytes", True)


def test_the_least_recently_used_leave_and_the_bound_holds() -> None:
    inner = Counting()
    memo = MemoTokenizer(inner, most_tokens=1_000)
    for number in range(50):
        memo.encode("first")
        memo.encode(f"text {number}")
        assert memo.tokens_held <= 1_000
    assert inner.encoded.count("first") == 1
    for number in range(50, 250):
        memo.encode(f"text {number}")
    memo.encode("text 0")
    assert inner.encoded.count("text 0") == 2


def test_a_text_that_would_push_out_much_of_the_rest_is_not_kept() -> None:
    inner = Counting()
    memo = MemoTokenizer(inner, most_tokens=1_000)
    for _ in range(2):
        memo.encode("x" * 500)
    assert len(inner.encoded) == 2
    assert memo.tokens_held == 0


@pytest.mark.parametrize("text", ["", "A ferry.", "犬は無料です。"])
def test_an_estimate_counts_as_it_does_without_memory(text: str) -> None:
    memo = MemoTokenizer(EstimateTokenizer())
    assert memo.count(text) == memo.count(text) == EstimateTokenizer().count(text)
    assert memo.encode(text) == ()
    assert not memo.exact


def test_threads_that_share_it_get_the_right_ids() -> None:
    memo = MemoTokenizer(ByteTokenizer(), most_tokens=2_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for number in range(400):
            text = f"text {(seed * 7 + number) % 60}"
            if memo.encode(text) != tuple(text.encode()):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert memo.tokens_held <= 2_000
