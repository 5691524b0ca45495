"""The words of a text for BM25, in any script, by one function for documents and queries alike."""

import unicodedata
from itertools import pairwise

import regex

# Scripts written without spaces between words: their words are taken as pairs of letters.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}々〆ー"
_RUN = regex.compile(
    rf"(?P<unspaced>(?:[{_UNSPACED}]\p{{M}}*)+)|(?P<hangul>\p{{Hangul}}+)|(?P<word>[\p{{L}}\p{{N}}\p{{M}}--{_UNSPACED}\p{{Hangul}}]+)",
    regex.VERSION1,
)
_CLUSTER = regex.compile(r"\X")
_ASCII_RUN = regex.compile(r"[a-z0-9]+")


def normalise(text: str) -> str:
    """One form for letters that look the same: full-width to plain, composed accents, case folded."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", text).casefold())


def words(text: str) -> list[str]:
    """Words in order, repeated as often as they occur; empty for a text without letters or digits.

    Spaced scripts give their words with diacritics kept (Vietnamese gives syllables). Hangul words add
    their letter pairs, so that a noun is found under any particle. Scripts without spaces give pairs of
    neighbouring letters; a lone letter gives itself.
    """
    folded = normalise(text)
    if folded.isascii():
        return [stem(word) for word in _ASCII_RUN.findall(folded)]
    found: list[str] = []
    for match in _RUN.finditer(folded):
        run = match.group()
        if match.lastgroup == "word":
            found.append(stem(run))
        elif match.lastgroup == "hangul":
            found.append(run)
            if len(run) > 2:
                found.extend(_pairs(run))
        else:
            found.extend(_pairs(_CLUSTER.findall(run)))
    return found


def stem(word: str) -> str:
    """English plurals joined with their singular; every other word unchanged."""
    if len(word) < 4 or not word.endswith("s") or not word.isascii() or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1]


def _pairs(letters: str | list[str]) -> list[str]:
    if len(letters) == 1:
        return [letters[0]]
    return [first + second for first, second in pairwise(letters)]
