"""Faults of dies that a start must find, injected into the laboratory (docs/ascend.md, What a start checks)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM
from lopa_ascend.backend.compiler import GraphError
from lopa_ascend.backend.npu.gate import AttentionShape, WrongKernelError, right_ops
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.backend.npu.trials import LayerShape, check_kernels
from lopa_ascend.config import ExpertsConfig
from lopa_ascend.graph.check import StepCheck
from tests.dist.ranks import start
from tests.npu.lab import attention, capture, engine, kernels  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.test_selftest import replaced
from tests.tiers import slow_but
from tests.tiny import VOCAB_SIZE, write_dream

pytestmark = pytest.mark.npu
SHAPE = AttentionShape(
    queries=32, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, max_keys=4100, entries=8
)  # whose last page is not full
EXPERTS = ExpertsConfig(
    num_experts=32, per_token=4, num_groups=4, kept_groups=2, scale=2.5, inner=32, shared_inner=32, first_layer=1
)
LAYER = LayerShape(
    hidden=256,
    inner=320,
    heads=4,
    kv_heads=2,
    head_dim=128,
    rotary_dim=128,
    eps=1e-6,
    dtype=torch.bfloat16,
    experts=EXPERTS,
    has_int8=True,
)


# ---- attention -----------------------------------------------------------------------------------------------------

compute = attention.fused_infer_attention_score


def a_key_less(*args: Any, actual_seq_lengths_kv: Sequence[int], **options: Any) -> Any:
    return compute(*args, actual_seq_lengths_kv=[length - 1 for length in actual_seq_lengths_kv], **options)


def a_key_more(*args: Any, actual_seq_lengths_kv: Sequence[int], block_table: Tensor, **options: Any) -> Any:
    most = block_table.shape[1] * options["block_size"]
    longer = [min(length + 1, most) for length in actual_seq_lengths_kv]
    return compute(*args, actual_seq_lengths_kv=longer, block_table=block_table, **options)


def swapped_pages(*args: Any, block_table: Tensor, **options: Any) -> Any:
    block_table = block_table.clone()
    block_table[-1, :2] = block_table[-1, :2].flip(0)
    return compute(*args, block_table=block_table, **options)


def many_entries_as_the_first(*args: Any, block_table: Tensor, **options: Any) -> Any:
    if len(block_table) > 4:
        block_table = torch.cat([block_table[:4], block_table[:1].expand(len(block_table) - 4, -1)])
    return compute(*args, block_table=block_table, **options)


@pytest.mark.parametrize("kernel", [a_key_less, a_key_more, swapped_pages, many_entries_as_the_first])
@pytest.mark.parametrize("is_causal", slow_but([False, True], [False]))
def test_wrong_attention(kernel: Any, is_causal: bool) -> None:
    with (
        replaced("npu_fused_infer_attention_score", kernel),
        pytest.raises(WrongKernelError, match=r"NPU 0 of .*npu_fused_infer_attention_score in the layout BSH is wrong"),
    ):
        right_ops(NpuOps(attention_layout="BSH"), replace(SHAPE, is_causal=is_causal), captures=False)


# ---- other kernels -------------------------------------------------------------------------------------------------


def first_row_off(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The first row of the first result is doubled."""

    def wrong(*args: Any, **options: Any) -> Any:
        found = kernel(*args, **options)
        result = found if isinstance(found, Tensor) else found[0]
        result[:1] *= 2
        return found

    return wrong


def one_bad_expert(x: Sequence[Tensor], weight: Sequence[Tensor], **options: Any) -> list[Tensor]:
    damaged = weight[0].clone()
    damaged[3] = 0
    return kernels.grouped_matmul(x, [damaged], **options)


def without_bias(x: Tensor, k: int, *, bias: Tensor, **options: Any) -> Any:
    return kernels.moe_gating_top_k(x, k, bias=torch.zeros_like(bias), **options)


def a_position_further(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **options: Any) -> None:
    kernels.scatter_pa_kv_cache(k, v, k_cache, v_cache, (slots + 1) % (k_cache.shape[0] * 128), **options)


def one_wrong_output(*args: Any, **options: Any) -> Tensor:
    product = kernels.quant_matmul(*args, **options)
    product[:, 5] = 0
    return product


