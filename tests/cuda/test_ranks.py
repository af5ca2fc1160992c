"""Ranks with the kernels of the CUDA backend, which meet over gloo because Triton interprets: the recorded traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from lopa_ascend.backend.cuda import DEVICE, INTERPRETED
from tests import golden
from tests.dist import ranks
from tests.tiers import slow_but


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "tp", "bp"),
    slow_but(
        [("lopa_bf5_causal_b4", 1, 2), ("lopa_bf2_full_b8_tau1", 1, 2), ("d2f_causal_b4_eos", 2, 1)],
        [("d2f_causal_b4_eos", 2, 1)],
    ),
)
def test_golden_cases(case: str, tp: int, bp: int, tmp_path: Path) -> None:
    """Block-causal branches send tokens and probabilities, full attention also the winner's keys and values."""
    trace = golden.read(case)
    options = {
        "device": "cuda", "graph_mode": "eager", "dtype": "float32", "enable_prefix_caching": False,
        "tensor_parallel_size": tp, "branch_parallel_size": bp,
    }  # fmt: skip
    request = {"prompt": trace["prompt_ids"], "params": asdict(golden.decoding_params(trace))}
    job = {"model": str(golden.model_path(trace)), "options": options, "requests": [request]}
    [[output]] = ranks.generate(tp * bp, [job], tmp_path)
    assert output["tokens"] == trace["output_ids"]
    assert output["winners"] == [record["winner"] for record in golden.rounds(trace)]


def test_ranks_on_gpus_meet_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEVICE.collectives == "gloo"
    monkeypatch.delenv(INTERPRETED)
    assert DEVICE.collectives == "nccl"
