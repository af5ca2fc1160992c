"""What is measured of answers, as far as it needs no model: task files, metrics, results."""

from dataclasses import replace
from pathlib import Path

import pytest

from lopa_ascend.config import DecodingParams
from lopa_ascend.types import GenerationOutput, TokenRun
from scripts.eval.files import DATA, TaskFileError, read_examples, read_problems
from scripts.eval.metrics import lopa_tpf, measure, over_runs, summed_tpf
from scripts.eval.results import results
from scripts.eval.sampler import num_visible, seeded
from scripts.eval.samples import SampleFile, Setting
from scripts.eval.task_kinds import TASKS
from tests.samples import SAMPLE, plan

GOOD = '{"question": "1 + 1?", "answer": "#### 2"}'

# ---- task files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question": "1 + 1?", "answer"', "line 3: is not valid JSON"),
        ("[1]", "line 3: expected a JSON object, found list"),
        ('{"question": "1 + 1?"}', 'line 3: has no "answer"; task problems needs question, answer'),
        ('{"question": 1, "answer": "2"}', 'line 3: "question" is 1, expected a text'),
        (
            '{"task": "gsm9k", "question": "", "answer": ""}',
            "line 3: unknown task 'gsm9k'; choose one of problems, gsm8k",
        ),
        ('{"task": ["gsm8k"], "question": "", "answer": ""}', "line 3: unknown task"),
        ('{"task": "mbpp", "text": "", "code": "", "test_list": [1]}', 'line 3: "test_list" is [1], expected a list'),
        ('{"question": "1", "question": "2", "answer": "3"}', "line 3: is not valid JSON"),
        ('{"question": "1 + 3?", "answer": "4"}', 'line 3: "answer" has no whole number after "####"'),
        ('{"question": "q", "answer": "#### 1,234"}', 'line 3: "answer" has no whole number'),
        (
            '{"task": "minerva_math", "problem": "p", "solution": "2"}',
            'line 3: "solution" has no \\boxed{...}',
        ),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: str, expected: str):
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(TaskFileError) as refusal:
        read_problems(path)
    assert str(refusal.value).startswith(f"{path}, {expected}")


