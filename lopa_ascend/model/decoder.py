"""A decoder like Qwen2 or Qwen3 in fused ops: the forward pass that all built-in families share.

A family's weights decide what a layer computes: biases, norms of queries and keys, or experts in place of the MLP,
beside one that all tokens take. Any linear layer of a layer may be int8 or fp8; it then has a ``weight_scale`` of each
output beside its ``weight``, and its activations are quantised when it runs. An int4 one has a scale of each output and
group of inputs, and perhaps a ``weight_zero``; its activations are int8 too.

Under tensor parallelism a rank holds its heads of qkv, the matching columns of o, its part of the MLP, and its part of
the LM head, padded to the same size on every rank. The ranks sum twice a layer, after o and after down. Each holds the
whole embedding, because a sum over the ranks would take longer than the embedding's memory is worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.interface import FP8, Experts, Int4Weight, Ops
from lopa_ascend.config import ExpertsConfig, ModelConfig, YarnConfig
from lopa_ascend.families import Family, Row
from lopa_ascend.families.table import DRAFTS, LORA_A, LORA_B, SCALE, ZERO
from lopa_ascend.model.base import Caches, ForwardInputs
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.types import Traffic

EXPERTS = {
    "router": "router.weight",
    "bias": "router.bias",
    "gate_up": "experts_gate_up.weight",
    "down": "experts_down.weight",
    "gate_up_scale": "experts_gate_up.weight_scale",
    "down_scale": "experts_down.weight_scale",
}
"""The tensors of ``Experts`` by our names, in a layer."""
Rows = Tensor | tuple[Tensor, Tensor]
"""Activations [T, in], or their codes [T, in], int8 or FP8, and scales, float32 [T]."""


class Decoder:
    """See ``model.base.SplitModel``."""

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        weights: MutableMapping[str, Tensor],
        ops: Ops,
        tp: Group = ALONE,
        num_positions: int | None = None,
    ) -> None:
        self.family, self.properties = family, family.properties
        self.config, self.ops, self.tp = config, ops, tp
        self.num_heads, self.num_kv_heads = config.local_heads(tp.size), config.local_kv_heads(tp.size)
        shard = config.vocab_shard(tp.size)
        self.first_token_id = tp.rank * shard
        self.local_vocab_size = min(shard, config.vocab_size - self.first_token_id)
        num_positions = num_positions or config.max_position_embeddings
        self._rope_unit = 1.0 if ops.rope_and_write is not None else _rope_unit(config.yarn, num_positions)
        rows = {spec.ours: spec.row for spec in family.tensors(config).specs.values()}
        int4 = [name for name, weight in weights.items() if weight.dtype == torch.uint8 and not name.endswith(ZERO)]
        self._codes = FP8 if any(weight.dtype == FP8 for weight in weights.values()) else torch.int8
        own = {name: self._stored(name, weights.pop(name), rows) for name in list(weights)}
        embed = own["embed.weight"]
        self.weights: Mapping[str, Tensor] = own
        self._int4 = {name: self._stored_int4(name, own) for name in int4}
        self._norms_heads = "layers.0.q_norm.weight" in own
        self._has_draft_weights = any(f"layers.0.o{end}.weight" in own for end in (DRAFTS, LORA_A))
        is_tied = config.tie_word_embeddings
        self.head = ops.packed(ops.stored(tied_head(embed, tp, shard))) if is_tied else own["head.weight"]
        self._experts = {
            f"layers.{n}.": self._stored_experts(f"layers.{n}.", sizes, own)
            for sizes in ([] if config.experts is None else [config.experts])
            for n in range(sizes.first_layer, config.num_layers)
        }
        self._rope_tables = self._make_rope_tables(num_positions, embed)

    def _stored(self, name: str, weight: Tensor, rows: Mapping[str, Row]) -> Tensor:
        """A tensor in the form in which the ops read it. ``rows``: by our name, of all but scales and an adapter."""
        if name.removesuffix(".weight").endswith((LORA_A, LORA_B)):
            return self.ops.packed(self.ops.stored(weight))
        is_scale = name not in rows  # or a zero
        row = rows[name.removesuffix(SCALE).removesuffix(ZERO)]
        if row.is_summed and self.tp.rank:
            weight.zero_()
        weight = self._with_halves(name, weight)
        # Of quantised weights the scales.
        is_wide = weight.is_floating_point() and weight.dtype != FP8
        if self._rope_unit != 1 and name.split(".")[-2].startswith("qkv") and is_wide:
            weight = weight * self._rope_unit
        if row.each:  # of all experts, whose rows lie one after another
            assert self.config.experts is not None
            of_experts: Tensor = weight.unflatten(0, (self.config.experts.num_experts, -1))
            return of_experts
        if is_scale or row.linear is None or weight.dtype == torch.uint8:  # int4, which is stored with its scales
            return weight
        return self.ops.packed(self.ops.stored(weight))

    def _stored_int4(self, name: str, own: dict[str, Tensor]) -> Int4Weight:
        """An int4 weight in the form in which the ops read it, which replaces its tensors."""
        stored = self.ops.stored_int4(Int4Weight(own[name], own[name + SCALE], own.get(name + ZERO)))
        own |= {name: stored.codes, name + SCALE: stored.scale}
        if stored.zero is not None:
            own[name + ZERO] = stored.zero
        return stored

    def _with_halves(self, name: str, weight: Tensor) -> Tensor:
        """A tensor of a layer with rows in the order of ``Ops.rope``, which rotates the pairs (x[i],
        x[i + head_dim / 2]). If only the first elements of a head are rotated, their pairs lie nearer together in the
        checkpoint. Products of queries and keys do not depend on the order of the elements of both."""
        dim, rotary = self.config.head_dim, self.config.rotary_dim
        part = name.split(".")[-2]
        if rotary == dim or part not in ("qkv", "q_norm", "k_norm"):
            return weight
        rotated, rest = torch.arange(rotary).chunk(2), torch.arange(rotary, dim).chunk(2)
        order = torch.cat([rotated[0], rest[0], rotated[1], rest[1]]).to(weight.device)
        if part != "qkv":
            return weight[order]
        heads = weight.unflatten(0, (-1, dim))
        num_rotated = self.num_heads + self.num_kv_heads
        return torch.cat([heads[:num_rotated, order], heads[num_rotated:]]).flatten(0, 1)

    def _stored_experts(self, layer: str, sizes: ExpertsConfig, own: dict[str, Tensor]) -> Experts:
        """A layer's experts in the form in which the ops read them, which replace their tensors."""
        names = {field: layer + name for field, name in EXPERTS.items() if layer + name in own}
        stored = self.ops.stored_experts(Experts(sizes, **{field: own.pop(name) for field, name in names.items()}))
        own |= {name: getattr(stored, field) for field, name in names.items()}
        return stored

    def _make_rope_tables(self, num_positions: int, embed: Tensor) -> Tensor:
        """Cosines and sines of ``Ops.rope`` on the embedding's device, [2, positions, heads + 2 * kv_heads, ...], or
        [2, positions, 1, ...] if queries and keys are normed, or a kernel rotates them alike and leaves v as it is.

        Otherwise v is rotated by an angle of 0: one kernel for q, k and v costs less than one for q and one for k. The
        tables have a row for each head, so that a step takes its rows with one kernel.

        An NPU's kernel takes cosines and sines up to 1. Larger ones are divided by a power of 2, and weights and biases
        of q, k and v multiplied by it, which rounds nothing.
        """
        rotary_dim, device = self.config.rotary_dim, embed.device
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        even_dims = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
        yarn, frequencies = self.config.yarn, self.config.rope_theta ** -(even_dims / rotary_dim)
        if yarn is not None:
            frequencies = torch.tensor(yarn.frequencies(self.config.rope_theta, rotary_dim), device=device)
        angles = torch.outer(positions, frequencies)
        angles = F.pad(angles, (0, (self.config.head_dim - rotary_dim) // 2))  # the others are rotated by 0
        factor = 1.0 if yarn is None else yarn.attention_factor
        tables = torch.stack(self.ops.rope_tables(angles.cos() * factor, angles.sin() * factor, embed.dtype))
        if self._norms_heads:
            assert yarn is None, "norms would undo what weights are multiplied by"
            return tables
        if self.ops.rope_and_write is not None and not (yarn and yarn.query_beta):
            return tables
        head = torch.arange(self.num_heads + 2 * self.num_kv_heads, device=device)
        is_value_head = head >= self.num_heads + self.num_kv_heads
        no_angle = torch.tensor([1.0, 0.0], dtype=embed.dtype, device=device)  # cos, sin
        tables = torch.where(is_value_head[:, None], no_angle.view(2, 1, 1, 1), tables)
        if yarn is not None and yarn.query_beta:
            scale = torch.tensor([yarn.query_scale(position) for position in range(num_positions)], device=device)
            tables[:, :, : self.num_heads] *= scale[:, None, None].to(tables.dtype)
        return tables / self._rope_unit

    def forward(self, inputs: ForwardInputs, k_caches: Caches, v_caches: Caches) -> Tensor:
        c, ops = self.config, self.ops
        num_drafts = inputs.num_drafts if self._has_draft_weights else 0
        cos, sin = self._rope_tables.index_select(1, inputs.positions).unbind()
        residual = self.weights["embed.weight"].index_select(0, inputs.tokens)
        x = self._norm(residual, "layers.0.attn_norm", reader="layers.0.qkv")
        for n in range(c.num_layers):
            p = f"layers.{n}."
            q = self._queries(x, p, (cos, sin), num_drafts, inputs, (k_caches[n], v_caches[n]))
            attended = ops.attention(q, k_caches[n], v_caches[n], inputs.entries)
            # After the last attention no token depends on another: go on with the wanted rows.
            if n == c.num_layers - 1 and inputs.rows is not None:
                if not len(inputs.rows):  # NPU kernels take no empty tensor
                    return residual[:0]
                residual = residual[inputs.rows]
                if num_drafts:
                    out = self._attention_output(attended, p, num_drafts)[inputs.rows]
                else:
                    out = self._attention_output(attended[inputs.rows], p, 0)
            else:
                out = self._attention_output(attended, p, num_drafts)
            out = self.tp.all_reduce(out, "layers")
            x, residual = self._add_norm(out, residual, p + "mlp_norm", reader=p + "gate_up")
            out = self.tp.all_reduce(self._mlp(x, p), "layers")
            if n < c.num_layers - 1:
                x, residual = self._add_norm(out, residual, f"layers.{n + 1}.attn_norm", reader=f"layers.{n + 1}.qkv")
        return ops.add_rms_norm(out, residual, self.weights["norm.weight"], c.rms_norm_eps)[0]

    def _queries(
        self,
        x: Rows,
        layer: str,
        tables: tuple[Tensor, Tensor],
        num_drafts: int,
        inputs: ForwardInputs,
        caches: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Queries [T, H, head_dim] of a layer, rotated. Its keys and values are written."""
        ops, eps = self.ops, self.config.rms_norm_eps
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self._linear_of_views(x, layer + "qkv", num_drafts).view(-1, sum(heads), self.config.head_dim)
        views = [
            (rows, (self.weights[f"{layer}q_norm{end}.weight"], self.weights[f"{layer}k_norm{end}.weight"]))
            for rows, end in (self._views(len(qkv), layer + "q_norm", num_drafts) if self._norms_heads else [])
        ]
        if ops.rope_and_write is not None and len(views) <= 1:
            norms = views[0][1] if views else None
            return ops.rope_and_write(qkv, norms, eps, tables, caches, inputs.slot_mapping, inputs.source)
        q: Tensor
        cos, sin = tables
        q, k, v = (qkv if views else ops.rope(qkv, cos, sin)).split(heads, 1)
        if views:
            normed = [ops.norm_rope(q[rows], k[rows], *norms, eps, cos[rows], sin[rows]) for rows, norms in views]
            q, k = _joined([queries for queries, _ in normed]), _joined([keys for _, keys in normed])
        ops.kv_write(k, v, *caches, inputs.slot_mapping, inputs.source)
        return q

    def _attention_output(self, attended: Tensor, layer: str, num_drafts: int) -> Tensor:
        out = self._linear_of_views(attended, layer + "o", num_drafts)
        if num_drafts and layer + f"o{LORA_A}.weight" in self.weights:
            low = self._linear(attended[:num_drafts], layer + "o" + LORA_A)
            out = torch.cat([out[:num_drafts] + self._linear(low, layer + "o" + LORA_B), out[num_drafts:]])
        return out

    def _linear_of_views(self, x: Rows, name: str, num_drafts: int) -> Tensor:
        """A linear layer of this rank, with weights for drafts if it has any."""
        num_rows = len(x if isinstance(x, Tensor) else x[0])
        parts = [
            self._linear(x[rows] if isinstance(x, Tensor) else (x[0][rows], x[1][rows]), name + end)
            for rows, end in self._views(num_rows, name, num_drafts)
        ]
        return _joined(parts)

    def _views(self, num_rows: int, name: str, num_drafts: int) -> list[tuple[slice, str]]:
        """(rows, ending of their weights' names): the rows that the same weights compute, none of them empty."""
        if not num_drafts or f"{name}{DRAFTS}.weight" not in self.weights:
            return [(slice(None), "")]
        views = [(slice(num_drafts), DRAFTS), (slice(num_drafts, None), "")]
        return views[: 1 + (num_rows > num_drafts)]

    def _mlp(self, x: Rows, layer: str) -> Tensor:
        """This rank's part of a layer's MLP, or of its experts and of the MLP that all tokens take."""
        experts = self._experts.get(layer)
        if experts is None:
            return self._linear(self._gated(x, layer + "gate_up", reader=layer + "down"), layer + "down")
        assert isinstance(x, Tensor), "the router reads it"
        gated = self._gated(x, layer + "shared_gate_up", reader=layer + "shared_down")
        return self.ops.moe(x, experts, self._linear(gated, layer + "shared_down"))

    def _norm(self, x: Tensor, norm: str, reader: str) -> Rows:
        """A norm of x, as the linear layer ``reader`` takes it."""
        weight, eps = self.weights[norm + ".weight"], self.config.rms_norm_eps
        if not self._takes_codes(reader):
            return self.ops.rms_norm(x, weight, eps)
        return self.ops.rms_norm_quant(x, weight, eps, self._codes)

    def _add_norm(self, x: Tensor, residual: Tensor, norm: str, reader: str) -> tuple[Rows, Tensor]:
        """A norm of x + residual, as the linear layer ``reader`` takes it, and x + residual."""
        weight, eps = self.weights[norm + ".weight"], self.config.rms_norm_eps
        if not self._takes_codes(reader):
            return self.ops.add_rms_norm(x, residual, weight, eps)
        codes, scale, total = self.ops.add_rms_norm_quant(x, residual, weight, eps, self._codes)
        return (codes, scale), total

    def _gated(self, x: Rows, name: str, reader: str) -> Rows:
        """SwiGLU of a linear layer, as the linear layer ``reader`` takes it."""
        if not self._takes_codes(reader):
            return self.ops.swiglu(self._linear(x, name))
        weight, scale = self.weights[name + ".weight"], self.weights.get(name + ".weight_scale")
        if scale is None or name + ".weight" in self._int4 or name + ".bias" in self.weights:
            return self.ops.swiglu_quant(self._linear(x, name), self._codes)
        rows = self.ops.quantize(x, self._codes) if isinstance(x, Tensor) else x
        return self.ops.quant_swiglu(*rows, weight, scale, self.head.dtype)

    def _takes_codes(self, name: str) -> bool:
        return name + ".weight_scale" in self.weights

    def _linear(self, x: Rows, name: str) -> Tensor:
        """A linear layer of this rank. If it is quantised, activations that are not yet codes are quantised here."""
        weight, bias = self.weights[name + ".weight"], self.weights.get(name + ".bias")
        weight_scale = self.weights.get(name + ".weight_scale")
        if weight_scale is None:
            assert isinstance(x, Tensor)
            return self.ops.linear(x, weight, bias)
        codes, scale = self.ops.quantize(x, self._codes) if isinstance(x, Tensor) else x
        int4 = self._int4.get(name + ".weight")
        if int4 is not None:
            return self.ops.int4_linear(codes, scale, int4, bias, self.head.dtype)
        return self.ops.quant_linear(codes, scale, weight, weight_scale, bias, self.head.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.head)[:, : self.local_vocab_size]

    def traffic(self, num_computed: int) -> tuple[Traffic, ...]:
        if self.tp.size == 1:
            return ()
        size = num_computed * self.config.hidden_size * self.head.dtype.itemsize
        count = 2 * self.config.num_layers
        return (Traffic("layers", count, count * size),)


def _rope_unit(yarn: YarnConfig | None, num_positions: int) -> float:
    """The least power of 2 that no cosine or sine of queries and keys exceeds."""
    if yarn is None:
        return 1.0
    largest = yarn.attention_factor * yarn.query_scale(num_positions - 1)
    return 2.0 ** max(0, math.ceil(math.log2(largest)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def tied_head(embed: Tensor, tp: Group, shard: int) -> Tensor:
    """This rank's ``shard`` rows of an LM head that is the embedding [vocab, hidden]; rows beyond the
    vocabulary are 0."""
    own = embed[tp.rank * shard : (tp.rank + 1) * shard]
    return own if len(own) == shard else torch.cat([own, own.new_zeros(shard - len(own), own.shape[1])])
