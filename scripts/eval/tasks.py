"""Scores a model through lm-eval, in this process, with the prompts and the scoring of the published evaluations.

    python -m scripts.eval tasks --limit 10                                    GSM8K's form, the bundled model
    python -m scripts.eval tasks problems --tau-conf 0.9 0.7 --num-branches 0 7      its own problems: a sweep, and AUP
    python -m scripts.eval tasks gsm8k --preset dream-gsm8k --model DIR --lora-path DIR --data DIR
    python -m scripts.eval tasks gsm8k --published dream --tau-conf 0.9 0.7 ...      beside d3LLM's leaderboard
    python -m scripts.eval tasks minerva_math --preset dream-math --model DIR --lora-path DIR --data DIR
    python -m scripts.eval tasks gsm8k mbpp --preset S13 --model DIR --lora-path DIR --data DIR
    python -m scripts.eval tasks lm_eval:arc_easy --model DIR                  any task of lm-eval itself

A preset is made for the tasks that it names, so each task has a preset of its own. Without one the model decodes as is
recommended for it. --data is a folder with TASK.jsonl and TASK.examples.jsonl; the project's own holds ten problems of
each task, which show that everything works and say nothing about a model, and for "problems" the bundled model's 500
held-out ones. A file with a mistake is refused with the line's number before the model is loaded. Programs that the
model writes run in a sandbox. docs/results.md says more.

Several values of --tau-conf, --num-branches or --block-size are a sweep, and so is --published. Each block size and
number of branches has a curve, which begins with one token a pass, and its AUP.

Needs lm-eval: pip install -e '.[eval]'
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.config.presets import Preset, PromptFormat, find_preset
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL, HELD_OUT
from lopa_ascend.hub import on_this_machine
from lopa_ascend.serve.flags import DECODING_FLAGS, ENGINE_FLAGS, add_flags, field_values
from scripts.arguments import new_file, number_from
from scripts.bench.machine import describe_machine
from scripts.eval.aup import TABLES, Method, as_json, best_accuracy, markdown, published_methods, source
from scripts.eval.command import SEED, Loader, add_prompt_flags, graphs_for, run_command, with_defaults
from scripts.eval.curves import drawn
from scripts.eval.described import describe_engine, describe_examples, describe_model, describe_run
from scripts.eval.files import DATA, DEFAULT_TASK, TaskFileError, check_runnable, read_examples, read_problems
from scripts.eval.metrics import METRICS, AnswerCounts, lopa_tpf, summed_tpf
from scripts.eval.prompts import CHAT, find_format
from scripts.eval.sweep import SWEPT, Way, add_swept_flags, ways_to_decode
from scripts.eval.task_kinds import TASKS, Problem, Task

if TYPE_CHECKING:
    from lopa_ascend import LLM

TPFS = {"summed_tpf": summed_tpf, "lopa_tpf": lopa_tpf}
"""By metric."""
FOREIGN = "lm_eval:"
"""In front of the names of lm-eval's own tasks."""


