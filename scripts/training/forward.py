"""The forward pass of the bundled model in training.

It computes what transformers' Qwen2Model computes, faster: the answers after a prompt attend to the prompt and to
themselves without the products between different answers, and what lies between two matrix products can be compiled to
one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

NOT_ATTENDED = -1e9
"""Added to the attention score of a position that is not attended to."""


@dataclass(frozen=True)
class Shapes:
    """How the positions of a batch lie: n rows, each a prompt of p positions and c answers of l positions."""

    prompt: int
    answer: int
    copies: int
    offsets: Tensor | None = None
    """Distance of each position of an answer from the end of the prompt [l]; None if they are in order."""

    @property
    def positions(self) -> Tensor:
        """The position within its conversation of each position of a row [p + c * l]; all answers follow the prompt."""
        offsets = torch.arange(self.answer) if self.offsets is None else self.offsets
        after = self.prompt + offsets
        return torch.cat([torch.arange(self.prompt), after.repeat(self.copies)])


@dataclass(frozen=True)
class AttentionMasks:
    """What is added to attention scores, float32: 0 where a key is attended to, ``NOT_ATTENDED`` elsewhere."""

    prompt: Tensor | None
    """Queries of prompts, keys of prompts [n, 1, p, p]; None with full attention."""
    answers: Tensor
    """Queries of answers, keys of the prompt and the same answer [n * c, 1, l, p + l]; with full attention queries and
    keys of the prompt and its one answer [n, 1, p + l, p + l]."""


def attention_masks(padding: Tensor, prompt: int, masks: list[Tensor], *, is_full: bool) -> AttentionMasks:
    """The attention masks of a batch; padding is attended to by itself alone.

    Args:
        padding: positions of padding at the left of each prompt [n].
        prompt: positions of a prompt, p.
        masks: for each of the c answers after a prompt, which of its positions attend to which [l, l] bool.
        is_full: all positions attend to one another, and there is one answer.
    """
    n, copies, length = len(padding), len(masks), masks[0].shape[0]
    is_real = torch.arange(prompt) >= padding[:, None]
    if is_full:
        of_all = F.pad(is_real, (0, length), value=True)[:, None, :] | torch.eye(prompt + length, dtype=torch.bool)
        return AttentionMasks(None, additive(of_all)[:, None])
    of_prompt = is_real[:, None, :] | torch.eye(prompt, dtype=torch.bool)
    of_answers = torch.cat(
        [
            is_real[:, None, None, :].expand(n, copies, length, prompt),
            torch.stack(masks).expand(n, copies, length, length),
        ],
        dim=-1,
    )
    return AttentionMasks(additive(of_prompt)[:, None], additive(of_answers).flatten(0, 1)[:, None])


def additive(mask: Tensor) -> Tensor:
    """A bool mask as what is added to scores, float32."""
    return torch.where(mask, 0.0, NOT_ATTENDED)


class Forward:
    """The forward pass of a model.

    Args:
        model: whose weights are used; they stay in float32.
        dtype: in which matrices are multiplied.
        is_compiled: compile what lies between the products; needs a C++ compiler.
    """

    def __init__(self, model: Qwen2Model, dtype: torch.dtype, *, is_compiled: bool):
        self.model = model
        self.dtype = dtype
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        exponent = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequency = config.rope_parameters["rope_theta"] ** -exponent
        compiled: Callable[..., Callable[..., Tensor]] = (
            torch.compile(dynamic=True) if is_compiled else lambda function: function
        )
        self._norm = compiled(partial(norm, eps=config.rms_norm_eps, dtype=dtype))
        self._add_and_norm = compiled(partial(add_and_norm, eps=config.rms_norm_eps, dtype=dtype))
        self._rotated = compiled(rotated)
        self._probabilities = compiled(partial(probabilities, dtype=dtype))
        self._swiglu = compiled(swiglu)
        self._dropped = compiled(dropped)
        self._cross_entropy = compiled(cross_entropy)

    def hidden(self, ids: Tensor, shapes: Shapes, masks: AttentionMasks, dropout: float = 0.0) -> Tensor:
        """Token ids [n, s] -> hidden states before the weight of the last norm [n, s, C], with s = p + c * l.

        Args:
            ids: rows of a prompt and its answers.
            shapes: how their positions lie.
            masks: what attends to what.
            dropout: share of the channels that a row's prompt goes without, drawn anew for each output of attention
                and of a feed-forward part. Prompts alone have it: they are read, and answers calculate.
        """
        n, s = ids.shape
        is_prompt = (torch.arange(s) < shapes.prompt)[:, None]

        def with_dropout(output: Tensor) -> Tensor:
            """An output [n * s, C] without the dropped channels of its prompts."""
            if not dropout:
                return output
            keep = F.dropout(torch.ones(n, 1, output.shape[1]), dropout)
            return self._dropped(output.view(n, s, -1), keep, is_prompt).view(n * s, -1)

        angles = (shapes.positions[:, None] * self.frequency).repeat(n, 1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids).flatten(0, 1)
        normed = self._norm(x)
        for layer in self.model.layers:
            q, k, v = self._queries_keys_values(layer, normed)
            q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
            q, k, v = (heads.unflatten(0, (n, s)) for heads in (q, k, v))
            attended = self._attention(q, k, v, shapes, masks).reshape(n * s, -1)
            x, normed = self._add_and_norm(x, with_dropout(self._linear(attended, layer.self_attn.o_proj)))
            norm_weight = layer.post_attention_layernorm.weight
            gate, up = (self._linear(normed, part, norm_weight) for part in (layer.mlp.gate_proj, layer.mlp.up_proj))
            output = self._linear(self._swiglu(gate, up), layer.mlp.down_proj)
            x, normed = self._add_and_norm(x, with_dropout(output))
        return normed.view(n, s, -1)

    def cross_entropy(self, hidden: Tensor, truth: Tensor) -> Tensor:
        """Cross entropy [m] of token ids [m] that hidden states [m, C] predict."""
        head = self.model.embed_tokens.weight * self.model.norm.weight
        return self._cross_entropy(F.linear(hidden, head.to(self.dtype)), truth)

    def _queries_keys_values(self, layer: Qwen2DecoderLayer, normed: Tensor) -> list[Tensor]:
        """[T, C] -> queries, keys and values, each [T, heads, D]."""
        attention, norm_weight = layer.self_attn, layer.input_layernorm.weight
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        return [self._linear(normed, part, norm_weight).unflatten(-1, (-1, self.head_dim)) for part in parts]

    def _linear(self, x: Tensor, layer: nn.Linear, norm_weight: Tensor | None = None) -> Tensor:
        """A linear layer, [T, in] -> [T, out]. The weight [in] of the norm before it is multiplied into its own.

        The gradient of a norm's weight is a sum over all T; with this it is a sum over the layer's outputs.
        """
        weight = layer.weight if norm_weight is None else layer.weight * norm_weight
        return F.linear(x, weight.to(self.dtype), None if layer.bias is None else layer.bias.to(self.dtype))

    # ---- attention -------------------------------------------------------------------------------------------------

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, shapes: Shapes, masks: AttentionMasks) -> Tensor:
        """Queries [n, s, H, D], keys and values [n, s, K, D] -> [n, s, H, D]."""
        if masks.prompt is None:
            return self._attend(q, k, v, masks.answers)
        n, p, c, length = len(q), shapes.prompt, shapes.copies, shapes.answer
        of_prompt = self._attend(q[:, :p], k[:, :p], v[:, :p], masks.prompt)
        keys, values = (
            torch.cat(
                [
                    x[:, None, :p].expand(n, c, p, *x.shape[2:]),
                    x[:, p:].unflatten(1, (c, length)),
                ],
                dim=2,
            ).flatten(0, 1)
            for x in (k, v)
        )
        queries = q[:, p:].unflatten(1, (c, length)).flatten(0, 1)
        of_answers = self._attend(queries, keys, values, masks.answers)
        return torch.cat([of_prompt, of_answers.unflatten(0, (n, c)).flatten(1, 2)], 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Queries [b, l, H, D], keys and values [b, s, K, D] -> [b, l, H, D].

        The heads of a group share their keys, so their queries are rows of one product.
        """
        b, length, heads, dim = q.shape
        s, kv_heads = k.shape[1:3]
        scaled = q * dim**-0.5
        rows = scaled.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(b * kv_heads, -1, dim)
        keys, values = (x.transpose(1, 2).reshape(b * kv_heads, s, dim) for x in (k, v))
        scores = torch.bmm(rows, keys.mT).view(b, heads, length, s)
        shares = self._probabilities(scores, mask).view(b * kv_heads, -1, s)
        return torch.bmm(shares, values).view(b, heads, length, dim).transpose(1, 2)


# ---- what lies between products ------------------------------------------------------------------------------------


def norm(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm [T, C] without its weight."""
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def add_and_norm(x: Tensor, y: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of the residual stream, float32 [T, C], and a layer's output [T, C]; and its norm."""
    total = x + y
    return total, norm(total, eps, dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, D] with cosines and sines [T, 1, D / 2]."""
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


def probabilities(scores: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of scores [b, H, l, s] over the keys that are attended to."""
    return torch.softmax(scores.float() + mask, -1).to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [T, I]."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def dropped(y: Tensor, keep: Tensor, is_prompt: Tensor) -> Tensor:
    """An output [n, s, C] whose prompt positions [s, 1] are multiplied with [n, 1, C]."""
    return y * torch.where(is_prompt, keep, 1.0).to(y.dtype)


def cross_entropy(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy [m] of token ids [m] under logits [m, V]."""
    return F.cross_entropy(logits.float(), truth, reduction="none")
