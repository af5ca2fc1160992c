"""Tables in Markdown, which the commands print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    columns = list(columns)
    return "\n".join([row(columns), "|---" * len(columns) + "|", *map(row, rows)])


def records(found: Sequence[Mapping[str, object]]) -> str:
    """Of figures by the headings of their columns, which are the same for all."""
    return table(found[0], (one.values() for one in found))


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(cell: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items()) if isinstance(cell, dict) else str(cell)
