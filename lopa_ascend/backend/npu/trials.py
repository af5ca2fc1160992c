"""The kernels of a layer beside attention. Before weights are loaded, they must compute with random tensors of a
model's shapes what the definition of the ops does, ``backend/cpu/definition.py``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.interface import Experts, Ops
from lopa_ascend.backend.npu.gate import TOLERANCE, WrongKernelError, error_share, this_die, wait_for_replay
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.config import ExpertsConfig
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for

MAX_INNER, MAX_OUTPUTS = 256, 4096
"""Largest tried widths of an expert and of an int8 product: larger ones would take seconds."""
SPARE_ROWS = 32
"""Drawn at a time beside twice as many rows as are needed."""
NORM_ROPE = "norm_rope"
"""The trial that only models with normed queries need."""
DIFFERENT = 8
"""Experts with weights of their own; the others have multiples of these."""
GAP = 0.004
"""How far apart the scores of what is taken and what is not must lie, so that no rounding decides."""
logger = logging.getLogger(__name__)
Results = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    dtype: torch.dtype
    experts: ExpertsConfig | None
    has_int8: bool
    rows: int = 32
    max_outputs: int = MAX_OUTPUTS


@dataclass(frozen=True)
class Trial:
    """One call on the device, and what it must give."""

    name: str
    run: Callable[[], Results]
    expected: Callable[[], Results]
    remedy: str = ""


def check_kernels(ops: NpuOps, shape: LayerShape) -> None:
    """Tries all kernels that a layer needs. WrongKernelError names one that is wrong or is refused, the die and the
    error; GraphError if one hangs."""
    begin, count = time.perf_counter(), 0
    for trial in trials(ops, shape):
        try:
            found = trial.run()
            wait_for_replay(trial.name)
            pairs = zip(_listed(found), _listed(trial.expected()), strict=True)
            share = max(error_share(*pair) for pair in pairs)
        except RuntimeError as error:
            raise WrongKernelError(f"{this_die()}: {trial.name} is refused ({shape}): {error}{trial.remedy}") from error
        if share > TOLERANCE:
            raise WrongKernelError(
                f"{this_die()}: {trial.name} is wrong: the error is {share:.0%} of the largest value for {shape}. This "
                f"is a fault of the device or of its software{trial.remedy}"
            )
        count += 1
    logger.info(
        "%d kernels compute what the CPU does (checked in %.0f ms)", count, 1000 * (time.perf_counter() - begin)
    )


def _listed(results: Results) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def trials(ops: NpuOps, shape: LayerShape) -> Iterator[Trial]:
    """All trials; their tensors are made one after the other, the same ones in every start."""
    random = Random(shape.dtype)
    yield from _dense(ops, shape, random)
    if shape.experts is not None:
        for tokens in (1, shape.rows):
            for is_int8 in (False, True)[: 1 + shape.has_int8]:
                yield experts_trial(ops, random, shape.experts, shape.hidden, tokens, is_int8=is_int8)
    if shape.has_int8:
        yield from int8_trials(ops, shape, random)


class Random:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, generator=self._generator)).to(self._dtype)

    def codes(self, *size: int) -> Tensor:
        return torch.randint(-127, 128, size, generator=self._generator, dtype=torch.int8)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


def _dense(ops: NpuOps, shape: LayerShape, random: Random) -> Iterator[Trial]:
    s, device = shape, ops.device
    x, residual, weight = random.normal(s.rows, s.hidden), random.normal(s.rows, s.hidden), random.normal(s.hidden)
    given = x.to(device), residual.to(device), weight.to(device)

    def added() -> Results:  # the op may overwrite what it is given
        return ops.add_rms_norm(given[0].clone(), given[1].clone(), given[2], s.eps)

    yield Trial(
        "rms_norm", lambda: ops.rms_norm(given[0], given[2], s.eps), lambda: definition.rms_norm(x, weight, s.eps)
    )
    yield Trial("add_rms_norm", added, lambda: definition.add_rms_norm(x, residual, weight, s.eps))
    qkv = random.normal((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, scale=s.hidden**-0.5)
    bias = random.normal(len(qkv))
    stored, on_device = ops.stored(qkv.to(device)), bias.to(device)
    yield Trial("linear", lambda: ops.linear(given[0], stored, on_device), lambda: definition.linear(x, qkv, bias))
    yield Trial("linear without bias", lambda: ops.linear(given[0], stored), lambda: definition.linear(x, qkv))
    gate_up = random.normal(s.rows, 2 * s.inner)
    yield Trial("swiglu", partial(ops.swiglu, gate_up.to(device)), lambda: definition.swiglu(gate_up))
    yield from _rotations(ops, s, random)
    yield from _writes(ops, s, random)


def _writes(ops: NpuOps, s: LayerShape, random: Random) -> Iterator[Trial]:
    """Each token to a position of its own, and each to two."""
    pages = pages_for(2 * s.rows)
    caches = random.normal(2, pages, PAGE_SIZE, s.kv_heads, s.head_dim)
    new, slots = random.normal(2, s.rows, s.kv_heads, s.head_dim), random.order(pages * PAGE_SIZE).int()
    twice = random.order(2 * s.rows) // 2

    def written(write: Callable[..., None], device: torch.device, count: int, source: Tensor | None) -> Tensor:
        k_cache, v_cache = into = caches.to(device, copy=True)
        k, v = new.to(device)
        write(k, v, k_cache, v_cache, slots[:count].to(device), source if source is None else source.to(device))
        return into

    for name, count, source in (("kv_write", s.rows, None), ("kv_write, each token twice", 2 * s.rows, twice)):
        yield Trial(
            name,
            partial(written, ops.kv_write, ops.device, count, source),
            partial(written, definition.kv_write, torch.device("cpu"), count, source),
        )


def _rotations(ops: NpuOps, shape: LayerShape, random: Random) -> Iterator[Trial]:
    s, device, dim = shape, ops.device, shape.rotary_dim
    angles = torch.outer(torch.arange(s.rows) * 17.0, 1e6 ** -(torch.arange(0, dim, 2) / dim))
    cos, sin = angles.cos().to(s.dtype), angles.sin().to(s.dtype)
    tables = ops.rope_tables(angles.cos().to(device), angles.sin().to(device), s.dtype)
    qkv, halves = random.normal(s.rows, s.heads + 2 * s.kv_heads, dim), (cos[:, None], sin[:, None])
    whole = qkv.to(device)
    q, k, _ = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
    given = whole.split([s.heads, s.kv_heads, s.kv_heads], 1)
    yield Trial("rope", partial(ops.rope, q.to(device), *tables), lambda: definition.rope(q, *halves))
    is_rotated = (torch.arange(qkv.shape[1]) < s.heads + s.kv_heads)[:, None]  # values are rotated by 0

    def by_head(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        there = is_rotated.to(cos.device)
        return torch.where(there, cos, torch.ones_like(cos)), torch.where(there, sin, torch.zeros_like(sin))

    yield Trial(
        "rope of q, k and v at once",
        partial(ops.rope, whole, *by_head(*tables)),
        lambda: definition.rope(qkv, *by_head(*halves)),
    )
    q_weight, k_weight = random.normal(dim), random.normal(dim)
    on_device = q_weight.to(device), k_weight.to(device)
    yield Trial(
        NORM_ROPE,
        partial(ops.norm_rope, given[0], given[1], *on_device, s.eps, *tables),
        lambda: definition.norm_rope(q, k, q_weight, k_weight, s.eps, *halves),
    )


def int8_trials(ops: NpuOps, shape: LayerShape, random: Random) -> Iterator[Trial]:
    s, device, remedy = shape, ops.device, "; without W8A8 (quantization) no such kernel is needed"
    x, residual, weight = random.normal(s.rows, s.hidden), random.normal(s.rows, s.hidden), random.normal(s.hidden)
    given = x.to(device), residual.to(device), weight.to(device)
    made = partial(Trial, remedy=remedy)
    yield made("quantize", lambda: ops.quantize(given[0]), lambda: definition.quantize(x))
    yield made(
        "rms_norm_quant",
        lambda: ops.rms_norm_quant(given[0], given[2], s.eps),
        lambda: definition.rms_norm_quant(x, weight, s.eps),
    )
    yield made(
        "add_rms_norm_quant",
        lambda: ops.add_rms_norm_quant(given[0].clone(), given[1].clone(), given[2], s.eps),
        lambda: definition.add_rms_norm_quant(x, residual, weight, s.eps),
    )
    gate_up = random.normal(s.rows, 2 * s.inner)
    run = partial(ops.swiglu_quant, gate_up.to(device))
    yield made("swiglu_quant", run, lambda: definition.swiglu_quant(gate_up))
    queries = s.heads * s.head_dim
    sizes = {"qkv": (queries + 2 * s.kv_heads * s.head_dim, s.hidden), "o": (s.hidden, queries)}
    sizes |= {"gate_up": (2 * s.inner, s.hidden), "down": (s.hidden, s.inner)}
    for name, (num_outputs, num_inputs) in sizes.items():
        codes, scale = definition.quantize(random.normal(s.rows, num_inputs))
        weights = random.codes(min(num_outputs, s.max_outputs), num_inputs)
        scales = random.normal(len(weights)).float().abs() / num_inputs
        bias = random.normal(len(weights)) if name == "qkv" else None
        on_device = codes.to(device), scale.to(device), ops.stored(weights.to(device)), scales.to(device)
        yield made(
            f"quant_linear of {name}",
            partial(ops.quant_linear, *on_device, bias if bias is None else bias.to(device), s.dtype),
            partial(definition.quant_linear, codes, scale, weights, scales, bias, s.dtype),
        )
        if name == "gate_up":
            yield made(
                "quant_swiglu",
                partial(ops.quant_swiglu, *on_device, s.dtype),
                partial(definition.quant_swiglu, codes, scale, weights, scales, s.dtype),
            )


# ---- mixtures of experts -------------------------------------------------------------------------------------------


def experts_trial(
    ops: NpuOps, random: Random, sizes: ExpertsConfig, hidden: int, tokens: int, *, is_int8: bool
) -> Trial:
    """A mixture of experts. ``sizes`` are the whole model's; each of ``tokens`` rows clearly ranks its experts."""
    experts = random_experts(random, sizes, hidden)
    x = ranked_rows(random, experts, tokens)
    if is_int8:
        experts = quantized(experts)
    given = stored(experts, ops)
    name = f"{'int8 ' if is_int8 else ''}experts of {tokens} tokens"
    return Trial(name, lambda: ops.moe(x.to(ops.device), given), lambda: definition.moe(x, experts))


