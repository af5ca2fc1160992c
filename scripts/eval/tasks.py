"""Scores a model through lm-eval, in this process, in the prompt formats of the published evaluations.

    python -m scripts.eval tasks --limit 10                                    held-out problems of the bundled model
    python -m scripts.eval tasks gsm8k arc_easy --model DIR                    any tasks of lm-eval
    python -m scripts.eval tasks --tau-conf 0.9 0.7 --num-branches 0 7         a sweep, and AUP
    python -m scripts.eval tasks gsm8k --preset dream-gsm8k --model DIR --lora-path DIR
    python -m scripts.eval tasks gsm8k --published dream --tau-conf 0.9 0.7 ...      beside d3LLM's leaderboard

A preset is made for the tasks that it names, so each task has a preset of its own. Without one the model decodes as is
recommended for it. lm-eval takes problems and examples from the hub of Hugging Face. --include names a folder with
tasks in its form, for example with local files of problems. Three tasks are added for presets: dream_humaneval,
diffucoder_humaneval_plus and diffucoder_mbpp_plus; "problems" are the bundled model's. docs/results.md says more.

Programs that a model writes run only with --confirm-run-unsafe-code and HF_ALLOW_CODE_EVAL=1 in the environment, as
lm-eval runs them: in processes with a limit of time, and with all that this user may do. Use a container.

Several values of --tau-conf, --num-branches or --block-size are a sweep, and so is --published. Each block size and
number of branches has a curve, which begins with one token a pass, and its AUP.

Needs lm-eval: pip install -e '.[eval]'
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.config.presets import find_preset
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.hub import on_this_machine
from lopa_ascend.serve.flags import DECODING_FLAGS, ENGINE_FLAGS, add_flags, field_values
from scripts.arguments import InputError, new_file, number_from
from scripts.bench.machine import describe_machine
from scripts.eval.aup import TABLES, Method, as_json, best_accuracy, draw, markdown, published_methods, source
from scripts.eval.command import SEED, Loader, graphs_for, run_command, with_defaults
from scripts.eval.described import describe_engine, describe_model, describe_run
from scripts.eval.lm_tasks import (
    CHAT,
    Evaluation,
    Point,
    add_prompt_flags,
    check_installed,
    load_tasks,
    prompt_formats,
    score,
    tasks_of,
)
from scripts.eval.metrics import METRICS, lopa_tpf, measure, summed_tpf
from scripts.eval.sweep import SWEPT, Way, add_swept_flags, ways_to_decode

DEFAULT_TASK = "problems"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval tasks",
        usage="%(prog)s [TASK ...] [--preset NAME] [FLAGS]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"(default: the preset's, or {DEFAULT_TASK})")
    parser.add_argument(
        "--preset", metavar="NAME", help='decoding, prompt and examples of a published evaluation; "list" prints all'
    )
    add_prompt_flags(parser, f"the preset's, or {CHAT.name}", "the preset's, or as many as lm-eval's task has")
    parser.add_argument(
        "--batch-size", type=number_from(1), default=8, metavar="N", help="answers made together (default: 8)"
    )
    parser.add_argument(
        "--mc-num",
        type=number_from(0),
        default=128,
        metavar="N",
        help="random maskings over which a log-likelihood is averaged (default: 128); 0: one pass over masks",
    )
    parser.add_argument(
        "--published",
        choices=TABLES,
        metavar="TABLE",
        help=f"rows of d3LLM's leaderboard beside ours: {', '.join(TABLES)}",
    )
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="picture of the curves of one task, e.g. a.svg")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file for scores, answers, settings and run record"
    )
    add_swept_flags(parser)
    shown = {"seed": str(SEED), "max_num_seqs": "`batch_size`"}
    flags = {name: flag for name, flag in {**ENGINE_FLAGS, **DECODING_FLAGS}.items() if name not in SWEPT}
    add_flags(parser, with_defaults(flags, shown))
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), argv, evaluate)


def evaluate(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Scores what the arguments ask for.

    Args:
        args: all arguments.
        given: by name, the arguments that were given or have a default.
    """
    preset = find_preset(args.preset) if args.preset else None
    of_preset = tasks_of(preset) if preset else {}
    names = args.tasks or [*of_preset] or [DEFAULT_TASK]
    published = {name: published_methods(args.published, name) for name in names if args.published}
    prompt = prompt_formats()[args.prompt or (preset.prompts[0].name if preset else CHAT.name)]
    engine = {"max_num_seqs": args.batch_size, "seed": SEED, **field_values(given, ENGINE_FLAGS)}
    here = on_this_machine(EngineConfig(**engine))
    engine |= {"model": here.model, "lora": here.lora}
    ways = ways_to_decode(given, preset, here.model or DEMO_MODEL, with_first=bool(args.published))
    is_sweep = len(ways) > 1
    if args.plot and (len(names) != 1 or not is_sweep):
        raise ParameterError("plot", "draws one task in several settings; give one TASK and several --tau-conf")
    described = describe_model(engine["model"], engine["lora"])
    if args.out:
        _check_writable(args.out)
    check_installed()
    examples = {name: of_preset.get(name) if args.examples is None else args.examples for name in names}
    work = Evaluation(
        tasks=load_tasks(examples, prompt, args.include, runs_code=args.confirm_run_unsafe_code),
        prompt=prompt,
        limit=args.limit,
        cut=preset is None or preset.cuts_answers,
        batch_size=args.batch_size,
        mc_num=args.mc_num,
    )
    print(f"{METRICS['summed_tpf']}\n{METRICS['lopa_tpf']}")
    points, record = [], {}
    with Loader() as loader:
        for way in ways:
            llm = loader.load({**engine, **graphs_for(way.params, engine)})
            record = describe_run(llm)
            points.append(work.point(llm, way.params, has_own_length="max_new_tokens" in way.decoding))
            _print_point(way, points[-1])
    tables = {}
    if is_sweep:
        tables = {name: [*curves(name, ways, points, described["model"]), *published.get(name, ())] for name in names}
    if args.out:
        settings = {
            "preset": preset.name if preset else None,
            "prompt": asdict(prompt),
            "examples": examples,
            "limit": args.limit,
            "cut": work.cut,
            "mc_num": args.mc_num,
            "engine": describe_engine(EngineConfig(**engine)),
        }
        content = {
            **described,
            "given": given_of(args),
            "settings": settings,
            "run": record,
            "machine": describe_machine(),
        }
        content["points"] = [_as_json(way, point) for way, point in zip(ways, points, strict=True)]
        content["aup"] = {name: as_json(methods) for name, methods in tables.items()}
        temporary = args.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        temporary.replace(args.out)
    _show(args, tables)


