"""Turns problems into prompts in the formats of presets.json: BOS, chat template, examples, system message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lopa_ascend.config import ParameterError
from lopa_ascend.config.presets import PromptFormat, presets
from lopa_ascend.text.tokenizer import Tokenizer
from scripts.eval.task_kinds import Problem, Task

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


def find_format(name: str) -> PromptFormat:
    """A format by its name.

    Raises:
        ParameterError: there is none of this name; the message lists all.
    """
    formats = prompt_formats()
    if name not in formats:
        raise ParameterError("prompt", f"unknown value {name!r}; choose one of {', '.join(formats)}")
    return formats[name]


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of one model in one format."""

    format: PromptFormat
    tokenizer: Tokenizer

    def check(self) -> None:
        """Refuses a format that the model's tokenizer cannot make.

        Raises:
            ParameterError: there is no BOS token or no chat template.
        """
        if self.format.add_bos and not self.tokenizer.special.get("bos_token"):
            raise ParameterError("prompt", f"{self.format.name} begins with a BOS token, and the tokenizer names none")
        if self.format.chat_template and self.tokenizer.chat_template is None:
            raise ParameterError("prompt", f"{self.format.name} needs a chat template, and the model has none")

    def text(self, task: Task, problem: Problem, examples: Sequence[Problem] = ()) -> str:
        """The whole prompt for a problem, as text.

        Args:
            examples: solved problems that stand before it.
        """
        own = self.format
        if own.chat_template:
            body = self.tokenizer.render(self.messages(task, problem, examples)) + own.answer_prefix
        else:
            body = self._asked(_in_one_text(task, problem, examples)) + own.answer_prefix
        return (self.tokenizer.special["bos_token"] if own.add_bos else "") + body

    def messages(self, task: Task, problem: Problem, examples: Sequence[Problem]) -> list[dict[str, str]]:
        """The conversation, for formats with a chat template."""
        own = self.format
        messages = [] if own.system is None else [{"role": "system", "content": own.system}]
        if own.fewshot_as_multiturn:
            for example in examples:
                messages.append({"role": "user", "content": self._asked(task.question(example))})
                messages.append({"role": "assistant", "content": task.example_answer(example)})
            question = task.question(problem)
        else:
            question = _in_one_text(task, problem, examples)
        return [*messages, {"role": "user", "content": self._asked(question)}]

    def _asked(self, question: str) -> str:
        # Not format(): questions hold braces.
        return self.format.user.replace("{prompt}", question)


def _in_one_text(task: Task, problem: Problem, examples: Sequence[Problem]) -> str:
    solved = (f"{task.question(example)}{task.separator}{task.example_answer(example)}" for example in examples)
    return "\n\n".join([*solved, task.question(problem)])