FAULTS: list[tuple[str, Any, str]] = [
    ("npu_rms_norm", first_row_off(kernels.rms_norm), "rms_norm"),
    ("npu_add_rms_norm", first_row_off(kernels.add_rms_norm), "add_rms_norm"),
    ("npu_rotary_mul", first_row_off(kernels.rotary_mul), "rope"),
    ("npu_swiglu", first_row_off(kernels.swiglu), "swiglu"),
    ("npu_scatter_pa_kv_cache", a_position_further, "kv_write"),
    ("npu_grouped_matmul", one_bad_expert, "experts of 32 tokens"),
    ("npu_moe_gating_top_k", without_bias, r"experts of \d+ tokens"),
    ("npu_quant_matmul", one_wrong_output, r"quant_linear of \w+"),
    ("npu_dequant_swiglu_quant", first_row_off(kernels.dequant_swiglu_quant), "swiglu_quant|quant_swiglu"),
]


@pytest.mark.parametrize(("kernel", "wrong", "named"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_wrong_kernel_beside_attention(kernel: str, wrong: Any, named: str) -> None:
    with (
        replaced(kernel, wrong),
        pytest.raises(WrongKernelError, match=rf"NPU 0 of .*: ({named}) is wrong: the error is"),
    ):
        check_kernels(NpuOps(), LAYER)


def test_right_kernels_pass() -> None:
    check_kernels(NpuOps(), LAYER)


# ---- captured steps ------------------------------------------------------------------------------------------------

run_task = capture.Task.run


def without(*names: str) -> Callable[[capture.Task], None]:
    """Tasks of these ops do nothing."""
    return lambda task: None if task.op._schema.name in names else run_task(task)


def wrong_place(task: capture.Task) -> None:
    if task.op._schema.name == "npu::npu_scatter_pa_kv_cache":
        slots = task.args[4].tensor()
        slots.copy_(slots.roll(1))
    run_task(task)


def pages_in_another_order(task: capture.Task) -> None:
    if "fused_infer" not in task.op._schema.name:
        run_task(task)
        return
    table = task.kwargs["block_table"].tensor()
    kept = table.clone()
    table[-1] = table[-1].flip(0)
    run_task(task)
    table.copy_(kept)


CAPTURED = {
    "no norm": without("npu::npu_rms_norm", "npu::npu_add_rms_norm"),
    "no rope": without("npu::npu_rotary_mul"),
    "no write of keys and values": without("npu::npu_scatter_pa_kv_cache"),
    "a write to another place": wrong_place,
    "swapped pages": pages_in_another_order,
    "no write of hidden states": without("npu::npu_scatter_nd_update_"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_dream(tmp_path_factory.mktemp("model"), hidden=64, heads=4, kv_heads=2)
    options: dict[str, Any] = {"max_num_seqs": 1, "graph_window_blocks": 2, "max_model_len": 300}
    with numeric():
        return LLM(path, device="npu", dtype="float32", graph_mode="npugraph_ex", **options)


@pytest.mark.parametrize("fault", [None, *CAPTURED])
def test_a_captured_step_that_computes_something_else(
    fault: str | None, served: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = served.engine.runner
    assert runner.graphs is not None
    (launcher,) = runner.graphs.launchers.values()
    if fault is not None:
        monkeypatch.setattr(capture.Task, "run", CAPTURED[fault])
    with numeric(), torch.inference_mode():
        check = StepCheck(runner.graphs.graphs.compiler, runner.model, runner.graphs.pool, VOCAB_SIZE)
        expected = check.expected("bucket", launcher.hidden, launcher.write_random(check))
        if fault is None:
            launcher.compare(check, expected)
        else:
            with pytest.raises(GraphError, match=r"its graph does not compute what .* rows differ, row .* eager"):
                launcher.compare(check, expected)


# ---- several ranks -------------------------------------------------------------------------------------------------


@pytest.mark.multirank
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "message"),
    slow_but(
        [
            ("sums", "the sum over 2 tensor parallel ranks is wrong in 1 of"),
            ("captured sums", "float32, in a captured graph"),
            ("one bad die", "TND is wrong on rank 1 (bp 0, tp 1) alone, so these dies may be broken"),
        ],
        [("captured sums", "float32, in a captured graph")],
    ),
)
def test_a_fault_of_some_ranks_ends_the_start_on_all(fault: str, message: str, tmp_path: Path) -> None:
    model = write_dream(tmp_path / "model", hidden=64, heads=4, kv_heads=2)
    options: dict[str, Any] = {"device": "npu", "dtype": "float32", "graph_mode": "npugraph_ex", "max_num_seqs": 1}
    options |= {"graph_window_blocks": 2, "max_model_len": 160, "tensor_parallel_size": 2}
    job = [{"model": str(model), "options": options, "requests": []}]
    (tmp_path / "job").write_text(json.dumps(job))
    ranks = start(2, "-m", "tests.npu.lab", "--numeric", "tests.npu.faulty", fault, str(tmp_path / "job"))
    try:
        errors = [rank.communicate(timeout=500)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode for rank in ranks)
    assert all(message in error for error in errors), errors[0][-2000:]
