"""Decodes prompts in this process, and measures what that takes."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.checkpoint.write import write_checkpoint
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.families import FAMILIES, read_config
from lopa_ascend.families.family import shape
from lopa_ascend.types import GenerationOutput, Update
from scripts.bench.parts import Peaks, measure_parts
from scripts.eval.make_checkpoint import random_tensors

ORDINARY_STEPS = 40
"""Steps by which an ordinary one is known."""


def write_random_model(folder: Path) -> None:
    """Writes a random Dream of 125 M parameters, unless it is there."""
    if (folder / "config.json").exists():
        return
    family = FAMILIES["Dream"]
    config = family.config_json("7B") | shape(768, 2048, 12, 12, 4, torch_dtype="float32")
    config |= {"vocab_size": 32000, "mask_token_id": 31999, "eos_token_id": 31998, "max_position_embeddings": 2048}
    specs = family.tensors(read_config(config, {}, str(folder), family)).specs.values()
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, random_tensors(specs, seed=7, dtype=torch.float32), {"config.json": config}, [])


def decode(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: DecodingParams,
    together: int,
    *,
    cached: bool,
    peaks: Peaks | None,
) -> dict[str, Any]:
    """The figures of all prompts, decoded once in batches, by name.

    Args:
        together: requests of a batch.
        cached: prompts are computed before, and taken from the prefix cache, so that only decoding is measured.
        peaks: of this machine, for floors.

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
            outputs.extend(llm.generate(batch, params, trace=params.strategy.drafts, quiet=True))

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
    if drafts := _draft_figures(outputs):
        found["drafts"] = drafts
    if before.graphs is not None and after.graphs is not None:
        computed = max(1, after.graphs.tokens - before.graphs.tokens)
        found["padding"] = round((after.graphs.padded_tokens - before.graphs.padded_tokens) / computed, 3)
    elif peaks is not None:
        found["floors"] = {name: part.floors(peaks) for name, part in parts.items()}
    return found


def middle(decodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The decode with the median CPU time; of an even number the slower one of the two in the middle."""
    return sorted(decodes, key=lambda one: one["cpu_seconds"])[len(decodes) // 2]


def _draft_figures(outputs: Iterable[GenerationOutput]) -> dict[str, Any]:
    """What passes that check drafts have found; nothing if there are none. ``places``: for each place how many rounds
    had a draft there behind right ones, and how many of these were right."""
    records = [record for output in outputs for record in output.trace or () if record.accepted is not None]
    if not records:
        return {}
    rounds = [(len(record.drafted), record.accepted or 0) for record in records]
    reached = Counter(place for drafted, right in rounds for place in range(min(right + 1, drafted)))
    accepted = Counter(place for _, right in rounds for place in range(right))
    return {
        "rounds": len(records),
        "tokens_per_round": round(sum(record.committed for record in records) / len(records), 3),
        "places": [[reached[place], accepted[place]] for place in sorted(reached)],
        "wrong": reached.total() - accepted.total(),
        "seconds": sum(record.second_was_right for record in records),
    }


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