def test_lines_may_have_tasks_of_their_own(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{GOOD}\n{{"task": "gsm8k", "question": "q", "answer": "#### 3"}}\n')
    assert [task.name for task, _ in read_problems(path).problems] == ["problems", "gsm8k"]
    assert [task.name for task, _ in read_problems(path, "gsm8k").problems] == ["gsm8k", "gsm8k"]
    with pytest.raises(TaskFileError, match="unknown task 'none'"):
        read_problems(path, "none")
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_problems(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskFileError, match="has no problems"):
        read_problems(tmp_path / "empty.jsonl")


def test_every_task_has_a_file_of_its_form():
    for name in TASKS:
        if name != "problems":
            assert len(read_problems(DATA / f"{name}.jsonl", name).problems) == 10
    assert len(read_examples(TASKS["mbpp"], None, 3)) == 3
    with pytest.raises(TaskFileError, match="has 3 examples, and 4 are needed"):
        read_examples(TASKS["mbpp"], None, 4)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_tokens_per_second_are_counted_as_published_and_as_seen():
    slow = replace(SAMPLE, seconds=5.0, visible_tokens=10, scores={"exact": 0.0}, index=1)
    found = measure([SAMPLE, slow])
    assert found["published_avg_tps"] == pytest.approx((64 / 2 + 64 / 4) / 2)
    assert found["published_max_tps"] == 32
    assert found["published_top10_tps"] == 24
    assert found["lopa_tpf"] == 128 / 16
    assert found["published_latency"] == 3
    assert found["user_avg_tps"] == pytest.approx((10 + 2) / 2)
    assert found["user_tps"] == 40 / 8
    assert found["summed_tpf"] == 40 / 14
    assert found["user_latency"] == 4
    assert found["score"] == 50
    assert found["outside_share"] == pytest.approx(1 - 4.8 / 8)
    assert found["host_share"] is None


def test_summed_tpf_is_no_mean_of_ratios_and_counts_no_token_after_the_end():
    short, long = replace(SAMPLE, visible_tokens=9, num_forwards=1), replace(SAMPLE, visible_tokens=30, num_forwards=10)
    assert summed_tpf([short, long]) == 39 / 11  # the mean of 9 and 3 is 6
    assert lopa_tpf([short, long]) == 128 / 13  # opened positions, and a closing round for each answer
    assert summed_tpf([]) == lopa_tpf([]) == 0


def test_published_tokens_per_second_leave_out_answers_of_one_pass():
    one_pass = replace(SAMPLE, num_forwards=1, first_seconds=SAMPLE.seconds - 1e-6, index=1)
    found = measure([SAMPLE, one_pass])
    assert found["published_max_tps"] == found["published_avg_tps"] == 64 / 2
    assert found["user_avg_tps"] == 10
    assert measure([one_pass])["published_top10_tps"] is None


def test_the_ten_fastest_answers_are_those_of_the_whole_run():
    samples = [replace(SAMPLE, index=i, seconds=1.0 + 64 / (i + 1)) for i in range(20)]
    assert measure(samples)["published_top10_tps"] == pytest.approx(sum(range(11, 21)) / 10)


def test_runs_are_shown_by_their_median_and_extremes():
    runs = [measure([replace(SAMPLE, seconds=seconds)]) for seconds in (3.0, 5.0, 2.0)]
    spread = over_runs(runs)["user_latency"]
    assert (spread.median, spread.low, spread.high) == (3, 2, 5)
    assert over_runs(runs)["padded_share"] is None


def test_the_padded_share_is_that_of_all_tokens():
    short, long = (0, 0), (400, 40)
    found = [replace(SAMPLE, graph_tokens=tokens, padded_tokens=padded) for tokens, padded in (short, (20, 16), long)]
    assert measure(found)["padded_share"] == 56 / 420
    assert measure(found[:1])["padded_share"] is None


def test_runs_that_are_not_finished_do_not_count(tmp_path: Path):
    settings = [Setting(DecodingParams(num_branches=k), f"k = {k}") for k in (0, 3, 7)]
    assert len({setting.key for setting in settings}) == 3
    assert Setting(DecodingParams(), "another name").key == settings[1].key
    file = SampleFile(tmp_path, {})
    for run, setting, index in plan(settings).missing(file):
        file.add(
            replace(SAMPLE, setting=setting.key, run=run, index=index, seconds=4.0 - 0.2 * setting.params.lookaheads)
        )
    file.add(replace(SAMPLE, setting=settings[0].key, run=2, index=0))
    found = results(settings, file, 2)
    assert [result.num_runs for result in found] == [2] * 3
    assert [result.value("user_latency") for result in found] == pytest.approx([4.0, 3.4, 2.6])


def test_tokens_behind_the_end_are_not_visible():
    output = GenerationOutput((1,), TokenRun((5, 6, 2, 9, 2)), "", "length", None, 3, 5, 10)
    params = DecodingParams(finish_at_eos=False)
    assert num_visible(output, params, (2,)) == 2
    assert num_visible(output, replace(params, ignore_eos=True), (2,)) == 5
    assert num_visible(output, replace(params, stop_token_ids=(6,)), (2,)) == 1


def test_sampled_answers_have_seeds_by_the_given_one_the_run_and_the_problem():
    sampled = DecodingParams(temperature=0.5)
    found = {(engine, run, index): seeded(sampled, engine, run, index).seed
             for engine in (0, 1) for run in (0, 1) for index in (0, 1)}  # fmt: skip
    assert len(set(found.values())) == 8
    assert seeded(sampled, 1, 0, 1).seed == found[1, 0, 1]
    own = replace(sampled, seed=7)
    assert seeded(own, 0, 0, 0).seed == seeded(own, 1, 0, 0).seed
    greedy = DecodingParams()
    assert seeded(greedy, 0, 0, 0) == greedy
