"""Chunks end where a reader would end them, in every script, and are made in linear time."""

import re
import time
import unicodedata
from itertools import pairwise

import pytest

from retrieval.chunking import chunk
from retrieval.records import ChunkingStrategy
from retrieval.sections import Parsed, Section
from retrieval.types import RenderedChunk, UnusableFile


class WordRenderer:
    """A token is a word, a mark, or a character of a script without spaces."""

    fingerprint = "words:1"

    def __init__(self) -> None:
        self.counted_characters = 0

    def count(self, text: str) -> int:
        self.counted_characters += len(text)
        return len(re.findall(r"[a-zA-Z0-9]+|[^\sa-zA-Z0-9]", text))

    def render(self, title: str, text: str) -> RenderedChunk:
        block = f"[k000] {title}\n{text}\n\n"
        return RenderedChunk("k000", block, tuple(range(self.count(block))))


def chunks(text: str, limit: int = 64, overlap: int = 0, path: tuple[str, ...] = (), rows: bool = False) -> list[str]:
    parsed = Parsed((Section(path, text, rows),), "text/plain")
    drafts = list(chunk(parsed, WordRenderer(), ChunkingStrategy(limit, overlap)))
    assert all(len(draft.rendered.token_ids) <= limit for draft in drafts)
    return [draft.text for draft in drafts]


def sentence(word: str, words: int = 10) -> str:
    return " ".join([word] * (words - 1)) + " end."


SCRIPTS = {
    "chinese": "员工每年享有十五天带薪年假休假申请需要提前两周提交给部门经理审批",
    "thai": "พนักงานมีสิทธิ์ลาพักร้อนสิบห้าวันต่อปีต้องแจ้งล่วงหน้าสองสัปดาห์",
    "hindi": "कर्मचारियोंकोहरसालपंद्रहदिनकीछुट्टीमिलतीहैआवेदनदोसप्ताहपहले",
    "japanese": "従業員は毎年十五日の有給休暇を取得することができます申請は二週間前に",
    "korean": "직원은매년십오일의유급휴가를받을수있습니다휴가신청은이주전에제출해야합니다",
    "vietnamese": "nhânviênđượcnghỉphépmườilămngàymỗinămđơnxinnghỉphảinộptrướchaituần",
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("overlap", [0, 32])
def test_b5_text_of_10500_characters_without_spaces_is_chunked_under_the_limit(script: str, overlap: int) -> None:
    text = (SCRIPTS[script] * 400)[:10_500]
    made = chunks(text, limit=256, overlap=overlap)
    assert len(made) > 1
    if overlap == 0:
        assert "".join(made) == text
    else:
        assert sum(map(len, made)) > len(text)
        assert all(text.find(piece) >= 0 for piece in made)


def test_b5_a_cut_never_parts_a_letter_from_its_marks() -> None:
    for script in ("thai", "hindi"):
        for piece in chunks(SCRIPTS[script] * 100, limit=50):
            assert not unicodedata.category(piece[0]).startswith("M")


def test_a_short_section_is_one_chunk_with_its_heading_path() -> None:
    parsed = Parsed((Section(("Leave", "Parental leave"), "Sixteen weeks."),), "text/markdown")
    (draft,) = chunk(parsed, WordRenderer(), ChunkingStrategy())
    assert (draft.title, draft.text) == ("Leave > Parental leave", "Sixteen weeks.")
    assert draft.rendered.text == "[k000] Leave > Parental leave\nSixteen weeks.\n\n"


def test_cuts_fall_between_paragraphs_where_they_fit() -> None:
    paragraphs = [" ".join([sentence(word)] * 3) for word in ("alpha", "beta", "gamma")]
    assert chunks("\n\n".join(paragraphs), limit=40) == paragraphs


def test_a_long_paragraph_is_cut_between_sentences() -> None:
    made = chunks(" ".join(sentence(f"w{n}") for n in range(20)), limit=64)
    assert len(made) > 1
    assert all(piece.endswith("end.") for piece in made)


def test_neighbours_share_whole_sentences_up_to_the_overlap() -> None:
    made = chunks(" ".join(sentence(f"w{n}") for n in range(20)), limit=64, overlap=24)
    for before, after in pairwise(made):
        shared = [s for s in re.findall(r"w\d+", after) if s in set(re.findall(r"w\d+", before))]
        assert len(set(shared)) == 2


def test_rows_of_a_table_are_never_cut_where_they_fit() -> None:
    rows = [f"Item: rope {n}; " + "; ".join(f"c{i}: v{n}" for i in range(n % 9)) for n in range(60)]
    made = chunks("\n".join(rows), limit=64, overlap=16, rows=True)
    assert {line for piece in made for line in piece.split("\n")} == set(rows)


def test_a_heading_path_that_is_too_long_keeps_its_nearest_headings() -> None:
    parsed = Parsed((Section(("far " * 50, "near", "nearest"), "Body text."),), "text/markdown")
    (draft,) = chunk(parsed, WordRenderer(), ChunkingStrategy(32, 0))
    assert draft.title == "near > nearest"
    parsed = Parsed((Section(("word " * 50,), "Body text."),), "text/markdown")
    (draft,) = chunk(parsed, WordRenderer(), ChunkingStrategy(32, 0))
    assert draft.title.startswith("word word")
    assert draft.title.endswith("…")


def test_a_limit_without_room_for_text_is_an_error_that_says_so() -> None:
    with pytest.raises(UnusableFile, match="Allow more tokens"):
        chunks("text", limit=8)


def test_long_runs_of_white_space_take_no_room() -> None:
    assert chunks("a" + " " * 100_000 + "b" + "\n" * 100_000 + "c") == ["a    b\n\nc"]


@pytest.mark.parametrize(
    "text", [sentence("word") + " ", "x" * 60, SCRIPTS["chinese"], "a,b;c ", "line of text\n", "\u0301"]
)
def test_a_million_characters_are_tokenized_a_few_times_not_quadratically(text: str) -> None:
    renderer = WordRenderer()
    source = text * (1_000_000 // len(text))
    started = time.monotonic()
    made = sum(1 for _ in chunk(Parsed((Section((), source),), "text/plain"), renderer, ChunkingStrategy(256, 32)))
    assert made > 1 or text == "x" * 60
    assert renderer.counted_characters < 5 * len(source)
    assert time.monotonic() - started < 20
