"""The engine of several ranks with captured graphs: golden tokens through replays of steps that hold collectives of
tensor parallel groups, of branch parallel groups, and of both."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import golden
from tests.dist.ranks import finish, start
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = [pytest.mark.npu, pytest.mark.multirank]
MODULE = ("-m", "tests.npu.lab", "--numeric", "tests.npu.generate")
CAUSAL, FULL = "lopa_bf3_causal_b16", "lopa_bf2_full_b32"
SUM, GATHER = "lab::all_reduce_", "lab::all_gather_into_tensor"
LAYERS = 3
TIMEOUT = 900
"""Seconds for the ranks, each of which imports torch_npu and compiles."""


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(
    ("tp", "bp", "case", "layout"),
    slow_but(
        [(2, 1, CAUSAL, "TND"), (1, 2, CAUSAL, "TND"), (2, 2, CAUSAL, "TND"), (2, 1, FULL, "TND16")],
        [(2, 1, CAUSAL, "TND")],
    ),
    ids=["tp2", "bp2", "tp2-bp2", "tp2-entries-of-16"],
)
def test_golden_tokens_through_captured_collectives(tp: int, bp: int, case: str, layout: str, tmp_path: Path) -> None:
    trace = golden.read(case)
    params = golden.decoding_params(trace)
    options = {
        "device": "npu",
        "dtype": "float32",
        "graph_mode": "npugraph_ex",
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "graph_window_blocks": 8 // (tp * bp),
        "graph_params": {
            "num_branches": params.lookaheads,
            "block_size": params.block_size,
            "window_attention": params.window_attention,
            "confidence": params.confidence,
        },
        "attention_layout": layout,
        "tensor_parallel_size": tp,
        "branch_parallel_size": bp,
    }
    request = {"prompt": trace["prompt_ids"], "params": asdict(params)}
    job: list[dict[str, Any]] = [{"model": str(golden.model_path(trace)), "options": options, "requests": [request]}]
    (tmp_path / "job").write_text(json.dumps(job))
    finish(start(tp * bp, *MODULE, str(tmp_path / "job"), str(tmp_path / "out")), timeout=TIMEOUT)
    sums = 2 * LAYERS if tp > 1 else 0
    gathers = (tp > 1) + (bp > 1)
    for rank in range(tp * bp):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        assert found["outputs"][0][0]["tokens"] == trace["output_ids"]
        assert sum(found["replays"]) > 0
        for names in found["tasks"]:
            tasks = Counter[str](names)
            assert (tasks[SUM], tasks[GATHER]) == (sums, gathers)
            assert not tasks["aten::fill_.Scalar"]
        assert set(found["stream_waits"]) == {2 * (sums + gathers)}
        assert not any(found["on_aicpu"])


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_captured_int8_layers_of_two_ranks_give_the_tokens_of_eager_ones(tmp_path: Path) -> None:
    """Each rank quantises its own part of the inputs of o and down, and their sums are captured in bfloat16."""
    shape: dict[str, Any] = {"hidden": 256, "intermediate": 640, "heads": 8, "kv_heads": 2, "head_dim": 128}
    model = write_dream(tmp_path / "model", **shape, dtype=torch.bfloat16, scale=0.05)
    options: dict[str, Any] = {
        "device": "npu",
        "dtype": "bfloat16",
        "quantization": "w8a8",
        "max_num_seqs": 1,
        "max_model_len": 256,
        "enable_prefix_caching": False,
        "graph_window_blocks": 2,
        "tensor_parallel_size": 2,
    }
    request = {"prompt": [1, 2, 3], "params": {"num_branches": 3, "max_new_tokens": 32, "ignore_eos": True}}
    job: list[dict[str, Any]] = []
    for mode in ("eager", "npugraph_ex"):
        job.append({"model": str(model), "options": {**options, "graph_mode": mode}, "requests": [request]})
    (tmp_path / "job").write_text(json.dumps(job))
    finish(start(2, *MODULE, str(tmp_path / "job"), str(tmp_path / "out")), timeout=TIMEOUT)
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        eager, captured = ([output["tokens"] for output in outputs] for outputs in found["outputs"])
        assert captured == eager
        assert sum(found["replays"]) > 0
        for names in found["tasks"]:
            tasks = Counter[str](names)
            assert (tasks["npu::npu_quant_matmul"], tasks["npu::npu_dequant_swiglu_quant"]) == (8, 2)
            assert tasks[SUM] == 2 * 2
