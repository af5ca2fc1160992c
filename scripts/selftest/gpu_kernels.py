"""The kernels of the CUDA backend at a model's shapes: against float64, and against the time that they must take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.cuda.graphs import Capture
from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for

EPS = 1e-6
TOLERANCE = 0.02
"""Largest error that is ok, as a share of the largest value: a few roundings of bfloat16."""
CALLS = 10
"""Calls in a graph that is timed."""
BLOCK = 32
BLOCKS = 2
"""Blocks of a window."""


@dataclass(frozen=True)
class Sizes:
    """A model, and the work that kernels are timed with."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    tokens: int
    """Tokens of a step."""
    keys: int
    """Of a long prompt."""
    sequences: int
    copied: int
    """Bytes of the copy that measures the bandwidth."""
    side: int
    """Of the square matrices whose product measures the rates."""


DREAM_7B = Sizes(3584, 18944, 28, 4, 128, 152064, 512, 4096, 32, 2**30, 8192)


@dataclass(frozen=True)
class Measured:
    """What this GPU reaches."""

    bandwidth: float
    """Bytes/s of a copy, read and written."""
    bf16_flops: float
    int8_flops: float


@dataclass(frozen=True)
class Case:
    """A call of a kernel."""

    name: str
    run: Callable[[], Tensor]
    expected: Tensor
    """What it computes, float64."""
    num_bytes: float
    """Bytes that it must read and write."""
    operations: float = 0.0
    rate: str = "bf16_flops"
    """The field of ``Measured`` that ``operations`` are counted in."""


def seconds_of(capture: Capture, run: Callable[[], Any], calls: int = CALLS) -> float:
    """Seconds of one of several calls in a captured graph."""

    def launch() -> Tensor:
        for _ in range(calls - 1):
            run()
        found = run()
        assert isinstance(found, Tensor)
        return found

    capture.warm_up(launch)
    replay, _ = capture.capture(launch)
    replay()
    capture.wait()
    begin = time.perf_counter()
    replay()
    capture.wait()
    return (time.perf_counter() - begin) / calls


def measure(ops: Ops, capture: Capture, sizes: Sizes) -> Measured:
    """The bandwidth of a copy and the rates of large products."""
    source = torch.zeros(sizes.copied, dtype=torch.int8, device=ops.device)
    target = torch.empty_like(source)
    copy = seconds_of(capture, lambda: target.copy_(source))
    side, product = sizes.side, 2.0 * sizes.side**3
    a = torch.ones(side, side, dtype=torch.bfloat16, device=ops.device)
    codes = torch.ones(side, side, dtype=torch.int8, device=ops.device)
    bf16 = seconds_of(capture, lambda: torch.mm(a, a))
    int8 = seconds_of(capture, lambda: torch._int_mm(codes, codes))
    return Measured(2 * sizes.copied / copy, product / bf16, product / int8)


def examine(case: Case, capture: Capture, measured: Measured) -> dict[str, Any]:
    """The error of a kernel, its time, and its floor: bytes at the measured bandwidth, or operations at the rate."""
    error = (case.run().double() - case.expected).abs().max() / case.expected.abs().max()
    share = float(error.nan_to_num(nan=float("inf")))
    taken = seconds_of(capture, case.run)
    floor = max(case.num_bytes / measured.bandwidth, case.operations / getattr(measured, case.rate))
    return {
        "kernel": case.name,
        "verdict": "ok" if share <= TOLERANCE else "WRONG",
        "error": share,
        "us": 1e6 * taken,
        "floor_us": 1e6 * floor,
    }


def cases(ops: Ops, s: Sizes) -> Iterator[Case]:
    """All kernels of a step."""
    random = torch.Generator(ops.device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=random, device=ops.device) * scale
        return values.to(torch.float32 if ops.device.type == "cpu" else torch.bfloat16)

    yield from _row_cases(ops, s, randn)
    yield from _product_cases(ops, s, randn)
    yield from _head_cases(ops, s, randn)
    yield attention_case(ops, s, randn, "attention, 1 request of 8 branches", 1, 8)
    yield attention_case(ops, s, randn, f"attention, {s.sequences} requests", s.sequences, 1)


Randn = Callable[..., Tensor]


def _row_cases(ops: Ops, s: Sizes, randn: Randn) -> Iterator[Case]:
    x, weight, gate_up = randn(s.tokens, s.hidden), randn(s.hidden), randn(s.tokens, 2 * s.inner)
    yield Case("rms_norm", lambda: ops.rms_norm(x, weight, EPS), _norm(x, weight), 2 * x.nbytes)
    codes_bytes = x.numel() + 4 * s.tokens
    yield Case(
        "rms_norm_quant",
        lambda: _dequantized(*ops.rms_norm_quant(x, weight, EPS)),
        _norm(x, weight),
        x.nbytes + codes_bytes,
    )
    residual = randn(s.tokens, s.hidden)
    yield Case(
        "add_rms_norm",
        lambda: ops.add_rms_norm(x, residual.clone(), weight, EPS)[0],
        _norm(x + residual, weight),
        4 * x.nbytes,
    )
    gate, up = gate_up.double().chunk(2, -1)
    gated = F.silu(gate) * up
    yield Case("swiglu", lambda: ops.swiglu(gate_up), gated, 1.5 * gate_up.nbytes)
    quantised_bytes = gate_up.nbytes + gated.numel() + 4 * s.tokens
    yield Case("swiglu_quant", lambda: _dequantized(*ops.swiglu_quant(gate_up)), gated, quantised_bytes)
    logits, never = randn(s.tokens, s.vocabulary), torch.zeros(s.vocabulary, device=ops.device)
    expected = torch.log_softmax(logits.double(), -1).amax(-1)
    assert ops.row_stats is not None
    score = ops.row_stats
    yield Case("scores", lambda: score(logits, never, "max_prob").log_share, expected, logits.nbytes)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale[:, None]


