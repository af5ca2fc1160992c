"""Runs the rows of a table of the LoPA paper, and writes our numbers beside the published ones.

    python -m scripts.eval paper-tables table1 --checkpoint Dream=DIR --checkpoint D2F-Dream=DIR,ADAPTER ...
    python -m scripts.eval paper-tables table2 --checkpoint DiffuCoder=DIR --checkpoint D2F-DiffuCoder=DIR,ADAPTER ...
    python -m scripts.eval paper-tables table3 --checkpoint D2F-Dream-Base=DIR,ADAPTER ... --device npu --dtype bfloat16
    python -m scripts.eval paper-tables table4 --checkpoint D2F-Dream-Base=DIR,ADAPTER ... --device npu --dtype bfloat16
    python -m scripts.eval paper-tables table1 --limit 10 --max-new-tokens 96   the bundled model, to see that all works

Rows are left out, with the reason in the table, if their checkpoint is not given, if they need more devices than there
are (--one-rank runs them on one all the same), or if this machine cannot score their task. Without any --checkpoint the
bundled model takes the place of all.

--data is a folder with gsm8k.jsonl, mbpp.jsonl and so on; the project's own holds ten problems of each task, which say
nothing about a model. The folder --out gets table.md and table.csv, rewritten after each row, and a folder for each
row with every answer; the same command again goes on where it was interrupted. docs/results.md says what is counted.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.hub import directory_of
from lopa_ascend.serve.flags import ENGINE_FLAGS, add_flags, field_values
from scripts.arguments import number_from
from scripts.eval.command import run_command, with_defaults
from scripts.eval.files import DATA
from scripts.eval.paper_rows import METRICS, TABLES, Row, models_of, rows_of
from scripts.eval.paper_run import Checkpoint, Options, RowOutcome, RowPlan, TableRun
from scripts.eval.prompts import prompt_formats

FROM_ROWS = ("model", "lora", "tensor_parallel_size", "branch_parallel_size", "max_num_seqs", "enable_prefix_caching")
"""Engine settings that the rows decide."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval paper-tables",
        usage="%(prog)s TABLE [--checkpoint MODEL=DIR[,ADAPTER] ...] [--data DIR] [--out DIR] [FLAGS]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    titles = "; ".join(f"{name}: {title}" for name, title in TABLES.items())
    parser.add_argument("table", choices=tuple(TABLES), help=titles)
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="MODEL=DIR[,ADAPTER]",
        help="directory of a model of the table, and of its LoRA adapter",
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="folder of task files (default: scripts/eval/data)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for table and answers (default: build/TABLE)")
    parser.add_argument("--rows", type=re.compile, metavar="REGEX", help="only rows whose name matches")
    parser.add_argument("--limit", type=number_from(1), metavar="N", help="the first N problems (default: all)")
    parser.add_argument(
        "--runs", type=number_from(1), default=1, metavar="N", help="repetitions; medians are shown (default: 1)"
    )
    parser.add_argument(
        "--one-rank", action="store_true", help="run rows of several devices on one: same tokens, other speed"
    )
    parser.add_argument(
        "--prompt",
        choices=tuple(prompt_formats()),
        help="format of prompts (default: the row's; chat for the bundled model)",
    )
    parser.add_argument(
        "--examples",
        type=number_from(0),
        metavar="N",
        help="examples in a prompt (default: the row's; 0 for the bundled model)",
    )
    parser.add_argument(
        "--max-new-tokens", type=number_from(1), metavar="N", help="most tokens of an answer (default: the row's)"
    )
    flags = {name: flag for name, flag in ENGINE_FLAGS.items() if flag.field not in FROM_ROWS}
    add_flags(parser, with_defaults(flags, {"seed": "0"}))
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), argv, run_table)


def run_table(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Runs the rows that can run here, one after the other, and writes the table after each.

    Args:
        args: all arguments.
        given: by name, the arguments that were given or have a default.
    """
    engine = field_values(given, ENGINE_FLAGS)
    EngineConfig(**engine)  # refuses wrong settings before any row is looked at
    rows = [row for row in rows_of(args.table) if args.rows is None or args.rows.search(row.name)]
    if not rows:
        raise ParameterError("rows", f"matches none of {', '.join(row.name for row in rows_of(args.table))}")
    options = Options(
        data=args.data,
        limit=args.limit,
        runs=args.runs,
        one_rank=args.one_rank,
        prompt=args.prompt,
        examples=args.examples,
        max_new_tokens=args.max_new_tokens,
        engine=engine,
    )
    out = args.out or Path("build") / args.table
    run = TableRun(out, options, _checkpoints(args.checkpoint, args.table))
    plans = run.check(rows)  # every task file and every row, before any model is loaded
    for row in rows:
        print(f"{row.name}: {plans[row].skipped or 'runs'}", flush=True)
    with run:
        outcomes: dict[Row, Any] = {row: plan for row, plan in plans.items() if plan.skipped}
        for row in rows:
            if row not in outcomes:
                outcomes[row] = run.measure(row, plans[row])
            write_table(args.table, rows, outcomes, out)
    print((out / "table.md").read_text(encoding="utf-8"))


def _checkpoints(given: list[str], table: str) -> dict[str, Checkpoint]:
    """The checkpoints by model; the bundled model for all where none is given.

    Raises:
        ParameterError: one is malformed, or the table has no such model.
    """
    models = models_of(table)
    if not given:
        return {model: Checkpoint(None, None) for model in models}
    found = {}
    for text in given:
        model, separator, paths = text.partition("=")
        folder, _, adapter = paths.partition(",")
        if not separator or not folder:
            raise ParameterError("checkpoint", f"must be MODEL=DIR or MODEL=DIR,ADAPTER, got {text!r}")
        if model not in models:
            raise ParameterError(
                "checkpoint", f"{paper_name(table)} has no model {model!r}; it has {', '.join(models)}"
            )
        found[model] = Checkpoint(str(directory_of(folder)), str(directory_of(adapter, "lora")) if adapter else None)
    return found


def paper_name(table: str) -> str:
    """What the paper calls a table, e.g. "Table 1"."""
    return f"Table {table.removeprefix('table')}"


# ---- the table's files -----------------------------------------------------------------------------------------------

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
