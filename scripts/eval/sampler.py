"""Decodes the problems of a benchmark one at a time, measures each answer, and keeps what was measured."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lopa_ascend.probe import PartTimes
from scripts.eval.prompts import PromptMaker
from scripts.eval.samples import Sample, SampleFile

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from lopa_ascend.config import DecodingParams
    from lopa_ascend.types import GenerationOutput, GraphStats
    from scripts.eval.samples import Setting
    from scripts.eval.task_kinds import Problem, Task


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a benchmark decodes."""

    settings: Sequence[Setting]
    problems: Sequence[tuple[Task, Problem]]
    examples: Mapping[str, Sequence[Problem]]
    """By task, the solved problems of its prompt."""
    runs: int
    """How often each problem is decoded in each setting."""
    warmup: int
    """Problems that are decoded before the first measured one of each setting, unmeasured."""
    cut: bool = True
    """Answers are cut at their task's stop strings before they are scored."""

    def missing(self, file: SampleFile) -> list[tuple[int, Setting, int]]:
        """Run, setting and problem of each sample that the file does not have yet. Settings of one engine take turns in
        each run, so that a machine that becomes slower makes all of them slower."""
        wanted = [
            (run, setting, index)
            for run in range(self.runs)
            for setting in self.settings
            for index in range(len(self.problems))
        ]
        return [item for item in wanted if (item[1].key, item[0], item[2]) not in file.samples]


def run(llm: LLM, maker: PromptMaker, plan: Plan, file: SampleFile, *, quiet: bool = False) -> None:
    """Measures what the file does not have yet."""
    maker.check()
    prompts = [maker.text(task, problem, plan.examples.get(task.name, ())) for task, problem in plan.problems]
    for text in prompts:
        ids = llm.tokenize(text)
        for setting in plan.settings:
            llm.check(ids, setting.params)
    missing = plan.missing(file)
    warm: set[str] = set()
    tokens = forwards = right = 0.0
    with tqdm(missing, disable=True if quiet else None, unit="answer", smoothing=0.1) as bar:
        for done, (repetition, setting, index) in enumerate(bar, 1):
            if setting.key not in warm:
                warm.add(setting.key)
                for text in prompts[: plan.warmup]:
                    for _ in llm.stream(text, setting.params):
                        pass
            task, problem = plan.problems[index]
            params = seeded(setting.params, llm.engine.config.seed, repetition, index)
            output, times = decode(llm, prompts[index], params)
            scores = task.score(problem, task.cut(output.text or "", at_stop=plan.cut))
            sample = Sample(
                setting=setting.key,
                run=repetition,
                index=index,
                task=task.name,
                text=output.text or "",
                visible_tokens=num_visible(output, params, llm.config.eos_token_ids),
                opened_tokens=output.num_positions,
                num_forwards=output.num_forwards,
                model_tokens=output.model_tokens,
                filled=filled_tokens(output),
                scores=scores,
                metric=task.metric,
                **times,
            )
            file.add(sample)
            tokens += sample.visible_tokens
            forwards += sample.num_forwards
            right += sample.score
            bar.set_postfix_str(f"TPF {tokens / max(forwards, 1):.2f}, right {right / done:.0%}, {setting.label}"[:70])


def num_visible(output: GenerationOutput, params: DecodingParams, eos: Sequence[int]) -> int:
    """Tokens of an answer before the first one that ends it. Without ``finish_at_eos`` the output goes on after it.

    Args:
        output: the answer.
        params: how it was decoded.
        eos: the model's EOS ids.
    """
    ends = params.ends(params.eos_ids_or(tuple(eos)))
    return next((place for place, token in enumerate(output.token_ids) if token in ends), len(output.token_ids))


def filled_tokens(output: GenerationOutput) -> tuple[int, ...]:
    """How many tokens each forward pass has filled. A winning lookahead branch brings tokens of its own."""
    assert output.trace is not None
    return tuple(len(record.fills) + len(record.branches[record.winner].own_fills) for record in output.trace)


def seeded(params: DecodingParams, engine_seed: int | None, repetition: int, index: int) -> DecodingParams:
    """The parameters of one answer. Sampled ones get a seed that depends on the given seeds, the run and the problem
    alone, so that a run that was interrupted goes on with the same ones.

    Args:
        params: of the setting; their own seed, if there is one, goes before the engine's.
        engine_seed: of --seed.
        repetition: the run, from 0.
        index: the problem, from 0.
    """
    if not params.is_random:
        return params
    base = engine_seed if params.seed is None else params.seed
    return replace(params, seed=random.Random(f"{base} {repetition} {index}").getrandbits(53))


def decode(llm: LLM, prompt: str | Sequence[int], params: DecodingParams) -> tuple[GenerationOutput, dict[str, Any]]:
    """Decodes one prompt; returns the output, and the fields of ``Sample`` that are measured on the way."""
    parts = PartTimes(clock=time.perf_counter)
    llm.engine.runner.set_probe(parts)
    before = llm.engine.stats().graphs
    pages, first, output = 0, None, None
    paused = 0.0
    start = time.perf_counter()
    for progress in llm.stream(prompt, params, trace=True):
        if first is None:
            first = time.perf_counter() - start
            # An answer of one pass has given its pages back already.
            pages = llm.engine.stats().pages_in_use
            paused = time.perf_counter() - start - first
        output = progress.output
    seconds = time.perf_counter() - start - paused
    assert output is not None
    assert first is not None
    after = llm.engine.stats().graphs
    return output, {
        "seconds": seconds,
        "first_seconds": first,
        "forward_seconds": None if after else sum(parts.seconds.get(part, 0.0) for part in ("forward", "score")),
        "host_seconds": sum(parts.seconds.get(part, 0.0) for part in ("inputs", "absorb")) if after else None,
        "pages": pages,
        "graph_tokens": None if before is None or after is None else after.tokens - before.tokens,
        "padded_tokens": None if before is None or after is None else after.padded_tokens - before.padded_tokens,
        "eager_steps": None if before is None or after is None else _num_eager(after) - _num_eager(before),
    }


def _num_eager(stats: GraphStats) -> int:
    return sum(stats.eager_steps.values())
