"""Measures the speed and the accuracy of a model on the problems of a task file, one answer at a time.

    python -m scripts.benchmark                                         the bundled model on its held-out problems
    python -m scripts.benchmark FILE.jsonl --model DIR --preset S13     a model in the setting of a row of the paper
    python -m scripts.benchmark --sweep num_branches=0,3,7 --sweep tau_conf=0.95,0.9,0.8 --out DIR
    python -m scripts.benchmark --sweep figures --limit 100 --plots build/plots

A task file has a JSON object on each line, with "question" and "answer", or the fields that its task needs; "task"
overrides --task for that line. A file with a mistake is refused, with the number of the line, before the model is
loaded. Where all lines are of task "problems", answers have at most 192 tokens, unless a preset or --max-new-tokens
gives another number.

The folder --out gets benchmark.json (what was measured, on which machine), samples.jsonl (an object for each answer,
written when the answer is there), results.csv and results.md. The same command again goes on where it was interrupted.

tokens/s are counted in two ways. "published" counts as the published code does: all opened positions, including those
after the end of the answer, divided by the time after the first forward pass. "user" counts what a user sees: the
tokens of the answer, divided by the whole time from the prompt to the end of the answer. docs/evaluation.md says what
else is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lopa_ascend.config import EngineConfig, GraphParams, ParameterError
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.config.presets import find_preset
from lopa_ascend.demo import HELD_OUT
from lopa_ascend.serve.flags import DECODING_FLAGS, ENGINE_FLAGS, add_flags, field_values
from scripts.arguments import folder_of_pictures, number_from
from scripts.benchmarking.machine import describe_benchmark
from scripts.benchmarking.report import markdown, results, write_csv
from scripts.benchmarking.run import Plan, run
from scripts.benchmarking.samples import SampleFile
from scripts.benchmarking.settings import FIGURES, Setting, one_setting, swept
from scripts.evaluation.command import SEED, add_prompt_flags, run_command, with_defaults
from scripts.evaluation.files import DEFAULT_TASK, check_runnable, read_examples, read_problems
from scripts.evaluation.prompts import CHAT, PromptMaker, find_format
from scripts.evaluation.tasks import TASKS

FIXED = {"enable_prefix_caching": False, "seed": SEED}
"""Options of every engine: answers to equal prompts must not become faster with the runs."""
ANSWER = 192
"""``max_new_tokens`` for the task "problems" where nothing is said of it: what the bundled model's answers need."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmark",
        usage="%(prog)s [FILE] [--out DIR] [--sweep ...] [FLAGS]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=HELD_OUT, metavar="FILE", help="task file (default: held-out problems)"
    )
    parser.add_argument(
        "--task",
        default=DEFAULT_TASK,
        choices=tuple(TASKS),
        help=f"task of the lines that do not name one (default: {DEFAULT_TASK})",
    )
    parser.add_argument("--limit", type=number_from(1), metavar="N", help="the first N problems (default: all)")
    parser.add_argument(
        "--runs", type=number_from(1), default=3, metavar="N", help="repetitions; medians are shown (default: 3)"
    )
    parser.add_argument(
        "--warmup",
        type=number_from(0),
        default=2,
        metavar="N",
        help="unmeasured answers before each setting (default: 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/benchmark"),
        metavar="DIR",
        help="folder for the results (default: build/benchmark)",
    )
    add_prompt_flags(parser)
    parser.add_argument(
        "--examples-from", type=Path, metavar="DIR", help="folder with TASK.examples.jsonl (default: that of FILE)"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=V1,V2,...",
        help="measure each of these values of a decoding parameter; several --sweep make all combinations; "
        f"--sweep {FIGURES}: all settings that the plots need",
    )
    parser.add_argument(
        "--plots",
        type=folder_of_pictures,
        metavar="DIR",
        help="folder to which the plots of a sweep are written (needs matplotlib)",
    )
    usual = DECODING_FLAGS["max_new_tokens"].default
    length = f"the preset's, or {ANSWER} where all lines are of task problems, else {usual}"
    shown = {"seed": str(SEED), "enable_prefix_caching": "off", "max_new_tokens": length}
    add_flags(parser, with_defaults({**ENGINE_FLAGS, **DECODING_FLAGS}, shown))
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), argv, benchmark)


