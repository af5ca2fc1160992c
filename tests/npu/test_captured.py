"""The tasks of the ACL graphs that the default graph mode captures of Dream-7B's steps. Nothing is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lopa_ascend.backend.npu.rewrites import join_in_place
from lopa_ascend.runner.scoring import HEAD_ROWS
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.reductions import columns_of
from lopa_ascend.score.shards import MAX_OFFERED, shard_scores
from lopa_ascend.types import Scoring
from tests.npu import captured_tasks
from tests.npu.captured_tasks import described
from tests.npu.lab import capture, units
from tests.npu.report import BUCKET, MASK, VOCABULARY, UnfilledOps, Variant, captured_step, variants

pytestmark = pytest.mark.npu
OUTSIDE = {"bf16": 107, "bf16_tp4": 114}
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
    # Constants; functional all-reduces, which copy; and parts that are not computed where they lie in a message.
    for other in ("aten::fill_.Scalar", "aten::clone", "aten::stack"):
        assert not three[other], other


def test_entries_of_16_queries_add_no_task() -> None:
    halved = Variant(UnfilledOps(attention_layout="TND16"))
    tasks = captured_step(halved, 1, BUCKET._replace(max_queries=16))
    assert capture.tapes()[-1].on_aicpu == []
    assert tasks == captured_step(variants()["bf16"], 1)


@pytest.mark.parametrize("name", ["bf16", pytest.param("bf16_tp4", marks=pytest.mark.slow)])
def test_the_largest_step_runs_no_kernel_on_the_devices_cpu(name: str) -> None:
    """But for sums that are too large for the vector cores: 56 MiB for four ranks."""
    tasks = captured_step(variants()[name], 1, BUCKET._replace(sequences=8, blocks=8, max_blocks=8))
    assert capture.tapes()[-1].on_aicpu == ["lab::all_reduce_"] * tasks["lab::all_reduce_"]


class Gathers(TorchDispatchMode):
    """Notes what would compute each gather."""

    def __init__(self) -> None:
        super().__init__()
        self.units: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.gather.default:
            self.units.add(units.unit_of(op, args, kwargs or {}))
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("chosen_by", [{}, {"temperature": 0.5}])
def test_eager_scores_gather_nothing_on_the_devices_cpu(shards: int, chosen_by: dict[str, Any]) -> None:
    scoring = Scoring("max_prob", MASK, VOCABULARY, **chosen_by)
    logits = torch.empty(HEAD_ROWS, VOCABULARY // shards, dtype=torch.bfloat16, device="meta")
    positions = torch.empty(HEAD_ROWS, dtype=torch.int64, device="meta")
    with Gathers() as gathers:
        stats = shard_scores(logits, scoring, positions, 0, limit=MAX_OFFERED if shards > 1 else None)
        merge_scores(stats.expand(shards, -1, -1), scoring, positions, 0)
    assert units.AICPU not in gathers.units


def test_columns_are_taken_without_a_gather_bit_by_bit() -> None:
    x, columns = torch.randn(7, 300), torch.randint(300, (7, 3))
    with Gathers() as gathers:
        taken = columns_of(x.to("npu"), columns.to("npu"))
    assert torch.equal(taken.cpu(), x.gather(1, columns))
    assert not gathers.units


def test_the_file_of_captured_tasks_is_up_to_date() -> None:
    """Of the smallest step; ``python -m tests.npu.lab tests.npu.captured_tasks`` writes them anew."""
    kept = json.loads(captured_tasks.FILE.read_text())
    layer, outside = captured_tasks.captured(1)
    assert kept["1"] == {"layer": [*map(described, layer)], "outside": [*map(described, outside)]}


def stacked(x: Tensor, index: Tensor) -> Tensor:
    best = x.max(1, keepdim=True)
    return torch.stack([best[0].view(-1).view(torch.int32), x.exp().gather(1, index).view(-1).view(torch.int32)]) + 1


def joined(x: Tensor, index: Tensor) -> Tensor:
    total, both = x.sum(1, dtype=torch.float32), torch.where(x > 0, x, index)
    return torch.cat([total, both.view(-1), both.t().clone(memory_format=torch.contiguous_format).view(-1)])


def of_an_input(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x.view(-1), x.exp().view(-1)])


def twice(x: Tensor, index: Tensor) -> Tensor:
    total = x.sum(1)
    return torch.stack([total, total])


def side_by_side(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x.exp(), x - 1], 1)


@pytest.mark.parametrize(
    ("function", "stays"), [(stacked, 0), (joined, 0), (of_an_input, 1), (twice, 1), (side_by_side, 1)]
)
def test_parts_that_ops_can_write_are_computed_where_they_lie(function: Callable[..., Any], stays: int) -> None:
    given = torch.randn(3, 4), torch.tensor([[2], [0], [3]])
    module = make_fx(function, tracing_mode="fake")(*given)
    join_in_place(module)
    joints = [
        node for node in module.graph.nodes if node.target in (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
    ]
    assert len(joints) == stays
    assert torch.equal(module(*given), function(*given))
