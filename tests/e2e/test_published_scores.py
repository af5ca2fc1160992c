"""Recorded runs of the published code: our evaluation counts them as the published scripts do."""

from __future__ import annotations

import pytest

from lopa_ascend import LLM
from scripts.eval.metrics import AnswerCounts, measure
from tests import golden

CASES = [case for case in golden.CASES if case != golden.MASK_CHOSEN]


def nv_statistics(runs: list[tuple[int, int, float]]) -> dict[str, float]:
    """eval_dream_stat.py's statistics of a data set, of (tokens, steps, seconds after the first round)."""
    tps = [tokens / seconds if seconds > 0 else 0.0 for tokens, _, seconds in runs]
    fastest = sorted(tps, reverse=True)[:10]
    return {
        "published_avg_tps": sum(tps) / len(tps),
        "published_max_tps": max(tps),
        "published_top10_tps": sum(fastest) / len(fastest),
        "lopa_tpf": sum(tokens for tokens, _, _ in runs) / sum(steps for _, steps, _ in runs),
    }


def test_counts_are_those_that_the_published_code_reported() -> None:
    """Opened tokens, steps, and the statistics from them, over all recorded runs."""
    answers: list[AnswerCounts] = []
    published: list[tuple[int, int, float]] = []
    models: dict[object, LLM] = {}
    for index, case in enumerate(CASES):
        trace = golden.read(case)
        path = golden.model_path(trace)
        if path not in models:
            models[path] = LLM(path, dtype="float32", enable_prefix_caching=False, max_num_seqs=1, threads=1)
        (output,) = models[path].generate([trace["prompt_ids"]], golden.decoding_params(trace), quiet=True)
        assert output.num_positions == trace["reported_tokens"], case
        assert output.num_forwards + 1 == trace["reported_steps"], case
        seconds = 0.5 + index % 7
        answers.append(AnswerCounts(len(output.token_ids), output.num_positions, output.num_forwards, seconds))
        published.append((trace["reported_tokens"], trace["reported_steps"], seconds))
    found = measure(answers)
    for name, expected in nv_statistics(published).items():
        assert found[name] == pytest.approx(expected), name