def _check_writable(file: Path) -> None:
    """Refuses a file that could not be written after hours of work."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        raise InputError(f"--out {file} is a directory, expected a file")
    if not os.access(file.parent, os.W_OK):  # a new file takes the place of an old one
        raise InputError(f"--out {file} cannot be written: nothing can be written to its folder")


def given_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as a file has them, without the names of files to write."""
    given = {name: value for name, value in vars(args).items() if value is not None and name not in ("out", "plot")}
    return dict(json.loads(json.dumps(given, default=str)))


def _print_point(way: Way, point: Point) -> None:
    """Prints scores in percent, and both TPFs of a task with answers."""
    for name, metrics in point.scores.items():
        text = ", ".join(f"{metric} {100 * value:.1f}" for metric, value in metrics.items())
        if answers := point.answers[name]:
            text += (
                f"; summed TPF {summed_tpf(answers):.2f}, LoPA's TPF {lopa_tpf(answers):.2f} ({len(answers)} answers)"
            )
        print(f"{way.label}: {name}: {text}" if way.label else f"{name}: {text}", flush=True)


def _as_json(way: Way, point: Point) -> dict[str, Any]:
    return {
        "label": way.label,
        "decoding": asdict(way.params),
        "scores": point.scores,
        "numbers": {
            name: {"answers": len(answers), **measure(answers)} for name, answers in point.answers.items() if answers
        },
        "samples": point.samples,
    }


def curves(task: str, ways: Sequence[Way], points: Sequence[Point], model: str) -> list[Method]:
    """The methods of a sweep: the thresholds of each block size and number of branches, after one token a pass.

    Args:
        task: whose scores and TPFs count.
        ways: how the points were decoded.
        points: what came of them.
        model: what the methods' names begin with.
    """
    found = [(summed_tpf(point.answers[task]), score(point.scores[task])) for point in points]
    firsts = {way.params.block_size: point for way, point in zip(ways, found, strict=True) if way.is_first}
    by_name: dict[str, list[tuple[float, float]]] = {}
    for way, point in zip(ways, found, strict=True):
        if not way.is_first:
            by_name.setdefault(f"{model}: {way.curve}", [firsts[way.params.block_size]]).append(point)
    return [Method.of(name, several) for name, several in by_name.items()]


def _show(args: argparse.Namespace, tables: Mapping[str, Sequence[Method]]) -> None:
    """Prints the tables with AUP, and draws the one of --plot."""
    for name, methods in tables.items():
        print(f"\n{name}: AUP, with y_max {best_accuracy(methods):.1f}; dropped points are more than 5 below the first")
        print(markdown(methods))
        if args.plot:
            draw(args.plot, name, methods)
    if args.published:
        print(f"\nPublished rows: {source()}. Other models, prompts and machines than this run's.")
