"""Scores a model through lm-eval, in this process, with the prompts and the scoring of the published evaluations.

    python -m scripts.eval tasks --limit 10                                    GSM8K's form, the bundled model
    python -m scripts.eval tasks gsm8k --preset dream-gsm8k --model DIR --lora-path DIR --data DIR
    python -m scripts.eval tasks minerva_math --preset dream-math --model DIR --lora-path DIR --data DIR
    python -m scripts.eval tasks gsm8k mbpp --preset S13 --model DIR --lora-path DIR --data DIR
    python -m scripts.eval tasks lm_eval:arc_easy --model DIR                  any task of lm-eval itself

A preset is made for the tasks that it names, so each task has a preset of its own. Without one the model decodes as is
recommended for it. --data is a folder with TASK.jsonl
and TASK.examples.jsonl; the project's own holds ten problems of each task, which show that everything works and say
nothing about a model. A file with a mistake is refused with the line's number before the model is loaded. Programs that
the model writes run in a sandbox. docs/results.md says more.

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
from typing import Any

from lopa_ascend.config import DecodingParams, EngineConfig, GraphParams, fitting_defaults
from lopa_ascend.config.presets import Preset, PromptFormat, find_preset
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from lopa_ascend.hub import on_this_machine
from lopa_ascend.serve.flags import DECODING_FLAGS, ENGINE_FLAGS, add_flags, field_values
from scripts.arguments import number_from
from scripts.bench.machine import describe_machine
from scripts.eval.command import SEED, add_prompt_flags, run_command, with_defaults
from scripts.eval.described import describe_engine, describe_examples, describe_model
from scripts.eval.files import DATA, TaskFileError, check_runnable, read_examples, read_problems
from scripts.eval.prompts import CHAT, find_format
from scripts.eval.task_kinds import TASKS, Problem, Task

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
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write scores, answers and settings to")
    shown = {"seed": str(SEED), "max_num_seqs": "`batch_size`"}
    add_flags(parser, with_defaults({**ENGINE_FLAGS, **DECODING_FLAGS}, shown))
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
    prompt = find_format(args.prompt or (preset.prompts[0].name if preset else CHAT.name))
    decoding = field_values(given, DECODING_FLAGS)
    here = on_this_machine(EngineConfig(**field_values(given, ENGINE_FLAGS)))
    if preset:
        decoding = preset.merged(decoding)
    else:
        decoding = {**fitting_defaults(recommended_decoding(here.model or DEMO_MODEL), decoding), **decoding}
    params = DecodingParams(**decoding)
    fixed = {"max_num_seqs": args.batch_size, "seed": SEED, "graph_params": GraphParams.of(params)}
    engine = {**fixed, **field_values(given, ENGINE_FLAGS), "model": here.model, "lora": here.lora}
    config = EngineConfig(**engine)
    settings = describe_settings(args, preset, prompt, params, config, jobs, foreign)
    check_runnable([job.task for job in jobs])
    if args.out:
        _check_writable(args.out)
    _check_installed()
    _check_foreign(foreign)
    cut = preset is None or preset.cuts_answers
    results = _simple_evaluate(args, jobs, foreign, prompt, {**engine, **decoding}, cut=cut)
    described = {**describe_model(engine.get("model"), engine.get("lora")), "settings": settings}
    _report(args, results, jobs, described)


def _job(args: argparse.Namespace, name: str, counts: Mapping[str, int]) -> Job:
    if name not in TASKS:
        raise TaskFileError(f"unknown task {name!r}; choose from {', '.join(TASKS)}, or {FOREIGN}NAME")
    task = TASKS[name]
    file = read_problems(args.data / f"{name}.jsonl", name)
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
    params: DecodingParams,
    config: EngineConfig,
    jobs: Sequence[Job],
    foreign: Sequence[Foreign],
) -> dict[str, Any]:
    """What was run, for the file of --out. A task may ask for other stop strings, as its samples show.

    Args:
        args: all arguments.
        preset: the one that was chosen, if any.
        prompt: format of the prompts.
        params: how answers are decoded.
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
        "decoding": asdict(params),
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


def _simple_evaluate(
    args: argparse.Namespace,
    jobs: list[Job],
    foreign: list[Foreign],
    prompt: PromptFormat,
    options: Mapping[str, Any],
    *,
    cut: bool,
) -> dict[str, Any]:
    """Runs lm-eval.

    Args:
        args: all arguments.
        jobs: tasks of ours.
        foreign: lm-eval's own.
        prompt: format of the prompts.
        options: of the engine and of the decoding.
        cut: answers are cut at stop strings.
    """
    from lm_eval import simple_evaluate

    from scripts.eval.lm import LopaLM
    from scripts.eval.lm_tasks import lm_eval_task

    configs = [lm_eval_task(job.task, job.problems, job.examples, prompt, cut=cut) for job in jobs]
    options = {**options}
    lm = LopaLM(
        options.pop("model", None),
        add_bos=prompt.add_bos,
        escape_until=not cut,
        batch_size=args.batch_size,
        mc_num=args.mc_num,
        **options,
    )
    evaluate = partial(
        simple_evaluate,
        model=lm,
        limit=args.limit,
        bootstrap_iters=0,
        apply_chat_template=prompt.chat_template,
        fewshot_as_multiturn=prompt.fewshot_as_multiturn,
        system_instruction=prompt.system,
    )
    with lm.llm:
        return merged_results(evaluate(tasks=tasks, num_fewshot=count) for count, tasks in calls(configs, foreign))


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


def _report(args: argparse.Namespace, results: Mapping[str, Any], jobs: list[Job], described: dict[str, Any]) -> None:
    from scripts.eval.lm_tasks import PREFIX, scores_of

    found = {job.task.name: scores_of(results, job.task) for job in jobs}
    # A tag or a group of lm-eval has scores under the names of its tasks.
    others = {name: scores for name, scores in results["results"].items() if not name.startswith(PREFIX)}
    if args.out:
        content = {
            **described,
            "machine": describe_machine(),
            "scores": found,
            "lm_eval": others,
            "samples": results["samples"],
        }
        temporary = args.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        temporary.replace(args.out)
    for job in jobs:
        text = ", ".join(f"{name} {value:.1f}" for name, value in found[job.task.name].items())
        print(f"{job.task.name}: {text} ({len(job.problems)} problems, {len(job.examples)} examples)")
    for name, scores in others.items():
        print(f"{name}: {scores}")
