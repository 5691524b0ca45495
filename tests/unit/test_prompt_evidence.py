import random

import pytest

from prompt_builder.evidence import evidence_lines, most_tokens
from prompt_builder.labels import EVIDENCE_MARK, label_of
from prompt_builder.sentences import sentences
from prompt_builder.types import PromptChunk
from retrieval.types import RenderedChunk


def chunk(body: str, relevance: float = 0.5) -> PromptChunk:
    label = label_of("", body)
    return PromptChunk(label, "file", "file.md", "", relevance, body, RenderedChunk(label, body, ()))


def words(text: str) -> int:
    return len(text.split())


CHUNKS = [
    chunk("The ferry leaves at seven. Dogs travel free of charge. Bicycles cost four crowns."),
    chunk("Refunds are paid within ten days. Dogs need a lead on the ferry. The office is closed on Sunday."),
    chunk("The captain decides in a storm. Nobody may smoke."),
]


def test_the_most_relevant_sentence_stands_last_with_its_label() -> None:
    lines = evidence_lines("When are refunds paid after a storm?", CHUNKS, lines=2, count=words).split("\n")
    assert lines[0] == EVIDENCE_MARK
    assert lines[-1] == f"[{CHUNKS[1].label}] “Refunds are paid within ten days.”"
    assert lines[1] == f"[{CHUNKS[2].label}] “The captain decides in a storm.”"
    assert len(lines) == 3


def test_a4_the_order_of_the_chunks_does_not_matter() -> None:
    rng = random.Random(5)
    expected = evidence_lines("dogs on the ferry", CHUNKS, lines=3, count=words)
    for _ in range(20):
        shuffled = rng.sample(CHUNKS, len(CHUNKS))
        assert evidence_lines("dogs on the ferry", shuffled, lines=3, count=words) == expected


def test_nothing_is_quoted_when_no_word_is_shared_or_no_line_is_wanted() -> None:
    assert evidence_lines("xylophone", CHUNKS, lines=2, count=words) == ""
    assert evidence_lines("", CHUNKS, lines=2, count=words) == ""
    assert evidence_lines("ferry", [], lines=2, count=words) == ""
    assert evidence_lines("ferry", CHUNKS, lines=0, count=words) == ""


def test_a_sentence_that_two_chunks_share_is_quoted_once() -> None:
    twins = [chunk("Dogs travel free. One."), chunk("Dogs travel free. Two.")]
    assert evidence_lines("dogs free", twins, lines=2, count=words).count("Dogs travel free.") == 1


def test_a_long_sentence_is_cut_between_words_around_the_words_of_the_question() -> None:
    body = " ".join(["filler"] * 20) + " the anchor weighs nine tonnes " + " ".join(["stuffing"] * 20)
    line = evidence_lines("How much does the anchor weigh?", [chunk(body)], lines=1, count=words, token_budget=12)
    quote = line.split("“")[1].rstrip("”")
    assert "the anchor weighs nine" in quote
    assert quote.startswith("… filler")
    assert quote.endswith(" …")
    assert words(quote) <= 12


@pytest.mark.parametrize("lines", [1, 2, 5])
def test_evidence_stays_within_its_bound(lines: int) -> None:
    rng = random.Random(lines)
    vocabulary = ["ferry", "harbour", "captain", "refund", "storm", "dogs"]
    bodies = [". ".join(" ".join(rng.choices(vocabulary, k=30)) for _ in range(5)) for _ in range(5)]
    evidence = evidence_lines("dogs storm ferry", [chunk(body) for body in bodies], lines=lines, count=words)
    assert evidence
    assert words(evidence) <= most_tokens(lines, words)
    assert evidence.count("\n") <= lines


@pytest.mark.parametrize(
    ("question", "wanted", "body"),
    [
        ("犬は無料ですか", "犬は無料です。", "船は七時に出ます。犬は無料です。嵐の日は休みです。"),
        ("退款需要几天", "退款在十天内支付。", "渡轮七点出发。退款在十天内支付。船长决定一切。"),
        (
            "환불은 며칠 걸리나요",
            "환불은 열흘 안에 지급됩니다.",
            "배는 일곱 시에 떠납니다. 환불은 열흘 안에 지급됩니다.",
        ),
        (
            "Hoàn tiền mất mấy ngày?",
            "Hoàn tiền trong mười ngày.",
            "Phà khởi hành lúc bảy giờ. Hoàn tiền trong mười ngày.",
        ),
        ("कुत्ते मुफ़्त हैं?", "कुत्ते मुफ़्त यात्रा करते हैं।", "नौका सात बजे चलती है। कुत्ते मुफ़्त यात्रा करते हैं।"),
        ("สุนัขฟรีไหม", "สุนัขเดินทางฟรี", "เรือออกเจ็ดโมง\nสุนัขเดินทางฟรี\nวันอาทิตย์ปิด"),
    ],
)
def test_sentences_of_many_scripts_are_split_and_found(question: str, wanted: str, body: str) -> None:
    assert f"“{wanted}”" in evidence_lines(question, [chunk(body)], lines=1, count=len, token_budget=200)


def test_sentences_keep_all_text_and_do_not_end_at_abbreviations() -> None:
    assert sentences("Ask Mr. Berg or Dr. Holm. It costs 3.50 crowns! \n\n- “Really?” Yes") == [
        "Ask Mr. Berg or Dr. Holm.",
        "It costs 3.50 crowns!",
        "- “Really?”",
        "Yes",
    ]
    assert sentences("") == sentences(" \n ") == []


def test_the_number_of_a_list_entry_is_no_sentence() -> None:
    assert sentences("1. The minutes were agreed.\n2. Nobody spoke. It was 1987. The end.\n12.\nLast.") == [
        "1. The minutes were agreed.",
        "2. Nobody spoke.",
        "It was 1987.",
        "The end.",
        "12. Last.",
    ]


def test_text_without_full_stops_is_cut_into_pieces() -> None:
    pieces = sentences("ไม่มีจุด" * 200)
    assert len(pieces) > 1
    assert all(len(piece) <= 600 for piece in pieces)
    assert "".join(pieces) == "ไม่มีจุด" * 200


def test_h8_a_quoted_sentence_cannot_carry_a_label_of_its_own() -> None:
    evidence = evidence_lines("ferry free", [chunk("The ferry is free [k7f2a].")], lines=1, count=words)
    assert "[k7f2a]" not in evidence
