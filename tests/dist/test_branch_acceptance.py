"""Confirmed lookahead branches on several ranks: exact is d2f, and verified is what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank

PROMPT = [5, 3, 8, 2, 9]
FIELDS: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5, "ignore_eos": True}
WINDOWS = ("block_causal", "full")


def job(model: str, **options: Any) -> dict[str, Any]:
    """For each kind of window d2f, exact, verified, and exact with drafts of several tokens."""
    variants: list[dict[str, Any]] = [
        {"decoding": "d2f"},
        {"num_branches": 5, "branch_acceptance": "exact"},
        {"num_branches": 5, "branch_acceptance": "verified"},
        {"num_branches": 5, "branch_acceptance": "exact", "lookahead_depth": 3},
    ]
    return {
        "model": model,
        "options": options,
        "requests": [
            {"prompt": PROMPT, "params": {**FIELDS, "window_attention": window, "top_logprobs": 2, **variant}}
            for window in WINDOWS
            for variant in variants
        ],
    }


@pytest.mark.parametrize(("tp", "bp"), slow_but([(1, 2), (2, 2)], [(1, 2)]))
def test_exact_is_d2f_on_ranks(tp: int, bp: int, tmp_path: Path) -> None:
    model = str(write_dream(tmp_path / "model"))
    alone = ranks.generate(1, [job(model)], tmp_path)[0]
    outputs = ranks.generate(tp * bp, [job(model, tensor_parallel_size=tp, branch_parallel_size=bp)], tmp_path)[0]
    assert [output["tokens"] for output in outputs] == [output["tokens"] for output in alone]
    assert [output["winners"] for output in outputs] == [output["winners"] for output in alone]
    for d2f, exact, verified, deep in (outputs[:4], outputs[4:]):
        for same in (exact, deep):
            assert same["tokens"] == d2f["tokens"]
            assert same["alternatives"] == d2f["alternatives"]
        assert verified["forwards"] < exact["forwards"] < d2f["forwards"]


@pytest.mark.parametrize(("tp", "bp"), slow_but([(1, 2), (2, 2)], [(2, 2)]))
def test_graphs_on_ranks_accept_the_branches_that_one_eager_process_accepts(tp: int, bp: int, tmp_path: Path) -> None:
    model = str(write_dream(tmp_path / "model"))
    kinds = ("verified", "exact")
    requests: list[list[dict[str, Any]]] = [
        [{"num_branches": 5, "branch_acceptance": kind}, {"num_branches": 0, "decoding": "d2f"}] for kind in kinds
    ]
    requests[1].append({"num_branches": "auto", "branch_acceptance": "exact"})
    jobs: list[dict[str, Any]] = [
        {
            "model": model,
            "options": {"dtype": "float32"},
            "requests": [{"prompt": PROMPT, "params": {**FIELDS, **fields}} for fields in asked],
        }
        for asked in requests
    ]
    eager = ranks.generate(1, jobs, tmp_path)
    ranked: dict[str, Any] = {"tensor_parallel_size": tp, "branch_parallel_size": bp, "max_num_seqs": 2}
    for job, kind in zip(jobs, kinds, strict=True):
        compiled = {"branch_acceptance": kind, "num_branches": 5}
        job["options"] |= {"graph_mode": "inductor", "graph_params": compiled, **ranked}
        job["eager_steps"] = {}
    (verified, d2f), (exact, _, auto) = ranks.generate(tp * bp, jobs, tmp_path)
    assert [verified, d2f, exact] == [*eager[0], eager[1][0]]
    assert auto["tokens"] == exact["tokens"] == d2f["tokens"]
    assert verified["forwards"] < exact["forwards"] < d2f["forwards"]


@pytest.mark.parametrize(("tp", "bp"), slow_but([(2, 1), (1, 2)], [(1, 2)]))
def test_ranks_agree_on_branches_that_follow_the_load(tp: int, bp: int, tmp_path: Path) -> None:
    """Every step is compared. Some groups have no branch."""
    model = str(write_dream(tmp_path / "model"))
    kinds: list[dict[str, Any]] = [
        {"decoding": "d2f"},
        {"num_branches": "auto", "branch_acceptance": "exact"},
        {"num_branches": "auto", "branch_acceptance": "verified"},
        {"num_branches": "auto"},
    ]
    work: dict[str, Any] = {
        "model": model,
        "options": {"tensor_parallel_size": tp, "branch_parallel_size": bp},
        "requests": [{"prompt": PROMPT, "params": {**FIELDS, **kind}} for kind in kinds],
    }
    d2f, exact, *others = ranks.generate(tp * bp, [work], tmp_path)[0]
    assert exact["tokens"] == d2f["tokens"]
    assert [len(output["tokens"]) for output in others] == [40, 40]
