"""Which of the system texts that are known another one is a version of."""

import re
from collections.abc import Sequence

from prompt_builder.versions import Versions

MOST_CHARS = 64 * 1024
MOST_LINES = 2048
"""Of longer texts the beginning is looked at; what follows counts as stable and stays where it is."""

NEAR = 0.8
"""Texts that share so much of their lines are versions of one."""

SURE = 0.95
"""No text is looked at that was seen longer ago."""

FAR = 0.5
"""Texts that share less than NEAR may be versions of one of which much changes: when each comes only once."""

SINGLES = 2
"""So many such texts, and a third one."""

_BY_WORDS_CHARS = 2000
_BY_WORDS_LINES = 10
_DIGITS = re.compile(r"\d+")


class KnownText:
    """One system text: its versions, and what it is found by.

    `loose`: much of it changes. `moving`: its changing lines have been moved. `told`: the log has told it. `behind`
    is the hash of the stable text behind the first change, which most requests share, and its tokens.
    """

    def __init__(self, text_id: int, text: str, lines: Sequence[str]) -> None:
        self.text_id = text_id
        self.versions = Versions(lines)
        self.last = hash(text)
        self.by_words = len(text) <= _BY_WORDS_CHARS or len(lines) < _BY_WORDS_LINES
        self.features = _features(text, lines, self.by_words)
        self.features_chars = sum(map(len, self.features))
        self.loose = False
        self.moving = False
        self.told = False
        self.behind = (0, 0)


class Sight:
    """A text that is to be found again, its features made once."""

    def __init__(self, text: str, lines: Sequence[str]) -> None:
        self.text, self.lines = text, lines
        self._features: dict[bool, tuple[frozenset[str], int]] = {}

    def shared(self, known: KnownText) -> float:
        """0 to 1: characters of the lines (of a short text: words) in both, of those of the larger."""
        if known.by_words not in self._features:
            features = _features(self.text, self.lines, known.by_words)
            self._features[known.by_words] = (features, sum(map(len, features)))
        features, chars = self._features[known.by_words]
        most = max(chars, known.features_chars)
        return sum(map(len, features & known.features)) / most if most else 0.0


def nearest_text(texts: list[KnownText], sight: Sight) -> KnownText | None:
    """None for a text of its own. Texts that each came once and share a good half are made versions of one."""
    scored: list[tuple[float, int]] = []
    for place in reversed(range(len(texts))):
        share = sight.shared(texts[place])
        if share >= SURE:
            return texts[place]
        scored.append((share, place))
    if not scored:
        return None
    share, place = max(scored)
    if share >= NEAR or (texts[place].loose and share >= FAR):
        return texts[place]
    scored.sort(reverse=True)
    singles = [texts[place] for share, place in scored if share >= FAR and texts[place].versions.requests == 1]
    if len(singles) < SINGLES:
        return None
    for other in singles[1:]:
        texts.remove(other)
    singles[0].loose = True
    return singles[0]


def _features(text: str, lines: Sequence[str], by_words: bool) -> frozenset[str]:
    """What versions of one text share: lines, or words whose numbers do not count."""
    if not by_words:
        return frozenset(lines)
    return frozenset(_DIGITS.sub("0", text[:_BY_WORDS_CHARS]).split())


def bounded_text(text: str) -> tuple[str, str]:
    """Whole lines within the bounds, and the rest."""
    if len(text) <= MOST_CHARS and text.count("\n") < MOST_LINES:
        return text, ""
    end = text.rfind("\n", 0, MOST_CHARS)
    end = MOST_CHARS if end < 0 else end
    lines = text[:end].split("\n", MOST_LINES)
    looked_at = "\n".join(lines[:MOST_LINES])
    return looked_at, text[len(looked_at) :]