def _product_cases(ops: Ops, s: Sizes, randn: Randn) -> Iterator[Case]:
    for name, inputs, outputs in (
        ("qkv", s.hidden, (s.heads + 2 * s.kv_heads) * s.dim),
        ("gate_up", s.hidden, 2 * s.inner),
        ("down", s.inner, s.hidden),
    ):
        x, weight = randn(s.tokens, inputs), ops.stored(randn(outputs, inputs, scale=inputs**-0.5))
        operations = 2.0 * s.tokens * inputs * outputs
        expected = x.double() @ weight.double().T
        moved = x.nbytes + weight.nbytes + s.tokens * outputs * x.itemsize
        yield Case(f"linear, {name}", partial(ops.linear, x, weight), expected, moved, operations)
        codes, scale = ops.quantize(x)
        int8, by_output = ops.quantize(weight)
        expected = _dequantized(codes, scale).double() @ _dequantized(int8, by_output).double().T
        moved = codes.nbytes + int8.nbytes + s.tokens * outputs * x.itemsize

        run = partial(ops.quant_linear, codes, scale, int8, by_output, None, x.dtype)
        yield Case(f"int8 linear, {name}", run, expected, moved, operations, "int8_flops")


def _head_cases(ops: Ops, s: Sizes, randn: Randn) -> Iterator[Case]:
    heads = s.heads + 2 * s.kv_heads
    qkv = randn(s.tokens, heads, s.dim)
    angles = torch.outer(
        torch.arange(s.tokens, device=ops.device), 1e4 ** -torch.linspace(0, 1, s.dim // 2).to(ops.device)
    )
    cos, sin = (table[:, : s.dim // 2] for table in ops.rope_tables(angles.cos(), angles.sin(), qkv.dtype))
    left, right = qkv.double().chunk(2, -1)
    c, d = cos.double(), sin.double()
    rotated = torch.cat([left * c - right * d, right * c + left * d], -1)
    yield Case("rope", lambda: ops.rope(qkv, cos, sin), rotated, 2 * qkv.nbytes)
    q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
    weight = torch.ones(s.dim, dtype=qkv.dtype, device=ops.device)
    left, right = _norm(q, weight).chunk(2, -1)
    normed = torch.cat([left * c - right * d, right * c + left * d], -1)
    moved = 2.0 * (q.nbytes + k.nbytes)
    yield Case("norm_rope", lambda: ops.norm_rope(q, k, weight, weight, EPS, cos, sin)[0], normed, moved)
    pages = pages_for(s.tokens)
    caches = torch.zeros(2, pages, PAGE_SIZE, s.kv_heads, s.dim, dtype=qkv.dtype, device=ops.device)
    slots = torch.randperm(s.tokens).int().to(ops.device)
    written = torch.zeros_like(caches[0]).flatten(0, 1).index_copy(0, slots.long(), k.contiguous())

    def write() -> Tensor:
        ops.kv_write(k, v, caches[0], caches[1], slots)
        return caches[0].flatten(0, 1)

    yield Case("kv_write", write, written.double(), 4 * k.nbytes)


def attention_case(ops: Ops, s: Sizes, randn: Randn, name: str, sequences: int, branches: int) -> Case:
    """Attention of windows of BLOCKS blocks; branches share the pages of their prompt."""
    shared, own = s.keys // PAGE_SIZE, pages_for(BLOCKS * BLOCK)
    slots = sequences * branches
    private = sequences * shared + torch.arange(slots * own).view(slots, own)
    prompt = torch.arange(sequences * shared).view(sequences, shared).repeat_interleave(branches, 0)
    tables = torch.cat([prompt, private], 1).repeat_interleave(BLOCKS, 0).int().to(ops.device)
    caches = randn(2, sequences * shared + slots * own, PAGE_SIZE, s.kv_heads, s.dim)
    q = randn(slots * BLOCKS * BLOCK, s.heads, s.dim)
    kv_lengths = tuple(shared * PAGE_SIZE + BLOCK * (1 + block) for _ in range(slots) for block in range(BLOCKS))
    count = len(kv_lengths)
    entries = Entries((BLOCK,) * count, kv_lengths, tables, (0,) * count, (0,))
    num_keys = sequences * shared * PAGE_SIZE + slots * BLOCKS * BLOCK
    moved = 2 * q.nbytes + 2.0 * num_keys * s.kv_heads * s.dim * q.itemsize
    operations = 4.0 * BLOCK * sum(kv_lengths) * s.heads * s.dim
    expected = _attention(q, caches, tables, kv_lengths)
    return Case(name, lambda: ops.attention(q, caches[0], caches[1], entries), expected, moved, operations)


def _attention(q: Tensor, caches: Tensor, tables: Tensor, kv_lengths: Sequence[int]) -> Tensor:
    outputs = []
    for query, table, length in zip(q.split(BLOCK), tables.long(), kv_lengths, strict=True):
        key, value = (cache[table].flatten(0, 1)[:length].double().transpose(0, 1) for cache in caches)
        query = query.double().transpose(0, 1)
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
        weights = (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1)
        outputs.append((weights @ value).transpose(0, 1))
    return torch.cat(outputs).flatten(1)
