"""AUP: the values of d3LLM's leaderboard, points that are dropped, tables and pictures of them."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import read_json_object
from scripts.eval.aup import FILE, LOPA, TABLES, Method, as_json, best_accuracy, draw, markdown, published_methods

PUBLISHED = {
    ("dream", "GSM8K-CoT"): [74.1, 318.9862, 83.94, 116.4864, 176.1064, 245.7335, 391.3278],
    ("dream", "MATH"): [41.15, 142.0584, 39.63, 55.2169, 126.6553, 77.9471, 97.4967],
    ("dream", "MBPP-Instruct"): [63.8, 298.5704, 57.2, 63.5892, 114.1151, 107.9665, 141.4058],
    ("dream", "HumanEval-Instruct"): [72.25, 344.8057, 55.2, 63.5012, 128.9414, 98.7677, 129.4756],
    ("dream", "Long-GSM8K"): [82.56, 422.2056, 78.95, 130.3502, 207.246, 262.3936, 348.6435],
    ("llada", "GSM8K-CoT"): [74.1, 72.55, 205.7811, 213.7564, 358.1422, 637.6549],
    ("llada", "MATH"): [41.15, 32.2, 47.1873, 48.9958, 64.5356, 107.6419],
    ("llada", "MBPP"): [63.6, 41.72, 56.6011, 52.9606, 60.4513, 88.356],
    ("llada", "HumanEval"): [67.73, 38.28, 54.0245, 61.9823, 83.6855, 96.6405],
    ("llada", "Long-GSM8K"): [82.56, 78.58, 175.3744, 176.948, 309.0756, 441.1296],
    ("dream-coder", "HumanEval"): [86.6, 82.9, 208.3577],
    ("dream-coder", "HumanEval+"): [82.3, 76.8, 171.7194],
    ("dream-coder", "MBPP"): [83.5, 79.9, 186.1772],
    ("dream-coder", "MBPP+"): [70.1, 68.8, 170.9205],
}
"""By table and task what d3LLM's script gives for each method of its data, in the order of its data."""


@pytest.mark.parametrize(("table", "task"), PUBLISHED)
def test_the_published_points_have_the_published_values(table: str, task: str):
    rows = read_json_object(FILE, ValueError)["tables"][table][task]
    methods = [Method.of(name, points) for name, points in rows.items()]
    y_max = best_accuracy(methods)
    assert [method.aup(y_max) for method in methods] == pytest.approx(PUBLISHED[table, task], abs=5e-5)


def test_every_published_task_is_checked():
    tables = read_json_object(FILE, ValueError)["tables"]
    assert tuple(tables) == TABLES
    assert {(table, task) for table, tasks in tables.items() for task in tasks} == {*PUBLISHED}


def test_points_more_than_five_below_the_first_are_dropped_wherever_they_are():
    method = Method.of("m", [(3, 75.0), (1, 80.0), (4, 76.0), (2, 74.9), (5, 60.0)])
    assert [point.tpf for point in method.kept] == [1, 3, 4]
    assert [point.tpf for point in method.dropped] == [2, 5]
    weights = {y: math.exp(-3 * (1 - y / 100)) for y in (80, 75, 76)}
    expected = 80 + 2 * (80 * weights[80] + 75 * weights[75]) / 2 + (75 * weights[75] + 76 * weights[76]) / 2
    assert method.aup(100.0) == pytest.approx(expected)
    assert "| 2.00, 74.9; 5.00, 60.0 |" in markdown([method])


def test_no_method_counts_more_than_its_points_and_none_right_is_nothing():
    assert Method.of("m", [(1, 80.0), (3, 82.0)]).aup(80.0) == 80 + 2 * 81
    nothing = Method.of("m", [(0.0, 0.0), (0.0, 0.0)])
    assert nothing.aup(0.0) == 0


def test_lopas_published_points_stand_beside_dreams_rows():
    methods = published_methods("dream", "gsm8k")
    lopa = methods[-1]
    assert (lopa.name, lopa.dropped) == (LOPA, ())
    assert lopa.aup(best_accuracy(methods)) == pytest.approx(649.33, abs=0.01)
    assert as_json(methods)["y_max"] == 83.94
    assert len(published_methods("llada", "gsm8k")) == 6
    with pytest.raises(ParameterError, match="'llada' has no rows for task 'problems'; it has gsm8k, minerva_math"):
        published_methods("llada", "problems")


def test_the_picture_has_each_method_with_its_aup(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra eval)")
    nothing = Method.of("nothing", [(0.0, 0.0), (0.0, 0.0)])
    methods = [Method.of("one < two", [(1, 80.0), (9, 80.0), (5, 60.0)]), Method.of("other", [(1, 70.0)]), nothing]
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name, "a & b", methods)
    text = "".join(ET.parse(tmp_path / "a.svg").getroot().itertext())
    assert f"one < two: AUP {methods[0].aup(80.0):.1f}" in text
    assert "other: AUP 70.0" in text
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
