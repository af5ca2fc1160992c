"""Dream (Qwen2-like decoder): architecture only. Dream-7B and DiffuCoder-7B are this.

Packed weights: ``embed``, ``layers.N.{attn_norm, qkv, o, mlp_norm, gate_up, down}``, ``norm``, ``head`` (absent when
tied); ``qkv`` stacks q, k, v and ``gate_up`` gate and up along the output rows.

Under tensor parallelism a rank holds its heads of qkv, the matching columns of o, its part of the MLP and of the
vocabulary (padded to the same size on every rank). Each layer sums over the ranks twice, after o and after down, and
the embedding once. A rank's embedding has a row of zeros more, which stands for the tokens of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lopa_ascend.backend import Entries, Ops
from lopa_ascend.config import ModelConfig
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.types import Traffic

Caches = Tensor | Sequence[Tensor]

LINEAR = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight", "head.weight")
"""Endings of the names of linear layers' weights."""


@dataclass(frozen=True)
class ForwardInputs:
    """Device tensors of one forward pass: T tokens of all rows, flat.

    ``tokens`` and ``positions`` int64 [T]; ``slots`` and ``source`` int64 [W]: cache position slots[i] takes token
    source[i], or token i; ``rows`` int64 [R]: the tokens whose hidden states are wanted, None for all.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    source: Tensor | None
    entries: Entries
    rows: Tensor | None


class Dream:
    """``forward`` gives final hidden states, ``logits`` the head's output for them.

    ``config`` is the whole model's and ``weights`` are this rank's of the group ``tp``, which has the token ids from
    ``first_token`` on, ``num_tokens`` of them.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], ops: Ops, tp: Group = ALONE):
        self.config, self.ops, self.tp = config, ops, tp
        self.weights = {name: ops.stored(w) if name.endswith(LINEAR) else w for name, w in weights.items()}
        self.num_heads, self.num_kv_heads = config.local_heads(tp.size), config.local_kv_heads(tp.size)
        shard = config.vocab_shard(tp.size)
        self.first_token = tp.rank * shard
        self.num_tokens = min(shard, config.vocab_size - self.first_token)
        embed = self.weights["embed.weight"]
        dtype, device = embed.dtype, embed.device
        if tp.size > 1:
            self.weights["embed.weight"] = torch.cat([embed, embed.new_zeros(1, config.hidden_size)])
            own = torch.arange(config.vocab_size, dtype=torch.int32) - self.first_token
            self._row_of_token = own.masked_fill((own < 0) | (own >= shard), shard).to(device)
        tied = config.tie_word_embeddings
        self.head = ops.stored(self.weights["embed.weight"][:shard]) if tied else self.weights["head.weight"]
        # v takes part in the rope, turned by nothing: one kernel for all of qkv is less than one for q and one for k.
        value_heads = torch.arange(self.num_heads + 2 * self.num_kv_heads) >= self.num_heads + self.num_kv_heads
        self._still = value_heads[:, None].to(device)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device),
            config.rope_theta ** -(half / config.head_dim),
        )
        self.cos, self.sin = ops.rope_tables(angles.cos(), angles.sin(), dtype)

    def forward(self, inputs: ForwardInputs, k_caches: Caches, v_caches: Caches) -> Tensor:
        """Final normed hidden states [R, hidden] of ``inputs.rows``; writes keys and values to the caches
        [layers, N, 128, K, D] as it goes. A compiled forward copies what it takes out of one tensor, and takes a
        sequence of those of the layers as they are."""
        c, w, ops = self.config, self.weights, self.ops
        heads, kv_heads = self.num_heads, self.num_kv_heads
        cos, sin = (table.index_select(0, inputs.positions) for table in (self.cos, self.sin))
        cos, sin = torch.where(self._still, 1.0, cos), torch.where(self._still, 0.0, sin)
        residual = self._embed(inputs.tokens)
        x = ops.rms_norm(residual, w["layers.0.attn_norm.weight"], c.rms_norm_eps)
        for n in range(c.num_layers):
            p = f"layers.{n}."
            qkv = ops.linear(x, w[p + "qkv.weight"], w.get(p + "qkv.bias"))
            qkv = ops.rope(qkv.view(-1, heads + 2 * kv_heads, c.head_dim), cos, sin)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            ops.kv_write(k, v, k_caches[n], v_caches[n], inputs.slots, inputs.source)
            x = ops.attention(q, k_caches[n], v_caches[n], inputs.entries)
            if n == c.num_layers - 1 and inputs.rows is not None:  # rows no longer meet: go on with the wanted ones
                x, residual = x[inputs.rows], residual[inputs.rows]
            x = self.tp.all_reduce(ops.linear(x, w[p + "o.weight"]), "layers")
            x, residual = ops.add_rms_norm(x, residual, w[p + "mlp_norm.weight"], c.rms_norm_eps)
            x = ops.swiglu(ops.linear(x, w[p + "gate_up.weight"]))
            x = self.tp.all_reduce(ops.linear(x, w[p + "down.weight"]), "layers")
            following = "norm.weight" if n == c.num_layers - 1 else f"layers.{n + 1}.attn_norm.weight"
            x, residual = ops.add_rms_norm(x, residual, w[following], c.rms_norm_eps)
        return x

    def _embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        rows = tokens if self.tp.size == 1 else self._row_of_token.index_select(0, tokens)
        return self.tp.all_reduce(self.weights["embed.weight"].index_select(0, rows), "embedding")

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, num_tokens], of this rank's part of the vocabulary."""
        return self.ops.linear(hidden, self.head)[:, : self.num_tokens]

    def traffic(self, tokens: int) -> tuple[Traffic, ...]:
        """What this rank sends in a forward pass over so many tokens, all of whose hidden states are wanted."""
        size = tokens * self.config.hidden_size * self.head.dtype.itemsize
        calls = {"embedding": 1, "layers": 2 * self.config.num_layers} if self.tp.size > 1 else {}
        return tuple(Traffic(purpose, count, count * size) for purpose, count in calls.items())
