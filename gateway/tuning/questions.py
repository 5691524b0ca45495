"""Questions whose documents and answers are known, from JSON lines."""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from gateway.cli.terminal import USAGE, CliError

_MAX_FILE_BYTES = 256 * 2**20
_WORD = re.compile(r"\w+")
# Words of these scripts take endings or stand without spaces, so that they are looked for inside the reply's words.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


@dataclass(frozen=True, slots=True)
class Question:
    """`documents` are file names without folders; `answers` are spellings of the answer, any of which counts."""

    text: str
    documents: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    def recall(self, filenames: Collection[str]) -> float | None:
        """The share of the known documents among `filenames`, 0 to 1; None where none is known."""
        if not self.documents:
            return None
        names = {base_name(name) for name in filenames}
        return sum(document in names for document in self.documents) / len(self.documents)

    def words_found(self, reply: str) -> float | None:
        """The largest share of an answer's words that the reply holds, 0 to 1; None where no answer is known.

        Case, compatibility forms and order do not count.
        """
        if not self.answers:
            return None
        text = _plain(reply)
        there = set(_WORD.findall(text))
        return max(_share(_WORD.findall(_plain(answer)), there, text) for answer in self.answers)


def read_questions(path: Path) -> tuple[Question, ...]:
    """One JSON object a line: `question`; `document` or `documents`, `answer` or `answers` where they are known.

    Empty lines and other fields are skipped. Raises CliError (2) naming the first line that is wrong.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CliError(f"'{path}' is larger than {_MAX_FILE_BYTES >> 20} MiB.", USAGE)
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise CliError(f"No file '{path}'.", USAGE) from None
    except OSError as error:
        raise CliError(f"'{path}' cannot be read: {error.strerror}.", USAGE) from error
    except UnicodeDecodeError as error:
        raise CliError(f"'{path}' is not UTF-8 (byte {error.start}).", USAGE) from None
    # Only at the newline: other separators of lines may stand inside a question.
    lines = enumerate(text.split("\n"), 1)
    questions = tuple(_question(path, number, line) for number, line in lines if line.strip())
    if not questions:
        raise CliError(f"'{path}' holds no question.", USAGE)
    return questions


def digest(questions: Sequence[Question]) -> str:
    """Identifies questions with what is known of them, in hex."""
    told = [[question.text, question.documents, question.answers] for question in questions]
    return hashlib.sha256(orjson.dumps(told)).hexdigest()


def base_name(name: str) -> str:
    return unicodedata.normalize("NFC", PurePosixPath(name).name)


def _question(path: Path, number: int, line: str) -> Question:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _wrong(path, number, f"it is not JSON: {error.msg}") from None
    if not isinstance(entry, dict):
        raise _wrong(path, number, "it is not a JSON object")
    text = entry.get("question")
    if not isinstance(text, str) or not text.strip():
        raise _wrong(path, number, "'question' must be a text")
    documents = _texts(path, number, entry, "document")
    return Question(text, tuple(base_name(name) for name in documents), _texts(path, number, entry, "answer"))


def _texts(path: Path, number: int, entry: dict[str, Any], field: str) -> tuple[str, ...]:
    """The field, or its plural, as one text or a list of them; none where it is absent or null."""
    given = [(name, entry[name]) for name in (field, f"{field}s") if entry.get(name) is not None]
    if len(given) > 1:
        raise _wrong(path, number, f"give '{field}' or '{field}s', not both")
    if not given:
        return ()
    name, value = given[0]
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each.strip() for each in values):
        raise _wrong(path, number, f"'{name}' must be a text or a list of texts")
    return tuple(dict.fromkeys(values))


def _wrong(path: Path, number: int, why: str) -> CliError:
    return CliError(f"'{path}', line {number}: {why}.", USAGE)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _share(words: Sequence[str], there: Collection[str], text: str) -> float:
    if not words:
        return 0.0
    return sum(word in there or (bool(_UNSPACED.search(word)) and word in text) for word in words) / len(words)
