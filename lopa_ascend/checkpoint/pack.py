"""Hugging Face tensors to the packed ones that the model runs on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lopa_ascend.checkpoint.shard import Slices

_MODEL = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_LAYER = {
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


def packed_name(name: str) -> str:
    """The packed tensor that a Hugging Face tensor goes into."""
    if name in _MODEL:
        return _MODEL[name]
    _, layers, layer, rest = name.split(".", 3)
    return f"{layers}.{layer}.{_LAYER[rest]}"


def pack(
    stream: Iterable[tuple[str, torch.Tensor]], slices: Slices, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Puts the pieces of each packed tensor one below the other (q, k, v; gate, up) and casts them to ``dtype``.

    The pieces are the parts that ``slices`` names; rows that a piece lacks at the end of its part are zero.

    Yields each packed tensor as soon as its last piece has come, always in memory of its own: pieces may be views of a
    file. In layer order only one packed tensor is in the making at a time.
    """
    spans: dict[str, dict[str, slice]] = {}
    for name, (rows, *_) in slices.items():
        pieces = spans.setdefault(packed_name(name), {})
        start = max((span.stop for span in pieces.values()), default=0)
        pieces[name] = slice(start, start + rows.stop - rows.start)
    making: dict[str, torch.Tensor] = {}
    for name, piece in stream:
        target = packed_name(name)
        pieces = spans[target]
        if target not in making:
            num_rows = max(span.stop for span in pieces.values())
            making[target] = torch.empty((num_rows, *piece.shape[1:]), dtype=dtype)
        place = making[target][pieces.pop(name)]
        place[: len(piece)] = piece
        place[len(piece) :] = 0  # beyond the vocabulary
        if not pieces:
            yield target, making.pop(target)
    assert not making, f"incomplete: {', '.join(making)}"
