"""Decodes prompts in this process, and measures what that takes."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.types import GenerationOutput
from scripts.bench.parts import Peaks, floors, measure_parts

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
    """The figures of all prompts, decoded once in batches of ``together``, by the headings of the table; with ``peaks``
    of this machine also "floors" by part.

    With ``cached`` prompts are computed before, and taken from the prefix cache, so that only decoding is measured;
    RuntimeError if it has no room for them.
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
    with timed_calls(llm.engine, "step") as steps:
        parts = measure_parts(llm, generate)
    wall, after = time.perf_counter() - started, llm.engine.stats()
    # A causal model computes a prompt's last token again, whose prediction begins the answer.
    is_causal = llm.engine.runner.model.properties.is_causal
    if cached and not is_causal and after.num_prefill_steps != before.num_prefill_steps:
        raise RuntimeError("prompts were computed again: the prefix cache has no room for them")
    forwards = sum(output.num_forwards for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    ids = repr([tuple(output.token_ids) for output in outputs])
    seconds = sum(part.seconds for part in parts.values())
    found = {
        "tokens": tokens,
        "digest": hashlib.sha256(ids.encode()).hexdigest()[:16],
        "forwards": forwards,
        "TPF": round(tokens / forwards, 3),
        "steps": len(steps),
        "tokens/step": round(sum(output.model_tokens for output in outputs) / len(steps), 1),
        **dict.fromkeys(("cpu s", "least", "most"), round(seconds, 3)),
        "wall s": round(wall, 3),
        "tokens/s": round(tokens / seconds, 1),
        "longest step, ms": round(1000 * max(steps), 2),
        **{name: round(1000 * part.seconds / len(steps), 2) for name, part in parts.items()},
    }
    return found if peaks is None else found | {"floors": floors(parts, peaks, len(steps))}


def middle(decodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The decode with the median CPU time, of an even number the slower one in the middle, and the range of all."""
    ranked = sorted(decodes, key=lambda one: one["cpu s"])
    return {**ranked[len(ranked) // 2], "least": ranked[0]["cpu s"], "most": ranked[-1]["cpu s"]}


def arrive(
    llm: LLM, prompts: Sequence[Sequence[int]], params: DecodingParams, arriving: Sequence[int]
) -> dict[str, float]:
    """Lets the prompt ``arriving`` come in while others are decoded; RuntimeError if these end before.

    Returns:
        In CPU milliseconds the median and the longest step of the others, and how long they wait for another one while
        the prompt is computed; the median and the longest wait divided by the median step, ``usual_stall`` and
        ``stall``; CPU seconds and steps until the prompt is computed.
    """
    engine, name = llm.engine, "arriving"
    others = {f"other {number}": tuple(prompt) for number, prompt in enumerate(prompts)}
    for request_id, prompt in others.items():
        engine.add(Request(request_id, prompt, params))
    try:
        while any(sequence.in_prefill for sequence in engine.scheduler.running.values()) or engine.scheduler.waiting:
            engine.step()
        with timed_calls(engine, "step") as own:
            for _ in range(ORDINARY_STEPS):
                engine.step()
        engine.add(Request(name, tuple(arriving), params))
        waits, waited = list[float](), 0.0
        with timed_calls(engine, "step") as steps:
            while waited or engine.scheduler.waiting or engine.scheduler.running[name].in_prefill:
                updates = engine.step()
                waited += steps[-1]
                if any(update.finish_reason for update in updates):
                    raise RuntimeError("a request ended before the prompt was computed: ask for more --new-tokens")
                if any(update.request_id in others for update in updates):
                    waits, own, waited = [*waits, waited], [*own, steps[-1]], 0.0
    finally:
        for request_id in (name, *others):
            engine.abort(request_id)
    step, wait = statistics.median(own), statistics.median(waits)
    times = {"step": step, "longest_step": max(own), "wait": wait, "longest_wait": max(waits)}
    return {
        **{f"{name}_ms": round(1000 * seconds, 1) for name, seconds in times.items()},
        "usual_stall": round(wait / step, 2),
        "stall": round(max(waits) / step, 2),
        "cpu_seconds": round(sum(steps), 1),
        "steps": len(steps),
    }


@contextmanager
def timed_calls(owner: object, *methods: str) -> Iterator[list[float]]:
    """Collects the CPU seconds of each call of some methods of an object, or of all objects of a class."""
    seconds: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.process_time()
            try:
                return method(*arguments)
            finally:
                seconds.append(time.process_time() - started)

        return call

    with ExitStack() as patches:
        for name in methods:
            patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds
