"""Calls of every kernel of the CUDA backend, with what they must compute and move. pytest runs them small and in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from tests.kernel_cases import BLOCK, EPS, Case, Sizes
from tests.torch.paging import paged_step

MOST = {torch.bfloat16: 1e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest error that is right, as a share of the largest value: a few roundings, and float32 sums in another order."""
MOST_OF_CODES = 1e-2
"""The same of int8 codes: a value that lies between two codes may become either."""
BLOCKS = 2
"""Of a window."""
EDGES = (1, 63, 64, 65, 127, 128, 129)
"""KV lengths around the ends of tiles and pages."""
QUERIES = (1, 7, 32, 33, 64)


class Random:
    """Random tensors on a device, the same ones for a seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator, device=self.device) * scale).to(self.dtype)

    def codes(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=self._generator, device=self.device, dtype=torch.int8)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)


def cases(ops: Ops, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> Iterator[Case]:
    """Every kernel of a step, one after the other, with inputs that depend on ``seed``."""
    random = Random(ops.device, dtype, seed)
    yield from _row_cases(ops, sizes, random)
    yield from product_cases(ops, sizes, random)
    yield from _head_cases(ops, sizes, random)
    yield from edge_cases(ops, sizes, random)
    yield attention_case(ops, sizes, random, "attention, 1 request of 8 branches", 1, 8)
    yield attention_case(ops, sizes, random, f"attention, {sizes.sequences} requests", sizes.sequences, 1)


def _row_cases(ops: Ops, s: Sizes, random: Random) -> Iterator[Case]:
    x, residual, weight = random.normal(s.tokens, s.hidden), random.normal(s.tokens, s.hidden), random.normal(s.hidden)
    gate_up = random.normal(s.tokens, 2 * s.inner)
    width, scales = x.numel(), 4 * s.tokens
    given = x, weight, EPS
    coded = partial(Case, read=_decoded, most=MOST_OF_CODES)
    yield Case("rms_norm", partial(ops.rms_norm, *given), partial(definition.rms_norm, *given), num_bytes=2 * x.nbytes)
    yield Case(
        "add_rms_norm",
        lambda: ops.add_rms_norm(x, residual.clone(), weight, EPS),
        lambda: definition.add_rms_norm(x, residual, weight, EPS),
        num_bytes=4 * x.nbytes,
    )
    yield coded(
        "rms_norm_quant",
        partial(ops.rms_norm_quant, *given),
        lambda: _decoded(definition.rms_norm_quant(*given)),
        num_bytes=x.nbytes + width + scales,
    )
    yield coded(
        "add_rms_norm_quant",
        lambda: ops.add_rms_norm_quant(x, residual.clone(), weight, EPS),
        lambda: _decoded(definition.add_rms_norm_quant(x, residual, weight, EPS)),
        num_bytes=3 * x.nbytes + width + scales,
    )
    yield coded(
        "quantize",
        partial(ops.quantize, x),
        lambda: _decoded(definition.quantize(x)),
        num_bytes=x.nbytes + width + scales,
    )
    yield Case(
        "swiglu",
        partial(ops.swiglu, gate_up),
        lambda: definition.swiglu(gate_up),
        num_bytes=1.5 * gate_up.nbytes,
    )
    yield coded(
        "swiglu_quant",
        partial(ops.swiglu_quant, gate_up),
        lambda: _decoded(definition.swiglu_quant(gate_up)),
        num_bytes=gate_up.nbytes + gate_up.numel() // 2 + scales,
    )
    yield from (_score_case(ops, s, random, confidence) for confidence in ("max_prob", "margin", "neg_entropy"))


def _decoded(found: Sequence[Tensor]) -> list[Tensor]:
    """What int8 codes and their scales stand for, and what else an op gives."""
    codes, scale, *others = found
    return [codes.float() * scale[:, None], *others]


def _score_case(ops: Ops, s: Sizes, random: Random, confidence: str) -> Case:
    """The ids are compared by their logits: several may be the largest."""
    logits, never = random.normal(s.tokens, s.vocabulary), torch.zeros(s.vocabulary, device=ops.device)
    assert ops.row_stats is not None

    def read(found: Any) -> list[Tensor]:
        return [found.log_share, logits.gather(1, found.column.long()[:, None])[:, 0], *found.rest]

    def expected() -> list[Tensor]:
        shares = logits.double().log_softmax(-1)
        two = shares.topk(2).values
        rest = {"margin": [two[:, 1]], "neg_entropy": [(shares.exp() * shares).sum(-1)]}
        return [two[:, 0], logits.amax(-1), *rest.get(confidence, [])]

    run = partial(ops.row_stats, logits, never, confidence)
    return Case(f"scores, {confidence}", run, expected, read, logits.nbytes, most=MOST[torch.float32])


def product_cases(ops: Ops, s: Sizes, random: Random) -> Iterator[Case]:
    """The products of a layer, of floats and of int8 codes."""
    queries = s.heads * s.dim
    for name, inputs, outputs in (
        ("qkv", s.hidden, queries + 2 * s.kv_heads * s.dim),
        ("o", queries, s.hidden),
        ("gate_up", s.hidden, 2 * s.inner),
        ("down", s.inner, s.hidden),
    ):
        x, weight = random.normal(s.tokens, inputs), ops.stored(random.normal(outputs, inputs, scale=inputs**-0.5))
        bias = random.normal(outputs) if name == "qkv" else None
        operations, written = 2.0 * s.tokens * inputs * outputs, s.tokens * outputs * x.itemsize
        yield Case(
            f"linear, {name}",
            partial(ops.linear, x, weight, bias),
            partial(_product, x, weight, bias),
            num_bytes=x.nbytes + weight.nbytes + written,
            operations=operations,
        )
        codes, weights = random.codes(s.tokens, inputs), ops.stored(random.codes(outputs, inputs))
        scale, by_output = (random.normal(size).float().abs() / inputs for size in (s.tokens, outputs))
        yield Case(
            f"int8 linear, {name}",
            partial(ops.quant_linear, codes, scale, weights, by_output, bias, x.dtype),
            partial(_int8_product, codes, scale, weights, by_output, bias),
            num_bytes=codes.nbytes + weights.nbytes + written,
            operations=operations,
            rate="int8",
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float64, which also holds sums of products of int8 exactly."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def _int8_product(codes: Tensor, scale: Tensor, weight: Tensor, by_output: Tensor, bias: Tensor | None) -> Tensor:
    product = _product(codes, weight) * by_output * scale[:, None]
    return product if bias is None else product + bias.double()


def _head_cases(ops: Ops, s: Sizes, random: Random) -> Iterator[Case]:
    qkv = random.normal(s.tokens, s.heads + 2 * s.kv_heads, s.dim)
    q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
    positions, halves = torch.arange(s.tokens, device=ops.device), torch.linspace(0, 1, s.dim // 2).to(ops.device)
    angles = torch.outer(positions, 1e4**-halves)
    tables = ops.rope_tables(angles.cos(), angles.sin(), qkv.dtype)
    by_head = [table.expand(-1, qkv.shape[1], -1).contiguous() for table in tables]
    yield Case(
        "rope",
        partial(ops.rope, qkv, *by_head),
        lambda: definition.rope(qkv, *by_head),
        num_bytes=2 * qkv.nbytes,
    )
    weights = random.normal(2, s.dim)
    yield Case(
        "norm_rope",
        partial(ops.norm_rope, q, k, weights[0], weights[1], EPS, *tables),
        lambda: definition.norm_rope(q, k, weights[0], weights[1], EPS, *tables),
        num_bytes=2.0 * (q.nbytes + k.nbytes),
    )
    caches, slots = _empty_pages(s, random)
    if (fused := getattr(ops, "rope_and_write", None)) is not None:
        into = caches.clone()
        given = qkv, None, EPS, by_head, (into[0], into[1]), slots[: s.tokens], None
        yield Case(
            "rope_and_write",
            partial(fused, *given),
            lambda: _rotated_and_written(qkv, by_head, caches, slots[: s.tokens], s),
            lambda found: [found, into],
            num_bytes=2 * qkv.nbytes,
        )
    for name, count, source in (
        ("kv_write", s.tokens, None),
        ("kv_write, each token twice", 2 * s.tokens, random.order(2 * s.tokens) // 2),
    ):
        written = caches.clone()
        yield Case(
            name,
            partial(ops.kv_write, k, v, written[0], written[1], slots[:count], source),
            partial(_written, caches, k, v, slots[:count], source),
            partial(_of_memory, written),
            num_bytes=4.0 * count * s.kv_heads * s.dim * k.itemsize,
            most=0.0,
        )


def _empty_pages(s: Sizes, random: Random) -> tuple[Tensor, Tensor]:
    """Pages for the tokens of a step twice, and where each goes."""
    shape = 2, pages_for(2 * s.tokens), PAGE_SIZE, s.kv_heads, s.dim
    return torch.zeros(shape, dtype=random.dtype, device=random.device), random.order(2 * s.tokens).int()


def _rotated_and_written(
    qkv: Tensor, tables: Sequence[Tensor], caches: Tensor, slots: Tensor, s: Sizes
) -> list[Tensor]:
    q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
    cos, sin = (table.split([s.heads, s.kv_heads, s.kv_heads], 1) for table in tables)
    rotated = definition.rope(k, cos[1], sin[1])
    return [definition.rope(q, cos[0], sin[0]), _written(caches, rotated, v, slots, None)]


def _of_memory(written: Tensor, _: object) -> Tensor:
    return written


def _written(caches: Tensor, k: Tensor, v: Tensor, slots: Tensor, source: Tensor | None) -> Tensor:
    """The definition runs on the CPU: it writes token by token."""
    into = caches.cpu().clone()
    definition.kv_write(k.cpu(), v.cpu(), into[0], into[1], slots.cpu(), None if source is None else source.cpu())
    return into.to(k.device)


def edge_cases(ops: Ops, s: Sizes, random: Random) -> Iterator[Case]:
    """Attention at the edges of tiles and pages, where everything behind an entry's keys is NaN."""
    lengths = [length for length in (*EDGES, s.keys) if length <= s.keys + BLOCK]
    shapes = [(0, QUERIES[index % len(QUERIES)], length) for index, length in enumerate(lengths)]
    plain, k_cache, v_cache = paged_step(shapes, (0,), s.kv_heads, s.dim, random.dtype)
    plain = replace(plain, page_tables=plain.page_tables.to(ops.device))
    k_cache, v_cache = k_cache.to(ops.device), v_cache.to(ops.device)
    q = random.normal(sum(plain.lengths), s.heads, s.dim)
    spans = zip(plain.lengths, plain.kv_lengths, strict=True)
    causal = replace(plain, causal=tuple(count <= keys for count, keys in spans))
    for name, entries in (("edges", plain), ("edges, causal", causal)):
        given = q, k_cache, v_cache, entries
        yield Case(f"attention, {name}", partial(ops.attention, *given), partial(definition.attention, *given))


