"""Puts a table that a script has made into a page of docs/."""

from __future__ import annotations

import re


def with_table(page: str, name: str, table: str) -> str:
    """A page in Markdown with one of its tables made anew.

    Args:
        page: the page. The table, which may be missing yet, follows the comment "<!-- table: NAME ... -->" after an
            empty line.
        name: of the table.
        table: its lines, each with a newline at its end.

    Raises:
        ValueError: the page has no such comment.
    """
    place = re.compile(rf"(<!-- table: {re.escape(name)}\b.*-->\n\n)(?:\|.*\n)*")
    page, count = place.subn(lambda found: found[1] + table, page)
    if not count:
        raise ValueError(f'the page has no comment "<!-- table: {name} ... -->" with an empty line after it')
    return page
