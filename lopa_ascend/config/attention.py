"""The layouts of attention on an NPU, and how they divide attention entries."""

from __future__ import annotations

ATTENTION_LAYOUTS = ("TND", "TND16", "BSH")
TND_HEADS = (128, 192)
"""Elements of the heads that attention of an NPU takes in the layouts TND and TND16."""
MAX_QUERIES = {"TND16": 16}
"""Queries that an attention entry has at most, by layout; any number in the others."""


def divided_length(length: int, max_queries: int | None) -> tuple[int, ...]:
    """The lengths of the entries that make up an entry of ``length`` queries.

    Args:
        max_queries: queries of an entry at most; None for any number.
    """
    if max_queries is None or length <= max_queries:
        return (length,)
    count, rest = divmod(length, max_queries)
    return (max_queries,) * count + ((rest,) if rest else ())
