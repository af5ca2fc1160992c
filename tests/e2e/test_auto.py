"""``num_branches`` "auto" in the engine: which tokens depend on other requests, and which do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lopa_ascend import DecodingParams
from lopa_ascend.config import EngineConfig
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
            block_size=rng.choice([4, 8, 16]),
            max_new_tokens=rng.choice([20, 40]),
            tau_conf=rng.choice([0.3, 0.6]),
            window_attention=rng.choice(["block_causal", "full"]),
            **fields,
        )
        asked.append(([rng.randrange(4, 200) for _ in range(rng.choice([1, 20, 127]))], params))
    return asked


def engine(path: str) -> Engine:
    return Engine(EngineConfig(model=path, enable_prefix_caching=False, max_num_batched_tokens=2048))


def test_exact_tokens_are_those_of_d2f_at_any_load(path: str) -> None:
    asked = auto_requests(1, 8, branch_acceptance="exact")
    d2f = [
        (prompt, params.changed(decoding="d2f", num_branches=0, branch_acceptance="published"))
        for prompt, params in asked
    ]
    plain = engine(path)
    expected = [run(plain, [one])[0] for one in d2f]
    loaded = engine(path)
    alone = [run(loaded, [one])[0] for one in asked]
    together = run(loaded, asked)
    for outputs in (alone, together, run(loaded, asked, arrivals=[0, 0, 3, 3, 5, 6, 6, 9])):
        assert [(o.token_ids, o.max_probs) for o in outputs] == [(o.token_ids, o.max_probs) for o in expected]
    rows = [sum(len(record.branches) for o in outputs for record in o.trace or ()) for outputs in (alone, together)]
    assert rows[0] > 1.2 * rows[1]
    assert sum(o.num_forwards for o in alone) < sum(o.num_forwards for o in expected)
    assert not loaded.stats().pages_in_use


@pytest.mark.parametrize(("count", "has_drafts"), [(2, True), (3, False)])
def test_drafts_are_made_while_at_most_two_requests_run(path: str, count: int, has_drafts: bool) -> None:
    params = DecodingParams(
        num_branches="auto",
        branch_acceptance="verified",
        block_size=8,
        max_new_tokens=24,
        tau_conf=0.9,
        ignore_eos=True,
    )
    outputs = run(engine(path), [([5, 6, 7], params)] * count)
    # The first pass computes the prompt, and equal requests end together.
    branches = {len(record.branches) for output in outputs for record in (output.trace or ())[1:-1]}
    assert (max(branches), min(branches) > 1) == ((4, True) if has_drafts else (1, False))


def test_a_published_request_does_not_notice_its_neighbours(path: str) -> None:
    own_state = auto_requests(2, 5)
    whole = [params.changed(base="parallel", window_attention="full") for _, params in auto_requests(3, 3)]
    own_state += [([5, 6, 7], params) for params in whole]
    by_load = auto_requests(4, 4, branch_acceptance="verified")
    alone = [decisions(run(engine(path), [one])[0]) for one in own_state]
    together = run(engine(path), [*by_load, *own_state, *batching.requests(0, 4)])
    assert [decisions(output) for output in together[len(by_load) : len(by_load) + len(own_state)]] == alone
    branches = {len(record.branches) for output in together[len(by_load) :][:5] for record in output.trace or ()}
    assert {1, 4} <= branches
