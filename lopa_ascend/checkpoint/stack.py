"""Stacks the projections of a Hugging Face checkpoint as our model wants them: q, k, v as qkv; gate, up as gate_up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from lopa_ascend.checkpoint.shard import TensorSlices

_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
"""Hugging Face name -> our name."""
_IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "qkv.weight",
    "self_attn.k_proj.weight": "qkv.weight",
    "self_attn.v_proj.weight": "qkv.weight",
    "self_attn.q_proj.bias": "qkv.bias",
    "self_attn.k_proj.bias": "qkv.bias",
    "self_attn.v_proj.bias": "qkv.bias",
    "self_attn.o_proj.weight": "o.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "gate_up.weight",
    "mlp.up_proj.weight": "gate_up.weight",
    "mlp.down_proj.weight": "down.weight",
}
"""Within a layer: Hugging Face name after "model.layers.N." -> our name after "layers.N."."""
_SCALE = "_scale"
"""The suffix that makes the name of an int8 weight the name of its scales."""


def stacked_name(name: str) -> str:
    """The name of our tensor that a Hugging Face tensor becomes, or becomes a part of."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, layers, layer, name_in_layer = name.split(".", 3)
    ending = _SCALE if name_in_layer.endswith(_SCALE) else ""
    return f"{layers}.{layer}.{_IN_LAYER[name_in_layer.removesuffix(ending)]}{ending}"


def stack_projections(
    tensors: Iterable[tuple[str, torch.Tensor]],
    slices: TensorSlices,
    dtype: torch.dtype,
    check: Callable[[str, torch.Tensor], None] = lambda name, tensor: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacks tensors that belong together along their rows, and casts them.

    Args:
        tensors: names and tensors of this rank in layer order; each may be a view of its file.
        slices: the rows and columns of this rank. Rows that a tensor lacks at the end of its slice become zero.
        dtype: what the results are cast to, but for int8 weights and their scales, which stay as they are.
        check: called with the Hugging Face name and the cast values of each tensor; may raise.

    Yields:
        Our names and tensors, each as soon as its last part has come, in memory of its own. At any time only one of
        them is incomplete.
    """
    missing = _rows_of_parts(slices)
    incomplete: dict[str, torch.Tensor] = {}
    for name, part in tensors:
        target = stacked_name(name)
        parts = missing[target]
        if target not in incomplete:
            num_rows = max(rows.stop for rows in parts.values())
            is_kept = part.dtype == torch.int8 or name.endswith(_SCALE)
            own_dtype = part.dtype if is_kept else dtype
            incomplete[target] = torch.empty((num_rows, *part.shape[1:]), dtype=own_dtype)
        rows = incomplete[target][parts.pop(name)]
        rows[: len(part)] = part
        check(name, rows[: len(part)])
        rows[len(part) :] = 0  # beyond the vocabulary
        if not parts:
            yield target, incomplete.pop(target)
    assert not incomplete, f"incomplete: {', '.join(incomplete)}"


def _rows_of_parts(slices: TensorSlices) -> dict[str, dict[str, slice]]:
    """By name of the stacked tensor: the Hugging Face names of its parts, and the rows that each part takes in it."""
    parts_by_target: dict[str, dict[str, slice]] = {}
    for name, (rows, *_) in slices.items():
        parts = parts_by_target.setdefault(stacked_name(name), {})
        start = max((part.stop for part in parts.values()), default=0)
        parts[name] = slice(start, start + rows.stop - rows.start)
    return parts_by_target
