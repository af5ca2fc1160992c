"""The planner: its terms against cases computed by hand, what must grow or shrink, and the best plan."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lopa_ascend.config import ModelConfig
from lopa_ascend.demo import DEMO_MODEL
from scripts.bench.plan import step, tasks
from scripts.bench.plan.devices import CONSTANTS, Device, Range, load_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.search import all_plans, best_plan, plan, tokens_per_forward
from scripts.bench.plan.step import collective_seconds, predict, predict_on
from scripts.bench.plan.tasks import Workload, all_reduce_bytes, step_tasks


@pytest.fixture(scope="module")
def dream() -> ModelConfig:
    return load_model("Dream-7B")


@pytest.fixture(scope="module")
def die() -> Device:
    """The slowest."""
    return load_device("910c").high


@pytest.fixture(scope="module")
def dies() -> Range:
    return load_device("910c")


UNIT = Device(
    **dict.fromkeys(CONSTANTS, 0.0)
    | dict.fromkeys(
        ["bf16_flops", "int8_flops", "fp32_flops", "memory_bandwidth", "memory_bytes", "compute_efficiency"], 1.0
    )
    | {"memory_efficiency": 1.0, "link_bandwidth": 1.0, "link_efficiency": 1.0},
    measured_sums=(),
)
"""A device that moves one byte and computes one operation a second, for nothing besides."""


# ---- counts of Dream-7B, by hand -------------------------------------------------------------------------------------


def test_weights_of_dream_7b(dream: ModelConfig):
    # qkv 3584 x (3584 + 2 x 512), o 3584 x 3584, gate and up and down 3 x 3584 x 18944
    layer = 16_515_072 + 12_845_056 + 203_685_888
    assert tasks.head_parameters(dream) == 152_064 * 3584 == 544_997_376
    assert tasks.weight_bytes(dream, "bf16") == (2 * 28 * layer, 2 * 544_997_376)
    assert sum(tasks.weight_bytes(dream, "bf16")) == 14_140_571_648


def test_weights_of_a_rank_of_four(dream: ModelConfig):
    # 7 query heads, 1 KV head, a quarter of the MLP: exactly a quarter, because 4 KV heads split over 4 ranks
    assert tasks.weight_bytes(dream, "bf16", 4)[0] == 2 * 28 * 233_046_016 // 4
    assert tasks.head_parameters(dream, 4) == 38_016 * 3584
    assert dream.tensor_parallel_sizes() == (1, 2, 4)
    demo = load_model(str(DEMO_MODEL))  # 4 query heads and 2 KV heads of 48: each of 4 ranks has one KV head
    layer = 192 * 48 * (1 + 2) + 48 * 192 + 3 * 192 * 256
    assert tasks.weight_bytes(demo, "bf16", 4)[0] == 2 * demo.num_layers * layer
    assert tasks.kv_bytes_per_position(demo, "fp32", 4) == 2 * 12 * 48 * 4


def test_w8a8_halves_the_layers_and_leaves_the_head(dream: ModelConfig):
    layers, head = tasks.weight_bytes(dream, "w8a8")
    channels = 3584 + 2 * 512 + 3584 + 2 * 18_944 + 3584  # outputs of qkv, o, gate and up, down
    assert layers == 28 * (233_046_016 + 4 * channels)
    assert head == 2 * 544_997_376


def test_keys_and_values(dream: ModelConfig):
    assert tasks.kv_bytes_per_position(dream, "bf16") == 2 * 28 * 4 * 128 * 2 == 57_344
    assert tasks.kv_bytes_per_position(dream, "bf16", 4) == 14_336
    work = Workload(tp=4, bp=2, k=3, window=64, context=1000)  # 4 branches on 2 groups
    assert (work.rows, work.tokens) == (2, 128)


def test_all_reduce(dream: ModelConfig):
    # 32 tokens of 3584 numbers in bfloat16: 229 KB, as in the fact sheet of the 910C
    assert tasks.all_reduce_bytes(dream, Workload(tp=4, k=0, window=32)) == 229_376
    assert tasks.all_reduce_bytes(dream, Workload(tp=4, k=0, window=32, precision="fp32")) == 458_752


def test_an_all_reduce_of_four_dies_by_hand(die: Device):
    # ring: 6 rounds of 0.5 us, and 6/4 of the bytes over 0.6 x 196 GB/s; tree: 4 rounds, and twice the bytes
    ring, tree = 6 * 0.5e-6 + 1.5 * 229_376 / 117.6e9, 4 * 0.5e-6 + 2 * 229_376 / 117.6e9
    assert collective_seconds(die, 4, 229_376, "sum") == pytest.approx(20e-6 + min(ring, tree))
    assert collective_seconds(die, 4, 16, "sum") == pytest.approx(20e-6 + 4 * 0.5e-6, rel=1e-3)


def test_a_gather_sends_half_of_what_a_sum_sends(die: Device):
    link = die.link_bandwidth * die.link_efficiency
    gathered = collective_seconds(die, 8, 1e6, "merge") - die.collective_s
    assert gathered == pytest.approx(min(7 * (0.5e-6 + 1e6 / 8 / link), 3 * 0.5e-6 + 1e6 / link))
    exchanged = collective_seconds(die, 8, 1e6, "exchange") - die.slow_collective_s
    assert exchanged == pytest.approx(gathered)


# ---- a step ----------------------------------------------------------------------------------------------------------


def test_terms_are_counts_over_rates(dream: ModelConfig):
    work = Workload(k=1, window=1, context=9, requests=2)
    found = predict_on(dream, UNIT, work)
    parameters = 28 * 233_046_016 + 544_997_376
    assert found.products == 2 * 4 * parameters  # 8 operations a weight against 2 bytes
    assert found.attention == 28 * 4 * 4 * 10 * 3584  # more operations than bytes: 4 queries see 10 positions
    small = (task for task in step_tasks(dream, work) if task.kind == "small")
    assert found.small_kernels == sum(task.times * task.bytes for task in small)
    assert (found.collectives, found.gaps, found.updates, found.other_host) == (0, 0, 0, 0)
    assert found.step == found.device == found.products + found.attention + found.small_kernels
    assert found.bound_by == "products"


def test_w8a8_has_int8_products_and_a_bf16_head(dream: ModelConfig):
    tasks = {precision: list(step_tasks(dream, Workload(precision=precision))) for precision in ("bf16", "w8a8")}
    head = [[task for task in of if task.kind == "head"] for of in tasks.values()]
    assert head[0] == head[1]
    fast = replace(UNIT, int8_flops=1e30)
    assert predict_on(dream, fast, Workload(precision="w8a8")).products < predict_on(dream, fast, Workload()).products


def test_fixed_costs_are_those_of_the_tasks(dream: ModelConfig, die: Device):
    work = Workload(requests=2)
    tasks = list(step_tasks(dream, work))
    without = predict_on(dream, replace(die, vector_kernel_s=0.0, attention_kernel_s=0.0), work)
    found = predict_on(dream, die, work)
    small = sum(task.times for task in tasks if task.kind == "small")
    assert found.small_kernels - without.small_kernels == pytest.approx(small * die.vector_kernel_s)
    assert found.attention - without.attention == pytest.approx(28 * die.attention_kernel_s)
    assert found.gaps == pytest.approx(sum(task.times for task in tasks) * die.gap_s)


def test_the_host_writes_what_has_changed(dream: ModelConfig, die: Device):
    found = predict_on(dream, die, Workload(requests=2, tpf=8))
    assert found.updates == pytest.approx(28 * die.host_layer_s * (1 - 0.75**4))
    assert found.other_host == pytest.approx(die.host_launch_s + 0.75e-3 * (1 - 0.08**2) + 2 * 0.4e-3)


def test_a_host_that_does_not_work_ahead_adds_its_time(dream: ModelConfig, die: Device):
    after = predict_on(dream, replace(die, host_overlaps=0.0), Workload())
    assert after.step == pytest.approx(after.device + after.updates + after.other_host)
    assert predict_on(dream, replace(die, host_layer_s=1.0), Workload(tpf=8)).bound_by == "host"


def test_a_short_step_does_not_make_up_for_a_long_one(dream: ModelConfig, die: Device):
    """Slow constants, TP 4 x BP 4: device 7.4 ms, and 8.9 ms of the host where lengths are written, on average 5.5."""
    work = Workload(tp=4, bp=4, window=64, context=512, precision="w8a8", tpf=9)
    ahead = predict_on(dream, die, work)
    share = step.lengths_written(9, 32)
    slow = 28 * die.host_layer_s + die.host_launch_s + die.host_inputs_s + die.host_request_s
    assert ahead.updates + ahead.other_host < ahead.device < slow
    assert ahead.step == pytest.approx((1 - share) * ahead.device + share * slow)
    several = predict_on(dream, die, replace(work, requests=3))
    share = 1 - (1 - share) ** 3
    assert several.step == pytest.approx((1 - share) * several.device + share * max(several.device, slow + 0.8e-3))


def test_the_host_of_a_causal_model_decides_between_its_passes(die: Device):
    work = Workload(k=0, window=1, block=1)
    for name in ("pangu-7B", "nemotron-8B"):
        found = predict_on(load_model(name), die, work)
        assert found.step == pytest.approx(found.device + found.updates + found.other_host)
        assert found.updates == load_model(name).num_layers * die.host_layer_s
        assert predict_on(load_model(name), die, replace(work, window=256, context=0)).device > found.device


def test_norms_of_queries_and_keys_are_tasks_of_their_families(dream: ModelConfig):
    def small(model: ModelConfig) -> int:
        work = Workload(k=0, window=1)
        return sum(task.times for task in step_tasks(model, work) if task.kind == "small")

    sdar = load_model("sdar-8B")
    assert small(sdar) - small(dream) == 36 * 2 + (36 - 28) * 8


GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").glob("*.json"))


def test_lengths_change_as_often_as_in_the_golden_traces():
    """Block ends of the winner's window, which attention sees, from pass to pass of the published code."""
    errors = []
    for file in GOLDEN:
        golden = json.loads(file.read_text())
        block = golden["hyperparameters"]["block_size"]
        windows = []
        for entry in golden["trace"]:
            if not entry.get("forwards"):
                continue
            winner = next(b for b in entry["branches_in"] if b["branch_id"] == entry["winner"]["branch_id"])
            windows.append([end for _, end, state, *_ in winner["blocks"] if state != "in_cache"])
        if len(windows) < 10:  # the published d2f traces have no windows, and two cases end at once
            continue
        changed = sum(a != b for a, b in pairwise(windows)) / (len(windows) - 1)
        tpf = golden["reported_tokens"] / len(windows)
        assert changed <= 2 * tpf / block
        errors.append(step.lengths_written(tpf, block) - changed)
    assert len(errors) == 15
    assert -0.04 < min(errors) < max(errors) < 0.14


