"""W8A8 on the simulated device: its ops against the CPU's, the engine, and the kernels of its graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.config import ParameterError
from scripts.eval_demo import decoding, evaluate, read
from tests.npu.lab import device  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.traffic import host_traffic
from tests.npu.report import UnfilledOps, Variant, lowered_model
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
    assert traffic.launches.count("copy to host") == 4 * forwards


def test_the_bundled_model_solves_as_many_problems_as_on_the_cpu() -> None:
    problems = read(8)
    with numeric():
        found = {
            name: evaluate(LLM(device=name, graph_mode="eager", **W8A8), problems, decoding(3, 0.9)).accuracy
            for name in ("cpu", "npu")
        }
    assert found["npu"] >= found["cpu"] - 1 / 8
    assert found["npu"] > 0.3


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "auto"}])
def test_float32_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(ParameterError, match="quantization: .w8a8. on device npu needs dtype bfloat16, got float32"):
        LLM(write_dream(tmp_path), device="npu", graph_mode="eager", quantization="w8a8", **options)


def test_graph_modes_are_refused(small: Path) -> None:
    with pytest.raises(
        ParameterError, match="quantization: 'w8a8' runs with graph_mode .eager.; graph_mode is 'npugraph_ex'"
    ):
        LLM(small, device="npu", **W8A8)


# ---- graphs ----------------------------------------------------------------------------------------------------------

LAYER = Counter(
    AddRmsNormDynamicQuant=2,
    DynamicQuant=2,
    QuantBatchMatmulV3=4,
    RotaryMul=1,
    SplitV=1,
    ScatterPaKvCache=1,
    FusedInferAttentionScore=1,
    SwiGlu=1,
)


@pytest.mark.parametrize(("tp_size", "sums"), [(1, 0), (4, 2)])
def test_a_layer_is_thirteen_kernels_and_two_sums(tp_size: int, sums: int) -> None:
    variant = Variant(UnfilledOps(), tp_size=tp_size, is_int8=True)
    one, two = (lowered_model(variant, count) for count in (1, 2))
    assert two.kernels - one.kernels == LAYER + Counter(HcomAllReduce=sums)
    assert two.num_kernels - one.num_kernels == 13 + sums
