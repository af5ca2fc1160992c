"""A model in plain torch, fused to NpuOps: what torchair makes of it, and that it still computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.graph.fusion import Report, fuse
from lopa_ascend.kv.pages import PAGE_SIZE
from tests.graph.plain import PlainModel, rms_norm
from tests.npu.lab import device  # noqa: F401
from tests.npu.lab.lowering import Lowered, lower, optimised
from tests.npu.samples import forward_inputs, moved, paged_entries, small_dream

pytestmark = pytest.mark.npu
OPS = NpuOps()
LAYER = {
    "AddRmsNorm": 2,
    "MatMulV2": 1,  # with bias
    "SplitV": 1,
    "RotaryMul": 2,
    "ScatterPaKvCache": 1,
    "FusedInferAttentionScore": 1,
    "MatMul": 3,
    "SwiGlu": 1,
}
"""The kernels of a layer of Dream, which is written for NpuOps."""


class Plain:
    """A plain model of ``num_layers`` with its arguments, on the device: tokens, positions, slots, page tables and
    caches. Keys and values are written, and attention is computed, by NpuOps: these have no plain form."""

    def __init__(self, num_layers: int):
        torch.manual_seed(0)
        config = small_dream(num_layers)
        self.model = PlainModel(config, torch.bfloat16).to("npu")
        self.entries, num_pages = paged_entries((32,) * 4, (544,) * 4)
        inputs = moved(forward_inputs(self.entries, num_pages), "npu")
        shape = (2 * num_layers, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        caches = torch.randn(shape).bfloat16().to("npu")
        self.args = [inputs.tokens, inputs.positions, inputs.slot_mapping, inputs.entries.page_tables, *caches.unbind()]

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, *caches: Tensor) -> Tensor:
        entries = replace(self.entries, page_tables=tables)

        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            OPS.kv_write(k, v, caches[2 * n], caches[2 * n + 1], slots)
            return OPS.attention(q, caches[2 * n], caches[2 * n + 1], entries)

        return self.model(tokens, positions, attend)

    def copied_args(self) -> list[Tensor]:
        return [x.clone() for x in self.args]

    def traced(self) -> GraphModule:
        with torch.no_grad():
            return make_fx(self)(*self.copied_args())

    def fused(self) -> tuple[GraphModule, Report]:
        module = self.traced()
        return module, fuse(module, OPS)


def lowered(module: GraphModule, *args: Tensor) -> Lowered:
    return lower(lambda *given: module(*given), *args)


def test_a_plain_layer_lowers_to_the_kernels_of_the_one_written_by_hand() -> None:
    one, two = Plain(1), Plain(2)
    before = lowered(two.traced(), *two.args).kernels - lowered(one.traced(), *one.args).kernels
    assert before.total() > 60, before
    graphs = [lowered(plain.fused()[0], *plain.args) for plain in (one, two)]
    assert graphs[1].kernels - graphs[0].kernels == Counter(LAYER)
    # Besides: embedding, cosines and sines of the positions, their tables, the first norm, the head.
    rest = {"GatherV2": 1, "IndexByTensor": 2, "StridedSliceV2": 2, "ConcatV2": 2, "RmsNorm": 1, "MatMul": 1}
    assert graphs[0].kernels - Counter(LAYER) == Counter(rest)


def test_a_fused_model_computes_what_the_plain_one_does() -> None:
    plain = Plain(2)
    module, report = plain.fused()
    assert report.fused == {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "packing": 4, "swiglu": 2, "linear": 9}
    expected_args = plain.copied_args()
    with torch.no_grad():
        expected = plain(*expected_args)
    for run in (module, optimised(lambda *given: module(*given))):
        args = plain.copied_args()
        with torch.no_grad():
            out = run(*args)
        assert_near(out, expected)
        for cache, expected_cache in zip(args[4:], expected_args[4:], strict=True):
            assert_near(cache, expected_cache)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Of two layers' worth of roundings in bfloat16."""
    torch.testing.assert_close(got.cpu().float(), expected.cpu().float(), rtol=2**-5, atol=2**-5)


def quantised(normed: Tensor) -> tuple[Tensor, Tensor]:
    wide = normed.float()
    scale = wide.abs().amax(-1) / 127
    return (wide / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale


def test_norm_and_quantisation_are_one_kernel_behind_a_sum_and_two_by_themselves() -> None:
    x, other = torch.randn(2, 32, 256).bfloat16().to("npu")
    weight = torch.randn(256).bfloat16().to("npu")

    def alone(x: Tensor) -> tuple[Tensor, ...]:
        return quantised(rms_norm(x, weight))

    def behind_a_sum(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        total = x.neg() + other.neg()
        return *quantised(rms_norm(total, weight)), total

    def kernels(function: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> Counter[str]:
        module = make_fx(function)(*args)
        fuse(module, OPS)
        return lowered(module, *args).kernels

    assert kernels(alone, x) == {"RmsNorm": 1, "DynamicQuant": 1}
    assert kernels(behind_a_sum, x, other) == {"Neg": 2, "AddRmsNormDynamicQuant": 1}


def test_norm_and_quantisation_as_the_cpu_defines_them() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 70, 256).bfloat16()
    x[3], residual[3] = 0, 0
    weight = torch.randn(256).bfloat16()
    cpu = CpuOps()
    npu_x, npu_weight = x.to("npu"), weight.to("npu")
    codes, scale, total = OPS.add_rms_norm_quant(npu_x, residual.to("npu"), npu_weight, 1e-6)
    expected_codes, expected_scale, expected_total = cpu.add_rms_norm_quant(x, residual.clone(), weight, 1e-6)
    assert torch.equal(codes.cpu(), expected_codes)
    torch.testing.assert_close(scale.cpu(), expected_scale)
    assert torch.equal(total.cpu(), expected_total)
    codes, scale = OPS.rms_norm_quant(npu_x, npu_weight, 1e-6)
    expected_codes, expected_scale = cpu.rms_norm_quant(x, weight, 1e-6)
    torch.testing.assert_close(codes.cpu(), expected_codes, rtol=0, atol=1)  # of a norm that is rounded before
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=2**-8, atol=0)
    assert not codes[3].any()
