"""Runs the rows of a table of the LoPA paper through lm-eval, and writes our numbers beside the published ones.

    python -m scripts.eval paper-tables table1 --checkpoint Dream=DIR --checkpoint D2F-Dream=DIR,ADAPTER ...
    python -m scripts.eval paper-tables table2 --checkpoint DiffuCoder=DIR --checkpoint D2F-DiffuCoder=DIR,ADAPTER ...
    python -m scripts.eval paper-tables table3 --checkpoint D2F-Dream-Base=DIR,ADAPTER ... --device npu --dtype bfloat16
    python -m scripts.eval paper-tables table4 --checkpoint D2F-Dream-Base=DIR,ADAPTER ... --device npu --dtype bfloat16
    python -m scripts.eval paper-tables table1 --limit 10 --max-new-tokens 96   the bundled model, to see that all works

Each row is a run of the command "tasks", whose flags this one takes too. Rows are left out, with the reason in the
table, if their checkpoint is not given, if they need more devices than there are (--one-rank runs them on one all the
same), or if their model or task cannot be loaded; tasks with programs need --confirm-run-unsafe-code. Without any
--checkpoint the bundled model takes the place of all.

The folder --out gets table.md and table.csv, rewritten after each row, and for each row the file of "tasks --out". The
same command again runs the rows whose file is missing. docs/results.md says what is counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.hub import directory_of
from lopa_ascend.serve.flags import option
from scripts.arguments import is_refusal
from scripts.eval import tasks
from scripts.eval.command import run_command
from scripts.eval.lm_tasks import CHAT, PUBLISHED, check_installed, score
from scripts.eval.paper_rows import METRICS, TABLES, Row, models_of, rows_of
from scripts.launch.npu import num_npus

Checkpoints = Mapping[str, tuple[Path | None, Path | None]]
"""Directories of a model and its adapter, by the paper's name of the model; None, None: the bundled model."""


@dataclass(frozen=True)
class Outcome:
    """What came of a row."""

    numbers: Mapping[str, float | None]
    """By metric."""
    answers: int = 0
    note: str = ""
    """What it ran on, or why it did not run."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval paper-tables",
        usage="%(prog)s TABLE [--checkpoint MODEL=DIR[,ADAPTER] ...] [--out DIR] [FLAGS OF tasks]",
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
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for table and answers (default: build/TABLE)")
    parser.add_argument("--rows", type=re.compile, metavar="REGEX", help="only rows whose name matches")
    parser.add_argument(
        "--one-rank", action="store_true", help="run rows of several devices on one: same tokens, other speed"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args, flags = parser.parse_known_args(argv)
    args.flags = flags
    run_command(parser, args, run_table)


def run_table(args: argparse.Namespace, _: Mapping[str, Any]) -> None:
    """Runs the rows that can run here, one after the other, and writes the table after each."""
    rows = [row for row in rows_of(args.table) if args.rows is None or args.rows.search(row.name)]
    if not rows:
        raise ParameterError("rows", f"matches none of {', '.join(row.name for row in rows_of(args.table))}")
    checkpoints = checkpoints_of(args.checkpoint, args.table)
    out = args.out or Path("build") / args.table
    parser = tasks.build_parser()
    parser.prog, parser.usage = "python -m scripts.eval paper-tables", build_parser().usage
    flags = parser.parse_args(args.flags)  # mistakes are refused before any row is looked at
    if flags.tasks:
        parser.error(f"the table says which tasks are run, and not {' '.join(flags.tasks)}")
    check_installed()
    out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[Row, Outcome] = {}
    for row in rows:
        skipped = reason_to_skip(row, checkpoints, flags.device or "cpu", one_rank=args.one_rank)
        print(f"{row.name}: {skipped or 'runs'}", flush=True)
        if skipped:
            outcomes[row] = Outcome({}, note=skipped)
        else:
            command = command_of(row, checkpoints, one_rank=args.one_rank)
            outcomes[row] = outcome_of(row, parser.parse_args([*command, *args.flags]), out / f"{row.name}.json")
        write_table(args.table, outcomes, out)
    print((out / "table.md").read_text(encoding="utf-8"))


def checkpoints_of(given: list[str], table: str) -> Checkpoints:
    """The checkpoints by model; the bundled model for all where none is given.

    Raises:
        ParameterError: one is malformed, or the table has no such model.
    """
    models = models_of(table)
    if not given:
        return dict.fromkeys(models, (None, None))
    found = {}
    for text in given:
        model, separator, paths = text.partition("=")
        folder, _, adapter = paths.partition(",")
        if not separator or not folder:
            raise ParameterError("checkpoint", f"must be MODEL=DIR or MODEL=DIR,ADAPTER, got {text!r}")
        if model not in models:
            name = f"Table {table.removeprefix('table')}"
            raise ParameterError("checkpoint", f"{name} has no model {model!r}; it has {', '.join(models)}")
        found[model] = (directory_of(folder), directory_of(adapter, "lora") if adapter else None)
    return found


# ---- rows ------------------------------------------------------------------------------------------------------------


def reason_to_skip(row: Row, checkpoints: Checkpoints, device: str, *, one_rank: bool) -> str:
    """Why a row does not run, as far as that does not need its model; empty if it does."""
    if row.model not in checkpoints:
        return f"no --checkpoint {row.model}=DIR"
    needed = 1 if one_rank else row.ranks[0] * row.ranks[1]
    available = (os.cpu_count() or 1) if device == "cpu" else num_npus()
    if needed > available:
        return f"needs {needed} devices, and there are {available}; --one-rank runs it on one"
    return ""


def command_of(row: Row, checkpoints: Checkpoints, *, one_rank: bool) -> list[str]:
    """The arguments of "tasks" for a row: one answer at a time, as the paper's times are."""
    model, adapter = checkpoints[row.model]
    task = PUBLISHED.get(row.task, row.task)
    command = [task, "--preset", row.preset.name, "--batch-size", "1", "--no-enable-prefix-caching"]
    for name, value in row.options.items():
        command += [option(name), str(value)]
    if model is None:
        command += ["--prompt", CHAT.name, "--examples", "0"]
    else:
        command += ["--prompt", row.prompt, "--model", str(model)]
        command += ["--lora-path", str(adapter)] if adapter else []
    if row.ranks != (1, 1) and not one_rank:
        tensor_parallel, branch_parallel = map(str, row.ranks)
        command += ["--tensor-parallel-size", tensor_parallel, "--branch-parallel-size", branch_parallel]
        is_full = DecodingParams(**row.preset.merged(row.options)).window_attention == "full"
        command += ["--graph-mode", "eager"] if is_full and row.ranks[1] > 1 else []  # no graph runs it
    return command


