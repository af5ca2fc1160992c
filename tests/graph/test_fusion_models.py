"""Whole models: one in plain torch, and transformers' Qwen2 as it is exported."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model, Qwen2RotaryEmbedding

from examples.plain_dream.plain_dream import PlainDream
from lopa_ascend.config import ModelConfig
from tests.graph.tracing import DTYPES, assert_fuses, calls, traced
from tests.tiers import slow_but

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LAYERS, TOKENS = 2, 20


def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).flatten(1)


def plain_model(dtype: torch.dtype) -> PlainDream:
    torch.manual_seed(0)
    model = PlainDream(
        ModelConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_layers=LAYERS,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position_embeddings=100,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            attention_bias=True,
            mask_token_id=63,
            eos_token_ids=(0,),
            dtype="float32",
        )
    )
    return model.to(dtype).requires_grad_(False)


@dtypes
def test_a_plain_model_becomes_the_one_that_is_written_by_hand(dtype: torch.dtype) -> None:
    model, tokens, positions = plain_model(dtype), torch.arange(TOKENS), torch.arange(TOKENS) + 7

    def forward(tokens: Tensor, positions: Tensor) -> Tensor:
        return model.lm_head(model(tokens, positions, attend))

    module = traced(forward, tokens, positions)
    report = assert_fuses(module, forward, tokens, positions)
    assert report.fused == {
        "rms_norm": 2 * LAYERS + 1,
        "add_rms_norm": 2 * LAYERS,
        "rope": 2 * LAYERS,
        "packing": 2 * LAYERS,
        "rope_packing": LAYERS,
        "swiglu": LAYERS,
        "linear": 4 * LAYERS + 1,
    }
    assert not report.refused
    called = [name for name in calls(module) if name.startswith("ops.")]
    layer = ["linear", "rope", "linear", "add_rms_norm", "linear", "swiglu", "linear", "add_rms_norm"]
    layers = [f"ops.{name}" for name in layer * LAYERS]
    assert called == ["ops.rms_norm", *layers, "ops.linear"]
    # Constants are packed weights, and no others.
    held = Counter(tuple(tensor.shape) for tensor in [*module.buffers(), *module.parameters()])
    assert held[(64, 32)] == 1 + LAYERS + 1  # embedding, qkv, head
    assert held[(96, 32)] == LAYERS
    assert held[(16, 32)] == 0


class Block(nn.Module):
    """A decoder layer of transformers with its rotary embedding."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.layer, self.rotary = Qwen2DecoderLayer(config, 0), Qwen2RotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        factors = self.rotary(x, positions)
        return self.layer(x, attention_mask=None, position_ids=positions, position_embeddings=factors)


def exported(model: nn.Module, *args: Tensor, core: bool) -> torch.fx.GraphModule:
    """``core``: decomposed to the core aten ops, of which SiLU and linear layers are none."""
    with torch.no_grad():
        program = torch.export.export(model, args)
        return (program.run_decompositions() if core else program.run_decompositions({})).module()


@pytest.mark.parametrize(
    ("core", "dtype"), slow_but(product((False, True), DTYPES), [(False, DTYPES[0]), (True, DTYPES[1])]), ids=str
)
def test_a_layer_of_transformers_is_fused(dtype: torch.dtype, core: bool) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "eager"
    block = Block(config).to(dtype).eval()
    args = torch.randn(2, 8, 64).to(dtype), torch.arange(8)[None].expand(2, -1)
    module = exported(block, *args, core=core)
    report = assert_fuses(module, block, *args)
    # The layer's input is the caller's, so the sum is written into what attention gave.
    expected = {"rms_norm": 2, "add_rms_norm": 1, "rope": 2, "packing": 2, "rope_packing": 1, "swiglu": 1, "linear": 4}
    assert report.fused == expected
    assert not report.refused
    assert not {"rsqrt", "neg", "silu", "sigmoid", "mm", "addmm", "linear"} & set(calls(module))


def test_a_model_of_transformers_is_fused() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
    )
    config._attn_implementation = "sdpa"
    model = Qwen2Model(config).eval()

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens, use_cache=False).last_hidden_state

    hidden, tokens = Hidden(), torch.randint(50, (2, 8))
    report = assert_fuses(exported(hidden, tokens, core=False), hidden, tokens)
    assert report.fused == {
        "rms_norm": 2 * LAYERS + 1,
        "add_rms_norm": 2 * LAYERS,
        "rope": 2 * LAYERS,
        "packing": 2 * LAYERS,
        "swiglu": LAYERS,
        "linear": 4 * LAYERS,
    }