def stored(experts: Experts, ops: Ops) -> Experts:
    """Experts of the CPU as a device takes them."""
    tensors: dict[str, Any] = {name: x.to(ops.device) for name, x in vars(experts).items() if isinstance(x, Tensor)}
    return ops.stored_experts(replace(experts, **tensors))


def quantized(experts: Experts) -> Experts:
    codes, scales = zip(*(definition.quantize(w.flatten(0, 1)) for w in (experts.gate_up, experts.down)), strict=True)
    count = experts.sizes.num_experts
    gate_up, down, gate_up_scale, down_scale = (x.unflatten(0, (count, -1)) for x in (*codes, *scales))
    return replace(experts, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale)


def random_experts(random: Random, sizes: ExpertsConfig, hidden: int) -> Experts:
    """Experts of no more than MAX_INNER elements on the CPU, as the definition takes them."""
    inner, count = min(sizes.inner, MAX_INNER), sizes.num_experts
    factors = 1 + torch.arange(count)[:, None, None] / count

    def repeated(outputs: int, inputs: int) -> Tensor:
        different = random.normal(DIFFERENT, outputs, inputs, scale=inputs**-0.5)
        return (different.repeat(-(-count // DIFFERENT), 1, 1)[:count] * factors).to(different.dtype)

    router = random.normal(count, hidden, scale=hidden**-0.5).float()
    bias = random.normal(count, scale=0.1).float()
    return Experts(sizes, router, bias, repeated(2 * inner, hidden), repeated(hidden, inner))


def ranked_rows(random: Random, experts: Experts, tokens: int) -> Tensor:
    """Random rows [tokens, hidden] whose experts are no near-ties, and neither are the groups of these."""
    sizes, found, count = experts.sizes, [], 0
    while count < tokens:
        x = random.normal(2 * tokens + SPARE_ROWS, experts.router.shape[1])
        ranking = (x.float() @ experts.router.T).sigmoid() + experts.bias
        is_clear = torch.ones(len(x), dtype=torch.bool)
        if sizes.kept_groups < sizes.num_groups:
            groups = ranking.unflatten(1, (sizes.num_groups, -1))
            sums = groups.topk(2).values.sum(-1).sort(descending=True)
            is_clear = _gap(sums.values, sizes.kept_groups) > GAP
            dropped = sums.indices[:, sizes.kept_groups :, None].expand(-1, -1, groups.shape[2])
            ranking = groups.scatter(1, dropped, -torch.inf).flatten(1)
        is_clear &= _gap(ranking.sort(descending=True).values, sizes.per_token) > GAP
        found.append(x[is_clear])
        count += len(found[-1])
    return torch.cat(found)[:tokens]


def _gap(ranked: Tensor, taken: int) -> Tensor:
    """By row, how far the last of the taken values lies above the next one."""
    if taken == ranked.shape[1]:
        return torch.full((len(ranked),), torch.inf)
    return ranked[:, taken - 1] - ranked[:, taken]
