"""CSV and TSV: every row becomes one line that names its columns."""

import csv
import io

from retrieval.sections import Budget, Section, row_text
from retrieval.types import UnusableFile

_SNIFFED_CHARACTERS = 65_536
_DELIMITERS = ",;\t|"


def parse_delimited(text: str, budget: Budget) -> tuple[Section, ...]:
    """Raises UnusableFile for quoting that cannot be read."""
    reader = csv.reader(io.StringIO(text, newline=""), _dialect(text[:_SNIFFED_CHARACTERS]))
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


def _dialect(sample: str) -> type[csv.Dialect]:
    try:
        return csv.Sniffer().sniff(sample, _DELIMITERS)
    except csv.Error:
        return csv.excel


def _is_header(row: list[str]) -> bool:
    """Names of columns: no number among them, none twice."""
    cells = [cell.strip() for cell in row if cell.strip()]
    return len(set(cells)) == len(cells) and not any(_is_number(cell) for cell in cells)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("-", "").replace("%", "").isdigit()
