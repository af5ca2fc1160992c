"""The definition of the fused ops in plain torch: what the ops of every device must compute.

Each function defines the method of ``Ops`` that has its name, and is written to be read, not to be fast. Arithmetic is
in float32, and a result is rounded once, to the dtype of the input. ``CpuOps`` is tested to compute the same, and the
ops of other devices are tested against ``CpuOps``.

Sizes in shapes: T tokens, H query heads, K key/value heads, D head dimension, N pages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Experts, Int4Weight


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
    """Attention over pages, one entry after the other: queries [T, H, D], caches [N, 128, K, D] -> [T, H * D].

    Every entry is softmax(q k^T / sqrt(D)) v over all positions that it sees. Which sequence an entry belongs to, and
    how long the prefix of that sequence is, does not change the result.
    """
    heads, dim = q.shape[1:]
    group = heads // k_cache.shape[2]  # query heads that share a KV head
    outputs = []
    spans = q.float().split(list(entries.lengths))
    causal = entries.causal or (False,) * len(spans)
    columns = zip(spans, entries.kv_lengths, entries.page_tables.long(), causal, strict=True)
    for query, kv_length, pages, is_causal in columns:
        visible = [cache[pages].flatten(0, 1)[:kv_length].float() for cache in (k_cache, v_cache)]  # [keys, K, D]
        key, value = (x.repeat_interleave(group, dim=1) for x in visible)  # [keys, H, D]
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
        if is_causal:
            behind = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(kv_length - len(query) + 1)
            scores = scores.masked_fill(behind, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(outputs).flatten(1).to(q.dtype)


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
) -> None:
    """Writes keys and values [T, K, D] of tokens to the flat positions ``slot_mapping`` of caches [N, 128, K, D]."""
    page_size = k_cache.shape[1]
    for index, position in enumerate(slot_mapping.tolist()):
        token = index if source is None else source[index]
        page, offset = divmod(position, page_size)
        k_cache[page, offset] = k[token]
        v_cache[page, offset] = v[token]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times the transpose of weight [out, in], plus bias [out] -> [T, out]."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def quantize(x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [T, in] as int8 or FP8 and a scale for each row, float32 [T]: its largest magnitude divided by 127 or 448."""
    wide, largest = x.float(), 127.0 if codes == torch.int8 else 448.0
    scale = wide.abs().amax(-1) / largest
    divisor = scale.masked_fill(scale == 0, 1)[:, None]
    quotient = (wide / divisor).clamp(-largest, largest)
    return (quotient.round() if codes == torch.int8 else quotient).to(codes), scale


def quant_linear(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """codes [T, in] times the transpose of weight [out, in], both int8 or both FP8; times both scales, plus bias [out]
    -> [T, out]. Float64 holds every sum of up to 2^17 products exactly: FP8 products are multiples of 2^-18 up to
    448^2."""
    product = (codes.double() @ weight.double().T).float() * weight_scale * scale[:, None]
    return (product if bias is None else product + bias.float()).to(dtype)


def int4_linear(codes: Tensor, scale: Tensor, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes int8 [T, in] times the transpose of an int4 weight [out, in]: the sums of each group, times its scale,
    added up in the order of the groups; times the scales of the rows [T], plus bias [out] -> [T, out]."""
    outputs, num_groups = weight.scale.shape
    unpacked = torch.stack([weight.codes & 15, weight.codes >> 4], -1).view(outputs, num_groups, -1).int()
    zero = torch.full(weight.scale.shape, 8) if weight.zero is None else weight.zero
    centered = unpacked - zero.int()[:, :, None]
    product = torch.zeros(len(codes), outputs)
    for group, part in enumerate(codes.int().chunk(num_groups, 1)):
        product += (part @ centered[:, group].T).float() * weight.scale[:, group]
    product *= scale[:, None]
    return (product if bias is None else product + bias.float()).to(dtype)


def _routed(x: Tensor, experts: Experts) -> list[dict[int, float]]:
    """For each token of x [T, hidden] the numbers of its experts with their weights, the best first."""
    sizes, tokens = experts.sizes, []
    size = sizes.num_experts // sizes.num_groups
    for logits in x.float() @ experts.router.float().T:
        scores = logits.sigmoid()
        ranking = (scores + experts.bias).tolist()
        groups = [range(first, first + size) for first in range(0, sizes.num_experts, size)]
        groups.sort(key=lambda group: -sum(sorted(ranking[expert] for expert in group)[-2:]))
        choice = sorted(expert for group in groups[: sizes.kept_groups] for expert in group)
        best = sorted(choice, key=lambda expert: -ranking[expert])[: sizes.per_token]
        total = float(scores[best].sum()) + 1e-20 if sizes.per_token > 1 else 1.0
        tokens.append({expert: float(scores[expert]) / total * sizes.scale for expert in best})
    return tokens


def moe(x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
    """The weighted sum of the MLPs of the experts that each token of x [T, hidden] takes, and ``shared``."""
    total = torch.zeros(x.shape)
    for row, found in enumerate(_routed(x, experts)):
        for expert, weight in found.items():
            total[row] += weight * _expert(x[row : row + 1], experts, expert)[0].float()
    return total.to(x.dtype) if shared is None else total.to(x.dtype) + shared


def _expert(x: Tensor, experts: Experts, number: int) -> Tensor:
    """The MLP of one expert."""
    gate_up, down = experts.gate_up[number], experts.down[number]
    if experts.gate_up_scale is None:
        products = linear(x, gate_up)
    else:
        products = quant_linear(*quantize(x), gate_up, experts.gate_up_scale[number], None, x.dtype)
    if experts.down_scale is None:
        return linear(swiglu(products), down)
    return quant_linear(*swiglu_quant(products), down, experts.down_scale[number], None, x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden] divided by its root mean square and multiplied by weight [hidden]."""
    return _normed(x, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is rounded to the dtype of x before the norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """The norm as codes [T, hidden] and a scale for each row, float32 [T]. The norm is not rounded before."""
    return quantize(_normed(x, weight, eps), codes)


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale) of ``rms_norm_quant(x + residual)``, and x + residual."""
    total = x + residual
    return *rms_norm_quant(total, weight, eps, codes), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] with the pairs (x[i], x[i + D / 2]) of every head rotated by angles with these cosines and sines
    [T, heads, D / 2], or [T, 1, D / 2] if all heads are rotated alike."""
    left, right = x.float().chunk(2, -1)
    cos, sin = cos.float(), sin.float()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


def norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """``rope`` of the RMSNorm of every head of queries [T, H, D] and keys [T, K, D]. The norm is not rounded before."""
    normed_q, normed_k = _normed(q, q_weight, eps), _normed(k, k_weight, eps)
    return rope(normed_q, cos, sin).to(q.dtype), rope(normed_k, cos, sin).to(k.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of [T, 2 * I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)


def swiglu_quant(gate_up: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """``swiglu`` of [T, 2 * I] as codes [T, I] and a scale for each row, float32 [T]."""
    return quantize(swiglu(gate_up), codes)


def quant_swiglu(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``swiglu_quant`` of ``quant_linear`` without a bias."""
    return swiglu_quant(quant_linear(codes, scale, weight, weight_scale, None, dtype), codes.dtype)


def put_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Writes values [n, C] to the rows int32 [n] of x [M, C]."""
    for row, value in zip(rows.tolist(), values, strict=True):
        x[row] = value


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` in float32, not rounded."""
    wide = x.float()
    root_mean_square = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return wide / root_mean_square * weight.float()