def test_collectives_of_a_step(dream: ModelConfig, die: Device):
    work = Workload(tp=4, bp=4, k=3, window=32)
    dearer = replace(die, collective_s=die.collective_s + 1e-3)
    more = predict_on(dream, dearer, work).collectives - predict_on(dream, die, work).collectives
    assert more == pytest.approx((56 + 1) * 1e-3)  # 56 sums and a merge of scores; the exchange is never fast
    assert predict_on(dream, die, replace(work, tp=1, bp=1)).collectives == 0


def test_sums_above_a_mebibyte_a_rank_leave_the_vector_cores(dream: ModelConfig, die: Device):
    """585 tokens of Dream-7B on four ranks: more than eight sequences of two blocks."""
    eight, sixteen = (Workload(tp=4, bp=4, window=64, requests=n) for n in (8, 16))
    limit = 4 * die.sum_limit_bytes
    assert all_reduce_bytes(dream, eight) <= limit < all_reduce_bytes(dream, sixteen)
    jump = collective_seconds(die, 4, limit + 1, "sum") - collective_seconds(die, 4, limit, "sum")
    assert jump == pytest.approx(die.slow_collective_s - die.collective_s, rel=0.01)
    times = [predict_on(dream, die, work).step for work in (eight, sixteen)]
    assert times[0] < times[1] / 2


