"""What the installed torch and transformers can do, for tests that need it; ci/versions.py runs others."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

HAS_DYNAMIC_SOURCES = hasattr(getattr(torch.compiler, "config", None), "dynamic_sources")
compiles_steps = pytest.mark.skipif(not HAS_DYNAMIC_SOURCES, reason="this torch cannot compile steps")


def _knows_head_dim() -> bool:
    config = Qwen2Config(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    query: torch.nn.Linear = Qwen2Model(config).layers[0].self_attn.q_proj
    return query.out_features == 8


qwen2_knows_head_dim = pytest.mark.skipif(
    not _knows_head_dim(), reason="Qwen2 of these transformers has no head_dim of its own"
)
