"""When an answer of the demo counts, and that its questions are answerable."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.ask import Answer
from gateway.cli.demo_questions import EXAMPLES, DemoQuestion, complaint, load_questions
from gateway.cli.terminal import CliError

QUESTION = DemoQuestion("Who?", "people.md")


def answer(text: str, *filenames: str) -> Answer:
    extension: Mapping[str, Any] = {"citations": [{"filename": name} for name in filenames]}
    return Answer(text, extension)


def test_the_demo_asks_three_questions_whose_documents_are_in_the_handbook() -> None:
    questions = load_questions()
    assert len(questions) == 3
    for question in questions:
        assert (EXAMPLES / "handbook" / question.document).is_file()


def test_an_answer_counts_when_it_has_text_and_cites_the_document_in_whatever_folder() -> None:
    assert complaint(QUESTION, answer("Ada.", "other.md", "handbook/people.md")) == ""


def test_an_empty_answer_does_not_count() -> None:
    assert complaint(QUESTION, answer(" \n", "people.md")) == "the answer is empty"


def test_an_answer_without_the_document_does_not_count_and_says_what_was_cited() -> None:
    assert complaint(QUESTION, answer("Ada.", "b.md", "a.md")) == "people.md is not among the citations (a.md, b.md)"
    assert complaint(QUESTION, Answer("Ada.", {})) == "people.md is not among the citations (none)"


def test_a_missing_examples_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="folder 'examples' of a checkout"):
        load_questions(tmp_path)
