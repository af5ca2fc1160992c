"""Tables in Markdown, which the commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([row(columns), "|---" * len(columns) + "|", *map(row, rows)])


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(cell: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items()) if isinstance(cell, dict) else str(cell)
