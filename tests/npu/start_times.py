"""CPU seconds of the start of a rank with graphs: all default buckets of Dream-7B on 4 x 4 ranks are compiled, and then
loaded from the cache of compiled graphs.

    .venv-npu/bin/python -m tests.npu.lab tests.npu.start_times          minutes

Nothing is computed, and no weight is touched or read. The ranks of both groups are one process here, whose collectives
reach nobody.
"""

from __future__ import annotations

import tempfile
import time

import torch

from lopa_ascend.config import EngineConfig
from lopa_ascend.config.engine import DEFAULT_MODEL_LEN
from lopa_ascend.graph.setup import plan_graphs
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.types import DREAM
from tests.npu.lab import capture, device, engine  # noqa: F401
from tests.npu.report import NUM_LAYERS, Sample, ranks, step_tensors, variants

SIZE = 4
"""Of both groups."""


def start(cache: str) -> list[float]:
    """CPU seconds of each bucket."""
    config = EngineConfig(device="npu", tensor_parallel_size=SIZE, branch_parallel_size=SIZE, graph_cache=cache)
    plan = plan_graphs(config, "start times", DREAM, DEFAULT_MODEL_LEN, max_tokens=DEFAULT_MODEL_LEN)
    seconds = []
    with ranks(SIZE) as group, device.nothing_computed():
        num_pages = config.max_num_seqs * plan.shape.slots * plan.shape.pages + plan.num_padding_pages
        sample = Sample(variants()["bf16_tp4"], NUM_LAYERS, group, num_pages)
        caches = sample.k_caches, sample.v_caches
        for bucket in plan.steps:
            begin = time.process_time()
            step = DecodeStep(bucket, sample.model, sample.score, group)
            tensors = step_tensors(bucket, sample.model.config.hidden_size, caches, seats=config.max_num_seqs)
            lengths = [544] * (bucket.sequences * bucket.slots * bucket.entries)
            plan.compiler.compile(step, bucket.name, tensors, lengths)
            seconds.append(time.process_time() - begin)
            loaded = "loaded" if plan.compiler.num_loaded else "compiled"
            print(f"{bucket.name}: {loaded} in {seconds[-1]:.1f} s", flush=True)
    torch._dynamo.reset()
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            seconds = start(cache)
            print(f"{kind}: {len(seconds)} graphs of {NUM_LAYERS} layers in {sum(seconds):.0f} s of CPU time")


if __name__ == "__main__":
    main()
