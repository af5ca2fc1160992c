"""A family of models by its table, as an example of how to add one: see docs/add-a-model.md.

Kestrel is an invented name for the network of SDAR: block-causal, with norms of queries and keys. Its tensors, and two
fields of its ``config.json``, have names of their own.
"""

from __future__ import annotations

from lopa_ascend.families import HEAD, Family, Row, Table
from lopa_ascend.types import ModelProperties

TABLE = Table(
    before=(Row("embed.weight", "embed.weight", ("vocab", "hidden")),),
    layers="layers",
    layer=(
        Row("norm_1.weight", "attn_norm.weight", ("hidden",)),
        Row("q.weight", "qkv.weight", ("heads", "hidden"), linear="qkv_proj", source="norm_1.weight"),
        Row("k.weight", "qkv.weight", ("kv_heads", "hidden"), linear="qkv_proj", source="norm_1.weight"),
        Row("v.weight", "qkv.weight", ("kv_heads", "hidden"), linear="qkv_proj", source="norm_1.weight"),
        Row("q_norm.weight", "q_norm.weight", ("head_dim",)),
        Row("k_norm.weight", "k_norm.weight", ("head_dim",)),
        Row("o.weight", "o.weight", ("hidden", "heads"), linear="o_proj"),
        Row("norm_2.weight", "mlp_norm.weight", ("hidden",)),
        Row("gate.weight", "gate_up.weight", ("inner", "hidden"), linear="gate_up_proj", source="norm_2.weight"),
        Row("up.weight", "gate_up.weight", ("inner", "hidden"), linear="gate_up_proj", source="norm_2.weight"),
        Row("down.weight", "down.weight", ("hidden", "inner"), linear="down_proj", source="up.weight"),
    ),
    after=(
        Row("norm.weight", "norm.weight", ("hidden",)),
        Row("head.weight", "head.weight", ("vocab", "hidden"), linear=HEAD, tied_to="embed.weight"),
    ),
)
FAMILY = Family(
    model_type="Kestrel",
    table=TABLE,
    properties=ModelProperties(logit_shift=0, attention="block_causal"),
    names={"num_hidden_layers": "depth", "block_size": "block_length"},
    defaults={"attention_bias": False},
    recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85},
    source="docs/add-a-model.md",
)
