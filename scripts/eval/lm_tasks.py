"""Tasks of lm-eval in the prompt formats of published evaluations, and what a model reaches on them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.presets import Preset, PromptFormat, presets
from scripts.arguments import InputError, number_from

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from scripts.eval.metrics import AnswerCounts

DATA = Path(__file__).with_name("data")
"""Tasks of this project, in lm-eval's form: a YAML file each."""
PUBLISHED = {
    "humaneval": "dream_humaneval",
    "humaneval_plus": "diffucoder_humaneval_plus",
    "mbpp_plus": "diffucoder_mbpp_plus",
}
"""What presets mean by a task, if their authors score it otherwise than lm-eval."""
CHAT = PromptFormat(
    name="chat",
    model="any with a chat template",
    add_bos=False,
    chat_template=True,
    fewshot_as_multiturn=True,
    system=None,
    user="{prompt}",
    answer_prefix="",
    source="the question is the user's message",
)
PLAIN = PromptFormat(
    name="plain",
    model="any",
    add_bos=False,
    chat_template=False,
    fewshot_as_multiturn=False,
    system=None,
    user="{prompt}",
    answer_prefix="",
    source="the question is the prompt",
)


def prompt_formats() -> dict[str, PromptFormat]:
    """All formats by name: those of presets, and two general ones."""
    formats = {prompt.name: prompt for preset in presets().values() for prompt in preset.prompts}
    return {CHAT.name: CHAT, PLAIN.name: PLAIN, **formats}


def tasks_of(preset: Preset) -> dict[str, int]:
    """Names of lm-eval's tasks, or of ours, that a preset was evaluated on, with the examples in a prompt."""
    return {PUBLISHED.get(name, name): count for name, count in preset.tasks.items()}


def add_prompt_flags(parser: argparse.ArgumentParser, format_default: str, examples_default: str) -> None:
    """Adds the flags about tasks and the form of prompts.

    Args:
        format_default: what --help says of --prompt.
        examples_default: the same of --examples.
    """
    parser.add_argument(
        "--prompt", choices=tuple(prompt_formats()), help=f"format of prompts (default: {format_default})"
    )
    parser.add_argument(
        "--examples", type=number_from(0), metavar="N", help=f"examples in a prompt (default: {examples_default})"
    )
    parser.add_argument("--limit", type=number_from(1), metavar="N", help="the first N problems (default: all)")
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder with further tasks in lm-eval's form")
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help="run the programs that the model writes")


def check_installed() -> None:
    """Raises InputError without lm-eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("this command needs lm-eval, which is not installed: pip install -e '.[eval]'")


def load_tasks(
    examples: Mapping[str, int | None], prompt: PromptFormat, folder: Path | None = None, *, runs_code: bool = False
) -> dict[str, Any]:
    """Tasks and groups of tasks by name, for ``lm_eval.simple_evaluate``; a tag becomes its tasks.

    Args:
        examples: by name, the examples in a prompt; None: as many as lm-eval's task has.
        prompt: what is asked is brought into this format. Its template, system message and turns are arguments of
            ``simple_evaluate``.
        folder: has further tasks in lm-eval's form, which go before others of the same name.
        runs_code: the user allows programs of the model to run.

    Raises:
        InputError: a name is unknown, its problems or a package are missing, or its programs may not run.
    """
    own = {path.stem for path in DATA.glob("*.yaml")}
    manager = _manager(folder, with_defaults=not own.issuperset(examples))
    found: dict[str, Any] = {}
    for name, count in examples.items():
        if name not in manager.all_tasks:
            raise InputError(f"lm-eval has no task {name!r}; this project adds {', '.join(sorted(own))}")
        try:
            loaded = manager.load([name])
        except Exception as error:  # of many kinds: the hub's, those of packages, of files
            raise InputError(f"task {name} cannot be loaded: {error}") from error
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) and not runs_code:
                raise InputError(f"task {name} runs programs of the model; --confirm-run-unsafe-code allows it")
            _adapt(task, prompt, count)
        found |= {name: loaded["groups"][name]} if name in loaded["groups"] else loaded["tasks"]
    return found


@cache
def _manager(folder: Path | None, *, with_defaults: bool) -> Any:
    """What finds tasks. To find those of lm-eval takes seconds, and is done once."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[DATA, *([folder] if folder else [])], include_defaults=with_defaults)