@dataclass(frozen=True)
class Job:
    """One task with its problems."""

    task: Task
    problems: tuple[Problem, ...]
    examples: tuple[Problem, ...]
    digest: str
    """SHA-256 of the task file, hexadecimal."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval tasks",
        usage="%(prog)s [TASK ...] [--data DIR] [FLAGS]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join(TASKS)
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"{names}, or {FOREIGN}NAME (default: the preset's, or gsm8k)"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="folder of task files (default: scripts/eval/data)"
    )
    parser.add_argument("--limit", type=number_from(1), metavar="N", help="the first N problems (default: all)")
    add_prompt_flags(parser)
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
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="SVG file to draw the curves of one task to")
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
    of_preset = [name if name in TASKS else FOREIGN + name for name in preset.tasks] if preset else []
    names = args.tasks or of_preset or ["gsm8k"]
    counts = preset.tasks if preset else {}
    jobs = [_job(args, name, counts) for name in names if not name.startswith(FOREIGN)]
    foreign = [Foreign.named(args, name.removeprefix(FOREIGN), counts) for name in names if name.startswith(FOREIGN)]
    published = {job.task.name: published_methods(args.published, job.task.name) for job in jobs if args.published}
    prompt = find_format(args.prompt or (preset.prompts[0].name if preset else CHAT.name))
    engine = {"max_num_seqs": args.batch_size, "seed": SEED, **field_values(given, ENGINE_FLAGS)}
    here = on_this_machine(EngineConfig(**engine))
    engine |= {"model": here.model, "lora": here.lora}
    ways = ways_to_decode(given, preset, here.model or DEMO_MODEL, with_first=bool(args.published))
    is_sweep = len(ways) > 1
    if args.plot and (len(jobs) != 1 or not is_sweep):
        raise ParameterError("plot", "draws one task in several settings; give one TASK and several --tau-conf")
    described = {
        **describe_model(engine.get("model"), engine.get("lora")),
        "settings": describe_settings(args, preset, prompt, EngineConfig(**engine), jobs, foreign),
    }
    check_runnable([job.task for job in jobs])
    if args.out:
        _check_writable(args.out)
    _check_installed()
    _check_foreign(foreign)
    print("\n".join(METRICS[name] for name in TPFS))
    run = Run(args, jobs, foreign, prompt, cut=preset is None or preset.cuts_answers)
    with Loader() as loader:
        points = [run.point(loader.load({**engine, **graphs_for(way.params, engine)}), way) for way in ways]
    tables = {
        job.task.name: [*curves(job.task, ways, points, described["model"]), *published.get(job.task.name, ())]
        for job in jobs
        if is_sweep
    }
    if args.out:
        aups = {name: as_json(methods) for name, methods in tables.items()}
        _write(args.out, {**described, "run": run.record, "machine": describe_machine(), "points": points, "aup": aups})
    _show(args, tables)


def _job(args: argparse.Namespace, name: str, counts: Mapping[str, int]) -> Job:
    if name not in TASKS:
        raise TaskFileError(f"unknown task {name!r}; choose from {', '.join(TASKS)}, or {FOREIGN}NAME")
    task = TASKS[name]
    is_bundled = name == DEFAULT_TASK and args.data == DATA
    file = read_problems(HELD_OUT if is_bundled else args.data / f"{name}.jsonl", name)
    problems = [problem for _, problem in file.problems]
    count = args.examples if args.examples is not None else counts.get(name, 0)
    return Job(task, tuple(problems[: args.limit]), tuple(read_examples(task, args.data, count)), file.digest)


@dataclass(frozen=True)
class Foreign:
    """A task of lm-eval's own."""

    name: str
    num_examples: int | None
    """Examples in a prompt; None: as many as lm-eval chooses."""

    @classmethod
    def named(cls, args: argparse.Namespace, name: str, of_preset: Mapping[str, int]) -> Foreign:
        """The task of this name, with the number of examples that the arguments or the preset give."""
        return cls(name, of_preset.get(name) if args.examples is None else args.examples)


def describe_settings(
    args: argparse.Namespace,
    preset: Preset | None,
    prompt: PromptFormat,
    config: EngineConfig,
    jobs: Sequence[Job],
    foreign: Sequence[Foreign],
) -> dict[str, Any]:
    """What was run, for the file of --out. A task may ask for other stop strings, as its samples show.

    Args:
        args: all arguments.
        preset: the one that was chosen, if any.
        prompt: format of the prompts.
        config: of the engine.
        jobs: tasks of ours.
        foreign: lm-eval's own.
    """
    tasks: dict[str, Any] = {
        job.task.name: {"sha256": job.digest, "examples": describe_examples(job.examples)} for job in jobs
    }
    tasks |= {FOREIGN + task.name: {"examples": {"count": task.num_examples}} for task in foreign}
    return {
        "preset": None if preset is None else preset.name,
        "cut": preset is None or preset.cuts_answers,
        "prompt": asdict(prompt),
        "tasks": tasks,
        "limit": args.limit,
        "engine": describe_engine(config),
        "batch_size": args.batch_size,
        "mc_num": args.mc_num,
    }


def _check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskFileError("this command needs lm-eval, which is not installed: pip install -e '.[eval]'")


def _check_foreign(tasks: list[Foreign]) -> None:
    if tasks:
        from lm_eval.tasks import TaskManager

        known = set(TaskManager().all_tasks)
        for task in tasks:
            if task.name not in known:
                raise TaskFileError(f"lm-eval has no task {task.name!r}")


