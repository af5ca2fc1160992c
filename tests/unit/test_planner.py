"""The planner: its terms against cases computed by hand, what must grow or shrink, and the best plan."""

from dataclasses import fields, replace

import pytest

from lopa_ascend.config import ModelConfig
from lopa_ascend.demo import DEMO_MODEL
from scripts.bench.plan import step
from scripts.bench.plan.devices import Device, load_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.search import all_plans, best_plan, plan, tokens_per_forward
from scripts.bench.plan.step import Workload, collective_seconds, predict


@pytest.fixture(scope="module")
def dream() -> ModelConfig:
    return load_model("Dream-7B")


@pytest.fixture(scope="module")
def die() -> Device:
    return load_device("910c")


UNIT = Device(
    **{f.name: 0.0 for f in fields(Device)}
    | dict.fromkeys(
        ["bf16_flops", "int8_flops", "fp32_flops", "memory_bandwidth", "memory_bytes", "compute_efficiency"], 1.0
    )
    | {"memory_efficiency": 1.0, "link_bandwidth": 1.0, "link_efficiency": 1.0}
)
"""A device that moves one byte and computes one operation a second, for nothing besides."""


# ---- counts of Dream-7B, by hand -------------------------------------------------------------------------------------


def test_weights_of_dream_7b(dream: ModelConfig):
    # qkv 3584 x (3584 + 2 x 512), o 3584 x 3584, gate and up and down 3 x 3584 x 18944
    assert step.layer_parameters(dream) == 16_515_072 + 12_845_056 + 203_685_888 == 233_046_016
    assert step.head_parameters(dream) == 152_064 * 3584 == 544_997_376
    assert step.weight_bytes(dream, "bf16") == (2 * 28 * 233_046_016, 2 * 544_997_376)
    assert sum(step.weight_bytes(dream, "bf16")) == 14_140_571_648


def test_weights_of_a_rank_of_four(dream: ModelConfig):
    # 7 query heads, 1 KV head, a quarter of the MLP: exactly a quarter, because 4 KV heads split over 4 ranks
    assert step.layer_parameters(dream, 4) == 233_046_016 // 4
    assert step.head_parameters(dream, 4) == 38_016 * 3584
    assert dream.tensor_parallel_sizes() == (1, 2, 4)
    demo = load_model(str(DEMO_MODEL))  # 4 query heads and 2 KV heads of 48: each of 4 ranks has one KV head
    assert step.layer_parameters(demo, 4) == 192 * 48 * (1 + 2) + 48 * 192 + 3 * 192 * 256
    assert step.kv_bytes_per_position(demo, "fp32", 4) == 2 * 12 * 48 * 4


def test_w8a8_halves_the_layers_and_leaves_the_head(dream: ModelConfig):
    layers, head = step.weight_bytes(dream, "w8a8")
    channels = 3584 + 2 * 512 + 3584 + 2 * 18_944 + 3584  # outputs of qkv, o, gate and up, down
    assert layers == 28 * (233_046_016 + 4 * channels)
    assert head == 2 * 544_997_376


def test_keys_and_values(dream: ModelConfig):
    assert step.kv_bytes_per_position(dream, "bf16") == 2 * 28 * 4 * 128 * 2 == 57_344
    assert step.kv_bytes_per_position(dream, "bf16", 4) == 14_336
    # 4 branches on 2 groups: 2 rows, each writes 64 positions and reads 1000 + 64
    work = Workload(tp=4, bp=2, k=3, window=64, context=1000)
    assert (work.rows, work.tokens) == (2, 128)
    assert step.kv_bytes(dream, work) == 14_336 * 2 * (1000 + 64 + 64)


def test_attention_sees_context_and_window(dream: ModelConfig):
    work = Workload(k=0, window=32, context=968)
    assert step.attention_flops(dream, work) == 28 * 2 * (2 * 32 * 1000 * 3584)


