"""LLaDA2 restated in plain torch from its published description: a dense forward pass, expert after expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]


def logits(
    config: Mapping[str, Any], tensors: Tensors, tokens: list[int], block: int, causal_from: int | None = None
) -> Tensor:
    """[tokens, vocabulary]. Positions see the blocks up to their own; from ``causal_from`` on those up to their own."""
    eps, positions = config["rms_norm_eps"], torch.arange(len(tokens))
    number = positions // block
    if causal_from is not None:
        number = torch.where(positions < causal_from, number, len(tokens) + positions)
    x = tensors["model.word_embeddings.weight"][torch.tensor(tokens)]
    for n in range(config["num_hidden_layers"]):
        own = {
            k.removeprefix(f"model.layers.{n}."): t for k, t in tensors.items() if k.startswith(f"model.layers.{n}.")
        }
        x = x + _attention(config, own, _norm(x, own["input_layernorm.weight"], eps), number[:, None] < number)
        normed = _norm(x, own["post_attention_layernorm.weight"], eps)
        if n < config["first_k_dense_replace"]:
            x = x + _mlp(normed, own, "mlp.")
        else:
            routed = torch.stack([_experts(config, own, token) for token in normed])
            x = x + routed + _mlp(normed, own, "mlp.shared_experts.")
    head = "model.word_embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return _norm(x, tensors["model.norm.weight"], eps) @ tensors[head].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _attention(config: Mapping[str, Any], own: Tensors, x: Tensor, hidden: Tensor) -> Tensor:
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    qkv = (x @ own["attention.query_key_value.weight"].T).unflatten(1, (-1, dim))
    q, k, v = qkv.transpose(0, 1).split([heads, kv_heads, kv_heads])
    q, k = (
        _rotated(config, _norm(part, own[f"attention.{name}_layernorm.weight"], config["rms_norm_eps"]))
        for part, name in ((q, "query"), (k, "key"))
    )
    k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
    scores = (q @ k.mT * dim**-0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ own["attention.dense.weight"].T


def _rotated(config: Mapping[str, Any], x: Tensor) -> Tensor:
    """x [heads, tokens, dim] with the first elements of each head rotated."""
    size = int(config["head_dim"] * config["partial_rotary_factor"])
    angles = torch.outer(torch.arange(x.shape[1]), config["rope_theta"] ** -(torch.arange(0, size, 2) / size))
    left, right, rest = x.split([size // 2, size // 2, config["head_dim"] - size], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


def _mlp(x: Tensor, own: Tensors, prefix: str) -> Tensor:
    gate, up, down = (own[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _experts(config: Mapping[str, Any], own: Tensors, token: Tensor) -> Tensor:
    """The weighted sum of the experts that one token takes."""
    scores = (own["mlp.gate.weight"] @ token).sigmoid()
    ranking = (scores + own["mlp.gate.expert_bias"]).view(config["n_group"], -1)
    worst = ranking.topk(2).values.sum(1).argsort(descending=True)[config["topk_group"] :]
    ranking[worst] = -torch.inf
    chosen = ranking.flatten().topk(config["num_experts_per_tok"]).indices
    weights = scores[chosen]
    if len(chosen) > 1:
        weights = weights / weights.sum()
    outputs = torch.stack([_mlp(token, own, f"mlp.experts.{expert}.") for expert in chosen.tolist()])
    return config["routed_scaling_factor"] * weights @ outputs
