"""How many pages the KV pool has by default: what a full server can use, as far as the memory beside the steps goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lopa_ascend.backend.compiler import Compiler, Eager, GraphError
from lopa_ascend.backend.cuda import Cuda
from lopa_ascend.backend.device import Device
from lopa_ascend.backend.npu import Npu
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.engine.prepare import choose_num_pages
from lopa_ascend.graph.buckets import Bucket, declare
from lopa_ascend.graph.setup import GraphPlan

GIB = 2**30
MAX_MODEL_LEN, PAGES = 8192, 64
VOCABULARY, HIDDEN, INNER = 152064, 3584, 18944


def num_pages(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    page_bytes: int,
    slots: int,
    ranks: dict[str, Any],
    device: type[Device] = Npu,
    has_kernel: bool = False,
) -> int:
    """The pages of Dream-7B's pool.

    Args:
        free: bytes that the device has left.
        slots: slots of a sequence on a rank.
        has_kernel: whether one kernel scores, and takes no memory.
    """
    monkeypatch.setattr(device, "free_memory", lambda *_: free)
    config = EngineConfig(device=device.name, **ranks)
    shape = Bucket(config.max_num_seqs, 8, PAGES, 4, slots, 32, 8)
    plan = GraphPlan(shape, declare(shape, 8192).declared, (), Eager())
    ops = SimpleNamespace(row_stats=object() if has_kernel else None)
    prepared: Any = SimpleNamespace(max_model_len=MAX_MODEL_LEN, graph_plan=plan, ops=ops)
    tp = config.tensor_parallel_size
    sizes = SimpleNamespace(hidden_size=HIDDEN, intermediate_size=INNER, experts=None)
    head = torch.empty(0, dtype=torch.bfloat16)
    model: Any = SimpleNamespace(config=sizes, local_vocab_size=VOCABULARY // tp, head=head)
    return choose_num_pages(config, prepared, model, page_bytes)


def test_what_the_largest_step_and_a_long_prompt_need_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dream-7B on one die: 8,192 rows of logits beside their values in float32 are 11.6 GiB."""
    page_bytes, free = 7 * 2**20, 45 * GIB
    pages = num_pages(monkeypatch, free, page_bytes, slots=4, ranks={})
    scores = 8192 * VOCABULARY * (2 + 4 + 4)
    padding = 8192 // 128 * page_bytes
    activations = 8192 * (3 * INNER + 4 * HIDDEN) * 2
    left = free - pages * page_bytes - scores - padding - 2 * activations
    assert left == pytest.approx((free - scores - padding - 2 * activations) / 5, abs=page_bytes)


def test_dream_7b_with_default_flags_has_room_for_its_graphs_on_24_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RTX 4090 has 25.2 GB free and 15.3 GB are weights. What graphs allocate is their pool, of the largest step;
    beside it a prompt of 8,192 tokens and, in a GB at most, what CUDA's libraries keep."""
    free, page_bytes = 9_900_000_000, 7 * 2**20
    pages = num_pages(monkeypatch, free, page_bytes, slots=4, ranks={}, device=Cuda, has_kernel=True)
    kept = pages * page_bytes + 8192 // 128 * page_bytes  # the pool of pages, and its padding
    logits, activations = 8192 * VOCABULARY * 2, 8192 * (3 * INNER + 2 * HIDDEN) * 2
    assert kept + (logits + activations) + activations < free - 0.8e9
    assert pages >= 4 * PAGES  # a request of the longest sequence with three lookahead branches


def test_a_share_of_the_device_is_what_weights_and_pages_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 GiB, 15 are weights and 9 are another program's."""
    page_bytes = 7 * 2**20
    monkeypatch.setattr(Npu, "held_memory", lambda *_: (15 * GIB, 64 * GIB))

    def pages(share: float | None) -> int:
        ranks = {} if share is None else {"gpu_memory_utilization": share}
        return num_pages(monkeypatch, 40 * GIB, page_bytes, slots=4, ranks=ranks)

    reserved = 8192 * VOCABULARY * 10 + 64 * page_bytes + 2 * 8192 * (3 * INNER + 4 * HIDDEN) * 2
    assert pages(0.6) == (int(64 * GIB * 0.6) - 15 * GIB - reserved) * 4 // 5 // page_bytes
    assert pages(1.0) == pages(0.9) == pages(None), "the other program keeps what it has"
    with pytest.raises(ParameterError, match=r"gpu_memory_utilization: a share of 0\.4 leaves no KV page beside the"):
        pages(0.4)


def test_one_kernel_takes_the_entries_of_a_whole_step_where_memory_goes_that_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one slot on each of four groups of ranks a step has 256 entries, and a request only 64 pages."""
    ranks: dict[str, Any] = {"tensor_parallel_size": 4, "branch_parallel_size": 4}
    page_bytes = 7 * 2**20 // 4
    assert num_pages(monkeypatch, 55 * GIB, page_bytes, slots=1, ranks=ranks) == 32 * 8 * PAGES
    assert num_pages(monkeypatch, 20 * GIB, page_bytes, slots=1, ranks=ranks) < 32 * 8 * PAGES


def test_a_step_for_which_the_device_has_no_memory_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 4.64 GiB")

    compiler: Compiler = Eager()
    monkeypatch.setattr(compiler, "_compile", fail)
    with pytest.raises(GraphError, match=r"bucket large: .*no memory.*4\.64 GiB.*lower kv_cache_memory"):
        compiler.compile(fail, "large", [], [2])
