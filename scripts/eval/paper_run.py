"""Runs rows of a table, each resumable on its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lopa_ascend.config import ConfigError, DecodingParams, EngineConfig
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.hub import model_name
from scripts.eval.command import Loader, graphs_for
from scripts.eval.described import describe_benchmark
from scripts.eval.files import TaskFile, TaskFileError, check_runnable, read_examples, read_problems
from scripts.eval.paper_rows import Row
from scripts.eval.prompts import CHAT, PromptMaker, find_format
from scripts.eval.results import Result, results
from scripts.eval.sampler import Plan, run
from scripts.eval.samples import SampleFile, Setting, check_header
from scripts.eval.task_kinds import TASKS, Problem, Task
from scripts.launch.npu import num_npus


@dataclass(frozen=True)
class Checkpoint:
    """A model directory and its adapter; None, None: the bundled model."""

    model: str | None
    adapter: str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is the same for all rows."""

    data: Path
    """Folder with TASK.jsonl and TASK.examples.jsonl."""
    limit: int | None
    """Problems, from the first one on; None: all."""
    runs: int
    """How often each problem is decoded."""
    one_rank: bool
    """Rows of several devices run on one."""
    prompt: str | None
    """Name of the prompts' format; None: the row's own."""
    examples: int | None
    """Examples in a prompt; None: as many as the row's own."""
    max_new_tokens: int | None
    """None: the row's own."""
    engine: Mapping[str, Any]
    """Engine settings that were given, by name."""


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a row runs, or why it does not."""

    skipped: str = ""
    """The reason; empty if the row runs. All other fields are those of a row that runs."""
    engine: Mapping[str, Any] | None = None
    """The engine's settings, by name."""
    setting: Setting | None = None
    tasks: TaskFile | None = None
    """The problems."""
    examples: Sequence[Problem] = ()
    """Solved problems in each prompt."""
    prompt: str = ""
    """Name of the prompts' format."""


@dataclass(frozen=True)
class RowOutcome:
    """What came of a row."""

    result: Result
    ran_on: str
    """Model, device, number format and ranks, for people."""
    skipped: str = ""


