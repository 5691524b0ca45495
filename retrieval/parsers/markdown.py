"""Markdown by its headings; tables become rows that can be understood alone, the rest stays as written."""

import re

from markdown_it import MarkdownIt
from markdown_it.token import Token

from retrieval.sections import Budget, Outline, Section, table_text

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S)


def parse_markdown(text: str, budget: Budget) -> tuple[Section, ...]:
    outline = Outline(budget)
    front_matter = _FRONT_MATTER.match(text)
    if front_matter:
        # Read as Markdown its last line would be a heading.
        outline.block(front_matter[1])
        text = text[front_matter.end() :]
    lines = text.split("\n")
    # The text stays as written, so only headings need the costly parsing of emphasis and links.
    blocks = MarkdownIt("commonmark").enable("table").disable(["inline", "text_join"])
    inline = MarkdownIt("commonmark")
    tokens = blocks.parse(text)
    position = 0
    while position < len(tokens):
        token = tokens[position]
        end = _end(tokens, position)
        if token.type == "heading_open":
            outline.heading(int(token.tag[1]), _plain(inline.parseInline(tokens[position + 1].content)[0]))
        elif token.type == "table_open":
            outline.block(table_text(_rows(tokens[position:end])))
        elif token.map is not None and token.type != "hr":
            outline.block("\n".join(lines[token.map[0] : token.map[1]]))
        position = end
    return outline.sections()


def _end(tokens: list[Token], start: int) -> int:
    """The position behind the top-level block that starts here."""
    depth = 0
    for position in range(start, len(tokens)):
        depth += tokens[position].nesting
        if depth == 0:
            return position + 1
    return len(tokens)


def _rows(tokens: list[Token]) -> list[list[str]]:
    rows: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(token.content)
    return rows


def _plain(inline: Token) -> str:
    return "".join(
        " " if child.type in ("softbreak", "hardbreak") else child.content for child in inline.children or ()
    )
