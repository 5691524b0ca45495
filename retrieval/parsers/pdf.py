"""PDF page by page, with the page in the title."""

import io

from pypdf import PdfReader
from pypdf.errors import DependencyError, PyPdfError

from retrieval.encodings import normalise
from retrieval.sections import Budget, ParseLimits, Section
from retrieval.types import UnusableFile

# What pypdf lets through when the structure of a file is broken, besides its own errors.
_BROKEN = (PyPdfError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OSError)
_LOCKED = "The PDF is protected by a password. Remove the password and upload it again."


def parse_pdf(data: bytes, limits: ParseLimits, budget: Budget) -> tuple[Section, ...]:
    """Raises UnusableFile for a PDF that is locked, broken, or has too many pages."""
    try:
        reader = PdfReader(io.BytesIO(data), strict=False)
        # Many PDFs are encrypted with an empty user password, only to forbid editing.
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnusableFile("invalid_file", _LOCKED)
        pages = len(reader.pages)
    except DependencyError:
        raise UnusableFile("invalid_file", _LOCKED) from None
    except _BROKEN as error:
        raise _unreadable("The PDF", error) from None
    if pages > limits.max_pages:
        raise UnusableFile(
            "invalid_file", f"The PDF has {pages:,} pages; the most is {limits.max_pages:,}. Split it."
        )
    sections = []
    for number in range(pages):
        try:
            text = reader.pages[number].extract_text()
        except _BROKEN as error:
            raise _unreadable(f"Page {number + 1} of the PDF", error) from None
        text = normalise(text.encode("utf-8", "replace").decode("utf-8"))
        budget.spend(text)
        if text.strip():
            sections.append(Section((f"Page {number + 1}",), text))
    return tuple(sections)


def _unreadable(what: str, error: Exception) -> UnusableFile:
    return UnusableFile(
        "invalid_file", f"{what} cannot be read ({type(error).__name__}). Save it anew or print it to PDF again."
    )
