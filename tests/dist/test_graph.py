"""Decode steps as graphs on several ranks, one launched ahead: the same tokens as one eager process."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.dist import ranks, test_concurrent
from tests.tiers import slow_but

pytestmark = pytest.mark.multirank
CASES = [case for case in golden.CASES if "causal" in case]


def job(case: str, tp: int, bp: int) -> dict:
    trace = golden.read(case)
    params = golden.decoding_params(trace)
    options = {
        "dtype": "float32",
        "graph_mode": "inductor",
        "graph_params": {"num_branches": params.lookaheads, "confidence": params.confidence},
        "tensor_parallel_size": tp,
        "branch_parallel_size": bp,
        "max_num_seqs": 2,
    }
    request = {"prompt": trace["prompt_ids"], "params": asdict(params)}
    return {"model": str(golden.model_path(trace)), "options": options, "requests": [request], "eager_steps": {}}


@pytest.mark.parametrize(("tp", "bp"), slow_but([(2, 2), (1, 3)], [(2, 2)]))
def test_golden_cases(tp: int, bp: int, tmp_path: Path) -> None:
    for case, (output,) in zip(
        CASES, ranks.generate(tp * bp, [job(case, tp, bp) for case in CASES], tmp_path), strict=True
    ):
        trace = golden.read(case)
        assert output["tokens"] == trace["output_ids"], case
        assert output["winners"] == [record["winner"] for record in golden.rounds(trace)], case


def eager_field(params: dict[str, Any]) -> str | None:
    """What a request of ``test_concurrent.job`` asks for that graphs do not decode; None if they decode it.

    What no graph decodes is named before what these graphs do not decode.
    """
    for name in ("branch_score", "min_new_tokens"):
        if name in params:
            return name
    if params.get("num_branches", 0) > 3:
        return "num_branches"
    return "confidence" if "confidence" in params else None


@pytest.mark.parametrize(("tp", "bp"), [(1, 2)])
def test_requests_together_get_what_one_eager_process_gives(tp: int, bp: int, tmp_path: Path) -> None:
    jobs = [
        test_concurrent.job(True),
        test_concurrent.job(
            True,
            graph_mode="inductor",
            graph_params={},  # the usual defaults, not what the bundled model recommends
            max_num_seqs=4,
            tensor_parallel_size=tp,
            branch_parallel_size=bp,
        ),
    ]
    for each in jobs:
        each["requests"] = [r for r in each["requests"] if r["params"].get("window_attention") != "full"]
    expected = ranks.generate(1, jobs[:1], tmp_path)
    eager: Counter[str] = Counter()
    for request, output in zip(jobs[0]["requests"], expected[0], strict=True):
        if (field := eager_field(request["params"])) is not None:
            eager[field] += output["forwards"] - (not output["cached"])  # a first pass that computes the prompt
    jobs[1]["eager_steps"] = eager
    assert ranks.generate(tp * bp, jobs[1:], tmp_path) == expected
