"""The parts of a step, and the least time that each could take on this machine.

The floor of a part is its work at peaks that are measured in the same run, and the longer one of two times: that of its
FLOPs at the speed of the fastest matrix product, and that of its bytes. Weights are read at the speed of the fastest
sum of so many bytes, or of their product with one row, whichever is faster here; other bytes move at the speed of the
fastest copy. Every tensor that an op takes or gives is counted once.

- products: the linear layers: FLOPs, and reading the weights with their scales.
- attention: scores and weighted sums, FLOPs; writing and reading keys and values, common beginnings once, bytes.
- norms and activations: norms, rotary embedding, SwiGLU and quantisation, bytes.
- head and score: the FLOPs of the LM head, reading its weight, and reading its logits once.
- host: everything else, among it the embedding and the layout of the batch. Its floor is 0.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lopa_ascend import LLM
from lopa_ascend.backend.cpu.native import load_cpu_ops
from lopa_ascend.backend.interface import Entries, Ops

OPS = {
    "products": ("linear", "quant_linear", "int4_linear"),
    "attention": ("attention", "kv_write"),
    "norms and activations": (
        *("rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant", "quantize"),
        *("rope", "norm_rope", "swiglu", "swiglu_quant"),
    ),
}
"""By part: ops that are timed."""
PARTS = (*OPS, "head and score", "host")
PART_OF_OP = {op: part for part, ops in OPS.items() for op in ops}
WEIGHTS_OF = {"linear": slice(1, 2), "quant_linear": slice(2, 4), "int4_linear": slice(2, 3)}
"""Linear layers, and which of their arguments are the weight and its scales: tensors, or a tuple of tensors."""
COPIED_BYTES = 4 << 20
"""Bytes of the copies that show the peak: about a tensor of a step."""
READ_BYTES = (4 << 20, 2 << 30)
"""The least and the most bytes that are read to show the peak of a model's weights. No cache holds the most; weights of
fewer bytes lie in caches from one step to the next."""
ROW_ELEMENTS = 1024
"""Inputs of the product that may show it."""
LAYERS = ((1152, 768, 4096), (1152, 2048, 768), (2048, 2048, 2048))
"""Rows, inputs and outputs of the linear layers that show the peak of products."""


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
    """Bytes of weights that are read."""


@dataclass
class PartWork:
    """One part of all steps."""

    seconds: float = 0.0
    """CPU seconds of this process."""
    flops: int = 0
    int8_flops: int = 0
    bytes: int = 0
    weight_bytes: int = 0

    def floors(self, peaks: Peaks) -> tuple[float, float]:
        """The least CPU seconds that the work takes by memory, and by products."""
        by_memory = self.weight_bytes / peaks.memory + self.bytes / peaks.bytes
        return by_memory, self.flops / peaks.flops + self.int8_flops / peaks.int8_flops


def floors(parts: Mapping[str, PartWork], peaks: Peaks, steps: int) -> list[dict[str, Any]]:
    """For each part of some steps, and for all of them, its milliseconds in a step, the least ones, and the share of
    its time that the longer floor is."""
    least = {name: part.floors(peaks) for name, part in parts.items()}
    rows = {name: [parts[name].seconds, *both, max(both)] for name, both in least.items()}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    return [
        {
            "part": name,
            "CPU ms": round(1000 * seconds / steps, 2),
            "least by memory": round(1000 * memory / steps, 2),
            "least by products": round(1000 * products / steps, 2),
            "share": f"{longer / seconds:.0%}",
        }
        for name, (seconds, memory, products, longer) in rows.items()
    ]


class TimedOps:
    """``Ops`` that count the time and the work of their calls to parts. In a part that is timed as a whole, such as
    head and score, they count the work alone."""

    def __init__(self, ops: Ops, parts: dict[str, PartWork]) -> None:
        self._ops, self._parts = ops, parts
        self._in_score = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._timed, name, found) if name in PART_OF_OP else found

    def quant_swiglu(
        self, codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As a CPU computes it, so that each half is counted to its part."""
        product = self.quant_linear(codes, scale, weight, weight_scale, None, dtype)
        halves: tuple[Tensor, Tensor] = self.swiglu_quant(product)
        return halves

    @contextmanager
    def probe(self, part: str, work: object) -> Iterator[None]:
        """For ``Runner.set_probe``."""
        started = time.process_time()
        self._in_score = part == "score"
        try:
            yield
        finally:
            if self._in_score:
                self._parts["head and score"].seconds += time.process_time() - started
            self._in_score = False

    def _timed(self, name: str, op: Callable[..., Any], *args: Any) -> Any:
        started = time.process_time()
        out = op(*args)
        seconds = time.process_time() - started
        flops, num_bytes, weight_bytes = work_of(name, args, out)
        part = self._parts["head and score" if self._in_score else PART_OF_OP[name]]
        if self._in_score:
            num_bytes = out.nbytes
        else:
            part.seconds += seconds
        if args[0].dtype is torch.int8:
            part.int8_flops += flops
        else:
            part.flops += flops
        part.bytes += num_bytes
        part.weight_bytes += weight_bytes
        return out


