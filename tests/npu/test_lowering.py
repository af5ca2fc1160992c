"""What torchair makes of a Dream on NpuOps, and ACL graphs of one. Where nothing is computed, layers are Dream-7B's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_npu import npu

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.families import dream
from lopa_ascend.graph.forwards import PassShape
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from tests.npu import report
from tests.npu.cases import paged_entries
from tests.npu.lab import capture, device  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.lowering import BOOKKEEPING, VIEWS, optimised
from tests.npu.lab.traffic import host_traffic
from tests.npu.plain_ops import PlainOps
from tests.npu.report import (
    BUCKET,
    UNFILLED,
    UnfilledOps,
    Variant,
    captured_forward,
    captured_step,
    lowered_model,
    lowered_policy,
    lowered_step,
    variants,
)
from tests.npu.samples import dream_weights, forward_inputs, moved, overwrite, small_dream

pytestmark = pytest.mark.npu
BLOCKS = (32,) * 4
COPIES = {"TensorMove", "Transpose", "Assign", "BroadcastTo"}
Step = Callable[[ForwardInputs, list[Tensor], list[Tensor]], Tensor]

LAYER = Counter(
    MatMulV2=1, RotaryMul=1, SplitV=1, ScatterPaKvCache=1, FusedInferAttentionScore=1, MatMul=3, AddRmsNorm=2, SwiGlu=1
)
SUMS = Counter(HcomAllReduce=2)
# Embedding, rows of cosines and sines of each head, first norm, head.
ENDS = Counter(GatherV2=2, Unpack=1, RmsNorm=1, MatMul=1)
SCORE = Counter(Cast=3, Add=2, ArgMaxWithValue=1, LogSoftmaxV2=1, Range=1, GatherV2=2)


def step_of(model: Decoder) -> Step:
    """A forward pass with the head."""
    return lambda inputs, k_caches, v_caches: model.logits(model.forward(inputs, k_caches, v_caches))


def layers(kernels: Counter[str], count: int) -> Counter[str]:
    return Counter({kind: number * count for kind, number in kernels.items()})


@pytest.mark.parametrize("ops", [UNFILLED, UnfilledOps(attention_layout="BSH")], ids=["TND", "BSH"])
def test_a_dream_layer_is_eleven_kernels_and_copies_nothing(ops: NpuOps) -> None:
    variant = Variant(ops)
    for count in (1, 3):
        lowered = lowered_model(variant, count)
        assert lowered.kernels == layers(LAYER, count) + ENDS + SCORE + Counter(Exp=1)


def test_a_rank_of_four_has_two_sums_a_layer_more_and_one_gather() -> None:
    merging = Counter(Sub=1, Pack=1, HcomAllGather=1, Unpack=1, ArgMaxV2=1, LogSoftmaxV2=1, Add=1, GatherElements=2)
    for count in (1, 3):
        lowered = lowered_model(Variant(UNFILLED, tp_size=4), count)
        ends = ENDS + SCORE + merging + Counter(Exp=1)
        assert lowered.kernels == layers(LAYER + SUMS, count) + ends


@pytest.mark.slow  # the test before it has one and three layers
def test_twenty_eight_layers_on_four_ranks() -> None:
    whole = lowered_model(Variant(UNFILLED, tp_size=4), 28)
    assert whole.num_kernels <= 28 * 14 + 20, whole.kernels
    assert not COPIES & set(whole.by_type)


def test_the_same_model_in_plain_torch_is_six_times_as_many() -> None:
    one, two = (lowered_model(Variant(PlainOps()), count) for count in (1, 2))
    assert 60 <= two.num_kernels - one.num_kernels <= 80, two.kernels


def test_the_policy_is_small_whatever_the_number_of_rows() -> None:
    one, eight = lowered_policy(), lowered_policy(BUCKET._replace(sequences=8, branches=8, slots=8))
    assert one.kernels == eight.kernels
    assert one.num_kernels <= 122, one.kernels


@pytest.mark.parametrize(("branch_acceptance", "most"), [("verified", 150), ("exact", 171)])
def test_branches_that_must_be_confirmed_need_more_kernels(branch_acceptance: str, most: int) -> None:
    assert lowered_policy(BUCKET, branch_acceptance).num_kernels <= most


def test_a_whole_decode_step_copies_no_cache_and_no_weight() -> None:
    variant = Variant(UNFILLED)
    step = lowered_step(variant, 1)
    more = step.num_kernels - lowered_model(variant, 1).num_kernels - lowered_policy().num_kernels
    # Hidden states gathered and kept, states kept, what is told put together.
    assert more <= 12, step.kernels
    # What branches have in common is broadcast where a branch is taken out of each sequence: some integers.
    assert COPIES & set(step.by_type) == {"TensorMove", "Transpose", "BroadcastTo"}
    assert step.by_type["TensorMove"] == 1  # of the kept states, which are small
    assert step.by_type["Transpose"] == 1  # of the products by which branches are compared, B x B integers a sequence


def test_a_packed_step_gathers_a_few_numbers_more() -> None:
    full, packed = (lowered_step(Variant(UNFILLED), 1, BUCKET._replace(rows=rows)) for rows in (None, 6))
    two_layers = lowered_step(Variant(UNFILLED), 2, BUCKET._replace(rows=6))
    more = two_layers.kernels - packed.kernels
    assert more == LAYER + Counter(GatherV2=2), "keys and values are taken from the tokens of a block-row"
    assert packed.num_kernels - full.num_kernels <= 2 + 42, packed.kernels - full.kernels
    assert set(packed.by_type) - set(full.by_type) <= {"Cumsum", "Minimum", "Mul"}


def test_branch_parallel_ranks_meet_in_one_gather() -> None:
    step = lowered_step(Variant(UNFILLED), 1, BUCKET._replace(slots=1), bp_size=4)
    collectives = {kind: number for kind, number in step.by_type.items() if kind.startswith("Hcom")}
    assert collectives == {"HcomAllGather": 1}


@pytest.mark.parametrize(
    ("name", "bucket", "per_layer"),
    [
        ("bf16", PassShape(4, 1, False, 1, 8, None), 11),
        pytest.param("bf16", PassShape(4, 32, True, 1, 8, None), 11, marks=pytest.mark.slow),
        ("bf16", PassShape(4, 32, True, 4, 8, None), 13),
        pytest.param("sdar", PassShape(4, 32, False, 1, 8, None), 13, marks=pytest.mark.slow),
        ("pangu", PassShape(4, 32, True, 1, 8, None), 11),
    ],
)
def test_tasks_of_forward_passes_of_causal_models(name: str, bucket: PassShape, per_layer: int) -> None:
    """Rows of one token; blocks that are committed, alone and for the slots of branches; blocks that are filled."""
    one, two = (captured_forward(variants()[name], count, bucket) for count in (1, 2))
    assert (two - one).total() == per_layer


@pytest.mark.parametrize(("name", "per_layer"), [("llada2", 20), ("llada2_w8a8", 22)])
def test_tasks_of_a_layer_with_experts(name: str, per_layer: int) -> None:
    """Beside those of SDAR: a product and the choice of the router, two kernels that move rows, which also round and
    add, and the MLPs."""
    one, two = (captured_step(variants()[name], count) for count in (1, 2))
    assert (two - one).total() == per_layer, two - one


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_report_ends_with_its_figures_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "NUM_LAYERS", 2)
    report.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    captured = figures.pop("npugraph_ex")
    counts = {"bf16": 11, "bf16_tp4": 13, "w8a8": 13, "w8a8_tp4": 14, "sdar": 13}
    assert list(captured) == list(counts)
    for name, per_layer in counts.items():
        found = captured[name]
        assert found["tasks_per_layer"] == per_layer
        assert found["tasks_model"] == sum(found["by_type"].values()) == 2 * per_layer + found["tasks_outside"]
    assert list(figures) == [*counts, "plain_fused", "unfused"]
    fused, own = figures["plain_fused"], figures["bf16"]
    assert fused["kernels_per_layer"] == own["kernels_per_layer"]
    # It takes cosines and sines by a kernel each, and puts those of v among them by a kernel each.
    assert fused["kernels_model"] == own["kernels_model"] + 2
    policy = lowered_policy().num_kernels
    counts["sdar"] += 2  # copies of what the rope overwrites
    for name, per_layer in counts.items():
        found = figures[name]
        assert (found["kernels_per_layer"], found["policy"]) == (per_layer, policy)
        kinds = found["by_type"]
        assert kinds["AddRmsNorm"] + kinds.get("AddRmsNormDynamicQuant", 0) == 4
        no_kernels = sum(number for kind, number in kinds.items() if kind in BOOKKEEPING | VIEWS)
        assert found["kernels_model"] == sum(kinds.values()) - no_kernels
        assert kinds["Data"] > 0


class Small:
    """A model that is small enough to be computed, with caches."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.config = small_dream(2)
        self.weights = dream_weights(self.config, dtype)
        _, self.num_pages = paged_entries(BLOCKS, (640,) * 4)
        shape = (2, 2, self.num_pages, PAGE_SIZE, self.config.num_kv_heads, self.config.head_dim)
        self.caches = torch.randn(shape).to(dtype)

    def step(self, ops: Ops) -> Step:
        weights = {name: weight.to(ops.device) for name, weight in self.weights.items()}
        return step_of(Decoder(dream.FAMILY, self.config, weights, ops))

    def inputs(self, seed: int, kv_length: int = 600) -> ForwardInputs:
        """On the CPU."""
        torch.manual_seed(seed)
        entries, num_pages = paged_entries(BLOCKS, (kv_length,) * 4, num_pages=self.num_pages)
        return forward_inputs(entries, num_pages)