def _adapt(task: Any, prompt: PromptFormat, count: int | None) -> None:
    if count is not None:
        task.set_config("num_fewshot", count)
    if prompt.answer_prefix:
        task.set_config("gen_prefix", prompt.answer_prefix)
    if prompt.chat_template and prompt.user != "{prompt}":
        question = _asked(prompt, task.config.doc_to_text)
        task.set_config("doc_to_text", question)
        task.fewshot_cfg.doc_to_text = question


def _asked(prompt: PromptFormat, question: Any) -> Any:
    """The user's message around a question, which is a function or a text of Jinja."""
    # Not format(): questions hold braces.
    if callable(question):
        return lambda problem: prompt.user.replace("{prompt}", question(problem))
    return prompt.user.replace("{prompt}", question)


@dataclass(frozen=True)
class Point:
    """What a model reaches in one setting; each by the name of a task or a group."""

    scores: dict[str, dict[str, float]]
    """By metric, as lm-eval has them."""
    answers: dict[str, list[AnswerCounts]]
    """Empty for tasks without answers, such as choices."""
    samples: dict[str, Any]
    """By task, what lm-eval records of each problem."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is the same in all settings."""

    tasks: Mapping[str, Any]
    """As ``load_tasks`` returns them."""
    prompt: PromptFormat
    limit: int | None
    """Problems of a task, from the first one on; None: all."""
    cut: bool = True
    """Answers are cut at their task's stop strings."""
    batch_size: int = 1
    mc_num: int = 0

    def point(self, llm: LLM, params: DecodingParams, *, has_own_length: bool) -> Point:
        """Evaluates a model with these decoding parameters; of these the length may be the task's.

        Raises:
            ParameterError: the model cannot make prompts of this format.
        """
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from scripts.eval.lm import LopaLM

        if self.prompt.chat_template and (llm.tokenizer is None or llm.tokenizer.chat_template is None):
            raise ParameterError("prompt", f"{self.prompt.name} needs a chat template, and the model has none")
        lm = LopaLM(
            llm,
            params,
            has_own_length=has_own_length,
            add_bos=self.prompt.add_bos,
            escape_until=not self.cut,
            batch_size=self.batch_size,
            mc_num=self.mc_num,
        )
        found = simple_evaluate(
            model=lm,
            tasks=list(self.tasks.values()),
            task_manager=TaskManager(include_defaults=False),
            limit=self.limit,
            bootstrap_iters=0,
            apply_chat_template=self.prompt.chat_template,
            fewshot_as_multiturn=self.prompt.fewshot_as_multiturn,
            system_instruction=self.prompt.system,
            confirm_run_unsafe_code=True,  # ``load_tasks`` has asked
        )
        scores = {name: _metrics(found["results"][name]) for name in self.tasks}
        answers = {
            name: [answer for part in parts_of(task) for answer in lm.counts.get(part, ())]
            for name, task in self.tasks.items()
        }
        return Point(scores, answers, found["samples"])


def parts_of(task: Any) -> Sequence[str]:
    """The names of the tasks of a group, or of the one task."""
    return [part.task_name for part in task.get_all_tasks()] if hasattr(task, "get_all_tasks") else [task.task_name]


def _metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores among what lm-eval says of a task, without their errors."""
    return {name: float(value) for name, value in result.items() if "," in name and "_stderr," not in name}


def score(metrics: Mapping[str, float]) -> float:
    """The score that tables show, in percent: the flexible one of GSM8K, and the first one of other tasks."""
    flexible = [value for name, value in metrics.items() if name.endswith(",flexible-extract")]
    return 100 * (flexible or list(metrics.values()))[0]
