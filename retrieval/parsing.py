"""From an uploaded file to sections of plain text; the type is told by content first, then by extension."""

import re
from pathlib import PurePosixPath

from retrieval.encodings import decode
from retrieval.parsers.docx import parse_docx
from retrieval.parsers.html import declared_encoding, parse_html
from retrieval.parsers.json_rows import parse_json, parse_json_lines
from retrieval.parsers.markdown import parse_markdown
from retrieval.parsers.pdf import parse_pdf
from retrieval.parsers.plain import parse_plain
from retrieval.parsers.tables import parse_delimited
from retrieval.sections import Budget, Parsed, ParseLimits, Section
from retrieval.types import UnusableFile

_TEXT_PARSERS = {
    ".md": ("text/markdown", parse_markdown),
    ".markdown": ("text/markdown", parse_markdown),
    ".html": ("text/html", parse_html),
    ".htm": ("text/html", parse_html),
    ".xhtml": ("text/html", parse_html),
    ".csv": ("text/csv", parse_delimited),
    ".tsv": ("text/tab-separated-values", parse_delimited),
    ".json": ("application/json", parse_json),
    ".jsonl": ("application/x-ndjson", parse_json_lines),
    ".ndjson": ("application/x-ndjson", parse_json_lines),
}
_FOREIGN = (  # first bytes, what they are
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\0", "a database"),
    (b"{\\rtf", "an RTF document"),
)
_HTML = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)
# Anything but white space, soft hyphens and characters of no width.
_VISIBLE = re.compile(r"[^\s\u00ad\u200b-\u200f\u2060-\u2064\ufeff]")
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ACCEPTED = "Upload text, Markdown, HTML, PDF, DOCX, CSV or JSON."


def parse(data: bytes, filename: str, limits: ParseLimits | None = None) -> Parsed:
    """Sections of the file in reading order; at least one, each with text.

    CPU-bound: call it off the event loop. Raises UnusableFile: empty_file when there is no text,
    unsupported_file for a type that is not read, invalid_file for one that is broken, locked or too large.
    """
    bounds = limits or ParseLimits()
    budget = Budget(bounds)
    if not data.strip():
        raise UnusableFile("empty_file", "The file is empty. Upload a file that holds text.")
    extension = PurePosixPath(filename).suffix.lower()
    media_type, sections = _dispatch(data, extension, bounds, budget)
    kept = tuple(section for section in sections if _VISIBLE.search(section.text))
    if not kept:
        raise UnusableFile("empty_file", _no_text(media_type))
    return Parsed(kept, media_type)


def _dispatch(data: bytes, extension: str, limits: ParseLimits, budget: Budget) -> tuple[str, tuple[Section, ...]]:
    if b"%PDF-" in data[:1024]:
        return "application/pdf", parse_pdf(data, limits, budget)
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _DOCX, parse_docx(data, limits, budget)
    if data.startswith(_OLE):
        raise _ole(extension)
    for start, name in _FOREIGN:
        if data.startswith(start):
            raise UnusableFile("unsupported_file", f"The file is {name}, which holds no readable text. {_ACCEPTED}")
    if extension in (".pdf", ".docx"):
        kind = extension[1:].upper()
        raise UnusableFile(
            "invalid_file", f"The file is named {extension} but is not a {kind}. Export it again as {kind}."
        )
    text = decode(data, declared_encoding(data)).text
    budget.spend(text)
    if extension in _TEXT_PARSERS:
        media_type, parser = _TEXT_PARSERS[extension]
        return media_type, parser(text, budget)
    if _HTML.match(text[:4096]):
        return "text/html", parse_html(text, budget)
    return "text/plain", parse_plain(text, budget)


_DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def _ole(extension: str) -> UnusableFile:
    if extension == ".docx":
        return UnusableFile(
            "invalid_file", "The document is protected by a password. Remove the password and upload it again."
        )
    return UnusableFile(
        "unsupported_file", "The file is in an old Office format. Save it as DOCX or PDF and upload that."
    )


def _no_text(media_type: str) -> str:
    if media_type == "application/pdf":
        return "The PDF holds no text, only images. Run text recognition (OCR) on it and upload the result."
    return "The file holds no text. Upload a file that does."
