"""Decodes prompts in this process, and measures what that takes."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.types import GenerationOutput, Update
from scripts.bench.parts import Peaks, measure_parts

ORDINARY_STEPS = 40
"""Steps by which an ordinary one is known."""


def decode(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: DecodingParams,
    together: int,
    *,
    cached: bool,
    peaks: Peaks | None,
) -> dict[str, Any]:
    """The figures of all prompts, decoded once in batches of ``together``, by name.

    With ``cached`` prompts are computed before, and taken from the prefix cache, so that only decoding is measured;
    with ``peaks`` of this machine there are floors.

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

    def generate() -> None:
        for batch in batches:
            outputs.extend(llm.generate(batch, params, quiet=True))

    before, started = llm.engine.stats(), time.perf_counter()
    with _timed_steps(llm.engine) as steps:
        parts = measure_parts(llm, generate)
    wall, after = time.perf_counter() - started, llm.engine.stats()
    # A causal model computes a prompt's last token again, whose prediction begins the answer.
    is_causal = llm.engine.runner.model.properties.is_causal
    if cached and not is_causal and after.num_prefill_steps != before.num_prefill_steps:
        raise RuntimeError("prompts were computed again: the prefix cache has no room for them")
    forwards = sum(output.num_forwards for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    ids = repr([tuple(output.token_ids) for output in outputs])
    found: dict[str, Any] = {
        "tokens": tokens,
        "token_digest": hashlib.sha256(ids.encode()).hexdigest()[:16],
        "forwards": forwards,
        "tpf": round(tokens / forwards, 3),
        "steps": len(steps),
        "model_tokens": sum(output.model_tokens for output in outputs),
        "cpu_seconds": round(sum(part.seconds for part in parts.values()), 4),
        "wall_seconds": round(wall, 4),
        "longest_step_ms": round(1000 * max(steps), 2),
        "parts": {name: round(part.seconds, 4) for name, part in parts.items()},
    }
    if peaks is not None:
        found["floors"] = {name: part.floors(peaks) for name, part in parts.items()}
    return found


def middle(decodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The decode with the median CPU time, of an even number the slower one in the middle, and the range of all."""
    ranked = sorted(decodes, key=lambda one: one["cpu_seconds"])
    ends = [ranked[end]["cpu_seconds"] for end in (0, -1)]
    return {**ranked[len(ranked) // 2], "cpu_spread": ends}


def arrive(
    llm: LLM, prompts: Sequence[Sequence[int]], params: DecodingParams, arriving: Sequence[int]
) -> dict[str, float]:
    """Lets the prompt ``arriving`` come in while others are decoded.

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
def _timed_steps(engine: Engine) -> Iterator[list[float]]:
    """Collects the CPU seconds of the engine's steps."""
    seconds, step = list[float](), engine.step

    def timed() -> list[Update]:
        started = time.process_time()
        updates = step()
        seconds.append(time.process_time() - started)
        return updates

    engine.step = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del engine.step  # the class's method again
