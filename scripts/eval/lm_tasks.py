"""The tasks as lm-eval's: its prompts, examples and limits, with the scores of ``tasks.TASKS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lopa_ascend.config.presets import PromptFormat
from scripts.eval.task_kinds import Problem, Task

PREFIX = "lopa_"
"""In front of our names, which lm-eval's own tasks have."""


def lm_eval_task(
    task: Task, problems: Sequence[Problem], examples: Sequence[Problem], prompt: PromptFormat, *, cut: bool = True
) -> dict[str, Any]:
    """The configuration of a task for ``lm_eval.simple_evaluate``.

    Args:
        task: what is evaluated.
        problems: the problems to answer.
        examples: solved problems for the prompt; all of them are shown.
        prompt: the model's format; its chat template, system message and turns are arguments of ``simple_evaluate``.
        cut: answers are cut at the task's stop strings.
    """
    from datasets import Dataset

    def splits(**_: object) -> dict[str, Any]:
        # Fields that some rows lack would become None in all others.
        fields = [*task.fields]
        found = {"test": [{name: problem[name] for name in fields} for problem in problems]}
        found["train"] = [{name: example[name] for name in fields} for example in examples]
        return {name: Dataset.from_list(rows) for name, rows in found.items() if rows}

    def question(problem: Problem) -> str:
        text = task.question(problem)
        return prompt.user.replace("{prompt}", text) if prompt.chat_template else text

    def score(problem: Problem, answers: Sequence[str]) -> dict[str, float]:
        return task.score(problem, task.cut(answers[0], at_stop=cut))

    config: dict[str, Any] = {
        "task": PREFIX + task.name,
        "custom_dataset": splits,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": question,
        "doc_to_target": task.example_answer,
        "target_delimiter": task.separator,
        "generation_kwargs": {"until": list(task.stop), "do_sample": False},
        "process_results": score,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in _metrics(task)],
        "num_fewshot": len(examples),
        "metadata": {"version": 1.0},
    }
    if examples:
        config |= {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
    if prompt.answer_prefix:
        config["gen_prefix"] = prompt.answer_prefix
    return config


def _metrics(task: Task) -> tuple[str, ...]:
    return ("strict_match", "flexible_extract") if task.name == "gsm8k" else (task.metric,)


def scores_of(results: Mapping[str, Any], task: Task) -> dict[str, float]:
    """The scores of a task in what ``simple_evaluate`` returned, in percent."""
    found = results["results"][PREFIX + task.name]
    return {name: 100 * found[f"{name},none"] for name in _metrics(task)}
