"""A Qwen2-like model as it is usually written, in plain torch and with a weight for every projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa_ascend.config import ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, D], k, v [T, K, D]) -> [T, H * D]."""


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] with factors for all of D."""
    return x * cos + rotate_half(x) * sin


class PlainLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.head_dim, self.eps = c.head_dim, c.rms_norm_eps
        self.attn_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q = nn.Linear(c.hidden_size, c.num_heads * c.head_dim)
        self.k, self.v = (nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim) for _ in range(2))
        self.o = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        normed = rms_norm(x, self.attn_norm, self.eps)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v))
        x = x + self.o(attend(rope(q, cos, sin), rope(k, cos, sin), v))
        normed = rms_norm(x, self.mlp_norm, self.eps)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class PlainModel(nn.Module):
    """Logits [T, vocabulary] of T tokens. Weights are random, and of ``dtype``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        c = config
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList([PlainLayer(c) for _ in range(c.num_layers)])
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(c.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])
        self.to(dtype).requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x, cos, sin = self.embed(tokens), self.cos[positions], self.sin[positions]
        for n, layer in enumerate(self.layers):
            x = layer(x, cos, sin, lambda q, k, v, n=n: attend(n, q, k, v))
        return self.head(rms_norm(x, self.norm))
