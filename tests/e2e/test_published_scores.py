"""Recorded runs of the published code: our evaluation counts and scores them as the published scripts do."""

import json
import re

import pytest

from lopa_ascend import LLM
from scripts.eval.metrics import measure
from scripts.eval.sampler import decode
from scripts.eval.samples import Sample
from scripts.eval.task_kinds import TASKS
from tests import golden, published_scoring
from tests.tiny import tiny_tokenizer

CASES = [case for case in golden.CASES if case != golden.MASK_CHOSEN]
FEW = CASES[::4]
"""Cases whose ids are also scored as programs, which takes a process each."""


def test_counts_are_those_that_the_published_code_reported():
    """Opened tokens, steps, and the dataset statistics from them, over all recorded runs."""
    samples, published, models = [], [], {}
    for index, case in enumerate(CASES):
        trace = golden.read(case)
        path = golden.model_path(trace)
        if path not in models:
            models[path] = LLM(path, dtype="float32", enable_prefix_caching=False, max_num_seqs=1, threads=1)
        output, times = decode(models[path], trace["prompt_ids"], golden.decoding_params(trace))
        assert output.num_positions == trace["reported_tokens"], case
        assert output.num_forwards + 1 == trace["reported_steps"], case
        sample = Sample(
            setting="", run=0, index=index, task="problems", text="", visible_tokens=len(output.token_ids),
            opened_tokens=output.num_positions, num_forwards=output.num_forwards, model_tokens=output.model_tokens,
            filled=(), scores={"exact": 0.0}, metric="exact", **times,
        )  # fmt: skip
        samples.append(sample)
        pure = sample.seconds - sample.first_seconds
        published.append((trace["reported_tokens"], trace["reported_steps"], pure))
    expected = published_scoring.nv_statistics(published)
    found = measure(samples)
    assert found["published_avg_tps"] == pytest.approx(expected["avg_tps"])
    assert found["published_max_tps"] == pytest.approx(expected["peak_tps"])
    assert found["published_top10_tps"] == pytest.approx(expected["top10_tps_mean"])
    assert found["lopa_tpf"] == pytest.approx(expected["overall_tpf"])


def texts_of(case: str) -> list[str]:
    """Answers that hold the text of the ids which the published code has generated, as a whole and in parts."""
    text = tiny_tokenizer().decode(golden.read(case)["output_ids"])
    ids = " ".join(map(str, golden.read(case)["output_ids"]))
    return [text, ids, f"{ids}\n#### {ids}", f"so\n#### {ids.split()[0]}\nQuestion: {text}", f"{text} [DONE] {ids}"]


@pytest.mark.parametrize("case", CASES)
def test_numbers_score_as_in_the_published_scripts(case: str):
    task = TASKS["gsm8k"]
    scores: list[float] = []
    for answer in texts_of(case):
        numbers = re.findall(r"\d+", answer)
        for target in {f"work\n#### {number}" for number in [*numbers[:1], *numbers[-1:], "none"]}:
            found = task.score({"question": "", "answer": target}, answer)
            assert found == published_scoring.gsm8k(target, answer)
            scores += found.values()
    assert {0.0, 1.0} == set(scores)


@pytest.mark.parametrize("case", FEW)
def test_programs_score_as_in_the_published_scripts(case: str):
    text = tiny_tokenizer().decode(golden.read(case)["output_ids"])
    ids = json.dumps(golden.read(case)["output_ids"])
    test = f"def check(candidate):\n    assert candidate() == {ids}\n"
    problem = {"prompt": "def f():\n", "entry_point": "f", "test": test, "canonical_solution": ""}
    fenced = f"Here:\n```python\ndef g():\n    return {ids}\ndef f():\n    return g()\n```\n{text}"
    scores = []
    for answer in (fenced, fenced.replace("[", "[1, ", 1), f"    return {ids}", text):
        found = TASKS["humaneval"].score(problem, answer)["pass_at_1"]
        assert found == published_scoring.humaneval(problem, answer)
        scores.append(found)
    assert scores[:2] == [1.0, 0.0]
    simple = {"text": "", "code": "", "test_list": [f"assert f() == {ids}", "assert True", "assert True"]}
    answer = f"def f():\n    return {ids}\n[DONE]\n{text}"
    found = TASKS["mbpp"].score(simple, TASKS["mbpp"].cut(answer))["pass_at_1"]
    assert found == published_scoring.mbpp(simple, answer) == 1.0
