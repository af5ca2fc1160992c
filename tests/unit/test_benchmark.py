"""The parts of the benchmark that need no model: task files, settings, metrics and their tables."""

import argparse
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.types import GenerationOutput
from scripts.arguments import picture
from scripts.benchmark import by_engine
from scripts.benchmarking.draw import by_branches, pareto_front
from scripts.benchmarking.metrics import accuracy_under_parallelism, measure, over_runs
from scripts.benchmarking.report import markdown, results, write_csv
from scripts.benchmarking.run import num_visible, seeded
from scripts.benchmarking.samples import SampleFile
from scripts.benchmarking.settings import one_setting, swept
from scripts.evaluation.files import DATA, TaskFileError, read_examples, read_problems
from scripts.evaluation.tasks import TASKS
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


def test_the_command_refuses_a_broken_file_before_the_model(tmp_path: Path):
    """The model does not exist either, which would be said first if it were looked at."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{GOOD}\n{{"question": "1"}}\n')
    command = [sys.executable, "-m", "scripts.benchmark", str(path), "--model", str(tmp_path / "absent")]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'tasks.jsonl, line 2: has no "answer"' in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_a_model_that_is_missing(tmp_path: Path):
    command = [sys.executable, "-m", "scripts.benchmark", "--model", str(tmp_path / "absent")]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("expected a directory in the Hugging Face layout, but it is missing")


# ---- settings --------------------------------------------------------------------------------------------------------


def test_a_sweep_is_the_product_of_its_axes_without_useless_combinations():
    found = swept(["decoding=lopa,d2f", "num_branches=0,3", "tau_conf=0.9,0.8"], {"max_new_tokens": 64})
    shown = [(s.params.decoding, s.params.lookaheads, s.params.tau_conf) for s in found]
    assert shown == [
        ("lopa", 0, 0.9), ("lopa", 0, 0.8), ("lopa", 3, 0.9), ("lopa", 3, 0.8), ("d2f", 0, 0.9), ("d2f", 0, 0.8),
    ]  # fmt: skip
    assert {s.params.max_new_tokens for s in found} == {64}
    assert len({s.key for s in found}) == len(found)
    assert found[2].label == "decoding=lopa num_branches=3 tau_conf=0.9"
    with pytest.raises(ParameterError, match="sweep: has tau_conf twice; give all its values in one"):
        swept(["tau_conf=0.9", "tau_conf=0.8"], {})
    with pytest.raises(ParameterError, match="sweep: leaves no setting"):
        swept(["decoding=d2f", "num_branches=3"], {})


def test_the_sweep_of_the_figures_has_what_each_figure_needs():
    found = [s.params for s in swept(["figures"], {"max_new_tokens": 64, "window_attention": "block_causal"})]
    assert {p.decoding for p in found} == {"lopa", "d2f", "parallel", "vanilla", "fast_dllm"}
    assert {p.lookaheads for p in found if p.decoding == "lopa" and p.tau_conf == 0.9} >= {1, 2, 3, 5, 7, 10, 14}
    assert {p.window_attention for p in found if p.decoding == "lopa"} == {"full", "block_causal"}
    assert {p.tau_conf for p in found if p.lookaheads == 7} >= {0.95, 0.9, 0.85, 0.8, 0.75, 0.7}
    assert {p.branch_acceptance for p in found if p.lookahead_depth > 1} == {"exact", "verified"}


def test_compiled_steps_are_made_for_the_settings_that_they_measure():
    found = swept(["figures"], {"window_attention": "block_causal"})
    ((_, together),) = by_engine(found, {"graph_mode": "eager"})
    assert together == found
    groups = by_engine(found, {"graph_mode": "inductor"})
    assert sorted(s.key for _, settings in groups for s in settings) == sorted(s.key for s in found)
    for options, settings in groups:
        for params in (setting.params for setting in settings):
            if params.is_pipelined and params.lookahead_depth == 1 and not params.is_auto:
                graphs = options["graph_params"]
                assert graphs.num_branches == params.lookaheads
                assert graphs.branch_acceptance == params.branch_acceptance
                assert graphs.window_attention == params.window_attention


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (["tau_conf"], 'must be "NAME=VALUE,VALUE..." or "figures"'),
        (["tau=0.9"], "unknown parameter 'tau'"),
        (["tau_conf=high"], "tau_conf: "),
        (["tau_conf=2"], "tau_conf"),
        (["figures", "tau_conf=0.9"], "stands alone"),
    ],
)
def test_a_malformed_axis_is_refused(axes: list[str], expected: str):
    with pytest.raises(ParameterError) as refusal:
        swept(axes, {})
    assert expected in str(refusal.value)


def test_the_key_of_a_setting_names_its_values_alone():
    assert one_setting({"num_branches": 3}).key == one_setting({}).key != one_setting({"num_branches": 4}).key


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_tokens_per_second_are_counted_as_published_and_as_seen():
    slow = replace(SAMPLE, seconds=5.0, visible_tokens=10, scores={"exact": 0.0}, index=1)
    found = measure([SAMPLE, slow])
    assert found["published_avg_tps"] == pytest.approx((64 / 2 + 64 / 4) / 2)
    assert found["published_max_tps"] == 32
    assert found["published_top10_tps"] == 24
    assert found["published_tpf"] == 128 / 16
    assert found["published_latency"] == 3
    assert found["user_avg_tps"] == pytest.approx((10 + 2) / 2)
    assert found["user_tps"] == 40 / 8
    assert found["user_tpf"] == 40 / 14
    assert found["user_latency"] == 4
    assert found["score"] == 50
    assert found["outside_share"] == pytest.approx(1 - 4.8 / 8)
    assert found["host_share"] is None


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


def test_aup_is_the_weighted_area_of_the_curve():
    def weight(score: float) -> float:
        return min(math.exp(-3 * (1 - score / 80)), 1)

    expected = 2 * 80 + (4 - 2) * (80 * weight(80) + 76 * weight(76)) / 2
    assert accuracy_under_parallelism([(4, 76), (2, 80), (9, 74)], 80) == pytest.approx(expected)
    assert accuracy_under_parallelism([(3, 50)], 80) == 150
    assert accuracy_under_parallelism([(3, 0), (4, 0)], 0) == 0


def finished(tmp_path: Path) -> list:
    settings = swept(["decoding=d2f,lopa", "num_branches=0,3,7"], {})
    file = SampleFile(tmp_path, {})
    for number, (run, setting, index) in enumerate(plan(settings).missing(file)):
        score = {"exact": float(number % 3 > 0)}
        seconds = 4.0 - 0.2 * setting.params.lookaheads
        file.add(replace(SAMPLE, setting=setting.key, run=run, index=index, scores=score, seconds=seconds))
    file.add(replace(SAMPLE, setting=settings[0].key, run=2, index=0))
    return results(settings, file, 2)


def test_tables_have_a_row_for_each_setting_and_leave_unfinished_runs_out(tmp_path: Path):
    found = finished(tmp_path)
    assert [result.num_runs for result in found] == [2] * 4
    write_csv(found, tmp_path / "results.csv")
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("setting,runs,answers,decoding,")
    assert markdown(found).count("\n") == 6
    assert "| decoding=lopa num_branches=7 |" in markdown(found)


def test_figures_choose_their_settings(tmp_path: Path):
    found = finished(tmp_path)
    assert [result.setting.params.lookaheads for result in by_branches(found)] == [0, 3, 7]
    front = pareto_front(found)
    assert all(a.value("user_avg_tps") > b.value("user_avg_tps") for a, b in zip(front, front[1:], strict=False))
    assert all(a.value("score") < b.value("score") for a, b in zip(front, front[1:], strict=False))
    assert front[0].setting.params.lookaheads == 7


def test_a_figure_of_branches_has_one_group_of_settings(tmp_path: Path):
    settings = swept(["num_branches=0,3,auto", "block_size=8,32"], {}) + swept(["num_branches=7"], {"block_size": 32})
    file = SampleFile(tmp_path, {})
    for setting in settings:
        file.add(replace(SAMPLE, setting=setting.key))
    chosen = [result.setting.params for result in by_branches(results(settings, file, 1))]
    assert [(params.lookaheads, params.block_size, params.is_auto) for params in chosen] == [
        (0, 32, False), (3, 32, False), (7, 32, False),
    ]  # fmt: skip


def test_passes_that_no_graph_made_are_shown(tmp_path: Path):
    settings = swept(["block_size=8,32"], {})
    file = SampleFile(tmp_path, {})
    for setting, eager in zip(settings, (0, SAMPLE.num_forwards - 1), strict=True):  # the prompt's pass is none of them
        file.add(replace(SAMPLE, setting=setting.key, eager_steps=eager))
    lines = markdown(results(settings, file, 1)).splitlines()
    assert "| eager steps |" in lines[0]
    assert "| 0% |" in lines[2]
    assert "| 100% |" in lines[3]
    assert "eager steps" not in markdown(finished(tmp_path / "none"))


def test_tokens_behind_the_end_are_not_visible():
    output = GenerationOutput((1,), (5, 6, 2, 9, 2), "", "length", None, 3, 5, 10)
    params = DecodingParams(finish_at_eos=False)
    assert num_visible(output, params, (2,)) == 2
    assert num_visible(output, replace(params, ignore_eos=True), (2,)) == 5
    assert num_visible(output, replace(params, stop_token_ids=(6,)), (2,)) == 1


def test_pictures_are_refused_at_once_without_matplotlib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert picture("x.png") == Path("x.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="needs matplotlib; install it"):
        picture("x.png")


def test_a_preset_keeps_its_values_in_a_sweep_unless_an_axis_replaces_them():
    found = swept(["tau_conf=0.9,0.7"], {"num_branches": 5, "confidence": "neg_entropy"})
    assert {(s.params.lookaheads, s.params.confidence) for s in found} == {(5, "neg_entropy")}
    assert [s.params.tau_conf for s in swept(["tau_conf=0.9,0.7"], {"tau_conf": 0.1})] == [0.9, 0.7]
    assert swept(["decoding=vanilla"], {"num_branches": 5})[0].params == DecodingParams(decoding="vanilla")


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
