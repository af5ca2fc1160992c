"""W8A8 on the simulated device: its ops against the CPU's, the engine, and the kernels of its graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.config import ParameterError
from scripts.eval.demo import decoding, evaluate, share_of_exact
from scripts.eval.problems import asked, read
from tests.npu.lab import capture, device, engine  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.device import is_tiled
from tests.npu.lab.traffic import host_traffic
from tests.npu.report import UnfilledOps, Variant, lowered_model
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.npu
CPU, NPU = CpuOps(), NpuOps()
W8A8: dict[str, Any] = {"quantization": "w8a8", "dtype": "bfloat16"}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_bias", [True, False])
def test_int8_layers_as_the_cpu_computes_them(has_bias: bool) -> None:
    x, (weight, weight_scale) = randn(70, 3584).bfloat16(), quantize_weight(randn(96, 3584, seed=1))
    x[3] = 0
    bias = randn(96, seed=2).bfloat16() if has_bias else None
    codes, scale = NPU.quantize(x.to("npu"))
    expected_codes, expected_scale = CPU.quantize(x)
    assert torch.equal(codes.cpu(), expected_codes)
    torch.testing.assert_close(scale.cpu(), expected_scale)
    out = NPU.quant_linear(
        codes,
        scale,
        NPU.stored(weight.to("npu")),
        weight_scale.to("npu"),
        None if bias is None else bias.to("npu"),
        torch.bfloat16,
    )
    expected = CPU.quant_linear(expected_codes, expected_scale, weight, weight_scale, bias, torch.bfloat16)
    torch.testing.assert_close(out.cpu(), expected)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as those of Dream-7B."""
    path = tmp_path_factory.mktemp("models") / "small"
    shape: dict[str, Any] = {"hidden": 256, "intermediate": 320, "heads": 7, "kv_heads": 1, "head_dim": 128}
    return write_dream(path, **shape, dtype=torch.bfloat16, scale=0.05)


def test_a_step_breaks_no_constraint_and_leaves_no_op_to_the_cpu(small: Path) -> None:
    llm = LLM(small, device="npu", graph_mode="eager", enable_prefix_caching=False, **W8A8)
    with host_traffic() as traffic:
        output = llm.generate([[1, 2, 3]], DecodingParams(num_branches=3, max_new_tokens=32, ignore_eos=True))[0]
    layers, forwards = 2, output.num_forwards
    assert traffic.launches.count("npu::npu_quant_matmul") % (4 * layers) == 0
    assert traffic.launches.count("npu::npu_quant_matmul") >= 4 * layers * forwards
    assert traffic.launches.count("copy to host") == forwards


def test_the_bundled_model_solves_as_many_problems_as_on_the_cpu() -> None:
    problems = read(8)
    with numeric():
        found = {
            name: evaluate(LLM(device=name, graph_mode="eager", **W8A8), problems, decoding(num_branches=3)).accuracy
            for name in ("cpu", "npu")
        }
    assert found["npu"] >= found["cpu"] - 1 / 8
    assert found["npu"] > 0.3


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "auto"}])
def test_float32_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(ParameterError, match="quantization: .w8a8. on device npu needs dtype bfloat16, got float32"):
        LLM(write_dream(tmp_path), device="npu", graph_mode="eager", quantization="w8a8", **options)


def test_weights_are_stored_in_tiles_which_only_the_int8_product_reads() -> None:
    weight = torch.randint(-127, 128, (96, 64), dtype=torch.int8).to("npu")
    stored = NPU.stored(weight)
    assert is_tiled(stored)
    assert not is_tiled(NPU.stored(weight.bfloat16()))
    with pytest.raises(RuntimeError, match="aten::mul: a tensor is in the format FRACTAL_NZ"):
        stored * 2


@pytest.mark.parametrize(("length", "kernels"), [(640, 1), (9472, 1), (37888, 2), (32 * 21, 2)])
def test_swiglu_is_quantised_by_its_own_kernel_where_that_takes_the_rows(length: int, kernels: int) -> None:
    gate_up = randn(5, length).bfloat16()
    gate_up[2] = 0
    with host_traffic() as traffic:
        codes, scale = NPU.swiglu_quant(gate_up.to("npu"))
    launched = [name for name in traffic.launches if name.startswith("npu::")]
    assert launched == [["npu::npu_dequant_swiglu_quant"], ["npu::npu_swiglu", "npu::npu_dynamic_quant"]][kernels - 1]
    expected_codes, expected_scale = CPU.swiglu_quant(gate_up)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=2**-7, atol=0)
    assert (codes.cpu().int() - expected_codes.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("length", "kernels"), [(640, ["dequant_swiglu_quant"]), (24576, ["dequant_swiglu_quant"]), (37888, [])]
)
def test_swiglu_of_integer_products_is_not_rounded_before(length: int, kernels: list[str]) -> None:
    """Where CANN's recipes have rows as long; longer ones are rounded."""
    (codes, scale), (weight, weight_scale) = CPU.quantize(randn(5, 64).bfloat16()), quantize_weight(randn(length, 64))
    given = (NPU.stored(weight.to("npu")), weight_scale.to("npu"), torch.bfloat16)
    with host_traffic() as traffic:
        found, found_scale = NPU.quant_swiglu(codes.to("npu"), scale.to("npu"), *given)
    launched = [name for name in traffic.launches if name.startswith("npu::")]
    own = ["quant_matmul", *(kernels or ["swiglu", "dynamic_quant"])]
    assert launched == [f"npu::npu_{name}" for name in own]
    expected, expected_scale = CPU.quant_swiglu(codes, scale, weight, weight_scale, torch.bfloat16)
    torch.testing.assert_close(found_scale.cpu(), expected_scale, rtol=2**-6, atol=0)
    assert (found.cpu().int() - expected.int()).abs().max() <= 2


