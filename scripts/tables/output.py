"""Writes a table of the paper with our numbers: Markdown for people, CSV for everything else."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.tables.rows import METRICS, TABLES, Row
from scripts.tables.run import RowOutcome, RowPlan

Outcome = RowOutcome | RowPlan


def write_table(table: str, rows: Sequence[Row], outcomes: Mapping[Row, Outcome], out: Path) -> None:
    """Writes table.md and table.csv with the rows that there are outcomes of."""
    out.mkdir(parents=True, exist_ok=True)
    done = [(row, outcomes[row]) for row in rows if row in outcomes]
    (out / "table.md").write_text(markdown(table, done), encoding="utf-8")
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["table", "model", "setting", "task", "metric", "paper", "ours", "difference", "answers",
                         "ran_on", "skipped", "setting_from"])  # fmt: skip
        for row, outcome in done:
            for heading in METRICS[table]:
                ours = _ours(row, outcome, heading)
                difference = "" if ours is None else ours - row.published[heading]
                answers, ran_on = _provenance(outcome)
                writer.writerow([table, row.model, row.label, row.task, heading, row.published[heading],
                                 "" if ours is None else ours, difference, answers, ran_on, outcome.skipped,
                                 row.certainty])  # fmt: skip


def markdown(table: str, done: Sequence[tuple[Row, Outcome]]) -> str:
    """The table for people: for each number of the paper ours, and the difference in brackets."""
    headings = ["model", "setting", "task", *(f"{name}: paper, ours" for name in METRICS[table]), "answers", "ran on"]
    lines = [f"# {TABLES[table]}", "", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row, outcome in done:
        cells = [row.model, row.label, row.task]
        for heading in METRICS[table]:
            ours, paper = _ours(row, outcome, heading), row.published[heading]
            cells.append(f"{paper:g}, " + ("none" if ours is None else f"{ours:.2f} ({ours - paper:+.2f})"))
        answers, ran_on = _provenance(outcome)
        lines.append(f"| {' | '.join([*cells, str(answers), outcome.skipped or ran_on])} |")
    return "\n".join(lines) + "\n"


def _ours(row: Row, outcome: Outcome, heading: str) -> float | None:
    if isinstance(outcome, RowPlan):
        return None
    spread = outcome.result.metrics[METRICS[row.table][heading]]
    return None if spread is None else spread.median


def _provenance(outcome: Outcome) -> tuple[int, str]:
    """How many answers there are, and what they ran on."""
    return (0, "") if isinstance(outcome, RowPlan) else (len(outcome.result.samples), outcome.ran_on)
