"""The parts of a step, and the least time that each could take on this machine.

The floor of a part is its work at a peak that is measured in the same run: FLOPs at the speed of the fastest matrix
product, bytes at the speed of the fastest copy. Every tensor that an op takes or gives is counted once.

- products: the linear layers, FLOPs; or, where that takes longer, reading the weights from memory.
- attention: scores and weighted sums, FLOPs; writing keys and values, bytes.
- norms and activations: norms, rotary embedding, SwiGLU and quantisation, bytes.
- head and score: the FLOPs of the LM head, and reading its logits once, bytes.
- host: everything else, among it the embedding and the layout of the batch. Its floor is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lopa_ascend import LLM
from lopa_ascend.backend.cpu.int8 import multiply_int8
from lopa_ascend.backend.cpu.native import load_cpu_ops
from lopa_ascend.backend.interface import Entries, Ops

PARTS = ("products", "attention", "norms and activations", "head and score", "host")
PART_OF_OP = {
    "linear": "products",
    "quant_linear": "products",
    "attention": "attention",
    "kv_write": "attention",
} | dict.fromkeys(
    (
        *("rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant", "quantize"),
        *("rope", "norm_rope", "swiglu", "swiglu_quant"),
    ),
    "norms and activations",
)
"""Ops that are timed."""
COPIED_BYTES = 4 << 20
"""Bytes of the copies that show the peak: about a tensor of a step."""
READ_BYTES = 256 << 20
"""Bytes that are read from memory to show the peak: more than caches hold."""


@dataclass(frozen=True)
class Peaks:
    """What this machine reaches in one second of CPU time."""

    flops: float
    """Of matrix products, in the faster of the model's dtype and float32."""
    int8_flops: float
    """Of int8 products, two for each multiplication."""
    bytes: float
    """Of a copy, read and written."""
    memory: float
    """Bytes that are read from memory, where they do not fit into a cache."""


@dataclass
class PartWork:
    """One part of all steps."""

    seconds: float = 0.0
    """CPU seconds of this process."""
    flops: int = 0
    int8_flops: int = 0
    bytes: int = 0
    weight_bytes: int = 0

    def floor(self, peaks: Peaks) -> float:
        """The least CPU seconds that the work takes."""
        products = self.flops / peaks.flops + self.int8_flops / peaks.int8_flops
        return max(products, self.weight_bytes / peaks.memory) + self.bytes / peaks.bytes


@dataclass
class Parts:
    """All parts, by name; the ops and the probe of an engine report to it."""

    by_name: dict[str, PartWork] = field(default_factory=lambda: {name: PartWork() for name in PARTS})
    forward: float = 0.0
    """CPU seconds of the model's forward passes."""
    _in_score: bool = False

    @contextmanager
    def probe(self, part: str, work: object) -> Iterator[None]:
        """For ``Runner.set_probe``: times forward passes, and head and score, whose ops are not timed one by one."""
        started = time.process_time()
        self._in_score = part == "score"
        try:
            yield
        finally:
            self._in_score = False
            seconds = time.process_time() - started
            if part == "score":
                self.by_name["head and score"].seconds += seconds
            elif part == "forward":
                self.forward += seconds

    def add(self, op: str, seconds: float, args: tuple[Any, ...], out: Any) -> None:
        """Counts one call of an op."""
        flops, num_bytes, weight_bytes = work_of(op, args, out)
        if self._in_score:
            part, seconds, num_bytes = self.by_name["head and score"], 0, out.nbytes
        else:
            part = self.by_name[PART_OF_OP[op]]
        part.seconds += seconds
        if op == "quant_linear":
            part.int8_flops += flops
        else:
            part.flops += flops
        part.bytes += num_bytes
        part.weight_bytes += weight_bytes

    def finish(self, total: float) -> None:
        """Counts what no other part has taken of ``total`` CPU seconds to the host."""
        self.by_name["host"].seconds = total - sum(self.by_name[name].seconds for name in PARTS if name != "host")


class TimedOps:
    """``Ops`` that report the time and the work of their calls.

    Args:
        ops: what computes.
        parts: what the calls are reported to.
    """

    def __init__(self, ops: Ops, parts: Parts) -> None:
        self._ops, self._parts = ops, parts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._timed, name, found) if name in PART_OF_OP else found

    def _timed(self, name: str, op: Callable[..., Any], *args: Any) -> Any:
        started = time.process_time()
        out = op(*args)
        self._parts.add(name, time.process_time() - started, args, out)
        return out


