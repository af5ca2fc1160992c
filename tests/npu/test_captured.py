"""The tasks of the ACL graphs that the default graph mode captures of Dream-7B's steps. Nothing is computed."""

from __future__ import annotations

import json

import pytest

from tests.npu import captured_tasks
from tests.npu.captured_tasks import described
from tests.npu.report import captured_step, variants

pytestmark = pytest.mark.npu
OUTSIDE = {"bf16": 55, "bf16_tp4": 65}
"""Tasks of a step outside its layers. W8A8 has one more, which quantises the first norm."""


@pytest.mark.parametrize(
    ("name", "per_layer", "sums"),
    [
        ("bf16", 11, 0),
        pytest.param("bf16_tp4", 13, 2, marks=pytest.mark.slow),
        ("w8a8", 13, 0),
        pytest.param("w8a8_tp4", 14, 2, marks=pytest.mark.slow),
    ],
)
def test_a_layer_is_captured_in_few_tasks_and_nothing_else_grows_with_the_layers(
    name: str, per_layer: int, sums: int
) -> None:
    one, three = (captured_step(variants()[name], layers) for layers in (1, 3))
    layer = three - one
    assert layer.total() == 2 * per_layer
    assert layer["lab::all_reduce_"] == 2 * sums
    assert layer["aten::split_with_sizes_copy.out"] == 2
    int8 = name.startswith("w8a8")
    assert one.total() - per_layer == OUTSIDE[name.replace("w8a8", "bf16")] + int8
    assert layer["npu::npu_quant_matmul"] == (8 if int8 else 0)
    for other in ("aten::fill_.Scalar", "aten::clone"):  # constants, and functional all-reduces, which copy
        assert not three[other], other


def test_the_tasks_that_predictions_add_up_are_those_that_are_captured() -> None:
    """Of the smallest step; ``python -m tests.npu.lab tests.npu.captured_tasks`` writes them anew."""
    kept = json.loads(captured_tasks.FILE.read_text())
    layer, outside = captured_tasks.captured(1)
    assert kept["1"] == {"layer": [*map(described, layer)], "outside": [*map(described, outside)]}
