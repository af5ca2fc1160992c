"""CPU kernels of the ``npu::`` ops, under their real schemas. Attention is in ``attention.py``.

Results are computed in float32 and rounded once, so their bits are not those of a device. The constraints are those of
torch_npu's own documents (``torch_npu/_op_plugin_docs.py``); they do not describe npu_add_rms_norm, which gets the
constraints of npu_rms_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.lab.constraints import require

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
BFLOAT16, INT32 = 15, 3
"""The numbers by which schemas name torch.bfloat16 and torch.int32."""
EXACT_SUMS = 1024
"""Products of int8 values whose sum float32 holds exactly."""
_library = torch.library.Library("npu", "IMPL")


def kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the CPU kernel of ``npu::name``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, "CPU")
        return function

    return register


def _normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of x in its dtype, and 1 / root mean square in float32."""
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * gamma.float()).to(x.dtype), scale


@kernel("npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require(x.dtype in FLOATS and gamma.dtype == x.dtype, "npu_rms_norm: x and gamma are of one float dtype")
    require(
        2 <= x.dim() <= 8 and gamma.shape == x.shape[-1:], "npu_rms_norm: x of 2 to 8 dimensions, gamma of the last"
    )
    return _normed(x, gamma, epsilon)


@kernel("npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    same = x1.dtype == x2.dtype == gamma.dtype
    require(same and x1.dtype in FLOATS, "npu_add_rms_norm: x1, x2 and gamma are of one float dtype")
    require(x1.shape == x2.shape, "npu_add_rms_norm: x1 and x2 are of one shape")
    require(gamma.shape == x1.shape[-1:], "npu_add_rms_norm: gamma is of the last dimension")
    total = (x1.float() + x2.float()).to(x1.dtype)
    return *_normed(total, gamma, epsilon), total


@kernel("npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    require(x.dtype in FLOATS and 1 <= x.dim() <= 8, "npu_swiglu: a float dtype, 1 to 8 dimensions")
    require(x.shape[dim] % 2 == 0, "npu_swiglu: an even size of the split dimension")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@kernel("npu_rotary_mul")
def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    require(rotary_mode == "half" and rotate is None, "npu_rotary_mul: the laboratory knows mode half alone")
    require(x.dim() == 4 and r1.dim() == 4 and r1.shape == r2.shape, "npu_rotary_mul: x, r1 and r2 are 4-D")
    require(x.dtype in FLOATS and x.dtype == r1.dtype == r2.dtype, "npu_rotary_mul: one float dtype")
    batch, tokens, heads, size = x.shape
    require(batch < 1000 and heads < 1000, "npu_rotary_mul: fewer than 1000 batches and heads")
    require(size < 896 and size % 2 == 0, "npu_rotary_mul: an even head size below 896")
    tables = ((1, tokens, 1, size), (batch, tokens, 1, size), (batch, tokens, heads, size))
    require(tuple(r1.shape) in tables, "npu_rotary_mul: r1 and r2 are 1S1D, BS1D or BSND for x BSND")
    require(bool(r1.abs().max() <= 1) and bool(r2.abs().max() <= 1), "npu_rotary_mul: r1 and r2 lie in [-1, 1]")
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * r1.float() + torch.cat((-right, left), -1) * r2.float()).to(x.dtype)


@kernel("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """It writes into its arguments and returns them."""
    name = "npu_apply_rotary_pos_emb"
    require(layout == "TND" and rotary_mode == "half", f"{name}: the laboratory knows TND and half alone")
    require(query.dtype in FLOATS and query.dtype == key.dtype == cos.dtype == sin.dtype, f"{name}: one float dtype")
    require(query.numel() > 0 and key.numel() > 0, f"{name}: no empty tensor")
    tokens, _, size = query.shape
    require(size in (64, 128), f"{name}: heads of 64 or 128")
    require(key.shape[0] == tokens and key.shape[2] == size, f"{name}: as many tokens and elements in key as in query")
    require(cos.shape == sin.shape == (tokens, 1, size), f"{name}: cos and sin are [T, 1, D]")
    require(query.is_contiguous() and key.is_contiguous(), f"{name}: contiguous tensors alone, which it writes to")
    for x in (query, key):
        wide = x.float()
        left, right = wide.chunk(2, -1)
        x.copy_(wide * cos.float() + torch.cat((-right, left), -1) * sin.float())
    return query, key


@kernel("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(  # noqa: PLR0913
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    name = "npu_scatter_pa_kv_cache"
    require(compress_lens is None and compress_seq_offsets is None and seq_lens is None, f"{name}: no compression here")
    require(cache_mode in (None, "Norm"), f"{name}: an ND cache takes cache_mode Norm, and the default is PA_NZ")
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    require(all(t.is_contiguous() for t in tensors), f"{name}: contiguous tensors alone")
    require(key.dtype == value.dtype == key_cache.dtype == value_cache.dtype, f"{name}: one dtype")
    require(slot_mapping.dtype in (torch.int32, torch.int64), f"{name}: slot_mapping is int32 or int64")
    require(key.dim() == 3 and key.shape[:2] == value.shape[:2], f"{name}: key and value are [T, heads, size]")
    require(slot_mapping.shape == key.shape[:1], f"{name}: as many positions in slot_mapping as tokens")
    positions = slot_mapping.long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        require(cache.dim() == 4 and cache.shape[2:] == new.shape[1:], f"{name}: a cache is [N, page, heads, size]")
        within = (positions >= 0) & (positions < cache.shape[0] * cache.shape[1])
        require(bool(within.all()), f"{name}: a position lies outside the cache")
        require(
            len(positions.unique()) == len(positions), f"{name}: a position comes twice, so its content is undefined"
        )
        cache.flatten(0, 1)[positions] = new


@kernel("npu_scatter_pa_kv_cache_functional")
def scatter_pa_kv_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The op that torch.compile replaces the op above by: it returns copies of the caches, with the keys and values
    written."""
    keys, values = key_cache.clone(), value_cache.clone()
    scatter_pa_kv_cache(key, value, keys, values, slot_mapping, **options)
    return keys, values


@kernel("npu_scatter_nd_update")
def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(input.clone(), indices, updates)


@kernel("npu_scatter_nd_update_")
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    name = "npu_scatter_nd_update_"
    kinds = (*FLOATS, torch.bool, torch.int64, torch.int8)
    require(input.dtype in kinds and input.dtype == updates.dtype, f"{name}: one dtype of floats, bool, int64 and int8")
    require(1 <= input.dim() <= 8, f"{name}: an input of 1 to 8 dimensions")
    require(indices.dtype in (torch.int32, torch.int64), f"{name}: indices are int32 or int64")
    require(indices.dim() >= 2 and indices.shape[-1] <= input.dim(), f"{name}: indices of 2 or more dimensions")
    depth = indices.shape[-1]
    require(updates.shape == indices.shape[:-1] + input.shape[depth:], f"{name}: updates of the indexed shape")
    places = indices.long().unbind(-1)
    for place, size in zip(places, input.shape, strict=False):
        require(bool(((place >= 0) & (place < size)).all()), f"{name}: an index lies outside the input")
    return input.index_put_(places, updates)


def _coded(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 rows as int8, with one scale for each row."""
    scale = wide.abs().amax(-1) / 127
    return (wide / scale.clamp_min(1e-30)[..., None]).round().to(torch.int8), scale


@kernel("npu_dynamic_quant")
def dynamic_quant(input: Tensor, *, quant_mode: str = "pertoken", **others: Any) -> tuple[Tensor, Tensor]:
    name = "npu_dynamic_quant"
    used = [option for option, given in others.items() if given]
    require(not used and quant_mode == "pertoken", f"{name}: the laboratory knows a scale a token alone")
    require(input.dtype in HALVES and input.dim() > 1, f"{name}: float16 or bfloat16 of 2 or more dimensions")
    return _coded(input.float())


@kernel("npu_add_rms_norm_dynamic_quant")
def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    name = "npu_add_rms_norm_dynamic_quant"
    used = [option for option, given in others.items() if given is not None]
    require(not used and output_mask == [True, False], f"{name}: the laboratory knows one output, and no smoothing")
    require(x1.dtype in HALVES and x1.dtype == x2.dtype == gamma.dtype, f"{name}: one dtype, float16 or bfloat16")
    require(2 <= x1.dim() <= 8 and x1.shape == x2.shape, f"{name}: x1 and x2 are of one shape, of 2 to 8 dimensions")
    require(x1.numel() > 0, f"{name}: no empty tensor")
    require(gamma.shape == x1.shape[-1:], f"{name}: gamma is of the last dimension")
    total = (x1.float() + x2.float()).to(x1.dtype)
    codes, scale = _coded(_normed(total.float(), gamma.float(), epsilon)[0])
    return codes, codes.new_empty(0), total, scale, scale.new_empty(0)


def _integer_product(x1: Tensor, x2: Tensor) -> Tensor:
    """The exact product of int8 matrices, int32."""
    parts = zip(x1.split(EXACT_SUMS, 1), x2.split(EXACT_SUMS), strict=True)
    return torch.stack([(left.float() @ right.float()).int() for left, right in parts]).sum(0, dtype=torch.int32)


@kernel("npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    name = "npu_quant_matmul"
    require(not any(given for given in others.values()), f"{name}: the laboratory knows symmetric int8 alone")
    require(x1.dtype == x2.dtype == torch.int8 and x1.dim() == x2.dim() == 2, f"{name}: two int8 matrices")
    require(x1.shape[1] == x2.shape[0], f"{name}: x1 is [M, K] and x2 [K, N]")
    require(x1.numel() > 0, f"{name}: no empty x1")
    require(max(x1.shape[1], x2.shape[1]) <= 65535, f"{name}: last dimensions of at most 65535")
    require(output_dtype in (BFLOAT16, INT32), f"{name}: the laboratory knows results in bfloat16 and int32 alone")
    require(scale.dtype in (torch.float32, torch.bfloat16), f"{name}: scale is float32 or bfloat16")
    require(scale.shape == x2.shape[1:], f"{name}: a scale for each output")
    if output_dtype == INT32:
        require(pertoken_scale is None and bias is None, f"{name}: int32 results are not scaled")
        return _integer_product(x1, x2)
    require(pertoken_scale is not None and pertoken_scale.dtype == torch.float32, f"{name}: float32 scales of tokens")
    assert pertoken_scale is not None
    require(pertoken_scale.shape == x1.shape[:1], f"{name}: a scale for each row of x1")
    allowed = (torch.int32, torch.bfloat16, torch.float32)
    require(bias is None or (bias.dtype in allowed and bias.shape == scale.shape), f"{name}: bias is [N]")
    require(bias is None or bias.dtype != torch.int32, f"{name}: the laboratory adds a float bias alone")
    product = _integer_product(x1, x2).float() * scale.float() * pertoken_scale[:, None]
    return (product if bias is None else product + bias.float()).bfloat16()


@kernel("npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Of bfloat16 under the limits of aclnnDequantSwigluQuant for A2 and A3, of int32 under those of its V2, which
    CANN's recipes call without groups on an A3."""
    name = "npu_dequant_swiglu_quant"
    defaults = {"swiglu_mode": 0, "clamp_limit": 7.0, "glu_alpha": 1.702, "glu_bias": 1.0}
    used = [option for option, given in others.items() if given is not None and given != defaults.get(option)]
    require(not used and activate_left and quant_mode == 1, f"{name}: the laboratory knows one mode alone")
    require(x.dtype in (torch.bfloat16, torch.int32) and x.dim() == 2, f"{name}: a matrix in bfloat16 or int32")
    rows, length = x.shape
    require(length % 64 == 0, f"{name}: rows of a multiple of 64")
    scales = (weight_scale, activation_scale)
    if x.dtype == torch.bfloat16:
        require(all(scale is None for scale in (*scales, group_index)), f"{name}: nothing to dequantise in bfloat16")
        require(
            10 * length * 2 + rows * 4 // 40 < 192 * 1024, f"{name}: rows that fit into the memory of a vector core"
        )
        gate, up = x.float().chunk(2, -1)
        return _coded(torch.nn.functional.silu(gate) * up)
    require(all(scale is not None and scale.dtype == torch.float32 for scale in scales), f"{name}: float32 scales")
    assert weight_scale is not None
    assert activation_scale is not None
    require(activation_scale.shape == (rows,), f"{name}: a scale for each row")
    groups = () if group_index is None else (len(group_index),)
    require(weight_scale.shape == (*groups, length), f"{name}: weight_scale is [2H], or [groups, 2H] with groups")
    if group_index is not None:
        require(group_index.dtype == torch.int64, f"{name}: group_index is int64")
        require(
            length <= 7232 and length // 2 % 64 == 0, f"{name}: H of a multiple of 64, 2H of at most 7232 in groups"
        )
        weight_scale = weight_scale.repeat_interleave(group_index, 0)
    gate, up = (x.float() * weight_scale * activation_scale[:, None]).chunk(2, -1)
    return _coded(torch.nn.functional.silu(gate) * up)


# ---- mixtures of experts -------------------------------------------------------------------------------------------


@kernel("npu_moe_gating_top_k")
def moe_gating_top_k(  # noqa: PLR0913
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_moe_gating_top_k"
    rows, experts = x.shape
    known = norm_type == group_select_mode == 1 and input_ids is tid2eid is None and not out_flag
    require(known, f"{name}: the laboratory knows sigmoid, groups by their two best, and no other outputs alone")
    require(renorm == 0, f"{name}: renorm 0")
    require(bias is not None and bias.dtype == x.dtype and bias.shape == (experts,), f"{name}: bias [E] of x's dtype")
    require(experts <= 2048 and experts % group_count == 0, f"{name}: at most 2048 experts, in equal groups")
    size = experts // group_count
    require(size > 2 and -(-size // 32) * 32 * group_count <= 2048, f"{name}: groups of more than 2")
    require(1 <= k_group <= group_count and k_group * size >= k, f"{name}: enough experts in k_group groups")
    assert bias is not None
    scores = x.float().sigmoid()
    ranking = (scores + bias.float()).view(rows, group_count, size)
    order = ranking.topk(2).values.sum(-1).sort(descending=True, stable=True).indices
    ranking = ranking.scatter(1, order[:, k_group:, None].expand(-1, -1, size), -torch.inf).flatten(1)
    ids = ranking.sort(descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(1, ids)
    if k > 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps)
    return (chosen * routed_scaling_factor).to(x.dtype), ids.int(), scores


@kernel("npu_moe_init_routing_v2")
def moe_init_routing_v2(  # noqa: PLR0913
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    name = "npu_moe_init_routing_v2"
    require(x.dtype in FLOATS and x.dim() == 2, f"{name}: x [rows, hidden] of a float dtype")
    require(expert_idx.dtype == torch.int32, f"{name}: expert_idx is int32")
    require(expert_tokens_num_flag and expert_tokens_num_type == 1, f"{name}: the laboratory knows counts alone")
    known = scale is offset is None and quant_mode in (-1, 1) and row_idx_type == drop_pad_mode == 0
    require(known, f"{name}: the laboratory knows quantisation by token, and indices of gather alone")
    require(quant_mode == -1 or x.dtype in HALVES, f"{name}: quantises float16 and bfloat16 alone")
    require(active_num in (-1, 0, expert_idx.numel()), f"{name}: the laboratory knows all rows as active alone")
    require(list(active_expert_range) == [0, expert_num], f"{name}: the laboratory knows all experts alone")
    flat = expert_idx.flatten().long()
    order = flat.sort(stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    counts = flat.bincount(minlength=expert_num)
    rows = x[order // expert_idx.shape[1]]
    rows, scales = (rows, torch.empty(len(flat))) if quant_mode == -1 else _coded(rows.float())
    return rows, places.int(), counts, scales


@kernel("npu_grouped_matmul")
def grouped_matmul(  # noqa: PLR0913
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    """Of int8 it gives int32, as vllm-ascend and CANN's recipes call it, or bfloat16 with scales of it."""
    name = "npu_grouped_matmul"
    known = len(x) == len(weight) == split_item - 2 == group_list_type == 1 and group_type == 0
    require(known, f"{name}: the laboratory knows one x, one weight, groups of rows by their counts alone")
    require(not any(value for value in others.values()), f"{name}: the laboratory knows no other arguments")
    (rows,), (weights,) = x, weight
    known_dtype = rows.dtype in (*FLOATS, torch.int8)
    require(rows.dtype == weights.dtype and known_dtype, f"{name}: x and weight are of one dtype")
    require(weights.dim() == 3 and rows.shape[1] == weights.shape[1], f"{name}: x [n, in], weight [E, in, out]")
    require(group_list is not None and len(group_list) == len(weights) > 1, f"{name}: a count for each of the groups")
    assert group_list is not None
    if rows.dtype == torch.int8:
        parts = zip(rows.split(group_list.tolist()), weights, strict=True)
        product = torch.cat([_integer_product(part, own) for part, own in parts])
        if output_dtype == INT32:
            require(scale is per_token_scale is None, f"{name}: int32 results are not scaled")
            return [product]
        require(output_dtype == BFLOAT16, f"{name}: int8 gives int32, or bfloat16")
        assert scale is not None
        assert per_token_scale is not None
        ((of_outputs,), (of_rows,)) = scale, per_token_scale
        require(of_outputs.dtype == torch.bfloat16, f"{name}: scales in bfloat16 for results in bfloat16")
        require(of_outputs.shape == (len(weights), weights.shape[2]), f"{name}: a scale for each output")
        require(of_rows.dtype == torch.float32 and of_rows.shape == rows.shape[:1], f"{name}: a scale for each row")
        return [(product * of_outputs.float().repeat_interleave(group_list, 0) * of_rows[:, None]).bfloat16()]
    require(all(x is None for x in (output_dtype, scale, per_token_scale)), f"{name}: scales of int8 alone")
    parts = rows.float().split(group_list.tolist())
    return [torch.cat([part @ own.float() for part, own in zip(parts, weights, strict=True)]).to(rows.dtype)]


@kernel("npu_moe_finalize_routing")
def moe_finalize_routing(  # noqa: PLR0913
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Its documents know neither ``drop_pad_mode`` 2, nor scales in float32 beside bfloat16, nor skip1 alone: CANN's
    recipes and vllm-ascend call it so on an A3, and its registration declares these dtypes."""
    name, rows = "npu_moe_finalize_routing", expanded_permuted_rows
    known = skip2 is bias is export_for_source_row is None and drop_pad_mode == 2
    require(known and scales is not None, f"{name}: the laboratory knows scaled rows alone, token after token")
    assert scales is not None
    require(rows.dtype in FLOATS and scales.dtype in (rows.dtype, torch.float32), f"{name}: rows and scales are floats")
    require(expanded_src_to_dst_row.dtype == torch.int32, f"{name}: expanded_src_to_dst_row is int32")
    num_tokens, per_token = scales.shape
    taken = rows.float()[expanded_src_to_dst_row.long()].view(num_tokens, per_token, -1)
    total = (taken * scales.float()[..., None]).sum(1)
    if skip1 is not None:
        require(skip1.dtype == rows.dtype and skip1.shape == total.shape, f"{name}: skip1 is as the result")
        total += skip1.float()
    return total.to(rows.dtype)


@kernel("npu_add_rms_norm_cast")
def add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``npu_add_rms_norm``, with the norm in float32 too: torchair puts it where a cast follows."""
    require(x1.dtype in HALVES, "npu_add_rms_norm_cast: a half dtype")
    normed, scale, total = add_rms_norm(x1, x2, gamma, epsilon)
    return normed.float(), normed, scale, total
