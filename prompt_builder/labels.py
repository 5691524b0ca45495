"""Chunks as they stand in prompts: a label made from the content, and text that cannot pose as a label."""

import re
import unicodedata
from hashlib import sha256

from prompt_builder.types import Tokenizer
from retrieval.types import RenderedChunk

LAYOUT_VERSION = "3"
LABEL_PATTERN = r"k[0-9][0-9a-hjkmnp-tv-z]{3}"
QUESTION_MARK = "Question:"
REFERENCES_MARK = "Passages above that matter here:"
EVIDENCE_MARK = "Sentences that may answer the question:"
FACTS_MARK = "Facts at the time of this message:"

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"
_BRACKETED = re.compile(
    rf"[\[(]\s*({LABEL_PATTERN}(?:\s*[,;]\s*{LABEL_PATTERN})*)\s*[\])]",
    re.IGNORECASE,
)
_MARKS = re.compile(
    rf"^([ \t]*)({'|'.join(map(re.escape, (QUESTION_MARK, REFERENCES_MARK, EVIDENCE_MARK, FACTS_MARK)))})",
    re.IGNORECASE | re.MULTILINE,
)
_LINE_ENDS = re.compile(r"\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


class Renderer:
    """Renders chunks for prompts (`retrieval.types.ChunkRenderer`): `[label] title`, body, blank line."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        return f"layout{LAYOUT_VERSION}:{self._tokenizer.fingerprint}"

    def count(self, text: str) -> int:
        return self._tokenizer.count(text)

    def render(self, title: str, text: str) -> RenderedChunk:
        """The block's bytes depend on title and text alone. Ids are empty when the tokenizer has none."""
        label = label_of(title, text)
        block = f"{first_line(label, title)}\n{as_data(text).strip()}\n\n"
        return RenderedChunk(label=label, text=block, token_ids=self._tokenizer.encode(block))


def first_line(label: str, title: str) -> str:
    """What a chunk's block begins with, without the line's end."""
    heading = " ".join(as_data(title).split())
    return f"[{label}] {heading}".rstrip()


def label_of(title: str, text: str) -> str:
    """`k`, a digit and three of base 32, from SHA-256 of the NFC title and text: one of 327,680.

    The digit keeps labels apart from words, so that a model's prose is never taken for one.
    """
    content = unicodedata.normalize("NFC", f"{title}\x00{text}").encode("utf-8", "surrogatepass")
    number = int.from_bytes(sha256(content).digest()[:8], "big")
    number, digit = divmod(number, 10)
    letters = [_BASE32[number >> shift & 31] for shift in (0, 5, 10)]
    return f"k{digit}{''.join(letters)}"


def as_data(text: str) -> str:
    """Document text that cannot be mistaken for the prompt's own structure.

    A bracketed label loses its brackets and a line that begins with one of the prompt's own headings is
    quoted with `>`; line ends of all kinds become newlines. All else stays as it is.
    """
    plain = _LINE_ENDS.sub("\n", text)
    return _MARKS.sub(r"\1> \2", _BRACKETED.sub(r"\1", plain))
