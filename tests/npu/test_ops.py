"""NpuOps on the simulated device against CpuOps: over random shapes in numeric mode, and at the shapes of Dream-7B in
strict mode."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Experts
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.config import ATTENTION_LAYOUTS, ExpertsConfig
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.types import KVShape
from tests.npu.cases import CPU, AttentionSample, attention_sample
from tests.npu.lab import attention as lab_attention
from tests.npu.lab import device  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.traffic import host_traffic
from tests.npu.strict_ops import StrictOps

pytestmark = pytest.mark.npu
NPU = NpuOps()

seeds = st.integers(0, 2**31)
rows = st.integers(1, 70)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Equal but for rounding; ``got`` is on the device."""
    assert got.device.type == "npu"
    tolerance = 2e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)


@given(seeds, rows, st.integers(1, 60), st.integers(1, 60), st.booleans(), dtypes)
def test_linear_takes_what_stored_gives(
    seed: int, rows: int, inner: int, outer: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight = randn(seed, rows, inner, dtype=dtype), randn(seed + 1, outer, inner, dtype=dtype)
    bias = randn(seed + 2, outer, dtype=dtype) if has_bias else None
    stored = NPU.stored(weight.to("npu"))
    assert stored.shape == (inner, outer)
    assert stored.is_contiguous()
    out = NPU.linear(x.to("npu"), stored, None if bias is None else bias.to("npu"))
    expected = CPU.linear(x, weight, bias)
    scale = expected.abs().max()
    assert_same(out / scale, expected / scale)


@given(seeds, rows, st.integers(1, 200), dtypes)
def test_norms(seed: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = randn(seed, 2, rows, hidden, dtype=dtype)
    weight = randn(seed + 1, hidden, dtype=dtype)
    assert_same(NPU.rms_norm(x.to("npu"), weight.to("npu"), 0.1), CPU.rms_norm(x, weight, 0.1))
    normed, total = NPU.add_rms_norm(x.to("npu"), residual.to("npu"), weight.to("npu"), 0.1)
    expected_normed, expected_total = CPU.add_rms_norm(x, residual, weight, 0.1)
    assert_same(normed, expected_normed)
    assert_same(total, expected_total)


@given(seeds, rows, st.sampled_from([(1, 1, 3), (2, 1, 4), (4, 2, 5)]), st.integers(1, 3), dtypes)
def test_experts(seed: int, rows: int, groups: tuple[int, int, int], per_token: int, dtype: torch.dtype) -> None:
    (number, kept, size), hidden, inner = groups, 24, 20
    sizes = ExpertsConfig(
        num_experts=number * size,
        per_token=per_token,
        num_groups=number,
        kept_groups=kept,
        scale=2.5,
        inner=inner,
        shared_inner=inner,
        first_layer=0,
    )
    router, bias = randn(seed, number * size, hidden) / 5, randn(seed + 1, number * size) / 4
    gate_up = randn(seed + 2, number * size, 2 * inner, hidden, dtype=dtype) / 5
    down = randn(seed + 3, number * size, hidden, inner, dtype=dtype) / 5
    x = randn(seed + 4, rows, hidden, dtype=dtype)
    if seed % 2:
        router = router.bfloat16().float()
    given = Experts(sizes, router, bias, gate_up, down)
    shared = randn(seed + 5, rows, hidden, dtype=dtype) if seed % 3 else None
    stored = NPU.stored_experts(on_npu(given))
    assert stored.router.dtype == (torch.bfloat16 if seed % 2 else torch.float32)
    got = NPU.moe(x.to("npu"), stored, None if shared is None else shared.to("npu"))
    expected = CPU.moe(x, given, shared)
    scale = expected.abs().max()
    assert_same(got / scale, expected / scale)


def on_npu(experts: Experts) -> Experts:
    given = {field.name: getattr(experts, field.name) for field in fields(experts)}
    moved: dict[str, Any] = {name: x.to("npu") for name, x in given.items() if isinstance(x, Tensor)}
    return replace(experts, **moved)


def random_experts(seed: int, inner: int, *int8: str) -> Experts:
    """Of 8 experts in 2 groups, with hidden states of 64. ``int8``: which weights."""
    sizes = ExpertsConfig(
        num_experts=8,
        per_token=3,
        num_groups=2,
        kept_groups=1,
        scale=2.5,
        inner=inner,
        shared_inner=inner,
        first_layer=0,
    )
    gate_up, down = randn(seed, 8, 2 * inner, 64) / 8, randn(seed + 1, 8, 64, inner) / 8
    given: dict[str, Tensor] = {"router": randn(seed + 2, 8, 64).bfloat16().float() / 8, "bias": randn(seed + 3, 8) / 4}
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if name in int8:
            codes, scales = zip(*map(quantize_weight, weight), strict=True)
            given |= {name: torch.stack(codes), f"{name}_scale": torch.stack(scales)}
        else:
            given[name] = weight.bfloat16()
    return Experts(sizes, **given)


@pytest.mark.parametrize("inner", [64, 40])
@pytest.mark.parametrize("int8", [(), ("gate_up",), ("down",), ("gate_up", "down")])
def test_int8_experts_as_the_cpu_computes_them(int8: tuple[str, ...], inner: int) -> None:
    experts, x = random_experts(0, inner, *int8), randn(9, 50, 64, dtype=torch.bfloat16)
    got = NPU.moe(x.to("npu"), NPU.stored_experts(on_npu(experts)))
    expected = CPU.moe(x, experts)
    scale = expected.abs().max()
    assert_same(got / scale, expected / scale)


def test_weights_of_experts_are_not_rounded() -> None:
    """Those of a token sum up to ``scale``, which rounded ones do not: equal experts give what one of them does."""
    one, x = random_experts(0, 64), randn(9, 50, 64, dtype=torch.bfloat16)
    equal = replace(one, gate_up=one.gate_up[:1].expand(8, -1, -1), down=one.down[:1].expand(8, -1, -1))
    results = [
        NPU.moe(x.to("npu"), NPU.stored_experts(on_npu(replace(equal, sizes=sizes)))).cpu()
        for sizes in (replace(one.sizes, per_token=number, scale=2.0) for number in (2, 3))
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("int8", "inner", "kernels"),
    [
        ((), 64, ["grouped_matmul", "swiglu", "grouped_matmul"]),
        (("gate_up", "down"), 64, ["grouped_matmul", "dequant_swiglu_quant", "grouped_matmul"]),
        (("gate_up", "down"), 40, ["grouped_matmul", "swiglu", "dynamic_quant", "grouped_matmul"]),
        (("down",), 64, ["grouped_matmul", "swiglu", "dynamic_quant", "grouped_matmul"]),
    ],
)
def test_kernels_of_experts(int8: tuple[str, ...], inner: int, kernels: list[str]) -> None:
    experts = NPU.stored_experts(on_npu(random_experts(0, inner, *int8)))
    x = randn(9, 50, 64, dtype=torch.bfloat16).to("npu")
    with host_traffic() as traffic:
        NPU.moe(x, experts, x)
    own = ["moe_gating_top_k", "moe_init_routing_v2", *kernels, "moe_finalize_routing"]
    assert traffic.launches == ["aten::mm", *(f"npu::npu_{name}" for name in own)]


@given(seeds, rows, st.integers(1, 80), dtypes)
def test_swiglu(seed: int, rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = randn(seed, rows, 2 * inner, dtype=dtype)
    assert_same(NPU.swiglu(gate_up.to("npu")), CPU.swiglu(gate_up))


@given(seeds, rows, st.integers(1, 9), st.sampled_from([8, 16, 128]), dtypes)
def test_rope_with_tables_indexed_by_positions(seed: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    x = randn(seed, rows, heads, dim, dtype=dtype)
    angles = randn(seed + 1, 300, dim // 2) * 5
    positions = torch.randint(300, (rows,), generator=torch.Generator().manual_seed(seed))
    cos, sin = (
        table[positions.to("npu")] for table in NPU.rope_tables(angles.cos().to("npu"), angles.sin().to("npu"), dtype)
    )
    expected = CPU.rope(x, *(table.to(dtype)[positions, None] for table in (angles.cos(), angles.sin())))
    assert_same(NPU.rope(x.to("npu"), cos, sin), expected)


@given(seeds, rows, st.integers(1, 4), st.sampled_from([8, 64, 128]), dtypes)
def test_queries_and_keys_of_one_projection_are_normed_and_rotated(
    seed: int, rows: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    qkv = randn(seed, rows, 4 * kv_heads, dim, dtype=dtype)
    weights, angles = randn(seed + 1, 2, dim, dtype=dtype), randn(seed + 2, rows, dim // 2) * 5
    parts = [2 * kv_heads, kv_heads, kv_heads]
    on_npu = NPU.rope_tables(angles.cos().to("npu"), angles.sin().to("npu"), dtype)
    q, k, v = qkv.to("npu").split(parts, 1)
    rotated = NPU.norm_rope(q, k, weights[0].to("npu"), weights[1].to("npu"), 0.1, *on_npu)
    q, k, _ = qkv.split(parts, 1)
    expected = CPU.norm_rope(q, k, weights[0], weights[1], 0.1, *CPU.rope_tables(angles.cos(), angles.sin(), dtype))
    for found, wanted in zip(rotated, expected, strict=True):
        assert_same(found / wanted.abs().max(), wanted / wanted.abs().max())
    assert torch.equal(v.cpu(), qkv[:, 3 * kv_heads :])


@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(1, 70), st.booleans(), dtypes)
def test_kv_writes(seed: int, pages: int, kv_heads: int, tokens: int, has_source: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = randn(seed, 2, tokens, kv_heads, 16, dtype=dtype)
    caches = randn(seed + 1, 2, pages, PAGE_SIZE, kv_heads, 16, dtype=dtype)
    source = torch.randint(tokens, (90,), generator=generator) if has_source else None
    written = tokens if source is None else len(source)
    slot_mapping = torch.randperm(pages * PAGE_SIZE, generator=generator)[:written]
    on_npu = caches.to("npu")
    given_source = None if source is None else source.to("npu")
    NPU.kv_write(k.to("npu"), v.to("npu"), on_npu[0], on_npu[1], slot_mapping.int().to("npu"), given_source)
    CPU.kv_write(k, v, caches[0], caches[1], slot_mapping, source)
    assert torch.equal(on_npu.cpu(), caches)


def test_a_write_takes_the_parts_of_a_packed_projection() -> None:
    packed = randn(0, 9, 8, 16).to("npu")
    caches = torch.zeros(2, 1, PAGE_SIZE, 2, 16, device="npu")
    slot_mapping = torch.arange(9, dtype=torch.int32, device="npu")
    NPU.kv_write(packed[:, 4:6], packed[:, 6:], caches[0], caches[1], slot_mapping)
    assert torch.equal(caches[:, 0, :9].transpose(0, 1).flatten(1, 2), packed[:, 4:])


@given(seeds, st.integers(2, 4), dtypes)
def test_positions_move_in_all_layers_at_once(seed: int, pages: int, dtype: torch.dtype) -> None:
    pools = [KVPool(KVShape(3, 2, 8), pages, dtype, name) for name in ("cpu", "npu")]
    values = randn(seed, *pools[0].caches.shape, dtype=dtype)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    begin, end = seed % PAGE_SIZE, PAGE_SIZE + 1 + seed % (PAGE_SIZE - 1)
    read = []
    for pool in pools:
        pool.caches.copy_(values)
        read.append(pool.read(table, begin, end).cpu())
        pool.write(table[::-1], begin, end, pool.read(table, begin, end).flip(2))
        pool.copy([0], [pages - 1], 7, 90)
    assert torch.equal(*read)
    assert torch.equal(*(pool.caches.cpu() for pool in pools))


def assert_attends(ops: NpuOps, sample: AttentionSample) -> None:
    on_npu = sample.on(ops)
    with host_traffic() as traffic:
        out = on_npu.attend(ops)
    assert not traffic.stalls
    assert_same(out, sample.attend(CPU))


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_queries_can_be_a_part_of_a_packed_projection(layout: str) -> None:
    ops, sample = NpuOps(attention_layout=layout), attention_sample([32, 32], [40, 70], heads=(14, 2))
    packed = torch.cat([sample.q, torch.zeros(64, 4, 128, dtype=torch.bfloat16)], 1).to("npu")
    assert_same(replace(sample.on(ops), q=packed[:, :14]).attend(ops), sample.attend(CPU))


@settings(max_examples=40)
@given(
    seeds,
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([(2, 2), (4, 2), (7, 1), (6, 3)]),
    st.sampled_from([8, 64, 128]),
    dtypes,
)
def test_attention_over_any_entries(
    seed: int, spans: list[tuple[int, int, bool]], heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    """Causal ones, which see at least themselves, among others."""
    lengths, kv_lengths, causal = zip(*spans, strict=True)
    kv_lengths = tuple(max(keys, length * is_causal) for length, keys, is_causal in spans)
    torch.manual_seed(seed)
    sample = attention_sample(lengths, kv_lengths, heads=heads, dim=dim, dtype=dtype)
    sample = replace(sample, entries=replace(sample.entries, causal=causal))
    for layout in ATTENTION_LAYOUTS:
        with numeric():
            assert_attends(NpuOps(attention_layout=layout), sample)


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_causal_attention_at_the_shapes_of_pangu_7b(layout: str) -> None:
    """A prompt in pieces by pages, its last piece, a commit, single tokens, a block that is filled: in strict mode."""
    lengths = (128, 128, 44, 32, 1, 1, 32)
    kv_lengths = (128, 256, 300, 300, 65, 129, 545)
    sample = attention_sample(lengths, kv_lengths, num_pages=125, heads=(32, 8))
    sample = replace(sample, entries=replace(sample.entries, causal=(True,) * 6 + (False,)))
    with host_traffic() as traffic:
        assert_attends(NpuOps(attention_layout=layout), sample)
    # In TND one kernel for those with the mask, single tokens among them, and one for the others.
    assert traffic.launches.count("npu::npu_fused_infer_attention_score") == (5 if layout == "BSH" else 2)


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_entries_with_more_places_than_the_pool_has_pages_come_in_turn(layout: str) -> None:
    """Eight entries of up to three pages out of a pool of seven, so two at a time."""
    lengths, kv_lengths = (32,) * 8, (300, 64, 300, 200, 300, 32, 100, 300)
    sample = attention_sample(lengths, kv_lengths, num_pages=7, heads=(7, 1))
    with host_traffic() as traffic:
        assert_attends(NpuOps(attention_layout=layout), sample)
    # In TND16 every entry is two.
    assert traffic.launches.count("npu::npu_fused_infer_attention_score") == (8 if layout == "TND16" else 4)


def test_tnd16_gives_the_kernel_entries_of_at_most_16_queries_with_the_kv_length_of_their_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend, calls = lab_attention.attend, []

    def noted(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append((len(query), len(key)))
        return attend(query, key, value, scale)

    monkeypatch.setattr(lab_attention, "attend", noted)
    sample = attention_sample([32, 16, 40, 1], [160, 33, 300, 7], heads=(7, 1))
    assert_attends(NpuOps(attention_layout="TND16"), sample)
    assert calls == [(16, 160), (16, 160), (16, 33), (16, 300), (16, 300), (8, 300), (1, 7)]


def test_an_unknown_layout_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'BNSD'; choose one of TND, TND16, BSH"):
        NpuOps(attention_layout="BNSD")


@pytest.mark.parametrize(
    ("slot_mapping", "message"),
    [
        ([0, 1, PAGE_SIZE * 2], r"slot_mapping: \[256\] lie outside the cache, which has 256 positions"),
        ([0, -1, 5], r"slot_mapping: \[-1\] lie outside"),
        ([7, 3, 7], r"slot_mapping: \[7\] are written more than once"),
    ],
)
def test_strict_ops_refuse_positions_of_a_write(slot_mapping: list[int], message: str) -> None:
    k = torch.zeros(3, 1, 16, device="npu")
    cache = torch.zeros(2, PAGE_SIZE, 1, 16, device="npu")
    with pytest.raises(ValueError, match=message):
        StrictOps().kv_write(k, k, cache, cache, torch.tensor(slot_mapping, dtype=torch.int32, device="npu"))


@pytest.mark.parametrize(
    ("table", "kv_length", "message"),
    [
        ([0, 2], 200, r"pages \[2\] of entry 1 lie outside the cache, which has 2"),
        ([-1, 0], 200, r"pages \[-1\] of entry 1"),
        ([1, 0], 257, "entry 1 sees 257 positions and has 2 pages"),
    ],
)
def test_strict_ops_refuse_pages(table: list[int], kv_length: int, message: str) -> None:
    tables = torch.tensor([[0, 1], table], dtype=torch.int32, device="npu")
    cache = torch.zeros(2, PAGE_SIZE, 1, 128, dtype=torch.bfloat16, device="npu")
    q = torch.zeros(2, 1, 128, dtype=torch.bfloat16, device="npu")
    with pytest.raises(ValueError, match=message):
        StrictOps().attention(q, cache, cache, Entries((1, 1), (1, kv_length), tables, (0, 1), (0, 0)))


def test_without_debug_no_op_waits_for_the_device() -> None:
    k = torch.zeros(3, 1, 16, device="npu")
    cache = torch.zeros(2, PAGE_SIZE, 1, 16, device="npu")
    slot_mapping = torch.arange(3, dtype=torch.int32, device="npu")
    with host_traffic() as traffic:
        NPU.kv_write(k, k, cache, cache, slot_mapping)
    assert traffic.launches == ["npu::npu_scatter_pa_kv_cache"]
    assert not traffic.stalls
