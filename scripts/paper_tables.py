"""Runs the rows of a table of the LoPA paper, and writes our numbers beside the published ones.

    python -m scripts.paper_tables table1 --checkpoint Dream=DIR --checkpoint D2F-Dream=DIR,ADAPTER --data DIR
    python -m scripts.paper_tables table2 --checkpoint DiffuCoder=DIR --checkpoint D2F-DiffuCoder=DIR,ADAPTER --data DIR
    python -m scripts.paper_tables table3 --checkpoint D2F-Dream-Base=DIR,ADAPTER ... --device npu --dtype bfloat16
    python -m scripts.paper_tables table4 --checkpoint D2F-Dream-Base=DIR,ADAPTER ... --device npu --dtype bfloat16
    python -m scripts.paper_tables table1 --limit 10 --max-new-tokens 96      the bundled model, to see that all works

Rows are left out, with the reason in the table, if their checkpoint is not given, if they need more devices than there
are (--one-rank runs them on one all the same), or if this machine cannot score their task. Without any --checkpoint the
bundled model takes the place of all.

--data is a folder with gsm8k.jsonl, mbpp.jsonl and so on; the project's own holds ten problems of each task, which say
nothing about a model. The folder --out gets table.md and table.csv, rewritten after each row, and a folder for each
row with every answer; the same command again goes on where it was interrupted. docs/evaluation.md says what is counted.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.serve.flags import ENGINE_FLAGS, add_flags, field_values
from scripts.arguments import number_from
from scripts.evaluation.command import refusals, with_defaults
from scripts.evaluation.files import DATA
from scripts.evaluation.prompts import prompt_formats
from scripts.tables.output import write_table
from scripts.tables.rows import TABLES, Row, models_of, rows_of
from scripts.tables.run import Checkpoint, Options, TableRun

FROM_ROWS = ("model", "lora", "tensor_parallel_size", "branch_parallel_size", "max_num_seqs", "enable_prefix_caching")
"""Engine settings that the rows decide."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.paper_tables",
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
        "--data", type=Path, default=DATA, metavar="DIR", help="folder of task files (default: scripts/evaluation/data)"
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
    parser = build_parser()
    args = parser.parse_args(argv)
    with refusals(parser):
        run_table(args)


def run_table(args: argparse.Namespace) -> None:
    """Runs the rows that can run here, one after the other, and writes the table after each."""
    engine: dict[str, Any] = field_values({k: v for k, v in vars(args).items() if v is not None}, ENGINE_FLAGS)
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
        found[model] = Checkpoint(folder, adapter or None)
    return found


def paper_name(table: str) -> str:
    """What the paper calls a table, e.g. "Table 1"."""
    return f"Table {table.removeprefix('table')}"


if __name__ == "__main__":
    main()