def test_all_reduce(dream: ModelConfig):
    # 32 tokens of 3584 numbers in bfloat16: 229 KB, as in the fact sheet of the 910C
    assert step.all_reduce_bytes(dream, Workload(tp=4, k=0, window=32)) == 229_376
    assert step.all_reduce_bytes(dream, Workload(tp=4, k=0, window=32, precision="fp32")) == 458_752


def test_an_all_reduce_of_four_dies_by_hand(die: Device):
    # ring: 6 rounds of 0.5 us, and 6/4 of the bytes over 0.7 x 196 GB/s; tree: 4 rounds, and twice the bytes
    ring, tree = 6 * 0.5e-6 + 1.5 * 229_376 / 137.2e9, 4 * 0.5e-6 + 2 * 229_376 / 137.2e9
    assert tree == pytest.approx(5.34e-6, rel=0.01)
    assert ring == pytest.approx(5.51e-6, rel=0.01)
    assert collective_seconds(die, 4, 229_376, "optimistic", reduce=True) == pytest.approx(10e-6 + tree)
    assert collective_seconds(die, 4, 229_376, "pessimistic", reduce=True) == pytest.approx(120e-6 + tree)
    assert collective_seconds(die, 4, 64 * 2**20, "optimistic", reduce=True) == pytest.approx(
        10e-6 + 3e-6 + 1.5 * 64 * 2**20 / 137.2e9
    )
    assert collective_seconds(die, 1, 229_376, "pessimistic", reduce=True) == 0


def test_a_gather_sends_half_of_what_a_sum_sends(die: Device):
    link = die.reachable_link
    gathered = collective_seconds(die, 8, 1e6, "optimistic", reduce=False) - die.collective_s
    assert gathered == pytest.approx(min(7 * (0.5e-6 + 1e6 / 8 / link), 3 * 0.5e-6 + 1e6 / link))


# ---- a step ----------------------------------------------------------------------------------------------------------


def test_terms_are_counts_over_rates(dream: ModelConfig):
    work = Workload(k=1, window=1, context=9, requests=2)
    found = predict(dream, UNIT, work)
    assert found.weights == sum(step.weight_bytes(dream, "bf16"))
    logits = 8 * 4 * 152_064
    assert found.kv == 57_344 * 4 * (9 + 2) + logits
    parameters = 28 * 233_046_016 + 544_997_376
    assert found.flops == 2 * 4 * parameters + 4 * 28 * 4 * 10 * 3584
    # Linear layers and head: 8 operations a weight against 2 bytes. Attention: more bytes than operations.
    assert found.device == 8 * parameters + 4 * 28 * 4 * 10 * 3584 + logits
    assert (found.launches, found.host, found.collectives, found.bound_by) == (0, 0, 0, "flops")
    assert found.step == found.device


def test_launches_and_host_of_a_die(dream: ModelConfig, die: Device):
    found = predict(dream, die, Workload(requests=2))
    assert found.launches == pytest.approx(28 * (5 * 5e-6 + 6 * 2e-6) + 116 * 2e-6)
    assert found.host == pytest.approx(0.7e-3 + 0.75e-3 + 28 * 184e-6 + 2 * 0.4e-3)
    quantised = predict(dream, die, Workload(requests=2, precision="w8a8"))
    assert quantised.launches - found.launches == pytest.approx(28 * 2e-6)


def test_a_host_that_does_not_work_ahead_adds_its_time(dream: ModelConfig, die: Device):
    ahead = predict(dream, die, Workload())
    after = predict(dream, replace(die, host_overlaps=0.0), Workload())
    assert ahead.step == max(ahead.device, ahead.host)
    assert after.step == after.device + after.host
    assert predict(dream, replace(die, host_layer_s=1.0), Workload()).bound_by == "host"


def test_collectives_of_a_step(dream: ModelConfig, die: Device):
    work = Workload(tp=4, bp=4, k=3, window=32)
    slow, fast = (predict(dream, die, work, case).collectives for case in ("pessimistic", "optimistic"))
    assert slow - fast == pytest.approx((56 + 1 + 1) * 110e-6)  # 56 sums, one merge of scores, one exchange
    alone = predict(dream, die, replace(work, tp=1, bp=1), "pessimistic")
    assert alone.collectives == 0