class TableRun:
    """Runs rows; closes the model that is loaded at the end of its ``with`` block.

    Args:
        out: gets a folder for each row.
        options: what is the same for all rows.
        checkpoints: by the paper's name of a model.
    """

    def __init__(self, out: Path, options: Options, checkpoints: Mapping[str, Checkpoint]) -> None:
        self._out, self._options, self._checkpoints = out, options, checkpoints
        self._loader = Loader()

    def __enter__(self) -> TableRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def check(self, rows: Sequence[Row]) -> dict[Row, RowPlan]:
        """How each row runs, by everything that can be known before a model is loaded.

        Raises:
            TaskFileError: a task file that a row needs cannot be used.
            ParameterError: a decoding parameter is not allowed, or the folder of a row has samples of something else.
        """
        plans = {row: self._plan(row) for row in rows}
        for row, plan in plans.items():
            if not plan.skipped:
                check_header(self._out / row.name, self._header(row, plan))
        return plans

    def _plan(self, row: Row) -> RowPlan:
        options, task = self._options, TASKS[row.task]
        checkpoint = self._checkpoints.get(row.model)
        if checkpoint is None:
            return RowPlan(skipped=f"no --checkpoint {row.model}=DIR")
        launch = row.preset.launch
        published_ranks = launch.tensor_parallel_size * launch.branch_parallel_size if row.is_distributed else 1
        ranks = 1 if options.one_rank else published_ranks
        if reason := self._reason_to_skip(task, checkpoint, ranks):
            return RowPlan(skipped=reason)
        is_bundled = checkpoint.model is None
        count = options.examples
        if count is None:
            count = 0 if is_bundled else row.preset.tasks.get(row.task, 0)
        decoding = row.preset.merged(row.options)
        if options.max_new_tokens is not None:
            decoding["max_new_tokens"] = options.max_new_tokens
        params = DecodingParams(**decoding)
        return RowPlan(
            engine=self._engine(row, checkpoint, params, ranks),
            setting=Setting(params, row.name),
            tasks=read_problems(options.data / f"{row.task}.jsonl", row.task),
            examples=read_examples(task, options.data, count),
            prompt=options.prompt or (CHAT.name if is_bundled else row.prompt),
        )

    def _reason_to_skip(self, task: Task, checkpoint: Checkpoint, ranks: int) -> str:
        """Why a row cannot run here; empty if it can.

        Args:
            task: of the row.
            checkpoint: of the row.
            ranks: devices that the row needs.
        """
        if problem := problem_of(checkpoint):
            return problem
        available = num_devices(self._options.engine.get("device", "cpu"))
        if ranks > available:
            remedy = "; --one-rank runs it on one" if available else ""
            return f"needs {ranks} devices, and there are {available}{remedy}"
        try:
            check_runnable([task])
        except TaskFileError as error:
            return str(error)
        return ""

    def _engine(self, row: Row, checkpoint: Checkpoint, params: DecodingParams, ranks: int) -> dict[str, Any]:
        """The engine's settings for a row that runs on so many ranks, by name."""
        given = self._options.engine
        engine = {
            "enable_prefix_caching": False,
            "seed": 0,
            "max_num_seqs": 1,
            **graphs_for(params, given),
            **given,
            "model": checkpoint.model,
            "lora": checkpoint.adapter,
        }
        if ranks > 1:
            launch = row.preset.launch
            engine["tensor_parallel_size"] = launch.tensor_parallel_size
            engine["branch_parallel_size"] = launch.branch_parallel_size
            if launch.branch_parallel_size > 1 and params.window_attention == "full":
                engine = {"graph_mode": "eager", **engine}  # no graph runs it
        return engine

    def measure(self, row: Row, plan: RowPlan) -> RowOutcome:
        """Measures what a row does not have yet."""
        assert plan.engine is not None
        assert plan.setting is not None
        assert plan.tasks is not None
        problems = plan.tasks.problems[: self._options.limit]
        file = SampleFile(self._out / row.name, self._header(row, plan))
        work = Plan(
            settings=[plan.setting],
            problems=problems,
            examples={row.task: plan.examples},
            runs=self._options.runs,
            warmup=1,
            cut=row.preset.cuts_answers,
        )
        if work.missing(file):
            llm = self._loader.load(plan.engine)
            assert llm.tokenizer is not None
            run(llm, PromptMaker(find_format(plan.prompt), llm.tokenizer), work, file)
        (result,) = results([plan.setting], file, len(problems))
        return RowOutcome(result, self._ran_on(EngineConfig(**plan.engine)))

    def _header(self, row: Row, plan: RowPlan) -> dict[str, Any]:
        """What must be the same in all samples of a row."""
        assert plan.engine is not None
        assert plan.setting is not None
        assert plan.tasks is not None
        examples, cut = {row.task: plan.examples}, row.preset.cuts_answers
        config = EngineConfig(**plan.engine)
        header = describe_benchmark(config, plan.tasks, self._options.limit, plan.prompt, examples, cut=cut)
        return {**header, "setting": plan.setting.key}

    def _ran_on(self, config: EngineConfig) -> str:
        model = "bundled model" if config.model is None else model_name(config)
        ranks = f"tp {config.tensor_parallel_size} x bp {config.branch_parallel_size}"
        return f"{model}, {config.device}, {number_format(config)}, {ranks}"


@cache
def problem_of(checkpoint: Checkpoint) -> str:
    """Why a checkpoint cannot be loaded, as far as its files say without reading weights; empty if it can."""
    from lopa_ascend.checkpoint import open_checkpoint  # these import torch, which takes seconds
    from lopa_ascend.checkpoint.files import CheckpointError, check_directory
    from lopa_ascend.families import dream

    try:
        if checkpoint.model is not None:
            open_checkpoint(checkpoint.model, dream.FAMILY)
        if checkpoint.adapter is not None:
            check_directory(Path(checkpoint.adapter))
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


def number_format(config: EngineConfig) -> str:
    """The number format of linear layers, such as "bfloat16" or "w8a8"."""
    from lopa_ascend.checkpoint import open_checkpoint, with_dtype  # these import torch, which takes seconds
    from lopa_ascend.families import dream

    found = open_checkpoint(DEMO_MODEL if config.model is None else config.model, dream.FAMILY)
    if found.quantized is not None:
        codes = found.quantized.codes
        return codes if codes == "fp8" else f"w{codes.removeprefix('int')}a8"
    return config.quantization or with_dtype(found.config, config.dtype).dtype


def num_devices(device: str) -> int:
    """How many ranks can run at the same time: a rank takes an NPU, or a core."""
    if device == "cpu":
        return os.cpu_count() or 1
    return num_npus()
