"""Questions with what is known of them, and how a reply is judged by it."""

from pathlib import Path

import pytest

from gateway.cli.demo_questions import EXAMPLES
from gateway.cli.terminal import CliError
from gateway.tuning.questions import Question, digest, read_questions


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "questions.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_example_questions_are_read_with_documents_of_the_handbook() -> None:
    questions = read_questions(EXAMPLES / "questions.jsonl")
    assert len(questions) == 172
    for question in questions:
        assert question.answers
        assert all((EXAMPLES / "handbook" / document).is_file() for document in question.documents)


def test_one_or_several_documents_and_answers_or_none_of_them(tmp_path: Path) -> None:
    lines = [
        '{"question": "a?", "document": "docs/a.md", "answer": "one", "language": "en"}',
        "",
        '{"question": "b?", "documents": ["a.md", "b.md"], "answers": ["one", "1"]}',
        '{"question": "c\u2028?", "document": null}',
    ]
    assert read_questions(written(tmp_path, "\ufeff" + "\r\n".join(lines))) == (
        Question("a?", ("a.md",), ("one",)),
        Question("b?", ("a.md", "b.md"), ("one", "1")),
        Question("c\u2028?"),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: it is not JSON"),
        ("[]", "line 2: it is not a JSON object"),
        ("{}", "line 2: 'question' must be a text"),
        ('{"question": " "}', "line 2: 'question' must be a text"),
        ('{"question": "a?", "document": 3}', "line 2: 'document' must be a text or a list"),
        ('{"question": "a?", "answers": ["a", ""]}', "line 2: 'answers' must be a text or a list"),
        ('{"question": "a?", "answer": "a", "answers": ["b"]}', "line 2: give 'answer' or 'answers'"),
    ],
)
def test_a_line_that_is_wrong_is_named_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(CliError, match=said) as refused:
        read_questions(written(tmp_path, '{"question": "fine?"}\n' + line))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("content", "said"), [("", "no question"), ("\n \n", "no question"), (b"\xff\xfe", "UTF-8")])
def test_a_file_that_is_empty_or_not_text_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(CliError, match=said):
        read_questions(written(tmp_path, content))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(CliError, match=r"No file 'nowhere\.jsonl'"):
        read_questions(Path("nowhere.jsonl"))


def test_recall_is_the_share_of_the_known_documents_in_whatever_folder() -> None:
    question = Question("?", ("a.md", "b.md"))
    assert question.recall({"handbook/a.md", "c.md"}) == 0.5
    assert question.recall(()) == 0
    assert Question("?").recall({"a.md"}) is None


def test_answer_words_are_found_whatever_their_case_form_and_order() -> None:
    question = Question("?", answers=("75 kilograms",))
    assert question.words_found("It weighs KILOGRAMS: \uff17\uff15.") == 1
    assert question.words_found("It weighs 750 kilograms.") == 0.5
    assert question.words_found("") == 0
    assert Question("?").words_found("75") is None


def test_the_best_of_several_answers_counts() -> None:
    assert Question("?", answers=("seventy-five", "75")).words_found("75") == 1


def test_korean_words_are_found_with_their_endings() -> None:
    assert Question("?", answers=("목요일",)).words_found("회의는 목요일에 있다.") == 1
    assert Question("?", answers=("sea",)).words_found("The season.") == 0


def test_the_digest_follows_text_documents_and_answers() -> None:
    digests = {
        digest([Question("a?")]),
        digest([Question("b?")]),
        digest([Question("a?", ("a.md",))]),
        digest([Question("a?", answers=("a.md",))]),
        digest([Question("a?"), Question("a?")]),
    }
    assert len(digests) == 5
