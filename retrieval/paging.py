"""Keyset paging over a table's `seq`, as OpenAI's lists page."""

import sqlite3
from collections.abc import Sequence

from retrieval.records import PageRequest
from retrieval.types import NotFound


def select_page(
    connection: sqlite3.Connection,
    select: str,
    where: str,
    parameters: Sequence[object],
    table: str,
    id_column: str,
    page: PageRequest,
    kind: str,
) -> tuple[list[sqlite3.Row], bool]:
    """Rows of one page, and whether more follow. Raises NotFound for a cursor that is not in the list.

    `table` is the alias whose `seq` orders the list. The texts of the query come from this package only;
    everything that a client sent is in the parameters.
    """
    conditions, values = [where], list(parameters)
    for cursor, is_after in ((page.after, True), (page.before, False)):
        if cursor is None:
            continue
        found = connection.execute(
            f"{select} WHERE {where} AND {table}.{id_column} = ?", (*parameters, cursor)
        ).fetchone()
        if found is None:
            raise NotFound(kind, cursor)
        conditions.append(f"{table}.seq {'<' if is_after == page.descending else '>'} ?")
        values.append(found["seq"])
    # With `before` alone the page is the one that ends at the cursor, not the first one of the list.
    reverse = page.before is not None and page.after is None
    direction = "DESC" if page.descending != reverse else "ASC"
    rows = connection.execute(
        f"{select} WHERE {' AND '.join(conditions)} ORDER BY {table}.seq {direction} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    more, rows = len(rows) > page.limit, rows[: page.limit]
    return (rows[::-1] if reverse else rows), more
