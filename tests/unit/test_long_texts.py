"""Long texts are tokenized in parts only where the parts give the ids of the whole."""

from collections.abc import Sequence

import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from prompt_builder.encoding import GPT2_PATTERN
from prompt_builder.long_texts import PART_CHARS, LongTexts, parts_of

BYTES = {bytes([byte]): byte for byte in range(256)}
PROBES = ("Two words. They're 2 words, aren't they?\n\n  Yes", "ein Wort und noch ein Wort", "")


def encoding(pattern: str, words: Sequence[bytes]) -> tuple[tiktoken.Encoding, LongTexts]:
    ranks = BYTES | {word: 256 + place for place, word in enumerate(words)}
    made = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return made, LongTexts(made, pattern, ranks, PROBES)


WORDS = (b"th", b"the", b" t", b" th", b" the", b"er", b"fer", b"ry", b" w", b"or", b"ord", b" word", b"s ", b"  ")


def test_a_long_text_in_parts_has_the_ids_of_the_whole() -> None:
    whole, parts = encoding(GPT2_PATTERN, [word for word in WORDS if word != b"s "])
    text = "the ferry's words, the other words\n\n  " * (4 * PART_CHARS // 30)
    assert parts.cuts
    assert parts.encode(text) == whole.encode_ordinary(text)


@given(st.text("ab é12.\n '", max_size=200), st.integers(1, 8))
def test_parts_make_up_the_text_and_their_ids_those_of_the_whole(text: str, count: int) -> None:
    whole, _ = encoding(GPT2_PATTERN, [b"ab", b" a", b"  ", b"a'", b"12"])
    parts = parts_of(text, count)
    assert "".join(parts) == text
    assert len(parts) <= count
    assert [i for part in parts for i in whole.encode_ordinary(part)] == whole.encode_ordinary(text)


def test_nothing_is_cut_where_a_token_spans_two_words() -> None:
    assert not encoding(GPT2_PATTERN, WORDS)[1].cuts


def test_nothing_is_cut_where_the_pattern_takes_the_space_behind_a_word() -> None:
    assert not encoding(r" ?\p{L}+ ?|[\s\S]", [b" w"])[1].cuts


def test_nothing_is_cut_where_the_pattern_looks_behind() -> None:
    assert not encoding(r"(?<=\s)\p{L}+| ?\p{L}+|[\s\S]", [b" w"])[1].cuts
    assert encoding(r"[^\s]+|\s", [b"wo"])[1].cuts


def test_a_text_without_words_is_not_cut() -> None:
    assert parts_of("你好，世界。" * 30_000, 4) == ["你好，世界。" * 30_000]