def attention_case(ops: Ops, s: Sizes, random: Random, name: str, sequences: int, branches: int) -> Case:
    """Attention of windows of BLOCKS blocks; branches share the pages of their prompt."""
    shared, own = s.keys // PAGE_SIZE, pages_for(BLOCKS * BLOCK)
    slots = sequences * branches
    private = sequences * shared + torch.arange(slots * own).view(slots, own)
    prompt = torch.arange(sequences * shared).view(sequences, shared).repeat_interleave(branches, 0)
    tables = torch.cat([prompt, private], 1).repeat_interleave(BLOCKS, 0).int().to(ops.device)
    caches = random.normal(2, sequences * shared + slots * own, PAGE_SIZE, s.kv_heads, s.dim)
    q = random.normal(slots * BLOCKS * BLOCK, s.heads, s.dim)
    kv_lengths = tuple(shared * PAGE_SIZE + BLOCK * (1 + block) for _ in range(slots) for block in range(BLOCKS))
    count = len(kv_lengths)
    entries = Entries((BLOCK,) * count, kv_lengths, tables, (0,) * count, (0,))
    # With lengths in its memory a device uploads nothing, as in a captured step.
    there = replace(entries, kv_lengths=(), kv_lengths_on_device=torch.tensor(kv_lengths).int().to(ops.device))
    num_keys = sequences * shared * PAGE_SIZE + slots * BLOCKS * BLOCK
    given = q, caches[0], caches[1]
    return Case(
        name,
        partial(ops.attention, *given, there),
        partial(definition.attention, *given, entries),
        num_bytes=2 * q.nbytes + 2.0 * num_keys * s.kv_heads * s.dim * q.itemsize,
        operations=4.0 * BLOCK * sum(kv_lengths) * s.heads * s.dim,
    )
