"""Long texts tokenized in parts, side by side, where the parts' ids are those of the whole."""

import os
import re
from collections.abc import Iterable, Sequence

import tiktoken

PART_CHARS = 32_768
"""Parts are at least so long: shorter ones are tokenized sooner (1.5 ms) than threads start."""

MOST_PARTS = 4

# Between two words: the pattern of every tokenizer with tokens like " word" ends a piece there.
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_SEEK_CHARS = 4096
_SPANNING = re.compile(rb"[A-Za-z] ")
# What looks behind, or knows where the text begins or ends, sees a cut.
_LOOKS_AROUND = re.compile(r"\(\?<|\\[bBAGzZ]|(?<!\[)\^|\$")


class LongTexts:
    """Encodes with one encoding. `cuts` says whether long texts are cut: only where no token spans two words, the
    pattern does not look behind, and the `probes`, cut between all their words, keep their ids.
    """

    def __init__(
        self, encoding: tiktoken.Encoding, pattern: str, tokens: Iterable[bytes], probes: Sequence[str]
    ) -> None:
        self._encoding = encoding
        self._most_parts = min(MOST_PARTS, os.cpu_count() or 1)
        spans = _LOOKS_AROUND.search(pattern) or any(map(_SPANNING.search, tokens))
        self.cuts = not spans and all(map(self._keeps_ids, probes))

    def encode(self, text: str) -> list[int]:
        count = min(self._most_parts, len(text) // PART_CHARS)
        parts = parts_of(text, count) if self.cuts and count > 1 else [text]
        if len(parts) == 1:
            return self._encoding.encode_ordinary(text)
        ids: list[int] = []
        # The encoder lets go of the interpreter meanwhile.
        for part in self._encoding.encode_ordinary_batch(parts, num_threads=len(parts)):
            ids += part
        return ids

    def _keeps_ids(self, probe: str) -> bool:
        ids: list[int] = []
        for part in _CUT.split(probe):
            ids += self._encoding.encode_ordinary(part)
        return ids == self._encoding.encode_ordinary(probe)


def parts_of(text: str, count: int) -> list[str]:
    """At most `count` parts of about equal length, cut between words; fewer where no two words are near."""
    parts, start = [], 0
    for number in range(1, count):
        near = max(start, len(text) * number // count)
        found = _CUT.search(text, near, near + _SEEK_CHARS)
        if found is not None and found.start() > start:
            parts.append(text[start : found.start()])
            start = found.start()
    return [*parts, text[start:]]
