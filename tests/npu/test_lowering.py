"""What torchair makes of a Dream on NpuOps, and ACL graphs of one. Where nothing is computed, layers are Dream-7B's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_npu import npu

from lopa_ascend.backend import Ops
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.config import ModelConfig
from lopa_ascend.model.dream import Dream, ForwardInputs
from lopa_ascend.pages import PAGE_SIZE
from tests.npu.lab import capture, device  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.lowering import Lowered, lower, optimised
from tests.npu.lab.traffic import host_traffic
from tests.npu.plain_ops import PlainOps
from tests.npu.samples import (
    dream_7b,
    dream_weights,
    forward_inputs,
    moved,
    overwrite,
    paged_entries,
    small_dream,
)

pytestmark = pytest.mark.npu
BLOCKS = (32,) * 4
COPIES = {"TensorMove", "Transpose", "Cast", "Assign"}
Step = Callable[[ForwardInputs, list[Tensor], list[Tensor]], Tensor]


def step_of(model: Dream) -> Step:
    """A forward pass with the head."""
    return lambda inputs, k_caches, v_caches: model.logits(model.forward(inputs, k_caches, v_caches))


def empty_caches(config: ModelConfig, num_pages: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of every layer, cut out of one tensor."""
    shape = (2, config.num_layers, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    keys, values = torch.empty(shape, dtype=torch.bfloat16, device="npu")
    return list(keys), list(values)


def lowered_dream(ops: Ops, num_layers: int) -> Lowered:
    config = dream_7b(num_layers)
    model = Dream(config, dream_weights(config, torch.bfloat16, filled=False), ops)
    entries, num_pages = paged_entries(BLOCKS, (544,) * 4)
    return lower(step_of(model), moved(forward_inputs(entries, num_pages), "npu"), *empty_caches(config, num_pages))


@pytest.mark.parametrize("layout", ["TND", "BSH"])
def test_a_dream_layer_is_twelve_kernels_and_copies_nothing(layout: str) -> None:
    ops = NpuOps(attention_layout=layout)
    one, three = lowered_dream(ops, 1), lowered_dream(ops, 3)
    assert three.num_kernels - one.num_kernels == 2 * 12, three.kernels
    assert one.num_kernels == 12 + 7, one.kernels
    assert not COPIES & set(three.by_type)


def test_the_same_model_in_plain_torch_is_six_times_as_many() -> None:
    ops = PlainOps()
    one, two = lowered_dream(ops, 1), lowered_dream(ops, 2)
    assert 70 <= two.num_kernels - one.num_kernels <= 80, two.kernels


class Small:
    """A model that is small enough to be computed, with caches."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.config = small_dream(2)
        self.weights = dream_weights(self.config, dtype)
        _, self.num_pages = paged_entries(BLOCKS, (640,) * 4)
        shape = (2, 2, self.num_pages, PAGE_SIZE, self.config.num_kv_heads, self.config.head_dim)
        self.caches = torch.randn(shape).to(dtype)

    def step(self, ops: Ops) -> Step:
        weights = {name: weight.to(ops.device) for name, weight in self.weights.items()}
        return step_of(Dream(self.config, weights, ops))

    def inputs(self, seed: int, kv_length: int = 600) -> ForwardInputs:
        """On the CPU."""
        torch.manual_seed(seed)
        entries, num_pages = paged_entries(BLOCKS, (kv_length,) * 4, pages=self.num_pages)
        return forward_inputs(entries, num_pages)


@pytest.mark.parametrize("ops", [NpuOps(), PlainOps()], ids=["fused", "plain"])
def test_a_model_computes_what_it_does_on_the_cpu(ops: Ops) -> None:
    small = Small(torch.float32)
    inputs, caches = small.inputs(1), small.caches.to("npu")
    with numeric():
        out = small.step(ops)(moved(inputs, "npu"), *map(list, caches))
    expected = small.step(CpuOps())(inputs, *map(list, small.caches))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches.cpu(), small.caches, rtol=1e-4, atol=1e-4)


def test_the_graph_after_torchairs_passes_computes_the_same() -> None:
    small, ops = Small(), NpuOps()
    step, inputs = small.step(ops), moved(small.inputs(1), "npu")
    caches, expected_caches = small.caches.to("npu"), small.caches.to("npu")
    expected = step(inputs, *map(list, expected_caches))
    out = optimised(step)(inputs, *map(list, caches))
    assert torch.equal(out.cpu(), expected.cpu())
    assert torch.equal(caches.cpu(), expected_caches.cpu())


def test_a_captured_step_replays_with_new_inputs_and_the_host_waits_for_nothing() -> None:
    small = Small()
    step, inputs = small.step(NpuOps()), moved(small.inputs(1), "npu")
    caches, expected_caches = small.caches.to("npu"), small.caches.to("npu")
    graph = npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        out = step(inputs, *map(list, caches))
    assert torch.equal(caches.cpu(), expected_caches.cpu())
    for seed, kv_length in ((1, 600), (2, 40), (3, 640)):
        new = moved(small.inputs(seed, kv_length), "npu")
        overwrite(inputs, new)
        with host_traffic() as traffic:
            graph.replay()
            graph.update([{"actual_seq_lengths_kv": [kv_length] * 4}])
        assert traffic.launches == ["replay"]
        assert not traffic.stalls
        expected = step(new, *map(list, expected_caches))
        assert torch.equal(out.cpu(), expected.cpu())
        assert torch.equal(caches.cpu(), expected_caches.cpu())
