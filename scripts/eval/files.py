"""Reads task files: problems as JSON objects, one a line. A file with a mistake is refused with the line's number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import parse_json_object, read_bytes, shown
from scripts.eval import latex, sandbox
from scripts.eval.task_kinds import TASKS, Problem, Task

DATA = Path(__file__).with_name("data")
"""Small files of each task's form, and the examples of tasks that always have the same ones."""
MAX_TASK_FILE = 2**30
"""Bytes of the largest file of problems."""
DEFAULT_TASK = "problems"
GENERATED_EXAMPLES = ("gsm8k",)
"""Tasks whose examples in this project are generated, and not those with which models are evaluated."""


class TaskFileError(ValueError):
    """A task file that cannot be used; the message names the file, the line and what was expected."""


@dataclass(frozen=True)
class TaskFile:
    """The problems of a file."""

    path: Path
    problems: tuple[tuple[Task, Problem], ...]
    digest: str
    """SHA-256 of the file's content, hexadecimal."""


def read_problems(path: Path, default_task: str = DEFAULT_TASK) -> TaskFile:
    """Reads and checks all problems of a file.

    A line may name its task by "task"; without it the line has the default one.

    Raises:
        TaskFileError: the default task is unknown, or the file cannot be read, has no problems, or has a wrong line.
    """
    if default_task not in TASKS:
        raise TaskFileError(f"unknown task {shown(default_task)}; choose one of {', '.join(TASKS)}")
    try:
        content = read_bytes(path, TaskFileError, MAX_TASK_FILE)
    except OSError as error:
        raise TaskFileError(f"{path}: cannot be read ({error.strerror})") from error
    problems = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                problems.append(_problem(line, default_task))
            except (ValueError, TypeError) as error:
                raise TaskFileError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise TaskFileError(f"{path}: has no problems")
    return TaskFile(path, tuple(problems), hashlib.sha256(content).hexdigest())


def _problem(line: bytes, default_task: str) -> tuple[Task, dict[str, Any]]:
    try:
        values = parse_json_object(line)
    except ValueError as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    name = values.get("task", default_task)
    task = TASKS.get(name) if isinstance(name, str) else None
    if task is None:
        raise ValueError(f"unknown task {shown(name)}; choose one of {', '.join(TASKS)}")
    for field, kind in task.fields.items():
        if field not in values:
            raise ValueError(f'has no "{field}"; task {task.name} needs {", ".join(task.fields)}')
        value = values[field]
        is_right = _is_text(value) if kind is str else _is_list_of_texts(value)
        if not is_right:
            expected = "a text" if kind is str else "a list of at least one text"
            raise ValueError(f'"{field}" is {shown(value)}, expected {expected}')
    task.check(values)
    return task, values


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of_texts(value: object) -> bool:
    """Whether a value is a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def read_examples(task: Task, folder: Path | None, count: int) -> list[Problem]:
    """The first examples for a task's prompt, from TASK.examples.jsonl.

    Args:
        task: the task.
        folder: where the file is looked for before the project's own; None: only there.
        count: how many.

    Raises:
        TaskFileError: there is no such file, it has fewer examples, or only the project has one, with generated
            examples.
    """
    if not count:
        return []
    name = f"{task.name}.examples.jsonl"
    folders = [*([folder] if folder else []), DATA]
    path = next((folder / name for folder in folders if (folder / name).exists()), folders[0] / name)
    is_foreign = folder is not None and folder.resolve() != DATA.resolve()
    if is_foreign and path.parent == DATA and task.name in GENERATED_EXAMPLES:
        raise TaskFileError(
            f"{folders[0] / name}: is missing, and this project's examples of {task.name} are generated; put {count} "
            f"lines of the training split there, or pass --examples 0"
        )
    problems = [problem for _, problem in read_problems(path, task.name).problems]
    if len(problems) < count:
        raise TaskFileError(f"{path}: has {len(problems)} examples, and {count} are needed")
    return problems[:count]


def check_runnable(tasks: Iterable[Task]) -> None:
    """Refuses tasks whose answers this machine cannot score, before anything is generated.

    Raises:
        TaskFileError: a package is missing, or programs cannot be run safely.
    """
    for task in tasks:
        missing = latex.missing_package() if task.name == "minerva_math" else None
        if missing is not None:
            raise TaskFileError(missing)
        if task.runs_code:
            try:
                sandbox.run("")
            except sandbox.SandboxError as error:
                raise TaskFileError(f"task {task.name}: {error}") from error
