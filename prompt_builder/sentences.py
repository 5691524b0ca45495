"""Sentences of any script, and the terms by which they are compared with a question."""

import re
from dataclasses import dataclass

MAX_SENTENCE_CHARS = 600

_SENTENCE_END = re.compile(r"(?<=[.!?…۔؟।॥։።])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？｡])|\n+")
_CLAUSE_END = re.compile(r"(?<=[,;:،、，；])\s*|\s+")
_CLAUSE = re.compile(r"(?<=[,;:،؛)])\s+|(?<=[，、；：])|\s+(?=[(–—])")
_ABBREVIATION = re.compile(r"(?:^|[\s(])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|vs|e\.g|i\.e)\.$")
# The number of a list's entry belongs to the entry.
_NUMBERING = re.compile(r"\d{1,3}\.")
# Scripts written without spaces are compared by pairs of letters, all others by words.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af"
_TERMS = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")
_UNSPACED_START = re.compile(f"[{_UNSPACED}]")


@dataclass(frozen=True, slots=True)
class Sentence:
    """`text` has its white space collapsed; `after` is what parts it from the next: a newline, a space or nothing."""

    text: str
    after: str


def split(text: str) -> list[Sentence]:
    """Sentences of text in any script; very long ones are cut between words."""
    found: list[Sentence] = []
    held = ""
    start = 0
    for end in [*_SENTENCE_END.finditer(text), None]:
        part = text[start : end.start() if end else len(text)].strip()
        joined = f"{held} {part}".strip() if held else part
        start = end.end() if end else len(text)
        if end and (_ABBREVIATION.search(joined[-8:]) or _NUMBERING.fullmatch(joined)):
            held = joined
            continue
        held = ""
        after = _parting(end.group()) if end else ""
        pieces = _pieces(" ".join(joined.split()))
        found.extend(Sentence(piece, " ") for piece in pieces[:-1])
        if pieces:
            found.append(Sentence(pieces[-1], after))
        elif found and after == "\n":
            found[-1] = Sentence(found[-1].text, after)
    return found


def sentences(text: str) -> list[str]:
    """The texts of `split`."""
    return [sentence.text for sentence in split(text)]


def clauses(text: str) -> list[Sentence]:
    """A sentence cut after commas and the like and around brackets and dashes; nothing follows the last part."""
    parts: list[Sentence] = []
    start = 0
    for end in _CLAUSE.finditer(text):
        if start < end.start() and end.end() < len(text):
            parts.append(Sentence(text[start : end.start()], " " if end.group() else ""))
            start = end.end()
    return [*parts, Sentence(text[start:], "")]


def terms_of(text: str) -> frozenset[str]:
    """Words cut to six letters, which forgives most endings; pairs of letters where words are not spaced."""
    terms: set[str] = set()
    for run in _TERMS.findall(text.casefold()):
        if _UNSPACED_START.match(run):
            terms.update(run[place : place + 2] for place in range(max(1, len(run) - 1)))
        else:
            terms.add(run[:6])
    return frozenset(terms)


def _parting(white: str) -> str:
    if "\n" in white:
        return "\n"
    return " " if white else ""


def _pieces(sentence: str) -> list[str]:
    """Long sentences, and text without full stops (Thai, lists), in pieces that end between clauses or words."""
    if not sentence:
        return []
    if len(sentence) <= MAX_SENTENCE_CHARS:
        return [sentence]
    pieces: list[str] = []
    piece = ""
    for clause in _CLAUSE_END.split(sentence):
        for part in (clause[at : at + MAX_SENTENCE_CHARS] for at in range(0, len(clause), MAX_SENTENCE_CHARS)):
            if piece and len(piece) + len(part) >= MAX_SENTENCE_CHARS // 2:
                pieces.append(piece)
                piece = part
            else:
                piece = f"{piece} {part}".strip()
    return [*pieces, piece] if piece else pieces
