"""Compiled steps of a model of random weights on a GPU, as an engine builds them, looked at while they are compiled."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import Run, Step
from lopa_ascend.backend.cuda.graphs import Capture, CudaGraphs
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.families import FAMILIES
from lopa_ascend.families.table import SCALE
from lopa_ascend.graph.check import StepCheck
from lopa_ascend.graph.setup import build_executor, plan_graphs
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import SplitModel
from lopa_ascend.model.registry import find_decoder
from lopa_ascend.parallel.collectives import ALONE
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import predict
from scripts.bench.plan.tasks import Workload
from scripts.selftest import gpu
from scripts.selftest.gpu import Plan
from scripts.selftest.hour import WRONG, Report, Row
from tests.made_weights import made_weights

NORM = "norm.weight"
SPREAD = 0.02
"""Standard deviation of weights."""
MAX_SAVED = 2**26
"""Elements of a tensor that is put back after a step: of larger ones a step writes what it would write again."""
NUM_PAGES = 128
MAX_POSITIONS = 8192
REPLAYS = 10


def captures(plan: Plan, found: Report) -> Iterator[Row]:
    """Two layers as an engine captures them: with other KV lengths over random keys a replay has the bits of the step
    op by op; and it can be captured again once all graphs are gone."""
    ops = gpu.opened()
    capture, model = gpu.capture_of(ops), random_model(plan, ops, layers=plan.layers)
    for attempt in ("captured", "captured again after all graphs were destroyed"):
        rows = build(model, capture, plan, 3, plan.keys, bits, max_num_seqs=plan.few_sequences, graph_window_blocks=2)
        yield from ({**row, "name": f"{attempt}, {row['name']}"} for row in rows)
        gc.collect()


def buckets(plan: Plan, found: Report) -> Iterator[Row]:
    """Memory of graphs after each bucket of an engine, from the largest to the smallest and the other way round. Both
    alike: the engine orders them itself."""
    ops = gpu.opened()
    model = random_model(plan, ops, layers=plan.layers)
    most: dict[str, Any] = {"max_num_seqs": plan.most_sequences, "graph_window_blocks": plan.most_blocks}
    for order, largest_first in (("descending", True), ("ascending", False)):
        rows = build(model, gpu.capture_of(ops), plan, 3, plan.keys, None, largest_first=largest_first, **most)
        yield {"name": order, "MiB": {row["name"]: row["MiB of graphs"] for row in rows}}
        gc.collect()


def steps(plan: Plan, found: Report) -> Iterator[Row]:
    """Milliseconds of steps of one request, after what the planner predicts of each; and what their kernels take."""
    ops = gpu.opened()
    for precision in ("bf16", "w8a8"):
        model = random_model(plan, ops, is_int8=precision == "w8a8")
        for k, keys in plan.steps:
            name = f"{precision}, k = {k}, {keys} keys"
            yield {"name": f"{name}, predicted", "ms": predicted(found, k, keys, precision)}
            capture = gpu.capture_of(ops)
            look = clock(capture, ops.device)
            rows = build(model, capture, plan, k, keys, look, max_num_seqs=1, graph_window_blocks=2)
            yield from ({**row, "name": f"{name}, {row['name']}"} for row in rows)
            gc.collect()
        del model
        gc.collect()


def predicted(found: Report, k: int, keys: int, precision: str) -> list[float]:
    """Milliseconds of the planner, the fewest and the most; none for a GPU that it does not know."""
    if (devices := gpu.known_device(found)) is None:
        return []
    work = Workload(precision=precision, k=k, window=64, context=keys - 64, requests=1)
    return [1000 * step.device for step in predict(load_model("Dream-7B"), devices, work).values()]


def random_model(plan: Plan, ops: Ops, *, layers: int | None = None, is_int8: bool = False) -> SplitModel:
    """A model of random weights on the device."""
    config = plan.model if layers is None else replace(plan.model, num_layers=layers)
    family, random = FAMILIES[config.model_type], torch.Generator(ops.device).manual_seed(0)

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith(SCALE):
            return torch.full(shape, SPREAD / 127, device=ops.device)
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, generator=random, device=ops.device, dtype=dtype)
        if name.endswith(NORM):
            return torch.ones(shape, dtype=dtype, device=ops.device)
        return torch.randn(shape, generator=random, device=ops.device, dtype=dtype) * SPREAD

    weights = made_weights(family, config, make, plan.dtype, is_int8=is_int8)
    return find_decoder(family)(family, config, weights, ops, ALONE, min(MAX_POSITIONS, config.max_position_embeddings))


Look = Callable[[Run, Run, list[int], list[int]], Row]
"""Is given a function that replays a graph with some KV lengths, one that runs its step op by op, both from the same
memory, random KV lengths, and the most keys."""


class Examined(CudaGraphs):
    """Graphs that keep what they were captured from.

    Attributes:
        found: what was found about each, in the order of their captures.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture)
        self.found: dict[str, Row] = {}
        self._sources: dict[str, tuple[Run, Step, Sequence[Tensor]]] = {}

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        run = super()._compile(step, name, tensors, kv_lengths)
        self._sources[name] = run, step, tensors
        self.found[name] = {"MiB of graphs": round(self.memory / 2**20)}
        return run

    def look(self, name: str, look: Look, kv_lengths: list[int], most: int) -> None:
        """Adds what ``look`` finds about a graph with the inputs that lie in its memory."""
        run, step, tensors = self._sources[name]
        memory = [(x, x.clone()) for x in tensors if x.numel() <= MAX_SAVED]

        def from_memory(launch: Run) -> Run:
            def launched(lengths: Sequence[int]) -> Tensor:
                for x, saved in memory:
                    x.copy_(saved)
                return launch(lengths)

            return launched

        def op_by_op(lengths: Sequence[int]) -> Tensor:
            return step(tensors, torch.tensor(lengths, dtype=torch.int32, device=tensors[0].device))

        self.found[name] |= look(from_memory(run), from_memory(op_by_op), kv_lengths, [most] * len(kv_lengths))


