"""``num_branches`` "auto" in the engine: which tokens depend on other requests, and which do not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lopa_ascend import DecodingParams
from lopa_ascend.config import EngineConfig
from lopa_ascend.decode.allotment import Allotment, StepCosts
from lopa_ascend.engine.engine import Engine
from tests.e2e import test_batching as batching
from tests.e2e.batching import decisions, run
from tests.tiny import write_dream

Asked = tuple[list[int], DecodingParams]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dream(tmp_path_factory.mktemp("model"), eos_token_id=batching.EOS, hidden=64, heads=4, kv_heads=2))


def auto_requests(seed: int, count: int, **fields: Any) -> list[Asked]:
    rng = random.Random(seed)
    asked = []
    for _ in range(count):
        params = DecodingParams(
            num_branches="auto",
            max_auto_branches=rng.choice([3, 7]),
            block_size=rng.choice([4, 8, 16]),
            max_new_tokens=rng.choice([20, 40]),
            tau_conf=rng.choice([0.3, 0.6]),
            window_attention=rng.choice(["block_causal", "full"]),
            **fields,
        )
        asked.append(([rng.randrange(4, 200) for _ in range(rng.choice([1, 20, 127]))], params))
    return asked


def engine(path: str, costs: StepCosts | None = None) -> Engine:
    made = Engine(EngineConfig(model=path, enable_prefix_caching=False, max_num_batched_tokens=2048))
    if costs is not None:
        made.runner.allotment = Allotment(costs, 2048)
    return made


def test_exact_tokens_are_those_of_d2f_at_any_load(path: str) -> None:
    asked = auto_requests(1, 8, branch_acceptance="exact")
    d2f = [
        (p, replace(params, decoding="d2f", num_branches=0, branch_acceptance="published", branches_by_load=None))
        for p, params in asked
    ]
    plain = engine(path)
    expected = [run(plain, [one])[0] for one in d2f]
    costs = StepCosts([(1, 1.0), (200, 1.02), (2000, 10.0)])  # free for one request, dear for eight
    loaded = engine(path, costs)
    alone = [run(loaded, [one])[0] for one in asked]
    together = run(loaded, asked)
    for outputs in (alone, together, run(loaded, asked, arrivals=[0, 0, 3, 3, 5, 6, 6, 9])):
        assert [(o.token_ids, o.max_probs) for o in outputs] == [(o.token_ids, o.max_probs) for o in expected]
    rows = [sum(len(record.branches) for o in outputs for record in o.trace or ()) for outputs in (alone, together)]
    assert rows[0] > 1.2 * rows[1]
    assert sum(o.num_forwards for o in alone) < sum(o.num_forwards for o in expected)
    assert not loaded.stats().pages_in_use


def test_the_anchor_has_room_in_the_slot_of_a_branch_that_is_dropped(path: str) -> None:
    """A draft that ends the answer opens no block, so its row ends before the anchor's, here on an earlier page."""
    loaded = engine(path, StepCosts([(1, 1.0), (2000, 2000.0)]))  # no branch pays
    rng = random.Random(6)
    for index in range(5):
        params = DecodingParams(
            num_branches="auto",
            branch_acceptance=rng.choice(["exact", "verified"]),
            max_auto_branches=3,
            block_size=32,
            max_new_tokens=64,
            tau_conf=rng.choice([0.1, 0.2, 0.3]),
            eos_token_id=tuple(rng.sample(range(4, 300), 60)),
            window_attention=rng.choice(["block_causal", "full"]),
        )
        prompt = [rng.randrange(4, 200) for _ in range(rng.choice([80, 90, 96]))]
        (output,) = run(loaded, [(prompt, params)])
        assert output.finish_reason in ("stop", "length"), index
        assert {len(record.branches) for record in output.trace or ()} == {1}


def test_a_published_request_does_not_notice_its_neighbours(path: str) -> None:
    own_state = auto_requests(2, 5)
    whole = [replace(params, base="parallel", window_attention="full") for _, params in auto_requests(3, 3)]
    own_state += [([5, 6, 7], params) for params in whole]
    by_load = auto_requests(4, 4, branch_acceptance="verified") + auto_requests(5, 2, branches_by_load=True)
    costs = StepCosts([(1, 1.0), (300, 1.02), (2000, 10.0)])
    alone = [decisions(run(engine(path), [one])[0]) for one in own_state]
    together = run(engine(path, costs), [*by_load, *own_state, *batching.requests(0, 4)])
    assert [decisions(output) for output in together[len(by_load) : len(by_load) + len(own_state)]] == alone
    branches = {len(record.branches) for output in together[len(by_load) :][:5] for record in output.trace or ()}
    assert {1, 4} <= branches or {1, 8} <= branches


def test_the_device_is_measured_before_the_first_request_that_needs_it(path: str) -> None:
    made = engine(path)
    run(made, auto_requests(2, 1))
    assert made.runner.allotment is None
    (verified,) = run(made, auto_requests(6, 1, branch_acceptance="verified"))
    assert made.runner.allotment is not None
    points = made.runner.allotment.costs.points
    assert [tokens for tokens, _ in points[:3]] == [32, 64, 128]
    assert all(seconds > 0 for _, seconds in points)
    assert verified.finish_reason in ("stop", "length")


def test_the_device_is_measured_with_few_positions_too(path: str) -> None:
    made = Engine(EngineConfig(model=path, max_model_len=24))
    params = DecodingParams(num_branches="auto", branch_acceptance="verified", max_new_tokens=4)
    assert len(run(made, [([5], params)])[0].token_ids) == 4
    assert made.runner.allotment is not None
