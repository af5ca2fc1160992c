"""Mixtures of experts: routing and products against the plain definition, uneven loads, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.experts import route
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Experts
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.config import ConfigError, ExpertsConfig, ModelConfig
from lopa_ascend.families import FAMILIES, read_config

PLAIN = ExpertsConfig(
    num_experts=8, per_token=2, num_groups=2, kept_groups=1, scale=2.5, inner=16, shared_inner=16, first_layer=0
)


def random_experts(sizes: ExpertsConfig, hidden: int, dtype: torch.dtype, seed: int, *, int8: bool = False) -> Experts:
    generator = torch.Generator().manual_seed(seed)
    number = sizes.num_experts

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gate_up, down = draw(number, 2 * sizes.inner, hidden) / hidden**0.5, draw(number, hidden, sizes.inner) / 4
    router, bias = draw(number, hidden) / hidden**0.5, draw(number) / 4
    if not int8:
        return Experts(sizes, router, bias, gate_up.to(dtype), down.to(dtype))
    (wide, wide_scale), (narrow, narrow_scale) = (
        [torch.stack(parts) for parts in zip(*map(quantize_weight, weights), strict=True)]
        for weights in (gate_up, down)
    )
    return Experts(sizes, router, bias, wide, narrow, wide_scale, narrow_scale)


def random_sizes(seed: int) -> ExpertsConfig:
    rng = random.Random(seed)
    groups = rng.choice([1, 2, 4])
    kept, size = rng.randint(1, groups), rng.choice([2, 5, 8])
    return replace(
        PLAIN,
        num_experts=groups * size,
        num_groups=groups,
        kept_groups=kept,
        per_token=rng.randint(1, min(4, kept * size)),
        inner=rng.choice([8, 64]),
        scale=rng.choice([1.0, 2.5]),
    )


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_experts_compute_what_the_definition_says(seed: int, int8: bool) -> None:
    sizes, dtype = random_sizes(seed), random.Random(seed).choice([torch.float32, torch.bfloat16])
    experts = random_experts(sizes, 48, dtype, seed, int8=int8)
    x = torch.randn(random.Random(seed).choice([1, 7, 40]), 48, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ids, weights = route(x.float() @ experts.router.T, experts.bias, sizes)
    for row, expected in enumerate(definition._routed(x, experts)):
        assert ids[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-5)
    found, plain = CpuOps().moe(x, experts), definition.moe(x, experts)
    bound = 2e-2 if dtype is torch.bfloat16 or int8 else 1e-5
    assert found.dtype is dtype
    assert float((found - plain).abs().max()) <= bound * float(plain.abs().max())


def test_all_tokens_may_take_the_same_experts() -> None:
    """Those of the other group, and all but two of this one, then have no token."""
    experts = random_experts(PLAIN, 48, torch.float32, 0)
    experts.bias.copy_(torch.tensor([0.0, 9, 0, 9, 0, 0, 0, 0]))
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(1))
    assert all({*found} == {1, 3} for found in definition._routed(x, experts))
    torch.testing.assert_close(CpuOps().moe(x, experts), definition.moe(x, experts), rtol=1e-5, atol=1e-5)


def test_equal_scores_go_to_the_lower_index() -> None:
    experts = random_experts(PLAIN, 48, torch.float32, 0)
    ids, _ = route(torch.zeros(3, 8), torch.zeros(8), experts.sizes)
    assert ids.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    ops, experts = CpuOps(), random_experts(replace(PLAIN, inner=64), 64, dtype, 2)
    ops.settle([experts.router, experts.gate_up[0], experts.down[0]])
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    whole = ops.moe(x, experts)
    for rows in (slice(0, 1), slice(17, 49), slice(5, 290)):
        assert torch.equal(ops.moe(x[rows], experts), whole[rows])


# ---- config.json -----------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 600000,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "router_dtype": "fp32",
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "pad_token_id": 156892,
}
"""Of LLaDA2.0-mini."""


def read(**changes: Any) -> ModelConfig:
    return read_config(CONFIG | changes, {}, "config.json", FAMILIES["llada2_moe"])


def test_the_fields_of_mini_are_read() -> None:
    model = read()
    assert (model.rotary_dim, model.mask_token_id, model.block_size) == (64, 156895, 32)
    assert model.experts == ExpertsConfig(
        num_experts=256, per_token=8, num_groups=8, kept_groups=4, scale=2.5, inner=512, shared_inner=512, first_layer=1
    )
    assert model.tensor_parallel_sizes() == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 7}, "n_group is 7, expected a number that divides num_experts 256 into groups of at least 2"),
        ({"n_group": 256}, "n_group is 256, expected a number that divides"),
        ({"topk_group": 9}, "topk_group is 9, expected at most n_group 8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129, expected at most the 128 of 256 experts"),
        ({"num_experts": None}, "num_experts is None, expected a positive integer"),
        ({"score_function": "softmax"}, "score_function is 'softmax', expected 'sigmoid'"),
        ({"router_dtype": "bf16"}, "router_dtype is 'bf16', expected 'fp32'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False, expected True"),
        ({"use_qk_norm": False}, "use_qk_norm is False, expected True"),
        ({"use_bias": True}, "use_bias is True, expected False"),
        ({"first_k_dense_replace": 20}, "first_k_dense_replace is 20, expected a number below num_hidden_layers 20"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a positive number"),
        ({"rotary_dim": 32}, "rotary_dim is 32, expected 64, which is head_dim 128 x partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.51}, "partial_rotary_factor is 0.51, expected a share of head_dim 128"),
        ({"expert_capacity": 48}, "expert_capacity is 48, expected no such field: LLaDA2.2 routes blocks"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is .*, expected None"),
    ],
)
def test_what_the_experts_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_a_compiled_step_computes_the_same() -> None:
    ops, experts = CpuOps(), [random_experts(PLAIN, 48, torch.float32, 0, int8=int8) for int8 in (False, True)]
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.moe(x * 2, experts[0]) + ops.moe(x, experts[1])

    with torch.inference_mode():
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(compiled, step(x))
