"""The demo's questions, and when an answer to one counts."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gateway.cli.ask import Answer
from gateway.cli.terminal import CliError

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """`document` is the file name of the document that answers."""

    text: str
    document: str


def load_questions(examples: Path = EXAMPLES) -> list[DemoQuestion]:
    """Raises CliError where the examples are not there: they belong to a checkout, not to the package."""
    try:
        entries = json.loads((examples / "demo.json").read_text("utf-8"))
        return [DemoQuestion(entry["question"], entry["document"]) for entry in entries]
    except OSError as error:
        raise CliError(f"The demo needs the folder 'examples' of a checkout: {error.strerror}.") from error


def complaint(question: DemoQuestion, answer: Answer) -> str:
    """Why the answer does not count; empty when it does."""
    if not answer.text.strip():
        return "the answer is empty"
    cited = {PurePosixPath(str(citation.get("filename", ""))).name for citation in answer.citations}
    if question.document not in cited:
        return f"{question.document} is not among the citations ({', '.join(sorted(cited)) or 'none'})"
    return ""
