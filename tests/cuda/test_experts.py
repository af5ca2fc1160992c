"""Mixtures of experts on the CUDA backend: against the definition, alone and among others, on ``meta``, in
captured steps, and the recorded traces of LLaDA2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from lopa_ascend import LLM
from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cuda.graphs import CudaGraphs
from lopa_ascend.backend.cuda.ops import CudaOps, _routed
from lopa_ascend.config import DecodingParams, GraphParams
from lopa_ascend.graph import setup
from tests import golden
from tests.cuda.recorder import Recorder
from tests.golden_families import Case
from tests.tiers import slow_but
from tests.torch.paging import randn
from tests.torch.test_experts import PLAIN, random_experts, random_sizes

OPS = CudaOps(torch.device("cpu"))
CASES = ["v20_b4_p12", "v20_b8_eos_early", "v21_budget1_b8"]
"""Of both models and decodings; the CPU's tests run all."""


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize("seed", range(3))
def test_experts_compute_what_the_definition_says(seed: int, kind: str, shared: bool) -> None:
    """The interpreter multiplies no bfloat16."""
    dtype = torch.float16 if kind == "float16" else torch.float32
    experts = random_experts(random_sizes(seed), 48, dtype, seed, int8=kind == "int8")
    x, beside = randn(2, (1, 7, 40)[seed], 48, seed=seed).to(dtype)
    added = beside if shared else None
    found, plain = OPS.moe(x, OPS.stored_experts(experts), added), definition.moe(x, experts, added)
    assert found.dtype is dtype
    # A code of int8 may differ by one where SwiGLU was rounded otherwise.
    bound = 1e-5 if kind == "float32" else 1e-2
    assert float((found - plain).abs().max()) <= bound * float(plain.abs().max())


@pytest.mark.parametrize("seed", range(6))
def test_routing(seed: int) -> None:
    """By the definition; among equals the lower index, of groups too."""
    experts = random_experts(random_sizes(seed), 48, torch.float32, seed)
    x = randn(9, 48, seed=seed)
    ids, weights = _routed(x @ experts.router.T, experts)
    expected = definition._routed(x, experts)
    assert ids.tolist() == [expert for found in expected for expert in found]
    assert weights.tolist() == pytest.approx([weight for found in expected for weight in found.values()], rel=1e-5)
    ids, _ = _routed(torch.zeros(2, experts.sizes.num_experts), replace(experts, bias=torch.zeros_like(experts.bias)))
    assert ids.tolist() == [*range(experts.sizes.per_token)] * 2


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_all_tokens_may_take_the_same_experts_and_no_row_depends_on_the_others(kind: torch.dtype) -> None:
    """70 rows of one expert lie in two tiles; six experts have none."""
    experts = random_experts(PLAIN, 48, torch.float32, 0, int8=kind is torch.int8)
    experts.bias.copy_(torch.tensor([0.0, 9, 0, 9, 0, 0, 0, 0]))
    x = randn(70, 48)
    whole = OPS.moe(x, experts)
    torch.testing.assert_close(whole[::30], definition.moe(x[::30], experts), rtol=1e-5, atol=1e-5)
    assert torch.equal(OPS.moe(x[33:67], experts), whole[33:67])


@pytest.mark.parametrize("int8", [False, True])
def test_a_layer_reads_nothing_on_the_host(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ``meta`` there is nothing to be read, and a tensor made elsewhere is refused."""
    launched = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *_, **options: launched.append((kernel.__name__, options))
    )
    experts = random_experts(replace(PLAIN, inner=64), 48, torch.bfloat16, 0, int8=int8)
    tensors: dict[str, Any] = {
        name: value.to("meta") for name, value in vars(experts).items() if isinstance(value, torch.Tensor)
    }
    ops, x = CudaOps(torch.device("meta")), torch.empty(512, 48, dtype=torch.bfloat16, device="meta")
    assert ops.moe(x, ops.stored_experts(replace(experts, **tensors)), x).shape == x.shape
    products = ["route_rows", "multiply_experts", "swiglu_rows", "multiply_experts", "sum_experts"]
    if int8:
        products = [
            "route_rows",
            "quantize_rows",
            "multiply_experts",
            "quantize_rows",
            "multiply_experts",
            "sum_experts",
        ]
    assert [name for name, _ in launched] == products
    assert dict(launched)["multiply_experts"]["grid"] == ((1024 + 8 * 63) // 64, 1)


@pytest.mark.parametrize("int8", [False, True])
def test_a_replay_routes_anew(int8: bool) -> None:
    experts, x, compiler = random_experts(PLAIN, 48, torch.float32, 0, int8=int8), randn(2, 48), CudaGraphs(Recorder())
    run = compiler.compile(lambda tensors, _: OPS.moe(tensors[0] * 2, experts, tensors[0]), "bucket", [x], [2])
    for seed in range(2):
        x.copy_(randn(2, 48, seed=seed))
        assert torch.equal(run([2]), OPS.moe(x * 2, experts, x))


@pytest.mark.parametrize("case", slow_but(CASES, CASES[:1]))
def test_golden_cases(case: str) -> None:
    found = Case.read(golden.FOLDER / "models" / "llada2" / case / "trace.json")
    options = {"graph_mode": "eager", "dtype": "float32", "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(found.model, device="cuda", max_model_len=128, **options) as llm:
        assert found.run(llm) is None


@pytest.mark.slow
def test_experts_are_replayed_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine compares what the device and the host have decided. Graphs and eager steps have the same tokens."""
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: CudaGraphs(Recorder()))
    model = golden.FOLDER / "models" / "llada2" / "model_b"
    params = DecodingParams(max_new_tokens=8, num_branches=2, block_size=4, tau_conf=0.5, tau_add=1.0, ignore_eos=True)
    sizes = {"max_num_seqs": 1, "max_model_len": 128, "graph_window_blocks": 2}
    outputs = []
    for graph_mode in ("eager", "cuda_graphs"):
        options = {"graph_mode": graph_mode, "dtype": "float32", "graph_params": GraphParams.of(params), **sizes}
        with LLM(model, device="cuda", **options) as llm:
            outputs.append(llm.generate([[5, 3, 8, 2, 9]], params, quiet=True)[0].token_ids)
            stats = llm.engine.runner.graph_stats()
    assert stats.num_steps > 0
    assert not stats.eager_steps
    assert outputs[0] == outputs[1]