def test_the_range_holds_what_others_have_measured(dream: ModelConfig):
    """All-reduces in captured graphs of 8 ranks (A3); and what a second reading of the sources expects of the step."""
    dies = load_device("910c")
    for mebibytes, micros in ((3.75, 77.6), (7.5, 143), (8.75, 251), (15, 255), (20, 307)):
        low, high = (1e6 * collective_seconds(device, 8, mebibytes * 2**20, "sum") for device in dies)
        assert 0.9 * low <= micros <= 1.1 * high
    one = predict(dream, dies, Workload(tp=4, bp=4, window=64, context=512))
    assert 5.5e-3 < one["low"].step < 7.1e-3 < one["high"].step < 9.5e-3


@pytest.mark.parametrize("end", step.ENDS)
@pytest.mark.parametrize("precision", ["bf16", "w8a8"])
def test_more_dies_never_raise_the_terms_that_they_share(dream: ModelConfig, precision: str, end: str):
    previous = None
    for tp in dream.tensor_parallel_sizes():
        found = predict(dream, load_device("910c"), Workload(tp=tp, precision=precision))[end]
        if previous is not None:
            assert found.products <= previous.products
            assert found.attention <= previous.attention
        previous = found
    rows = [Workload(bp=bp, k=7).rows for bp in range(1, 9)]
    assert rows == [8, 4, 3, 2, 2, 2, 2, 1]


