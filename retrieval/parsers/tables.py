"""CSV and TSV: every row becomes one line that names its columns."""

import csv
import io
import re
from collections import Counter

from retrieval.sections import Budget, Section, row_text
from retrieval.types import UnusableFile

_SAMPLE_CHARACTERS = 16_384
_DELIMITERS = ",;\t|"
_NUMBER = re.compile(r"[-+]?[\d.,\s]*\d[\d.,\s]*%?")
_YEAR = re.compile(r"(?:19|20)\d\d")


def parse_delimited(text: str, budget: Budget) -> tuple[Section, ...]:
    """Raises UnusableFile for quoting that cannot be read."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
    lines: list[str] = []
    header: list[str] | None = None
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if header is None and _is_header(row):
                header = row
                continue
            header = header if header is not None else []
            line = row_text(header, row)
            budget.spend(line)
            lines.append(line)
    except csv.Error as error:
        raise UnusableFile(
            "invalid_file", f"Line {reader.line_num} of the table cannot be read: {error}. Export it again as CSV."
        ) from None
    if not lines and header:
        lines.append(row_text((), header))
    return (Section((), "\n".join(lines), rows=True),)


def _delimiter(text: str) -> str:
    """The sign that cuts most of the first rows into the same number of cells, and more than one."""
    sample = text[:_SAMPLE_CHARACTERS]
    # A row that the sample cuts off says nothing.
    whole = sample if len(sample) == len(text) else sample.rpartition("\n")[0]
    scores = {}
    for delimiter in _DELIMITERS:
        widths = Counter(len(row) for row in csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter) if row)
        width, rows = max(widths.items(), key=lambda item: (item[0] > 1, item[1]), default=(1, 0))
        scores[delimiter] = (rows if width > 1 else 0, width)
    return max(scores, key=lambda delimiter: scores[delimiter])


def _is_header(row: list[str]) -> bool:
    """Names of columns: no number among them but years, none twice."""
    cells = [cell.strip() for cell in row if cell.strip()]
    return len(set(cells)) == len(cells) and not any(
        _NUMBER.fullmatch(cell) and not _YEAR.fullmatch(cell) for cell in cells
    )