# ---- graphs ----------------------------------------------------------------------------------------------------------

GRAPHS: dict[str, Any] = {"device": "npu", "enable_prefix_caching": False, "max_num_seqs": 1, "max_model_len": 256}
PARAMS = DecodingParams(num_branches=3, max_new_tokens=64, block_size=16, tau_conf=0.02, ignore_eos=True)


@pytest.mark.parametrize(
    "excluded",
    [
        pytest.param((), id="all"),
        pytest.param(("down_proj",), id="without down", marks=pytest.mark.slow),
        pytest.param(("qkv_proj", "gate_up_proj"), id="o and down alone", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", slow_but(["npugraph_ex", "ge"], ["npugraph_ex"]))
def test_compiled_steps_give_the_tokens_of_eager_ones(small: Path, mode: str, excluded: tuple[str, ...]) -> None:
    options = {**GRAPHS, **W8A8, "quantization_exclude": excluded, "graph_window_blocks": 4}
    llm = LLM(small, graph_mode=mode, **options)
    eager = LLM(small, graph_mode="eager", **options)
    prompts = [[1, 2, 3], list(range(5, 45))]
    outputs, expected = (each.generate(prompts, PARAMS, quiet=True) for each in (llm, eager))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.num_forwards for output in outputs] == [output.num_forwards for output in expected]
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert stats.num_steps > 0
    assert not stats.eager_steps


@pytest.mark.slow  # test_compiler.py keeps and takes graphs by their key
def test_kept_graphs_are_taken_with_the_same_layers_as_int8_alone(small: Path, tmp_path: Path) -> None:
    made, num_files = [], []
    for changes in (W8A8, W8A8, {**W8A8, "quantization_exclude": ("down_proj",)}, {"dtype": "bfloat16"}):
        options = {**GRAPHS, "graph_window_blocks": 2, "kv_cache_memory": 2**22, "graph_cache": str(tmp_path / "kept")}
        llm = LLM(small, graph_mode="npugraph_ex", **options, **changes)
        assert llm.engine.runner.graphs is not None
        compiler = llm.engine.runner.graphs.graphs.compiler
        made.append((compiler.num_compilations > 0, compiler.num_loaded > 0))
        files = [file for file in (tmp_path / "kept").rglob("*") if file.is_file()]
        num_files.append(len(files))
    assert made == [(True, False), (False, True), (True, False), (True, False)]
    # A graph that was taken and then failed would leave a temporary directory in use, and no file here.
    assert num_files == [num_files[0] * number for number in (1, 1, 2, 3)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["npugraph_ex", "ge"])
def test_the_bundled_model_answers_as_in_eager_mode(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems, params = read(24), decoding(num_branches=3)
    conversations = [asked(question) for question, _ in problems]
    options = {**GRAPHS, **W8A8, "max_num_seqs": 8, "max_model_len": 512, "graph_window_blocks": 4}
    with numeric():
        llm = LLM(graph_mode=mode, **options)
        outputs = llm.chat(conversations, params, quiet=True)
        expected = LLM(graph_mode="eager", **options).chat(conversations, params, quiet=True)
    with capsys.disabled():
        print(f"\n{len(problems)} held-out problems, w8a8, {mode}: {share_of_exact(outputs, problems):.1%} exact")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert share_of_exact(outputs, problems) > 0.4
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert stats.num_steps > 0
    assert not stats.eager_steps


LAYER = Counter(
    AddRmsNormDynamicQuant=2,
    DynamicQuant=1,
    QuantBatchMatmulV3=4,
    RotaryMul=1,
    SplitV=1,
    ScatterPaKvCache=1,
    FusedInferAttentionScore=1,
)


@pytest.mark.parametrize(
    ("tp_size", "more"),
    [(1, Counter(SwiGlu=1, DynamicQuant=1)), (4, Counter(DequantSwigluQuant=1, HcomAllReduce=2))],
)
def test_a_layer_is_at_most_thirteen_kernels_and_two_sums(tp_size: int, more: Counter[str]) -> None:
    """On one rank of Dream-7B, rows of SwiGLU are too long for the kernel that also quantises."""
    variant = Variant(UnfilledOps(), tp_size=tp_size, is_int8=True)
    one, two = (lowered_model(variant, count) for count in (1, 2))
    assert two.kernels - one.kernels == LAYER + more
    assert not {"TensorMove", "Transpose", "Cast"} & set(two.kernels - one.kernels)
