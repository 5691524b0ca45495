"""Words for BM25 in many scripts."""

import unicodedata
from typing import Literal

import pytest

from retrieval.words import stem, words


def test_english_words_are_folded_and_plurals_meet_their_singular() -> None:
    assert words("The Ferries' CAPTAINS, and one ferry's captain") == [
        "the", "ferry", "captain", "and", "one", "ferry", "s", "captain",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["gas", "class", "status", "analysis", "is", "tàus"])
def test_words_that_only_look_like_plurals_stay(word: str) -> None:
    assert stem(word) == word


def test_vietnamese_keeps_its_diacritics_by_syllable() -> None:
    assert words("Nghỉ phép năm") == ["nghỉ", "phép", "năm"]
    assert words("ma má mà") == ["ma", "má", "mà"]


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKD"])
def test_e5_composed_and_decomposed_letters_are_the_same_words(form: Literal["NFC", "NFD", "NFKD"]) -> None:
    assert words(unicodedata.normalize(form, "bệnh viện")) == ["bệnh", "viện"]


def test_korean_nouns_are_found_under_any_particle() -> None:
    assert set(words("여객선은")) & set(words("여객선을")) == {"여객", "객선"}


@pytest.mark.parametrize("text", ["東京都庁", "とうきょう", "东京大学", "กรุงเทพมหานคร", "ພາສາລາວ", "ភាសាខ្មែរ"])
def test_scripts_without_spaces_give_pairs_of_letters(text: str) -> None:
    found = words(text)
    assert len(found) > 2
    assert set(found) <= set(words(f"ก่อน{text}")) | set(words(f"前{text}"))


def test_a_part_of_a_chinese_sentence_is_found_in_it() -> None:
    assert set(words("年假")) <= set(words("员工的年假为二十天"))


def test_a_lone_letter_of_an_unspaced_script_gives_itself() -> None:
    assert words("水") == ["水"]


def test_mixed_scripts_are_split_where_the_script_changes() -> None:
    assert words("vLLM推理 2台") == ["vllm", "推理", "2", "台"]


def test_full_width_forms_equal_plain_ones() -> None:
    assert words("ＡＢＣ　１２３") == ["abc", "123"]


def test_hindi_words_keep_their_vowel_signs() -> None:
    assert words("यात्री नौका") == ["यात्री", "नौका"]


@pytest.mark.parametrize("text", ["", "   ", "!?—…", "😀🎉", "\u200b\u2028"])
def test_a_text_without_letters_has_no_words(text: str) -> None:
    assert words(text) == []