def work_of(name: str, args: tuple[Any, ...], out: Any) -> tuple[int, int, int]:
    """FLOPs, bytes and bytes of weights of one call of an op, as far as the floor of its part counts them."""
    if name in WEIGHTS_OF:
        weights = [x for part in args[WEIGHTS_OF[name]] for x in (part if isinstance(part, tuple) else (part,))]
        num_bytes = sum(x.nbytes for x in weights if isinstance(x, Tensor))
        return 2 * args[0].numel() * out.shape[1], 0, num_bytes
    if name == "attention":
        entries: Entries = args[3]
        pairs = sum(length * keys for length, keys in zip(entries.lengths, entries.kv_lengths, strict=True))
        _, heads, dim = args[0].shape
        groups = zip(entries.kv_lengths, entries.prefix_groups, strict=True)
        read = sum(entries.prefixes) + sum(length - entries.prefixes[group] for length, group in groups)
        # Scores and weighted sums, with two FLOPs for each product; keys and values.
        return 2 * 2 * pairs * heads * dim, 2 * read * args[1][0, 0].nbytes, 0
    if name == "kv_write":
        keys, slots = args[0], args[4]
        return 0, 2 * 2 * len(slots) * keys[0].nbytes, 0  # keys and values, each read and written
    outputs = out if isinstance(out, tuple) else (out,)
    return 0, sum(x.nbytes for x in (*args, *outputs) if isinstance(x, Tensor)), 0


@contextmanager
def timed_parts(llm: LLM) -> Iterator[dict[str, PartWork]]:
    """The parts of the eager steps that a model makes in the ``with`` block, by name."""
    runner, parts = llm.engine.runner, {name: PartWork() for name in PARTS}
    ops, probe = runner.model.ops, runner.eager.probe
    timed = TimedOps(ops, parts)
    runner.model.ops = timed
    runner.set_probe(timed.probe)
    started = time.process_time()
    try:
        yield parts
    finally:
        total = time.process_time() - started
        runner.model.ops = ops
        runner.set_probe(probe)
        parts["host"].seconds = total - sum(part.seconds for part in parts.values())


# ---- peaks of this machine -------------------------------------------------------------------------------------------


def measure_peaks(dtype: torch.dtype, weight_bytes: int) -> Peaks:
    """The peaks for a model with weights of so many bytes. A processor without bfloat16 units is faster in float32, and
    that is the peak then."""
    ops = load_cpu_ops(packs_weights=True)

    def floats(kind: torch.dtype, rows: int, inner: int, outer: int) -> Callable[[], object]:
        return partial(ops.linear, torch.randn(rows, inner).to(kind), ops.packed(torch.randn(outer, inner).to(kind)))

    def integers(rows: int, inner: int, outer: int) -> Callable[[], object]:
        x, weight = (torch.ones(n, inner, dtype=torch.int8) for n in (rows, outer))
        packed, scales = ops.packed(ops.stored(weight)), torch.ones(outer)
        return partial(ops.quant_linear, x, torch.ones(rows), packed, scales, None, torch.float32)

    def flops(layer: Callable[[int, int, int], Callable[[], object]]) -> float:
        return max(_rate(2 * math.prod(sizes), layer(*sizes), 6) for sizes in LAYERS)

    products = [flops(partial(floats, kind)) for kind in (dtype, torch.float32)]
    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    weight = torch.ones(min(max(weight_bytes, READ_BYTES[0]), READ_BYTES[1]) // (4 * ROW_ELEMENTS), ROW_ELEMENTS)
    row = torch.ones(ROW_ELEMENTS)
    return Peaks(
        flops=max(products),
        int8_flops=flops(integers),
        bytes=_rate(8 * 2 * COPIED_BYTES, lambda: [target.copy_(source) for _ in range(8)], 20),
        memory=max(_rate(weight.nbytes, read, 5) for read in (weight.sum, partial(weight.mv, row))),
    )


def _rate(amount: float, call: Callable[[], object], repeats: int) -> float:
    """What the fastest of some equal calls, each of which does so much, does in a CPU second of this process."""
    return amount / max(min(timeit.repeat(call, number=1, repeat=repeats, timer=time.process_time)), 1e-9)
