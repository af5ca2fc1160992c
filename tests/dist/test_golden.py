"""The recorded traces of the published code on several ranks: the same tokens, forward passes and winners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import golden
from tests.dist import ranks
from tests.dream_checkpoint import open_checkpoint

CASES = [case for case in golden.CASES if case != golden.MASK_CHOSEN]


SIZES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2)]
ONE_OF_EACH_KIND = [next(case for case in cases if case in CASES) for cases in golden.cases_by_kind().values()]


@pytest.mark.multirank
@pytest.mark.parametrize(("tp", "bp"), [pytest.param(*size, marks=pytest.mark.slow) for size in SIZES])
def test_all_cases(tp: int, bp: int, tmp_path: Path) -> None:
    check(CASES, tp, bp, tmp_path)


@pytest.mark.multirank
def test_one_case_of_each_kind(tmp_path: Path) -> None:
    check(ONE_OF_EACH_KIND, 2, 2, tmp_path)


def check(chosen: Sequence[str], tp: int, bp: int, tmp_path: Path) -> None:
    traces = {case: golden.read(case) for case in chosen}
    by_model: dict[Path, list[str]] = {}
    for case, trace in traces.items():
        model = golden.model_path(trace)
        if tp in open_checkpoint(model).config.tensor_parallel_sizes():
            by_model.setdefault(model, []).append(case)
    jobs = [
        {
            "model": str(model),
            "options": {
                "dtype": "float32",
                "tensor_parallel_size": tp,
                "branch_parallel_size": bp,
                "enable_prefix_caching": False,
            },
            "requests": [
                {"prompt": traces[case]["prompt_ids"], "params": asdict(golden.decoding_params(traces[case]))}
                for case in cases
            ],
        }
        for model, cases in by_model.items()
    ]
    assert len(jobs) >= 2
    for cases, outputs in zip(by_model.values(), ranks.generate(tp * bp, jobs, tmp_path), strict=True):
        for case, output in zip(cases, outputs, strict=True):
            trace, expected = traces[case], golden.rounds(traces[case])
            assert output["tokens"] == trace["output_ids"], case
            assert output["forwards"] == trace["n_forward_rounds"], case
            assert output["winners"] == [record["winner"] for record in expected], case
            assert [[tuple(fill) for fill in fills] for fills in output["fills"]] == [
                record["fills"] for record in expected
            ], case