def test_more_work_never_takes_less_time(dream: ModelConfig, die: Device):
    base, numbers = Workload(tp=4, bp=2), (1, 2, 5, 16, 64)
    for works in (
        [replace(base, window=n) for n in numbers],
        [replace(base, context=n) for n in numbers],
        [replace(base, requests=n) for n in numbers],
        [replace(base, k=n) for n in numbers],
    ):
        times = [predict_on(dream, die, work).device for work in works]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Workload(tp=3), "1, 2, 4"),
        (Workload(precision="int4"), "w8a8"),
    ],
)
def test_what_a_model_cannot_do_is_refused(dream: ModelConfig, die: Device, work: Workload, expected: str):
    with pytest.raises(ValueError, match=expected):
        predict_on(dream, die, work)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_tokens_per_forward_are_interpolated_and_not_extrapolated():
    known = {0: 3.0, 3: 7.0}
    assert [tokens_per_forward(known, k) for k in (0, 1, 3)] == [3.0, 5.0, 7.0]
    with pytest.raises(ValueError, match="0:3, 3:7"):
        tokens_per_forward(known, 4)


def test_memory_of_a_die_is_a_limit(dream: ModelConfig, dies: Range):
    fits = plan(dream, dies, Workload(), 3.0)
    assert tasks.memory_bytes(dream, fits.work) == (
        14_140_571_648 + 2 * 544_997_376 + (1024 + 4 * 128) * 57_344
    )  # weights, embedding, cached positions and the windows of four rows
    with pytest.raises(ValueError, match="GiB"):
        plan(dream, dies, Workload(context=2_000_000), 3.0)
    assert plan(dream, dies, Workload(context=2_000_000, tp=4), 3.0)


def test_dies_beyond_one_replica_make_replicas(dream: ModelConfig, dies: Range):
    one = plan(dream, dies, Workload(tp=2, requests=4), 3.0, 2)
    two = plan(dream, dies, Workload(tp=2, requests=4), 3.0, 4)
    assert (one.replicas, two.replicas, two.work.requests) == (1, 2, 2)
    assert two.middle > one.middle
    with pytest.raises(ValueError, match="needs 8 dies, there are 4"):
        plan(dream, dies, Workload(tp=4, bp=2), 3.0, 4)


def test_the_best_plan_is_the_best_of_all(dream: ModelConfig, dies: Range):
    known, work = {0: 3.1, 14: 10.1}, Workload(precision="w8a8")
    plans = all_plans(dream, dies, work, known, 16, {})
    assert {(p.work.tp, p.work.bp) for p in plans} >= {(1, 1), (4, 4), (1, 15), (2, 8)}
    assert all(p.work.tp * p.work.bp <= 16 and p.work.bp <= p.work.k + 1 for p in plans)
    best = best_plan(plans)
    assert best.middle == max(p.middle for p in plans)


@pytest.mark.parametrize("given", [{"tp": 4}, {"bp": 4}, {"tp": 2, "bp": 3}])
def test_given_sizes_are_kept_and_the_others_searched(dream: ModelConfig, dies: Range, given: dict[str, int]):
    known, work = {0: 3.1, 14: 10.1}, Workload()
    plans = all_plans(dream, dies, work, known, 16, given)
    everything = all_plans(dream, dies, work, known, 16, {})
    assert plans == [p for p in everything if all(getattr(p.work, name) == size for name, size in given.items())]


def test_more_dies_never_make_the_best_plan_slower(dream: ModelConfig, dies: Range):
    known = {0: 3.1, 14: 10.1}
    speeds = [best_plan(all_plans(dream, dies, Workload(), known, n, {})).middle for n in (1, 2, 4, 8, 16)]
    assert speeds == sorted(speeds)


def test_experts_are_held_whole_and_read_as_tokens_take_them():
    mini = load_model("LLaDA2.0-mini")
    attention, shared = (16 + 2 * 4) * 128 * 2048 + 2048 * 16 * 128, 3 * 512 * 2048
    of_experts, router = 256 * 3 * 512 * 2048, 256 * 2048
    assert tasks.weight_bytes(mini, "bf16") == (
        2 * (20 * attention + 3 * 5120 * 2048 + 19 * (shared + of_experts)) + 19 * 4 * router,
        2 * 157_184 * 2048,
    )
    held = tasks.memory_bytes(mini, Workload(k=0, window=32, context=0)) - 32 * 2 * 20 * 4 * 128 * 2
    assert held == pytest.approx(32.5e9, rel=0.01)
    assert sum(tasks.weight_bytes(mini, "w8a8", 4)) * 4 == pytest.approx(17e9, rel=0.03)

    def read(tokens: int) -> float:
        found = tasks.step_tasks(mini, Workload(k=0, window=tokens, context=0))
        return sum(task.bytes * task.times for task in found if task.kind == "product")

    assert read(1) == pytest.approx(
        2 * (20 * attention + 3 * 5120 * 2048 + 19 * (shared + of_experts * 8 / 256)) + 19 * 4 * router, rel=0.01
    )
    assert 19 * 2 * of_experts * 0.6 < read(32) - read(1) < 19 * 2 * of_experts * 0.64