@pytest.mark.parametrize("case", step.COLLECTIVES)
@pytest.mark.parametrize("precision", ["bf16", "w8a8"])
def test_more_dies_never_raise_the_terms_that_they_share(dream: ModelConfig, die: Device, precision: str, case: str):
    previous = None
    for tp in dream.tensor_parallel_sizes():
        found = predict(dream, die, Workload(tp=tp, precision=precision), case)
        if previous is not None:
            assert found.weights <= previous.weights
            assert found.flops <= previous.flops
            assert found.kv <= previous.kv
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
        times = [predict(dream, die, work).device for work in works]
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
        predict(dream, die, work)
    with pytest.raises(ValueError, match="pessimistic"):
        predict(dream, die, Workload(), "usual")


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_tokens_per_forward_are_interpolated_and_not_extrapolated():
    known = {0: 3.0, 3: 7.0}
    assert [tokens_per_forward(known, k) for k in (0, 1, 3)] == [3.0, 5.0, 7.0]
    with pytest.raises(ValueError, match="0:3, 3:7"):
        tokens_per_forward(known, 4)


def test_memory_of_a_die_is_a_limit(dream: ModelConfig, die: Device):
    fits = plan(dream, die, Workload(), 3.0)
    assert step.memory_bytes(dream, fits.work) == (
        14_140_571_648 + 2 * 544_997_376 + (1024 + 4 * 128) * 57_344
    )  # weights, embedding, cached positions and the windows of four rows
    with pytest.raises(ValueError, match="GiB"):
        plan(dream, die, Workload(context=2_000_000), 3.0)
    assert plan(dream, die, Workload(context=2_000_000, tp=4), 3.0)


def test_dies_beyond_one_replica_make_replicas(dream: ModelConfig, die: Device):
    one = plan(dream, die, Workload(tp=2, requests=4), 3.0, 2)
    two = plan(dream, die, Workload(tp=2, requests=4), 3.0, 4)
    assert (one.replicas, two.replicas, two.work.requests) == (1, 2, 2)
    assert two.tokens_per_second("optimistic") > one.tokens_per_second("optimistic")
    with pytest.raises(ValueError, match="needs 8 dies, there are 4"):
        plan(dream, die, Workload(tp=4, bp=2), 3.0, 4)


@pytest.mark.parametrize("case", step.COLLECTIVES)
def test_the_best_plan_is_the_best_of_all(dream: ModelConfig, die: Device, case: str):
    known, work = {0: 3.1, 14: 10.1}, Workload(precision="w8a8")
    plans = list(all_plans(dream, die, work, known, 16))
    assert {(p.work.tp, p.work.bp) for p in plans} >= {(1, 1), (4, 4), (1, 15), (2, 8)}
    assert all(p.work.tp * p.work.bp <= 16 and p.work.bp <= p.work.k + 1 for p in plans)
    best = best_plan(dream, die, work, known, 16, case)
    assert best.tokens_per_second(case) == max(p.tokens_per_second(case) for p in plans)


@pytest.mark.parametrize("given", [{"tp": 4}, {"bp": 4}, {"tp": 2, "bp": 3}])
def test_given_sizes_are_kept_and_the_others_searched(dream: ModelConfig, die: Device, given: dict[str, int]):
    known, work = {0: 3.1, 14: 10.1}, Workload()
    plans = list(all_plans(dream, die, work, known, 16, given))
    everything = list(all_plans(dream, die, work, known, 16))
    assert plans == [p for p in everything if all(getattr(p.work, name) == size for name, size in given.items())]
    best = best_plan(dream, die, work, known, 16, given=given)
    assert best.tokens_per_second("optimistic") == max(p.tokens_per_second("optimistic") for p in plans)


def test_more_dies_never_make_the_best_plan_slower(dream: ModelConfig, die: Device):
    known = {0: 3.1, 14: 10.1}
    speeds = [best_plan(dream, die, Workload(), known, n).tokens_per_second("optimistic") for n in (1, 2, 4, 8, 16)]
    assert speeds == sorted(speeds)