def work_of(name: str, args: tuple[Any, ...], out: Any) -> tuple[int, int, int]:
    """FLOPs, bytes and bytes of weights of one call of an op, as far as the floor of its part counts them."""
    if name in ("linear", "quant_linear"):
        weight = args[1] if name == "linear" else args[2]
        return 2 * len(args[0]) * weight.numel(), 0, weight.nbytes
    if name == "attention":
        entries: Entries = args[3]
        pairs = sum(length * keys for length, keys in zip(entries.lengths, entries.kv_lengths, strict=True))
        _, heads, dim = args[0].shape
        return 2 * 2 * pairs * heads * dim, 0, 0  # scores and weighted sums, with two FLOPs for each product
    if name == "kv_write":
        keys, slots = args[0], args[4]
        return 0, 2 * 2 * len(slots) * keys[0].nbytes, 0  # keys and values, each read and written
    outputs = out if isinstance(out, tuple) else (out,)
    tensors = [x for x in (*args, *outputs) if isinstance(x, Tensor)]
    return 0, sum(tensor.nbytes for tensor in tensors), 0


def measure_parts(llm: LLM, run: Callable[[], object]) -> Parts:
    """The parts of the steps that ``run`` makes with a model."""
    runner, parts = llm.engine.runner, Parts()
    ops, probe = runner.model.ops, runner.eager.probe
    runner.model.ops = TimedOps(ops, parts)
    runner.set_probe(parts.probe)
    started = time.process_time()
    try:
        run()
    finally:
        total = time.process_time() - started
        runner.model.ops = ops
        runner.set_probe(probe)
    parts.finish(total)
    return parts


def measure_peaks(dtype: torch.dtype) -> Peaks:
    """The peaks for a model.

    A processor without bfloat16 units is faster in float32, and that is the peak then.

    Args:
        dtype: of the model's weights and activations.
    """
    return Peaks(max(gemm_peak(dtype), gemm_peak(torch.float32)), int8_peak(), copy_peak(), memory_peak())


def gemm_peak(dtype: torch.dtype) -> float:
    """The largest FLOP/s of CPU time of some linear layers of the model's sizes, multiplied as the engine does."""
    ops = load_cpu_ops(packs_weights=True)

    def layer(rows: int, inner: int, outer: int) -> Callable[[], object]:
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        packed = ops.packed(weight)
        return lambda: ops.linear(x, packed)

    return largest_flops(layer)


def int8_peak() -> float:
    """The largest FLOP/s of CPU time of exact int8 products of the same sizes, as the engine multiplies them."""
    ops = load_cpu_ops(packs_weights=True)

    def layer(rows: int, inner: int, outer: int) -> Callable[[], object]:
        x, weight = torch.ones(rows, inner, dtype=torch.int8), torch.ones(outer, inner, dtype=torch.int8)
        packed = ops.packed(weight)
        return lambda: multiply_int8(x, packed)

    return largest_flops(layer)


def fastest_call(call: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this process for the fastest of some equal calls; never 0, so that rates can be computed."""
    fastest = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        fastest = min(fastest, time.process_time() - start)
    return max(fastest, 1e-9)


def largest_flops(layer: Callable[[int, int, int], Callable[[], object]]) -> float:
    """The largest FLOP/s of CPU time of some linear layers.

    Args:
        layer: takes numbers of rows, inputs and outputs, and returns a call that computes such a linear layer.
    """
    best = 0.0
    for rows, inner, outer in ((1152, 768, 4096), (1152, 2048, 768), (2048, 2048, 2048)):
        best = max(best, 2 * rows * inner * outer / fastest_call(layer(rows, inner, outer), 6))
    return best


def copy_peak() -> float:
    """The bytes, read and written, that torch's fastest of some copies moves in a second of CPU time."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target, copies = torch.empty_like(source), 8

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    return copies * 2 * COPIED_BYTES / fastest_call(copy, 20)


def memory_peak() -> float:
    """The bytes that torch's fastest of some sums reads from memory in a second of CPU time."""
    values = torch.zeros(READ_BYTES // 4)
    return READ_BYTES / fastest_call(values.sum, 5)