def benchmark(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Measures what the arguments ask for, and writes the results.

    Args:
        args: all arguments.
        given: by name, the arguments that were given or have a default.
    """
    tasks = read_problems(args.file, args.task)
    problems = tasks.problems[: args.limit]
    used = {task.name: task for task, _ in problems}
    preset = find_preset(args.preset) if args.preset else None
    counts = {name: _num_examples(args, preset.tasks if preset else {}, name) for name in used}
    folder = args.examples_from or args.file.parent
    examples = {name: read_examples(task, folder, counts[name]) for name, task in used.items()}
    settings = _settings(args, given, used)
    engine = field_values(given, ENGINE_FLAGS)
    config = EngineConfig(**{**FIXED, **engine})
    groups = by_engine(settings, engine)
    name = args.prompt or (preset.prompts[0].name if preset else CHAT.name)
    check_runnable(used.values())
    cut = preset is None or preset.cuts_answers
    file = SampleFile(args.out, describe_benchmark(config, tasks, args.limit, name, examples, cut=cut))
    for options, chosen in groups:
        plan = Plan(
            settings=chosen,
            problems=problems,
            examples=examples,
            runs=args.runs,
            warmup=args.warmup,
            cut=cut,
        )
        if plan.missing(file):
            from lopa_ascend import LLM  # imports torch, which takes seconds

            with LLM(**options) as llm:
                if llm.tokenizer is None:
                    raise ParameterError("model", "has no tokenizer files, and prompts are texts")
                run(llm, PromptMaker(find_format(name), llm.tokenizer), plan, file)
    _write(args, settings, file, len(problems))


def by_engine(settings: Iterable[Setting], engine: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[Setting]]]:
    """The options of each engine that is needed, and the settings that it measures.

    Compiled steps have a fixed number of branches and size of block, one kind of score and so on. In those of another
    setting an answer would be padded, or decoded without a graph, and its speed would say nothing. In eager mode one
    engine measures all.

    Args:
        settings: what is measured.
        engine: options that were given.
    """
    is_eager = EngineConfig(**engine).mode == "eager"
    groups: dict[str, tuple[dict[str, Any], list[Setting]]] = {}
    for setting in settings:
        options = {**FIXED, **({} if is_eager else {"graph_params": GraphParams.of(setting.params)}), **engine}
        EngineConfig(**options)  # refuses what does not go together before any model is loaded
        groups.setdefault(repr(sorted(options.items())), (options, []))[1].append(setting)
    return list(groups.values())


def _settings(args: argparse.Namespace, given: Mapping[str, Any], tasks: Collection[str]) -> list[Setting]:
    """The settings that are measured on problems of these tasks."""
    decoding = field_values(given, DECODING_FLAGS)
    if args.preset:
        decoding = find_preset(args.preset).merged(decoding)
    if set(tasks) == {DEFAULT_TASK}:
        decoding = {"max_new_tokens": ANSWER, **decoding}
    if args.sweep:
        return swept(args.sweep, decoding)
    setting = one_setting(decoding)
    return [Setting(setting.params, args.preset)] if args.preset else [setting]


def _num_examples(args: argparse.Namespace, of_preset: Mapping[str, int], task: str) -> int:
    return args.examples if args.examples is not None else of_preset.get(task, 0)


def _write(args: argparse.Namespace, settings: list[Setting], file: SampleFile, num_problems: int) -> None:
    found = results(settings, file, num_problems)
    table = markdown(found)
    write_csv(found, args.out / "results.csv")
    (args.out / "results.md").write_text(table, encoding="utf-8")
    print(table)
    if args.plots:
        from scripts.benchmarking.draw import draw_all

        for path in draw_all(found, args.plots):
            print(f"drew {path}")


if __name__ == "__main__":
    main()