def build(
    model: SplitModel,
    capture: Capture,
    plan: Plan,
    k: int,
    keys: int,
    look: Look | None,
    *,
    largest_first: bool = True,
    **config: Any,
) -> list[Row]:
    """Compiles the buckets of an engine with ``k`` lookahead branches, and looks at each over random tokens, pages,
    keys and values, of which the longest sequence has ``keys``. Without ``look`` only the memory of graphs is found."""
    ops, dtype, compiler = model.ops, model.head.dtype, Examined(capture)
    engine = EngineConfig(device="cuda", graph_params=GraphParams(k, plan.block), **config)
    graphs = plan_graphs(engine, "random", model.properties, keys, engine.max_num_batched_tokens or 8192)
    graphs = replace(graphs, compiler=compiler, steps=graphs.steps[::-1] if largest_first else graphs.steps)
    pool = KVPool(model.config.kv_shape(), NUM_PAGES, dtype, str(ops.device), graphs.num_padding_pages)
    with torch.inference_mode():
        executor = build_executor(engine, graphs, model, pool, model.config.vocab_size, ALONE)
        if look is not None:
            check = StepCheck(compiler, model, pool, model.config.vocab_size)
            for launcher in executor.launchers.values():
                lengths = launcher.write_random(check)
                compiler.look(launcher.bucket.name, look, lengths, launcher.bucket.pages * PAGE_SIZE)
    return [{"name": name, **row} for name, row in compiler.found.items()]


def bits(replay: Run, step: Run, some: list[int], most: list[int]) -> Row:
    """Whether replays with other KV lengths have the bits of the step op by op."""
    pairs = [(replay(lengths).clone(), step(lengths)) for lengths in (most, some, some[::-1])]
    return {"verdict": "ok" if all(torch.equal(*pair) for pair in pairs) else WRONG, "keys": [max(some), max(most)]}


def clock(capture: Capture, device: torch.device) -> Look:
    """What measures a step with the most keys."""

    def look(replay: Run, _: Run, some: list[int], most: list[int]) -> Row:
        replay(most)
        taken = gpu.timed(lambda: [replay(most) for _ in range(REPLAYS)], capture, device)
        row: Row = {"keys": max(most), "ms": 1000 * taken / REPLAYS}
        begin = time.perf_counter()
        launched = replay(most)
        row["host ms"] = 1000 * (time.perf_counter() - begin)
        if launched.is_cuda:
            capture.wait()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                replay(most)
                capture.wait()
            by_time = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
            row["kernels ms"] = sum(event.device_time_total for event in by_time) / 1000
            row["us by kernel"] = {event.key[:60]: [event.count, event.device_time_total] for event in by_time[:12]}
        return row

    return look
