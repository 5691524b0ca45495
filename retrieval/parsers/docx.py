"""DOCX by its heading styles; the archive's sizes are checked before anything is unpacked."""

import io
import re
import zipfile

import docx
from docx.table import Table
from docx.text.paragraph import Paragraph
from lxml import etree

from retrieval.encodings import normalise
from retrieval.sections import Budget, Outline, ParseLimits, Section, table_text
from retrieval.types import UnusableFile

_HEADING = re.compile(r"heading (\d)", re.I)
_DOCUMENT = "word/document.xml"
_BROKEN = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    etree.LxmlError,
    KeyError,
    ValueError,
    AttributeError,
    IndexError,
    NotImplementedError,
    EOFError,
    OSError,
)


def parse_docx(data: bytes, limits: ParseLimits, budget: Budget) -> tuple[Section, ...]:
    """Raises UnusableFile for a broken or oversized document, or another kind of archive."""
    try:
        _check_archive(data, limits)
        document = docx.Document(io.BytesIO(data))
        outline = Outline(budget)
        for item in document.iter_inner_content():
            if isinstance(item, Table):
                outline.block(table_text(_rows(item)))
            else:
                _paragraph(item, outline)
        return outline.sections()
    except _BROKEN as error:
        raise UnusableFile(
            "invalid_file",
            f"The document cannot be read ({type(error).__name__}). Open it and save it again as DOCX.",
        ) from None


def _check_archive(data: bytes, limits: ParseLimits) -> None:
    # The sizes of the directory bound what is read: zipfile stops at them even where they lie.
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if len(entries) > limits.max_archive_entries:
        raise UnusableFile("invalid_file", f"The archive has {len(entries):,} entries. Save the document anew.")
    unpacked = sum(entry.file_size for entry in entries)
    largest_xml = max((e.file_size for e in entries if e.filename.endswith((".xml", ".rels"))), default=0)
    if unpacked > limits.max_unpacked_bytes or largest_xml > limits.max_xml_part_bytes:
        raise UnusableFile(
            "invalid_file",
            f"The document unpacks to {unpacked:,} bytes, {largest_xml:,} of them in one part; the most is "
            f"{limits.max_unpacked_bytes:,}, and {limits.max_xml_part_bytes:,} in a part. "
            f"Split it, or remove its pictures.",
        )
    names = {entry.filename for entry in entries}
    if any(entry.flag_bits & 0x1 for entry in entries):
        raise UnusableFile("invalid_file", "The archive is protected by a password. Upload the document without it.")
    if _DOCUMENT not in names:
        raise UnusableFile(
            "unsupported_file", "The file is an archive or an Office file other than DOCX. Save it as DOCX or PDF."
        )


def _paragraph(paragraph: Paragraph, outline: Outline) -> None:
    text = normalise(paragraph.text)
    style = paragraph.style.name if paragraph.style is not None else ""
    heading = _HEADING.fullmatch(style or "")
    if style == "Title":
        outline.heading(1, text)
    elif heading:
        # Below the title, which stands above all headings.
        outline.heading(int(heading[1]) + 1, text)
    elif style and style.startswith("List"):
        outline.block(f"- {text}" if text.strip() else "")
    else:
        outline.block(text)


def _rows(table: Table) -> list[list[str]]:
    rows = [[normalise(cell.text) for cell in row.cells] for row in table.rows]
    return [row for row in rows if any(cell.strip() for cell in row)] or [[""]]
