"""What the self-test asks: every op at the shapes of Dream-7B in bfloat16, and what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend import Entries, Ops
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, EPS = 3584, 18944, 28, 4, 128, 1e-6
BLOCK, TOKENS = 32, 128
CAPTURED = "captured layer, replayed with other KV lengths"
ASKED = "attention, pool smaller than the entries' pages, at once"
CPU = CpuOps()


@dataclass(frozen=True)
class Case:
    """``run`` gives a tensor on the device, or several, and ``expected`` is what it must be."""

    name: str
    run: Callable[[], Tensor | Sequence[Tensor]]
    expected: Tensor | Sequence[Tensor]
    timed: bool = True


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def elementwise_cases(ops: Ops) -> Iterator[Case]:
    x, residual, weight = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(HIDDEN)
    gate_up = randn(TOKENS, 2 * INTERMEDIATE)
    npu_x, npu_residual, npu_weight, npu_gate_up = (t.to(ops.device) for t in (x, residual, weight, gate_up))
    yield Case("rms_norm", partial(ops.rms_norm, npu_x, npu_weight, EPS), CPU.rms_norm(x, weight, EPS))
    yield Case(
        "add_rms_norm",
        lambda: ops.add_rms_norm(npu_x.clone(), npu_residual.clone(), npu_weight, EPS),  # which it may overwrite
        CPU.add_rms_norm(x, residual.clone(), weight, EPS),
    )
    yield Case("swiglu", partial(ops.swiglu, npu_gate_up), CPU.swiglu(gate_up))
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        part = randn(TOKENS, heads, DIM)
        run = partial(ops.rope, part.to(ops.device), *tables(ops))
        yield Case(f"rope of {name}", run, CPU.rope(part, *tables(CPU)))


def tables(ops: Ops) -> tuple[Tensor, Tensor]:
    """Cosines and sines of TOKENS positions, as the device wants them."""
    frequencies = 1e6 ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(TOKENS) * 17.0, frequencies)
    return ops.rope_tables(angles.cos().to(ops.device), angles.sin().to(ops.device), torch.bfloat16)


def linear_cases(ops: Ops) -> Iterator[Case]:
    rows = (HEADS + 2 * KV_HEADS) * DIM
    x, weight, bias = randn(TOKENS, HIDDEN), randn(rows, HIDDEN, scale=HIDDEN**-0.5), randn(rows)
    without = partial(ops.linear, x.to(ops.device), ops.stored(weight.to(ops.device)))
    yield Case("linear with bias", partial(without, bias.to(ops.device)), CPU.linear(x, weight, bias))
    yield Case("linear", without, CPU.linear(x, weight))


def write_cases(ops: Ops) -> Iterator[Case]:
    k, v, caches = randn(TOKENS, KV_HEADS, DIM), randn(TOKENS, KV_HEADS, DIM), randn(2, 8, PAGE_SIZE, KV_HEADS, DIM)
    source = torch.randint(TOKENS, (2 * TOKENS,))
    slots = torch.randperm(8 * PAGE_SIZE)[: len(source)]
    npu_caches = caches.to(ops.device)
    write = partial(ops.kv_write, k.to(ops.device), v.to(ops.device), npu_caches[0], npu_caches[1])
    npu_slots, npu_source = slots.to(ops.device), source.to(ops.device)
    CPU.kv_write(k, v, caches[0], caches[1], slots, source)

    def run() -> Tensor:
        write(npu_slots, npu_source)
        return npu_caches

    yield Case("kv write", run, caches)


def entries_of(lengths: Sequence[int], kv_lengths: Sequence[int], num_pages: int) -> Entries:
    """One sequence each, over random pages."""
    width = pages_for(max(kv_lengths))
    page_tables = torch.stack([torch.randperm(num_pages)[:width] for _ in lengths]).int()
    return Entries(tuple(lengths), tuple(kv_lengths), page_tables, tuple(range(len(lengths))), (0,) * len(lengths))


def on_device(entries: Entries, ops: Ops) -> Entries:
    return replace(entries, page_tables=entries.page_tables.to(ops.device))


BLOCKS = [BLOCK] * 8, [160, 192, 224, 256, 512, 545, 577, 640]
ATTENTION: dict[str, tuple[list[int], list[int], int]] = {
    "32 queries each": (*BLOCKS, 40),
    "a prompt, blocks, one query": ([150, BLOCK, BLOCK, 1], [150, 545, 33, 300], 20),
    "pool smaller than the entries' pages": (*BLOCKS, 9),
}
"""What NpuOps is asked: lengths, KV lengths and the pages of the pool."""


def attention_cases(ops: Ops, layout: str) -> Iterator[Case]:
    for name, (lengths, kv_lengths, num_pages) in ATTENTION.items():
        q, caches = randn(sum(lengths), HEADS, DIM), randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
        entries = entries_of(lengths, kv_lengths, num_pages)
        k_cache, v_cache = caches.to(ops.device)
        run = partial(ops.attention, q.to(ops.device), k_cache, v_cache, on_device(entries, ops))
        yield Case(f"attention {layout}, {name}", run, CPU.attention(q, caches[0], caches[1], entries))


def asked_case(ops: Ops, layout: str) -> Case:
    """Whether the kernel minds that its entries have more pages together than there are; NpuOps never lets it come to
    that, which costs further launches when the pool is nearly full."""
    from lopa_ascend.backend.npu.ops import attend

    (lengths, kv_lengths), num_pages = BLOCKS, 9
    q, caches = randn(sum(lengths), HEADS, DIM), randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
    entries = entries_of(lengths, kv_lengths, num_pages)
    k_cache, v_cache = caches.to(ops.device)
    page_tables = entries.page_tables.to(ops.device)
    run = partial(attend, layout, q.to(ops.device), k_cache, v_cache, lengths, kv_lengths, page_tables)
    return Case(ASKED, run, CPU.attention(q, caches[0], caches[1], entries))


class Layer:
    """The part of a decoder layer up to attention, whose inputs can change in place."""

    def __init__(self, ops: Ops, weights: Sequence[Tensor]):
        self.ops = ops
        norm, qkv, self.bias = (weight.to(ops.device) for weight in weights)
        self.norm, self.qkv, self.tables = norm, ops.stored(qkv), tables(ops)

    def __call__(self, x: Tensor, caches: Tensor, slots: Tensor, entries: Entries) -> Tensor:
        qkv = self.ops.linear(self.ops.rms_norm(x, self.norm, EPS), self.qkv, self.bias)
        q, k, v = qkv.view(TOKENS, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = (self.ops.rope(part, *self.tables) for part in (q, k))
        self.ops.kv_write(k, v, caches[0], caches[1], slots)
        return self.ops.attention(q, caches[0], caches[1], entries)


def captured_case(ops: Ops) -> Case:
    """Captured with some inputs, and replayed with others of the same shapes."""
    weights = randn(HIDDEN), randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, scale=HIDDEN**-0.5), randn(4608)
    caches = randn(2, 24, PAGE_SIZE, KV_HEADS, DIM)
    inputs = []
    for first in (200, 513):
        entries = entries_of([BLOCK] * 4, [first + 8 * i for i in range(4)], 24)
        inputs.append((randn(TOKENS, HIDDEN), torch.randperm(24 * PAGE_SIZE)[:TOKENS], widened(entries, 6)))
    (x, slots, entries), (later_x, later_slots, later_entries) = inputs
    npu_x, npu_slots, npu_caches = x.to(ops.device), slots.to(ops.device), caches.to(ops.device)
    npu_entries, layer = on_device(entries, ops), Layer(ops, weights)

    def run() -> list[Tensor]:
        npu = torch.get_device_module("npu")
        graph = npu.NPUGraph()
        with npu.graph(graph, auto_dispatch_capture=True):
            out = layer(npu_x, npu_caches, npu_slots, npu_entries)
        npu_x.copy_(later_x)
        npu_slots.copy_(later_slots)
        npu_entries.page_tables.copy_(later_entries.page_tables)
        # In this order: a replay without lengths would never end.
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(later_entries.kv_lengths)}])
        graph.replay()
        return [out.cpu(), npu_caches]  # the output's memory is the graph's

    expected = Layer(CPU, weights)(later_x, caches, later_slots, later_entries)
    return Case(CAPTURED, run, [expected, caches], timed=False)


def widened(entries: Entries, width: int) -> Entries:
    """With page tables of this many columns, which repeat the last one."""
    tables = entries.page_tables
    extra = tables[:, -1:].expand(-1, width - tables.shape[1])
    return replace(entries, page_tables=torch.cat([tables, extra], 1))
