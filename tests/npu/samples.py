"""Tensors for tests: a Dream of any size with a step's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from examples.plain_dream.plain_dream import PlainDream
from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.config import ModelConfig
from lopa_ascend.families import dream
from lopa_ascend.graph.fusion.fused_model import FusedModel, fuse_model
from lopa_ascend.graph.fusion.trace import trace
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.plain import build_module
from tests.made_weights import made_weights

SMALL_VOCABULARY = 512


def dream_config(num_layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelConfig:
    """Of heads of 128, as Dream-7B's are, and with few tokens."""
    return ModelConfig(
        vocab_size=SMALL_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=2048,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=True,
        mask_token_id=SMALL_VOCABULARY - 1,
        eos_token_ids=(0,),
        dtype="bfloat16",
    )


def dream_7b(num_layers: int) -> ModelConfig:
    """The layers of Dream-7B."""
    return dream_config(num_layers, hidden=3584, intermediate=18944, heads=28, kv_heads=4)


def small_dream(num_layers: int) -> ModelConfig:
    """One that can be computed here, with as many query heads a KV head as Dream-7B."""
    return dream_config(num_layers, hidden=256, intermediate=320, heads=7, kv_heads=1)


def dream_weights(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random ones on the CPU."""

    def make(_: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (torch.randn(shape) * shape[-1] ** (0.5 - len(shape) / 2)).to(dtype)

    return made_weights(dream.FAMILY, config, make, dtype)


def plain_dream(config: ModelConfig, ops: Ops, weights: Mapping[str, Tensor] | None = None) -> FusedModel:
    """The example of a model in plain torch, fused, with these weights by their Hugging Face names, or with whatever is
    in memory."""
    module = build_module(PlainDream, config)
    saved = module.state_dict()
    tensors = dict(weights or {name: torch.empty_like(x, device=ops.device) for name, x in saved.items()})
    return fuse_model(config, module, trace(module, config, ops.device), tensors, ops)


def forward_inputs(entries: Entries, num_pages: int) -> ForwardInputs:
    """Random ones, on the CPU. Every token is written to a slot, and wanted."""
    count = sum(entries.lengths)
    return ForwardInputs(
        tokens=torch.randint(SMALL_VOCABULARY, (count,)),
        positions=torch.randint(2048, (count,)),
        slot_mapping=torch.randperm(num_pages * PAGE_SIZE)[:count],
        source=None,
        entries=entries,
        rows=torch.randperm(count),
    )


def moved(inputs: ForwardInputs, device: str) -> ForwardInputs:
    """The same on a device."""
    return inputs.to(torch.device(device))


def overwrite(inputs: ForwardInputs, other: ForwardInputs) -> None:
    """Puts other tensors into the memory of these; lengths stay."""
    for name in ("tokens", "positions", "slot_mapping", "rows"):
        getattr(inputs, name).copy_(getattr(other, name))
    inputs.entries.page_tables.copy_(other.entries.page_tables)
