"""The floor of one decoding step, term by term.

All counts are those of one rank. Compiled steps compute every row whole, so positions that branches share count once
for each row. Left out: activations that stay in caches, padding to buckets, prompts, and rounds without branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lopa_ascend.config import ModelConfig
from scripts.bench.plan.devices import Device

PRECISIONS = ("bf16", "w8a8", "fp32")
"""Number formats of the linear layers' weights. Embedding, head, keys and values are bf16 with "w8a8"."""
COLLECTIVES = ("optimistic", "pessimistic")
EXCHANGED = 12
"""Bytes of a position that branch-parallel groups exchange: token, probability, confidence."""
MERGED = 20
"""Bytes of a position of which tensor-parallel ranks tell their shard: best token, its logit, maximum and sums."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one group of ranks decodes at a time."""

    precision: str = "bf16"
    tp: int = 1
    bp: int = 1
    k: int = 3
    """Lookahead branches beside the anchor."""
    window: int = 128
    """Positions of a branch that one pass computes."""
    context: int = 1024
    """Positions in front of the window whose keys and values are cached."""
    requests: int = 1

    @property
    def rows(self) -> int:
        """Rows that the busiest rank computes."""
        return self.requests * -(-(self.k + 1) // self.bp)

    @property
    def tokens(self) -> int:
        """Positions that the busiest rank computes."""
        return self.rows * self.window


@dataclass(frozen=True)
class Step:
    """Seconds of a step's terms, each as if it were alone, and what they come to together."""

    weights: float
    """Reading the weights from memory."""
    kv: float
    """Reading and writing keys and values, and writing and reading the logits."""
    flops: float
    """Arithmetic of linear layers, attention and head."""
    launches: float
    """Fixed costs of kernels."""
    host: float
    collectives: float
    device: float
    """Sum over the parts of the model of the longer of its memory time and its arithmetic time, plus launches, plus
    collectives."""
    step: float
    """The longer of device and host, or their sum where the host does not work ahead."""
    bound_by: str
    """The term that takes most of ``step``."""

    def as_json(self) -> dict[str, Any]:
        """Milliseconds by term."""
        terms = {name: value for name, value in asdict(self).items() if name != "bound_by"}
        return {**{f"{name}_ms": round(1000 * value, 4) for name, value in terms.items()}, "bound_by": self.bound_by}


# ---- counts ----------------------------------------------------------------------------------------------------------


def layer_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Weights of one layer's linear layers on a rank, without biases."""
    hidden, dim = model.hidden_size, model.head_dim
    heads, kv_heads = model.local_heads(tp), model.local_kv_heads(tp)
    qkv = hidden * dim * (heads + 2 * kv_heads)
    return qkv + heads * dim * hidden + 3 * hidden * (model.intermediate_size // tp)


def head_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Weights of the output head on a rank."""
    return model.vocab_shard(tp) * model.hidden_size


def weight_bytes(model: ModelConfig, precision: str, tp: int = 1) -> tuple[int, int]:
    """Bytes of linear layers and of the head that a rank reads in a step.

    W8A8 also has a float32 scale for each output channel; the head stays bf16. The embedding's rows are left out.
    """
    size = {"bf16": 2, "w8a8": 1, "fp32": 4}[precision]
    layers = model.num_layers * layer_parameters(model, tp) * size
    if precision == "w8a8":
        dim = model.head_dim
        channels = dim * (model.local_heads(tp) + 2 * model.local_kv_heads(tp)) + 2 * model.hidden_size
        layers += 4 * model.num_layers * (channels + 2 * (model.intermediate_size // tp))
    return layers, head_parameters(model, tp) * element_bytes(precision)


def element_bytes(precision: str) -> int:
    """Bytes of a number in the head, in activations, and in keys and values."""
    return 4 if precision == "fp32" else 2


def kv_bytes_per_position(model: ModelConfig, precision: str, tp: int = 1) -> int:
    """Bytes of a position's keys and values in all layers of a rank."""
    return 2 * model.num_layers * model.local_kv_heads(tp) * model.head_dim * element_bytes(precision)


def kv_bytes(model: ModelConfig, work: Workload) -> int:
    """Bytes of keys and values that a rank moves in a step: each row writes its window, and reads all once."""
    position = kv_bytes_per_position(model, work.precision, work.tp)
    return position * work.rows * (work.context + 2 * work.window)


def attention_flops(model: ModelConfig, work: Workload) -> int:
    """FLOPs of the two products of attention on a rank; every query sees context and window."""
    width = model.local_heads(work.tp) * model.head_dim
    return 4 * model.num_layers * work.tokens * (work.context + work.window) * width


def all_reduce_bytes(model: ModelConfig, work: Workload) -> int:
    """Bytes of the hidden states that tensor-parallel ranks sum up in one all-reduce."""
    return work.tokens * model.hidden_size * element_bytes(work.precision)


# ---- times -----------------------------------------------------------------------------------------------------------


def collective_seconds(device: Device, ranks: int, num_bytes: float, case: str, *, reduce: bool) -> float:
    """Seconds of one all-reduce, or of one all-gather whose result has ``num_bytes``.

    The transfer follows msmodeling: the better of a ring and a tree. Pessimistic: a larger fixed cost.
    """
    if ranks == 1:
        return 0.0
    rounds, latency, link = (2 if reduce else 1), device.link_latency_s, device.reachable_link
    ring = rounds * (ranks - 1) * (latency + num_bytes / ranks / link)
    tree = rounds * (math.ceil(math.log2(ranks)) * latency + num_bytes / link)
    fixed = device.collective_s if case == "optimistic" else device.slow_collective_s
    return fixed + min(ring, tree)


def host_seconds(
    device: Device, layers: int, requests: int, lengths_written: float = 1.0, inputs_written: float = 1.0
) -> tuple[float, float]:
    """Seconds of the host in a step: those that update KV lengths, and all others.

    Args:
        device: of each rank.
        layers: of the model.
        requests: in the step.
        lengths_written: share of the steps of one request before which the host must write its KV lengths. Of several
            requests, one that needs it is enough.
        inputs_written: share of the steps of one request before which the host must write the inputs, likewise.
    """
    updates = layers * device.host_layer_s * _of_any(lengths_written, requests)
    inputs = device.host_inputs_s * _of_any(inputs_written, requests)
    return updates, device.host_launch_s + inputs + requests * device.host_request_s


def _of_any(share: float, requests: int) -> float:
    return 1 - (1 - share) ** requests


def whole_step(device: Device, shares: Mapping[str, float], host: float) -> tuple[float, str]:
    """The time of a step, and the term that takes most of it.

    Args:
        device: of each rank.
        shares: the device's time by term, in any unit.
        host: the host's time, in the same unit.
    """
    on_device, largest = sum(shares.values()), max(shares, key=shares.__getitem__)
    if device.host_overlaps:
        return max(on_device, host), "host" if host > on_device else largest
    return on_device + host, "host" if host > shares[largest] else largest


def predict(model: ModelConfig, device: Device, work: Workload, collectives: str = "optimistic") -> Step:
    """The floor of one step.

    Args:
        model: the geometry.
        device: of each rank.
        work: what a group of ranks decodes.
        collectives: "optimistic" or "pessimistic".

    Raises:
        ValueError: the model cannot be split over ``tp`` ranks, or a value is not among its choices.
    """
    _check(model, work, collectives)
    parts = _parts(model, device, work)
    shares = {"weights": 0.0, "kv": 0.0, "flops": 0.0}
    for part in parts:
        is_bound_by_memory = part.memory >= part.arithmetic
        term, seconds = (part.term, part.memory) if is_bound_by_memory else ("flops", part.arithmetic)
        shares[term] += seconds
    shares["launches"] = _launches(model, device, work)
    shares["collectives"] = _collectives(model, device, work, collectives)
    host = sum(host_seconds(device, model.num_layers, work.requests))
    step, bound_by = whole_step(device, shares, host)
    return Step(
        weights=sum(part.memory for part in parts if part.term == "weights"),
        kv=sum(part.memory for part in parts if part.term == "kv"),
        flops=sum(part.arithmetic for part in parts),
        launches=shares["launches"],
        host=host,
        collectives=shares["collectives"],
        device=sum(shares.values()),
        step=step,
        bound_by=bound_by,
    )


@dataclass(frozen=True)
class _Part:
    """A part of the model, which takes the longer of its memory traffic and its arithmetic."""

    term: str
    """The term of ``Step`` that the memory traffic counts to."""
    memory: float
    """Seconds of memory traffic."""
    arithmetic: float
    """Seconds of arithmetic."""


def _parts(model: ModelConfig, device: Device, work: Workload) -> tuple[_Part, ...]:
    """Linear layers, head, attention, and the logits, which are written and read as float32."""
    linear_peak = {"bf16": device.bf16_flops, "w8a8": device.int8_flops, "fp32": device.fp32_flops}[work.precision]
    other_peak = device.fp32_flops if work.precision == "fp32" else device.bf16_flops
    layer_flops = 2 * work.tokens * model.num_layers * layer_parameters(model, work.tp)
    head_flops = 2 * work.tokens * head_parameters(model, work.tp)
    layer_bytes, head_bytes = weight_bytes(model, work.precision, work.tp)
    logits_bytes = 2 * 4 * work.tokens * model.vocab_shard(work.tp)

    def part(term: str, num_bytes: int, flops: int, peak: float) -> _Part:
        return _Part(term, num_bytes / device.reachable_bandwidth, flops / (peak * device.compute_efficiency))

    return (
        part("weights", layer_bytes, layer_flops, linear_peak),
        part("weights", head_bytes, head_flops, other_peak),
        part("kv", kv_bytes(model, work), attention_flops(model, work), other_peak),
        part("kv", logits_bytes, 0, other_peak),
    )


def _check(model: ModelConfig, work: Workload, collectives: str) -> None:
    if work.tp not in model.tensor_parallel_sizes():
        sizes = ", ".join(map(str, model.tensor_parallel_sizes()))
        raise ValueError(f"tp is {work.tp}, but the model can be split over {sizes} ranks")
    if work.precision not in PRECISIONS:
        raise ValueError(f"unknown precision {work.precision!r}; choose one of {', '.join(PRECISIONS)}")
    if collectives not in COLLECTIVES:
        raise ValueError(f"unknown collectives {collectives!r}; choose one of {', '.join(COLLECTIVES)}")


def _launches(model: ModelConfig, device: Device, work: Workload) -> float:
    vector = device.vector_kernels_layer + (device.quantise_kernels_layer if work.precision == "w8a8" else 0)
    layer = device.matrix_kernels_layer * device.matrix_kernel_s + vector * device.vector_kernel_s
    return model.num_layers * layer + device.other_kernels * device.vector_kernel_s


def _collectives(model: ModelConfig, device: Device, work: Workload, case: str) -> float:
    """Two all-reduces a layer, a merge of scores, and an exchange of predictions by groups."""
    summed = collective_seconds(device, work.tp, all_reduce_bytes(model, work), case, reduce=True)
    merged = collective_seconds(device, work.tp, MERGED * work.tp * work.tokens, case, reduce=False)
    gathered = collective_seconds(device, work.bp, EXCHANGED * work.bp * work.tokens, case, reduce=False)
    return 2 * model.num_layers * summed + merged + gathered


def memory_bytes(model: ModelConfig, work: Workload) -> int:
    """Bytes that a rank must hold: weights with the whole embedding, and keys and values of its rows.

    The positions in front of the window are shared by a request's rows. A tied head is held beside the embedding,
    transposed for the product, as on an NPU.
    """
    layers, head = weight_bytes(model, work.precision, work.tp)
    cached = work.requests * work.context + work.tokens
    held = model.vocab_size * model.hidden_size * element_bytes(work.precision)
    return layers + head + held + cached * kv_bytes_per_position(model, work.precision, work.tp)
