"""HTML by its headings: what a reader sees, without scripts, navigation and hidden parts."""

import re

import lxml.html
from lxml import etree

from retrieval.encodings import normalise
from retrieval.sections import Budget, Outline, Section, table_text
from retrieval.types import UnusableFile

_DROPPED = frozenset(
    ("script", "style", "noscript", "template", "nav", "svg", "canvas", "iframe", "object", "audio", "video", "head")
) | frozenset(("select", "button", "dialog"))
_BLOCKS = (
    frozenset(
        ("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "div", "dl")
    )
    | frozenset(("dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hr", "html", "legend", "li"))
    | frozenset(("main", "ol", "p", "pre", "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead"))
    | frozenset(("tr", "ul"))
)
_HEADING = re.compile(r"h([1-6])")
_CUT_OFF = "ERR_RESOURCE_LIMIT"
_SPACES = re.compile(r"[ \t\n\f]+")
_DECLARED = re.compile(rb"""<(?:meta[^>]+charset|\?xml[^>]+encoding)\s*=\s*["']?\s*([a-zA-Z0-9_:.-]+)""", re.I)


def declared_encoding(data: bytes) -> str | None:
    """The encoding that an HTML or XML file names in its first 2,048 bytes."""
    found = _DECLARED.search(data[:2048])
    return found[1].decode("ascii") if found else None


def parse_html(text: str, budget: Budget) -> tuple[Section, ...]:
    """Raises UnusableFile when the parser can make nothing of it."""
    # Bytes with a stated encoding: text that names another one is refused by the parser.
    parser = lxml.html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    try:
        root = lxml.html.document_fromstring(text.encode("utf-8"), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError) as error:
        raise UnusableFile("invalid_file", f"The HTML cannot be read: {error}. Save it again, or in parts.") from None
    if any(entry.type_name == _CUT_OFF for entry in parser.error_log):
        # The parser drops all that follows, and a part of a document must not pass for the whole.
        raise UnusableFile(
            "invalid_file", "The HTML nests deeper than can be read. Save it again as text, or in parts."
        )
    walker = _Walker(Outline(budget))
    title = root.findtext(".//title")
    if title and root.find(".//h1") is None:
        walker.outline.heading(1, normalise(title))
    for element in [element for element in root.iter() if _is_dropped(element)]:
        if element is not root:
            element.drop_tree()
    walker.walk(root)
    return walker.outline.sections()


class _Walker:
    """Turns start and end events into blocks; iterative, so that deep nesting costs no stack."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self._pieces: list[str] = []
        self._preformatted = 0

    def walk(self, root: lxml.html.HtmlElement) -> None:
        events = etree.iterwalk(root, events=("start", "end"))
        for event, element in events:
            if not isinstance(element.tag, str):
                continue
            if event == "start":
                if self._is_table(element):
                    # Its end event still comes, and adds the text behind it.
                    events.skip_subtree()
                else:
                    self._start(element)
            else:
                self._end(element)
                if element is not root:
                    self._text(element.tail)
        self._flush()

    def _is_table(self, element: lxml.html.HtmlElement) -> bool:
        """A table of data, without tables in it (those lay out a page and are read as blocks)."""
        if element.tag != "table" or element.find(".//table") is not None:
            return False
        self._flush()
        rows = [[_content(cell) for cell in row.iterchildren("td", "th")] for row in element.iter("tr")]
        rows = [row for row in rows if any(row)]
        if rows:
            caption = element.find("caption")
            heading = f"{_content(caption)}\n" if caption is not None else ""
            self.outline.block(heading + table_text(rows))
        return True

    def _start(self, element: lxml.html.HtmlElement) -> None:
        tag = element.tag
        if tag in _BLOCKS or _HEADING.fullmatch(tag):
            self._flush()
        if tag == "li":
            self._pieces.append("- ")
        elif tag == "br":
            self._pieces.append("\0")
        elif tag == "pre":
            self._preformatted += 1
        self._text(element.text)

    def _end(self, element: lxml.html.HtmlElement) -> None:
        heading = _HEADING.fullmatch(element.tag)
        if heading:
            self.outline.heading(int(heading[1]), self._take())
        elif element.tag in _BLOCKS:
            self._flush()
        if element.tag == "pre":
            self._preformatted -= 1

    def _text(self, text: str | None) -> None:
        if text:
            self._pieces.append(text.replace("\n", "\0") if self._preformatted else text)

    def _take(self) -> str:
        text = _SPACES.sub(" ", "".join(self._pieces))
        self._pieces.clear()
        return normalise("\n".join(line.rstrip() for line in text.split("\0")))

    def _flush(self) -> None:
        text = self._take().strip()
        if text and text != "-":
            self.outline.block(text)


def _is_dropped(element: lxml.html.HtmlElement) -> bool:
    return (
        element.tag in _DROPPED
        or "hidden" in element.attrib
        or element.get("aria-hidden") == "true"
        or element.get("role") == "navigation"
    )


def _content(element: lxml.html.HtmlElement) -> str:
    return normalise(" ".join("".join(element.itertext()).split()))