@pytest.mark.parametrize("ops", [NpuOps(), PlainOps()], ids=["fused", "plain"])
def test_a_model_computes_what_it_does_on_the_cpu(ops: Ops) -> None:
    small = Small(torch.float32)
    inputs, caches = small.inputs(1), small.caches.to("npu")
    with numeric():
        out = small.step(ops)(moved(inputs, "npu"), *map(list, caches))
    expected = small.step(CpuOps())(inputs, *map(list, small.caches))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches.cpu(), small.caches, rtol=1e-4, atol=1e-4)


def test_the_graph_after_torchairs_passes_computes_the_same() -> None:
    small, ops = Small(), NpuOps()
    step, inputs = small.step(ops), moved(small.inputs(1), "npu")
    caches, expected_caches = small.caches.to("npu"), small.caches.to("npu")
    expected = step(inputs, *map(list, expected_caches))
    out = optimised(step)(inputs, *map(list, caches))
    assert torch.equal(out.cpu(), expected.cpu())
    assert torch.equal(caches.cpu(), expected_caches.cpu())


def test_a_captured_step_replays_with_new_inputs_and_the_host_waits_for_nothing() -> None:
    small = Small()
    step, inputs = small.step(NpuOps()), moved(small.inputs(1), "npu")
    caches, expected_caches = small.caches.to("npu"), small.caches.to("npu")
    graph = npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        out = step(inputs, *map(list, caches))
    assert torch.equal(caches.cpu(), expected_caches.cpu())
    for seed, kv_length in ((1, 600), (2, 40), (3, 640)):
        new = moved(small.inputs(seed, kv_length), "npu")
        overwrite(inputs, new)
        with host_traffic() as traffic:
            graph.replay()
            graph.update([{"actual_seq_lengths_kv": [kv_length] * 4}])
        assert traffic.launches == ["replay"]
        assert not traffic.stalls
        expected = step(new, *map(list, expected_caches))
        assert torch.equal(out.cpu(), expected.cpu())
        assert torch.equal(caches.cpu(), expected_caches.cpu())
