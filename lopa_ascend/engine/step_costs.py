"""Measures how long steps take on this device, by the tokens that they compute."""

from __future__ import annotations

import time

import numpy as np
import torch

from lopa_ascend.backend import Entries
from lopa_ascend.backend.memory import is_out_of_memory
from lopa_ascend.decode.allotment import StepCosts
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.probe import no_probe
from lopa_ascend.runner.runner import Runner
from lopa_ascend.runner.scoring import Job
from lopa_ascend.types import Scoring

ROW = 32
"""Tokens of a row."""
LONG = 0.1
"""Seconds. Sizes are measured from small to large, at least two of them; after a step that takes longer than this, or
that has no memory, no larger size is measured."""
REPETITIONS = 5
"""The most measurements of one size."""
ENOUGH = 0.1
"""Seconds that repeated measurements of one size may take together, because other requests wait meanwhile. One
repetition is made in any case."""


def measure_step_costs(runner: Runner, max_tokens: int, world: Group) -> StepCosts:
    """Runs steps of 32, 64, 128, ... tokens on keys and values of their own: a forward pass, and the scores of all its
    tokens. ``StepCosts`` infers other sizes. All ranks get what rank 0 has measured.

    Args:
        max_tokens: tokens of the largest step that is worth measuring; two sizes are measured in any case.
    """
    largest = max(2 * ROW, max_tokens)
    sizes = [ROW * 2**power for power in range(16) if ROW * 2**power <= largest]
    points: list[tuple[int, float]] = []
    for size in sizes:
        try:
            nanoseconds = _measure(runner, size // ROW, world)
        except (RuntimeError, MemoryError) as error:
            if world.size > 1 or len(points) < 2 or not is_out_of_memory(error):
                raise
            break
        points.append((size, nanoseconds / 1e9))
        if len(points) > 1 and nanoseconds > LONG * 1e9:
            break
    return StepCosts(points)


def _measure(runner: Runner, num_rows: int, world: Group) -> int:
    """The nanoseconds of the fastest of several steps, as measured by rank 0. Each of the ``num_rows`` rows is a
    sequence of its own. All ranks make the same number of steps, because a step may contain collectives."""
    model, device = runner.model, runner.ops.device
    num_layers, _, _, num_kv_heads, head_dim = runner.pool.caches.shape[1:]
    # Every row has a page of its own, as in a real step: one attention kernel of an NPU takes no more rows than there
    # are pages. All layers write to the same memory: a measurement does not use what it computes.
    cache_shape = (num_rows, PAGE_SIZE, num_kv_heads, head_dim)
    keys, values = (torch.zeros(cache_shape, dtype=model.head.dtype, device=device) for _ in "kv")
    page_tables = torch.arange(num_rows, dtype=torch.int32, device=device)[:, None]
    written = (page_tables.long() * PAGE_SIZE + torch.arange(ROW, device=device)).flatten()
    entries = Entries(
        lengths=(ROW,) * num_rows,
        kv_lengths=(ROW,) * num_rows,
        page_tables=page_tables,
        prefix_groups=tuple(range(num_rows)),
        prefixes=(0,) * num_rows,
    ).divided(runner.ops.max_queries)
    inputs = ForwardInputs(
        tokens=torch.zeros(ROW * num_rows, dtype=torch.int64, device=device),
        positions=torch.zeros(ROW * num_rows, dtype=torch.int64, device=device),  # max_model_len may be below 32
        slot_mapping=written,
        source=None,
        entries=entries,
        rows=torch.arange(ROW * num_rows, device=device),
    )
    scoring = Scoring(confidence="max_prob", mask=model.config.mask_token_id, num_token_ids=model.config.vocab_size)
    positions = np.tile(np.arange(ROW), num_rows)

    def timed_step() -> int:
        start = time.perf_counter_ns()
        hidden = model.forward(inputs, [keys] * num_layers, [values] * num_layers)
        runner.eager.scorer.score([Job(hidden, positions, scoring, 0)], no_probe)  # ends on the host
        return time.perf_counter_ns() - start

    def by_rank_0(nanoseconds: int) -> int:
        return int(world.broadcast(torch.tensor([nanoseconds]), 0, "start"))

    first = by_rank_0(timed_step())
    num_more = max(1, min(REPETITIONS - 1, int(ENOUGH * 1e9) // first))  # the first step of a size may be slow
    return by_rank_0(min([first, *(timed_step() for _ in range(num_more))]))
