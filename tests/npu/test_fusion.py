"""A model in plain torch, fused to NpuOps: what torchair makes of it, and that it still computes the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from examples.plain_dream.plain_dream import PlainDream
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from tests.npu.cases import paged_entries
from tests.npu.lab import device  # noqa: F401
from tests.npu.lab.lowering import lower, optimised
from tests.npu.report import UNFILLED, Variant, lowered_model, lowered_step
from tests.npu.samples import forward_inputs, moved, plain_dream, small_dream
from tests.npu.test_lowering import ENDS, LAYER, SCORE, layers

pytestmark = pytest.mark.npu
OPS = NpuOps()


class Plain:
    """A plain Dream of ``num_layers`` on the device, with inputs. Keys and values are written, and attention is
    computed, by NpuOps: these have no plain form."""

    def __init__(self, num_layers: int):
        torch.manual_seed(0)
        self.config = small_dream(num_layers)
        self.module = PlainDream(self.config).to(torch.bfloat16).requires_grad_(False).to("npu")
        entries, num_pages = paged_entries((32,) * 4, (544,) * 4)
        self.inputs = replace(moved(forward_inputs(entries, num_pages), "npu"), rows=None)
        shape = (2, num_layers, num_pages, PAGE_SIZE, self.config.num_kv_heads, self.config.head_dim)
        self.caches = torch.randn(shape).bfloat16().to("npu")

    def __call__(self, inputs: ForwardInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> Tensor:
        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            OPS.kv_write(k, v, k_caches[n], v_caches[n], inputs.slot_mapping)
            return OPS.attention(q, k_caches[n], v_caches[n], inputs.entries)

        hidden: Tensor = self.module(inputs.tokens, inputs.positions, attend)
        return hidden


def test_a_plain_dream_lowers_to_the_kernels_of_the_one_written_by_hand() -> None:
    """But for the angles of the rope: here cosines and sines are gathered from a table each, and those of v put among
    them; there both are gathered from one table, which has the angles of v."""
    by_hand, fused = Variant(UNFILLED), Variant(UNFILLED, is_plain=True)

    def with_two_tables(kernels: Counter[str]) -> Counter[str]:
        return kernels - Counter(Unpack=1) + Counter(GatherV2=1, SelectV2=2)

    assert LAYER.total() == 11
    assert lowered_model(fused, 2).kernels == with_two_tables(layers(LAYER, 2) + ENDS + SCORE + Counter(Exp=1))
    assert lowered_step(fused, 1).kernels == with_two_tables(lowered_step(by_hand, 1).kernels)


def test_a_plain_layer_is_six_times_as_many_kernels_before_it_is_fused() -> None:
    before = []
    for plain in (Plain(1), Plain(2)):
        caches = [list(cache.unbind()) for cache in plain.caches]
        before.append(lower(plain.__call__, plain.inputs, *caches).kernels)
    assert (before[1] - before[0]).total() > 60, before


def test_a_fused_model_computes_what_the_plain_one_does() -> None:
    plain = Plain(2)
    model = plain_dream(plain.config, OPS, plain.module.state_dict())
    assert model.report.fused == {
        "rms_norm": 5,
        "add_rms_norm": 4,
        "rope": 4,
        "packing": 4,
        "rope_packing": 2,
        "swiglu": 2,
        "linear": 8,
    }
    expected_caches = plain.caches.clone()
    with torch.no_grad():
        expected = plain(plain.inputs, *map(list, expected_caches))
    for run in (model.forward, optimised(model.forward)):
        caches = plain.caches.clone()
        with torch.no_grad():
            out = run(plain.inputs, *map(list, caches))
        assert_near(out, expected)
        assert_near(caches, expected_caches)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Of two layers' worth of roundings in bfloat16."""
    torch.testing.assert_close(got.cpu().float(), expected.cpu().float(), rtol=2**-5, atol=2**-5)


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
