"""The cases of the self-test: every op at the shapes of Dream-7B in bfloat16, and what the CPU computes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend import Entries, Ops
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for

# Dream-7B.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, EPS = 3584, 18944, 28, 4, 128, 1e-6
QKV_ROWS = (HEADS + 2 * KV_HEADS) * DIM
ROPE_THETA = 1e6
BLOCK = 32
"""Queries of a block."""
TOKENS = 128
"""Tokens of a step."""
CAPTURED = "captured"
"""Beginning of the names of ``captured_cases``."""
INT8 = "W8A8"
"""Beginning of the names of ``int8_cases``."""
ASKED = "attention, pool smaller than the entries' pages, at once"
"""Name of ``asked_case``."""
CPU = CpuOps()


@dataclass(frozen=True)
class Case:
    """One computation on the device, with its result on the CPU."""

    name: str
    run: Callable[[], Tensor | Sequence[Tensor]]
    """Computes a tensor on the device, or several."""
    expected: Tensor | Sequence[Tensor]
    """What ``run`` must return, within rounding."""
    timed: bool = True
    """Whether ``run`` may be called again and timed."""


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    """Random values of mean 0, bfloat16."""
    return (torch.randn(shape) * scale).bfloat16()


def elementwise_cases(ops: Ops) -> Iterator[Case]:
    """Norms, SwiGLU and rope."""
    x, residual, weight = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(HIDDEN)
    gate_up = randn(TOKENS, 2 * INTERMEDIATE)
    npu_x, npu_residual, npu_weight, npu_gate_up = (t.to(ops.device) for t in (x, residual, weight, gate_up))
    yield Case("rms_norm", partial(ops.rms_norm, npu_x, npu_weight, EPS), CPU.rms_norm(x, weight, EPS))
    yield Case(
        "add_rms_norm",
        lambda: ops.add_rms_norm(npu_x.clone(), npu_residual.clone(), npu_weight, EPS),  # it may overwrite its inputs
        CPU.add_rms_norm(x, residual.clone(), weight, EPS),
    )
    yield Case("swiglu", partial(ops.swiglu, npu_gate_up), CPU.swiglu(gate_up))
    q, qkv = randn(TOKENS, HEADS, DIM), randn(TOKENS, HEADS + 2 * KV_HEADS, DIM)
    for name, heads, tables in (("q", q, rope_tables), ("q, k and v at once", qkv, rope_tables_by_head)):
        run = partial(ops.rope, heads.to(ops.device), *tables(ops))
        yield Case(f"rope of {name}", run, CPU.rope(heads, *tables(CPU)))


def rope_tables(ops: Ops) -> tuple[Tensor, Tensor]:
    """The tables of ``ops.rope`` for TOKENS positions, in the form that the device wants."""
    frequencies = ROPE_THETA ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(TOKENS) * 17.0, frequencies)
    return ops.rope_tables(angles.cos().to(ops.device), angles.sin().to(ops.device), torch.bfloat16)


def rope_tables_by_head(ops: Ops) -> tuple[Tensor, Tensor]:
    """The same tables with a row for each head of q, k and v, as Dream has them: v is not rotated."""
    is_rotated = (torch.arange(HEADS + 2 * KV_HEADS) < HEADS + KV_HEADS)[:, None].to(ops.device)
    cos, sin = rope_tables(ops)
    return torch.where(is_rotated, cos, torch.ones_like(cos)), torch.where(is_rotated, sin, torch.zeros_like(sin))


def linear_cases(ops: Ops) -> Iterator[Case]:
    """The product for q, k and v, with and without bias."""
    x, weight, bias = randn(TOKENS, HIDDEN), randn(QKV_ROWS, HIDDEN, scale=HIDDEN**-0.5), randn(QKV_ROWS)
    without_bias = partial(ops.linear, x.to(ops.device), ops.stored(weight.to(ops.device)))
    yield Case("linear with bias", partial(without_bias, bias.to(ops.device)), CPU.linear(x, weight, bias))
    yield Case("linear", without_bias, CPU.linear(x, weight))


def int8_cases(ops: Ops) -> Iterator[Case]:
    """What only W8A8 needs. SwiGLU has the rows of a rank of four, and those of a single one."""
    x, residual, norm = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(HIDDEN)
    npu_x, npu_residual, npu_norm = (t.to(ops.device) for t in (x, residual, norm))
    yield Case(f"{INT8}: quantize", partial(ops.quantize, npu_x), CPU.quantize(x))
    yield Case(
        f"{INT8}: add_rms_norm_quant",
        lambda: ops.add_rms_norm_quant(npu_x.clone(), npu_residual.clone(), npu_norm, EPS),
        CPU.add_rms_norm_quant(x, residual.clone(), norm, EPS),
    )
    for ranks in (4, 1):
        gate_up = randn(TOKENS, 2 * INTERMEDIATE // ranks)
        run = partial(ops.swiglu_quant, gate_up.to(ops.device))
        yield Case(f"{INT8}: swiglu_quant of {gate_up.shape[1]}", run, CPU.swiglu_quant(gate_up))
    codes, scale = CPU.quantize(x)
    weight, weight_scale = CPU.quantize(randn(QKV_ROWS, HIDDEN, scale=HIDDEN**-0.5))
    bias, stored = randn(QKV_ROWS), ops.stored(weight.to(ops.device))
    npu_codes, npu_scale, npu_weight_scale, npu_bias = (t.to(ops.device) for t in (codes, scale, weight_scale, bias))
    yield Case(
        f"{INT8}: linear, weights in FRACTAL_NZ",
        lambda: ops.quant_linear(npu_codes, npu_scale, stored, npu_weight_scale, npu_bias, torch.bfloat16),
        CPU.quant_linear(codes, scale, weight, weight_scale, bias, torch.bfloat16),
    )


def write_cases(ops: Ops) -> Iterator[Case]:
    """The write of keys and values to random cache positions, each token to two of them on average."""
    k, v, caches = randn(TOKENS, KV_HEADS, DIM), randn(TOKENS, KV_HEADS, DIM), randn(2, 8, PAGE_SIZE, KV_HEADS, DIM)
    source = torch.randint(TOKENS, (2 * TOKENS,))
    slot_mapping = torch.randperm(8 * PAGE_SIZE)[: len(source)]
    npu_caches = caches.to(ops.device)
    write = partial(ops.kv_write, k.to(ops.device), v.to(ops.device), npu_caches[0], npu_caches[1])
    npu_slot_mapping, npu_source = slot_mapping.to(ops.device), source.to(ops.device)
    CPU.kv_write(k, v, caches[0], caches[1], slot_mapping, source)

    def run() -> Tensor:
        write(npu_slot_mapping, npu_source)
        return npu_caches

    yield Case("kv write", run, caches)


def entries_of(lengths: Sequence[int], kv_lengths: Sequence[int], num_pages: int) -> Entries:
    """Attention entries over random pages, each of a sequence of its own.

    Args:
        lengths: queries of each entry.
        kv_lengths: positions that each entry sees.
        num_pages: pages of the pool.
    """
    width = pages_for(max(kv_lengths))
    page_tables = torch.stack([torch.randperm(num_pages)[:width] for _ in lengths]).int()
    return Entries(tuple(lengths), tuple(kv_lengths), page_tables, tuple(range(len(lengths))), (0,) * len(lengths))


def on_device(entries: Entries, ops: Ops) -> Entries:
    """The entries as ``ops`` take them, with their page tables on its device."""
    entries = entries.divided(ops.max_queries)
    return replace(entries, page_tables=entries.page_tables.to(ops.device))


BLOCK_LENGTHS = [BLOCK] * 8
BLOCK_KV_LENGTHS = [160, 192, 224, 256, 512, 545, 577, 640]
SMALL_POOL = 9
"""Pages of a pool that has fewer pages than these entries together."""
ATTENTION: dict[str, tuple[list[int], list[int], int]] = {
    "32 queries each": (BLOCK_LENGTHS, BLOCK_KV_LENGTHS, 40),
    "a prompt, blocks, one query": ([150, BLOCK, BLOCK, 1], [150, 545, 33, 300], 20),
    "pool smaller than the entries' pages": (BLOCK_LENGTHS, BLOCK_KV_LENGTHS, SMALL_POOL),
}
"""By name of a case: queries of each entry, positions that each entry sees, and pages of the pool."""


def attention_cases(ops: Ops, layout: str) -> Iterator[Case]:
    """Attention in one layout, as the engine calls it."""
    for name, (lengths, kv_lengths, num_pages) in ATTENTION.items():
        q, caches = randn(sum(lengths), HEADS, DIM), randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
        entries = entries_of(lengths, kv_lengths, num_pages)
        k_cache, v_cache = caches.to(ops.device)
        run = partial(ops.attention, q.to(ops.device), k_cache, v_cache, on_device(entries, ops))
        yield Case(f"attention {layout}, {name}", run, CPU.attention(q, caches[0], caches[1], entries))


def asked_case(ops: Ops) -> Case:
    """Asks whether the kernel minds entries that together have more pages than the pool.

    NpuOps avoids such calls by further launches when the pool is nearly full, so the engine does not depend on the
    answer.
    """
    from lopa_ascend.backend.npu.ops import NpuOps, attend

    assert isinstance(ops, NpuOps)
    q, caches = randn(sum(BLOCK_LENGTHS), HEADS, DIM), randn(2, SMALL_POOL, PAGE_SIZE, KV_HEADS, DIM)
    entries = entries_of(BLOCK_LENGTHS, BLOCK_KV_LENGTHS, SMALL_POOL)
    k_cache, v_cache = caches.to(ops.device)
    given = on_device(entries, ops)
    lengths = given.lengths, given.kv_lengths
    run = partial(attend, ops.kernel_layout, q.to(ops.device), k_cache, v_cache, *lengths, given.page_tables)
    return Case(ASKED, run, CPU.attention(q, caches[0], caches[1], entries))


LENGTHS_OF_CAPTURE = [200, 208, 216, 224]


class Layer:
    """The part of a decoder layer up to attention.

    Args:
        ops: the device's.
        norm: weight of the norm [HIDDEN].
        qkv: weight of the product for q, k and v [QKV_ROWS, HIDDEN].
        bias: of the same product [QKV_ROWS].
    """

    def __init__(self, ops: Ops, norm: Tensor, qkv: Tensor, bias: Tensor):
        self.ops = ops
        self.norm, self.bias = norm.to(ops.device), bias.to(ops.device)
        self.qkv = ops.stored(qkv.to(ops.device))
        self.tables = rope_tables_by_head(ops)

    def __call__(self, x: Tensor, caches: Tensor, slot_mapping: Tensor, entries: Entries) -> Tensor:
        qkv = self.ops.linear(self.ops.rms_norm(x, self.norm, EPS), self.qkv, self.bias)
        q, k, v = self.ops.rope(qkv.view(TOKENS, -1, DIM), *self.tables).split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.ops.kv_write(k, v, caches[0], caches[1], slot_mapping)
        return self.ops.attention(q, caches[0], caches[1], entries)


def captured_cases(ops: Ops) -> Iterator[Case]:
    """A layer that is captured with some inputs, and replayed with other inputs of the same shapes.

    Lengths that stay as they were are not given to the kernel again: it must have kept them.
    """
    yield captured_case(ops, f"{CAPTURED} layer, replayed with other KV lengths", [513, 521, 529, 537])
    yield captured_case(ops, f"{CAPTURED} layer, replayed with the KV lengths of the capture", LENGTHS_OF_CAPTURE)


def captured_case(ops: Ops, name: str, kv_lengths: list[int]) -> Case:
    """A layer that is captured with LENGTHS_OF_CAPTURE, and replayed as the engine replays it.

    Args:
        kv_lengths: the KV lengths of the replay.
    """
    num_pages, page_table_width = 24, 6
    weights = randn(HIDDEN), randn(QKV_ROWS, HIDDEN, scale=HIDDEN**-0.5), randn(QKV_ROWS)
    caches = randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)

    def make_inputs(kv_lengths: list[int]) -> tuple[Tensor, Tensor, Entries]:
        entries = widened(entries_of([BLOCK] * 4, kv_lengths, num_pages), page_table_width).divided(ops.max_queries)
        return randn(TOKENS, HIDDEN), torch.randperm(num_pages * PAGE_SIZE)[:TOKENS], entries

    x, slot_mapping, entries = make_inputs(LENGTHS_OF_CAPTURE)
    later_x, later_slot_mapping, later_entries = make_inputs(kv_lengths)
    npu_x, npu_slot_mapping, npu_caches = x.to(ops.device), slot_mapping.to(ops.device), caches.to(ops.device)
    npu_entries, layer = on_device(entries, ops), Layer(ops, *weights)

    def run() -> list[Tensor]:
        from lopa_ascend.backend.npu.captured import CapturedRun, capturing

        npu = torch.get_device_module("npu")
        # What a first call needs, such as loading the kernels, may not happen in a capture.
        layer(npu_x, npu_caches.clone(), npu_slot_mapping, npu_entries)
        graph = npu.NPUGraph()
        with capturing(graph, auto_dispatch_capture=True):
            out = layer(npu_x, npu_caches, npu_slot_mapping, npu_entries)
        replay = CapturedRun(graph, layer, out, name, list(entries.kv_lengths))
        npu_x.copy_(later_x)
        npu_slot_mapping.copy_(later_slot_mapping)
        npu_entries.page_tables.copy_(later_entries.page_tables)
        replay(later_entries.kv_lengths)
        return [out.cpu(), npu_caches]  # the memory of ``out`` belongs to the graph

    expected = Layer(CPU, *weights)(later_x, caches, later_slot_mapping, later_entries)
    return Case(name, run, [expected, caches], timed=False)


def widened(entries: Entries, width: int) -> Entries:
    """The entries with page tables of ``width`` columns; the further columns repeat the last one."""
    page_tables = entries.page_tables
    extra = page_tables[:, -1:].expand(-1, width - page_tables.shape[1])
    return replace(entries, page_tables=torch.cat([page_tables, extra], 1))
