"""Decodes prompts in this process, and measures what that takes."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.probe import PartTimes
from lopa_ascend.types import GenerationOutput, GraphStats, Update
from scripts.bench.parts import Parts, Peaks, measure_parts

ORDINARY_STEPS = 40
"""Steps by which an ordinary one is known."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of decode."""

    k: int
    """Lookahead branches."""
    window: str
    """Window attention."""
    block_size: int | None
    """None: the model's."""
    requests: int
    """How many are decoded together."""
    prompt_tokens: int | None
    """None: as many as a prompt has."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """All prompts, decoded once."""

    params: DecodingParams
    outputs: tuple[GenerationOutput, ...]
    cpu: float
    """CPU seconds of this process."""
    wall: float
    """Seconds by the clock."""
    steps: list[float]
    """CPU seconds of each engine step."""
    parts: dict[str, float]
    """CPU seconds by part."""
    work: Parts | None
    """The work of the parts; None with compiled steps."""
    padding: float | None
    """Share of the tokens of compiled steps that no branch needed; None without compiled steps."""

    def as_json(self, peaks: Peaks | None) -> dict[str, Any]:
        """The figures by name. ``peaks``: of this machine, for floors; None for none."""
        forwards = sum(output.num_forwards for output in self.outputs)
        tokens = sum(len(output.token_ids) for output in self.outputs)
        model_tokens = sum(output.model_tokens for output in self.outputs)
        ids = repr([tuple(output.token_ids) for output in self.outputs])
        found: dict[str, Any] = {
            "tokens": tokens,
            "token_digest": hashlib.sha256(ids.encode()).hexdigest()[:16],
            "forwards": forwards,
            "tpf": round(tokens / forwards, 3),
            "steps": len(self.steps),
            "model_tokens": model_tokens,
            "cpu_seconds": round(self.cpu, 4),
            "wall_seconds": round(self.wall, 4),
            "longest_step_ms": round(1000 * max(self.steps), 2),
            "parts": {name: round(seconds, 4) for name, seconds in self.parts.items()},
        }
        if drafts := draft_figures(self.outputs):
            found["drafts"] = drafts
        if peaks is not None and self.work is not None:
            found["floors"] = {
                name: dict(zip(("memory", "products"), part.floors(peaks), strict=True))
                for name, part in self.work.by_name.items()
            }
        if self.padding is not None:
            found["padding"] = round(self.padding, 3)
        return found


def decode(
    llm: LLM, prompts: Sequence[Sequence[int]], params: DecodingParams, together: int, *, cached: bool
) -> Decode:
    """Decodes prompts in batches.

    Args:
        llm: the model.
        prompts: token ids.
        params: of every request.
        together: requests of a batch.
        cached: prompts are computed before, and taken from the prefix cache, so that only decoding is measured.

    Raises:
        RuntimeError: the prefix cache has no room for the prompts.
    """
    batches = [prompts[first : first + together] for first in range(0, len(prompts), together)]
    if cached:
        # With full attention a prompt is kept together with the first block that it was computed with.
        first_block = replace(params, max_new_tokens=min(params.block_size, params.max_new_tokens))
        for batch in batches:
            llm.generate(batch, first_block, quiet=True)
    outputs: list[GenerationOutput] = []
    before = llm.engine.stats()
    with timed_steps(llm) as steps:
        started = time.perf_counter()
        parts, work = _measured(llm, lambda: outputs.extend(_generated(llm, batches, params)))
        wall = time.perf_counter() - started
    after = llm.engine.stats()
    # A causal model computes a prompt's last token again, whose prediction begins the answer.
    is_causal = llm.engine.runner.model.properties.is_causal
    if cached and not is_causal and after.num_prefill_steps != before.num_prefill_steps:
        raise RuntimeError("prompts were computed again: the prefix cache has no room for them")
    return Decode(
        params=params,
        outputs=tuple(outputs),
        cpu=sum(parts.values()),
        wall=wall,
        steps=steps,
        parts=parts,
        work=work,
        padding=_padding(before.graphs, after.graphs),
    )


def _generated(
    llm: LLM, batches: Iterable[Sequence[Sequence[int]]], params: DecodingParams
) -> Iterator[GenerationOutput]:
    trace: bool = params.strategy.drafts
    return itertools.chain.from_iterable(llm.generate(batch, params, trace=trace, quiet=True) for batch in batches)


def draft_figures(outputs: Iterable[GenerationOutput]) -> dict[str, Any]:
    """What passes that check drafts have found; nothing if there are none. ``places``: for each place how many rounds
    had a draft there behind right ones, and how many of these were right."""
    rounds = [
        (len(record.drafted), record.accepted, record)
        for output in outputs
        for record in output.trace or ()
        if record.accepted is not None
    ]
    if not rounds:
        return {}
    reached = Counter(place for drafted, right, _ in rounds for place in range(min(right + 1, drafted)))
    accepted = Counter(place for _, right, _ in rounds for place in range(right))
    written = sum(record.committed for _, _, record in rounds)
    return {
        "rounds": len(rounds),
        "tokens_per_round": round(written / len(rounds), 3),
        "places": [[reached[place], accepted[place]] for place in sorted(reached)],
        "wrong": reached.total() - accepted.total(),
        "seconds": sum(record.second_was_right for _, _, record in rounds),
    }


def _measured(llm: LLM, run: Callable[[], object]) -> tuple[dict[str, float], Parts | None]:
    """CPU seconds by part of what ``run`` computes, and the work of the parts.

    A compiled step cannot be divided; of it only the host's parts are known: "inputs" and "absorb".
    """
    if llm.engine.stats().graphs is None:
        work = measure_parts(llm, run)
        return {name: part.seconds for name, part in work.by_name.items()}, work
    runner, times = llm.engine.runner, PartTimes()
    probe = runner.eager.probe
    runner.set_probe(times)
    started = time.process_time()
    try:
        run()
    finally:
        total = time.process_time() - started
        runner.set_probe(probe)
    return {**times.seconds, "compiled steps and host": total - sum(times.seconds.values())}, None


def arrive(
    llm: LLM, prompts: Sequence[Sequence[int]], params: DecodingParams, arriving: Sequence[int]
) -> dict[str, float]:
    """Lets a prompt come in while others are decoded.

    Args:
        llm: the model.
        prompts: token ids of the others.
        params: of every request.
        arriving: token ids of the prompt.

    Returns:
        In CPU milliseconds the median and the longest step of the others, and how long they wait for another one while
        the prompt is computed; the median and the longest wait divided by the median step, ``usual_stall`` and
        ``stall``; CPU seconds and steps until the prompt is computed.

    Raises:
        RuntimeError: the others ended before.
    """
    engine, name = llm.engine, "arriving"
    others = {f"other {number}": tuple(prompt) for number, prompt in enumerate(prompts)}
    for request_id, prompt in others.items():
        engine.add(Request(request_id, prompt, params))
    try:
        while any(sequence.in_prefill for sequence in engine.scheduler.running.values()) or engine.scheduler.waiting:
            engine.step()
        own = [seconds for seconds, _ in itertools.islice(_steps(engine), ORDINARY_STEPS)]
        engine.add(Request(name, tuple(arriving), params))
        waits, waited, total, count = list[float](), 0.0, 0.0, 0
        for seconds, updates in _steps(engine):
            waited, total, count = waited + seconds, total + seconds, count + 1
            if any(update.finish_reason for update in updates):
                raise RuntimeError("a request ended before the prompt was computed: ask for more --new-tokens")
            if any(update.request_id in others for update in updates):
                waits, own, waited = [*waits, waited], [*own, seconds], 0.0
                if not (engine.scheduler.waiting or engine.scheduler.running[name].in_prefill):
                    break
    finally:
        for request_id in (name, *others):
            engine.abort(request_id)
    step, wait = statistics.median(own), statistics.median(waits)
    times = {"step": step, "longest_step": max(own), "wait": wait, "longest_wait": max(waits)}
    return {
        **{f"{name}_ms": round(1000 * seconds, 1) for name, seconds in times.items()},
        "usual_stall": round(wait / step, 2),
        "stall": round(max(waits) / step, 2),
        "cpu_seconds": round(total, 1),
        "steps": count,
    }


def _steps(engine: Engine) -> Iterator[tuple[float, list[Update]]]:
    """Makes steps: CPU seconds and updates of each."""
    while True:
        started = time.process_time()
        updates = engine.step()
        yield time.process_time() - started, updates


@contextmanager
def timed_steps(llm: LLM) -> Iterator[list[float]]:
    """Collects the CPU seconds of the engine's steps."""
    engine, seconds = llm.engine, list[float]()
    step = engine.step

    def timed() -> Any:
        started = time.process_time()
        updates = step()
        seconds.append(time.process_time() - started)
        return updates

    engine.step = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del engine.step  # the class's method again


def _padding(before: GraphStats | None, after: GraphStats | None) -> float | None:
    if before is None or after is None:
        return None
    return (after.padded_tokens - before.padded_tokens) / max(1, after.tokens - before.tokens)


def middle(decodes: Sequence[Decode]) -> Decode:
    """The decode with the median CPU time; of an even number the slower one of the two in the middle."""
    return sorted(decodes, key=lambda one: one.cpu)[len(decodes) // 2]