def _check_writable(file: Path) -> None:
    """Refuses a file that could not be written after hours of work."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        raise TaskFileError(f"--out {file} is a directory, expected a file")
    if not os.access(file.parent, os.W_OK):  # a new file takes the place of an old one
        raise TaskFileError(f"--out {file} cannot be written: nothing can be written to its folder")


class Run:
    """What is the same in all settings.

    Args:
        args: all arguments.
        jobs: tasks of ours.
        foreign: lm-eval's own.
        prompt: format of the prompts.
        cut: answers are cut at stop strings.
    """

    def __init__(
        self, args: argparse.Namespace, jobs: list[Job], foreign: list[Foreign], prompt: PromptFormat, *, cut: bool
    ) -> None:
        self._args, self._jobs, self._foreign, self._prompt, self._cut = args, jobs, foreign, prompt, cut
        self.record: dict[str, Any] = {}
        """What ``describe_run`` says."""

    def point(self, llm: LLM, way: Way) -> dict[str, Any]:
        """Scores the tasks in one setting, and prints it."""
        from scripts.eval.lm_tasks import PREFIX, scores_of

        self.record = describe_run(llm)
        results, counts = self.evaluated(llm, way)
        tpf = {
            name.removeprefix(PREFIX): {"answers": len(answers), **{key: count(answers) for key, count in TPFS.items()}}
            for name, answers in counts.items()
        }
        scores = {job.task.name: scores_of(results, job.task) for job in self._jobs}
        # A tag or a group of lm-eval has scores under the names of its tasks.
        others = {name: found for name, found in results["results"].items() if not name.startswith(PREFIX)}
        label = f"{way.label}: " if way.label else ""
        for job in self._jobs:
            text = ", ".join(f"{name} {value:.1f}" for name, value in scores[job.task.name].items())
            about = f"({len(job.problems)} problems, {len(job.examples)} examples)"
            print(f"{label}{job.task.name}: {text}{_spoken(tpf.get(job.task.name))} {about}", flush=True)
        for name, found in others.items():
            print(f"{label}{name}: {found}{_spoken(tpf.get(name))}", flush=True)
        return {
            "label": way.label,
            "decoding": asdict(way.params),
            "scores": scores,
            "lm_eval": others,
            "tpf": tpf,
            "samples": results["samples"],
        }

    def evaluated(self, llm: LLM, way: Way) -> tuple[dict[str, Any], dict[str, list[AnswerCounts]]]:
        """Runs lm-eval; returns its results, and by name of a task in it what is counted of its answers."""
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from scripts.eval.lm import LopaLM
        from scripts.eval.lm_tasks import lm_eval_task

        args, prompt = self._args, self._prompt
        configs = [lm_eval_task(job.task, job.problems, job.examples, prompt, cut=self._cut) for job in self._jobs]
        lm = LopaLM(
            llm=llm,
            add_bos=prompt.add_bos,
            escape_until=not self._cut,
            batch_size=args.batch_size,
            mc_num=args.mc_num,
            **way.decoding,
        )
        evaluate = partial(
            simple_evaluate,
            model=lm,
            task_manager=TaskManager(include_defaults=bool(self._foreign)),  # to find its own tasks takes seconds
            limit=args.limit,
            bootstrap_iters=0,
            apply_chat_template=prompt.chat_template,
            fewshot_as_multiturn=prompt.fewshot_as_multiturn,
            system_instruction=prompt.system,
        )
        found = (evaluate(tasks=tasks, num_fewshot=count) for count, tasks in calls(configs, self._foreign))
        return merged_results(found), lm.counts


def _spoken(tpf: Mapping[str, float] | None) -> str:
    """Both TPFs in words; nothing for a task without answers."""
    return "" if tpf is None else f"; summed TPF {tpf['summed_tpf']:.2f}, LoPA's TPF {tpf['lopa_tpf']:.2f}"


def calls(configs: list[dict[str, Any]], foreign: list[Foreign]) -> list[tuple[int | None, list[Any]]]:
    """What each call of lm-eval evaluates: a number of examples holds for all tasks of a call.

    Args:
        configs: tasks of ours, which have their examples.
        foreign: lm-eval's own.

    Returns:
        Numbers of examples, None for each task's own, with their tasks.
    """
    by_count: dict[int | None, list[Any]] = {None: list(configs)}
    for task in foreign:
        by_count.setdefault(task.num_examples, []).append(task.name)
    return [(count, tasks) for count, tasks in by_count.items() if tasks]


def merged_results(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores and samples of several calls of lm-eval, by task."""
    merged: dict[str, Any] = {"results": {}, "samples": {}}
    for results in found:
        for part, by_task in merged.items():
            by_task.update(results[part])
    return merged


def curves(task: Task, ways: Sequence[Way], points: Sequence[Mapping[str, Any]], model: str) -> list[Method]:
    """The methods of a sweep: the thresholds of each block size and number of branches, after one token a pass.

    Args:
        task: whose scores and TPFs count.
        ways: how the points were decoded.
        points: what ``Run.point`` returned.
        model: what the methods' names begin with.
    """
    found = [(point["tpf"][task.name]["summed_tpf"], point["scores"][task.name][task.metric]) for point in points]
    firsts = {way.params.block_size: point for way, point in zip(ways, found, strict=True) if way.is_first}
    by_name: dict[str, list[tuple[float, float]]] = {}
    for way, point in zip(ways, found, strict=True):
        if not way.is_first:
            by_name.setdefault(f"{model}: {way.curve}", [firsts[way.params.block_size]]).append(point)
    return [Method.of(name, several) for name, several in by_name.items()]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    temporary.replace(file)


def _show(args: argparse.Namespace, tables: Mapping[str, Sequence[Method]]) -> None:
    """Prints the tables with AUP, and draws the one of --plot."""
    for name, methods in tables.items():
        print(f"\n{name}: AUP, with y_max {best_accuracy(methods):.1f}; dropped points are more than 5 below the first")
        print(markdown(methods))
        if args.plot:
            args.plot.write_text(drawn(name, methods), encoding="utf-8")
    if args.published:
        print(f"\nPublished rows: {source()}. Other models, prompts and machines than this run's.")