def outcome_of(row: Row, args: argparse.Namespace, file: Path) -> Outcome:
    """What came of a row: of an earlier run, or of one now.

    Args:
        args: of "tasks", without --out.
        file: where the row's numbers are, or will be.

    Raises:
        ParameterError: the file is of a run with other arguments.
    """
    task, wanted = args.tasks[0], tasks.given_of(args)
    if not file.exists():
        args.out = file
        try:
            tasks.evaluate(args, {name: value for name, value in vars(args).items() if value is not None})
        except (ValueError, OSError) as error:
            if not is_refusal(error):
                raise
            return Outcome({}, note=str(error).partition("\n")[0])
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in {**wanted, **content["given"]}:
        if wanted.get(name) != (found := content["given"].get(name)):
            message = f"{file} was made with {name} {found}, and not {wanted.get(name)}; choose another folder"
            raise ParameterError("out", message)
    point, run = content["points"][0], content["run"]
    numbers = {**point["numbers"][task], "score": score(point["scores"][task])}
    note = f"{content['model']}, {run['device']}, {run['number_format']}, {run['ranks']} ranks"
    return Outcome(numbers, numbers["answers"], note)


# ---- the table's files -----------------------------------------------------------------------------------------------


def write_table(table: str, outcomes: Mapping[Row, Outcome], out: Path) -> None:
    """Writes table.md and table.csv with the rows that there are outcomes of."""
    (out / "table.md").write_text(markdown(table, outcomes), encoding="utf-8")
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "setting", "task", "metric", "paper", "ours", "answers", "note", "setting_from"])
        for row, outcome in outcomes.items():
            for heading, metric in METRICS[table].items():
                numbers = [row.published[heading], outcome.numbers.get(metric), outcome.answers]
                writer.writerow([row.model, row.label, row.task, heading, *numbers, outcome.note, row.certainty])


def markdown(table: str, outcomes: Mapping[Row, Outcome]) -> str:
    """The table for people: for each number of the paper ours, and the difference in brackets."""
    compared = [f"{name}: paper, ours" for name in METRICS[table]]
    headings: Sequence[str] = ["model", "setting", "task", *compared, "answers", "ran on"]
    lines = [f"# {TABLES[table]}", "", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row, outcome in outcomes.items():
        cells = [row.model, row.label, row.task]
        for heading, metric in METRICS[table].items():
            ours, paper = outcome.numbers.get(metric), row.published[heading]
            cells.append(f"{paper:g}, " + ("none" if ours is None else f"{ours:.2f} ({ours - paper:+.2f})"))
        lines.append(f"| {' | '.join([*cells, str(outcome.answers), outcome.note])} |")
    return "\n".join(lines) + "\n"
