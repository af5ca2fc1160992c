"""Confirmed lookahead branches in decode steps as graphs: what they give is what eager steps give. Here a graph is the
step as it is, not compiled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lopa_ascend import DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import setup
from lopa_ascend.types import GenerationOutput
from tests.e2e.batching import one_at_a_time, run
from tests.e2e.test_batching import requests
from tests.tiers import slow_but
from tests.tiny import write_dream

Asked = tuple[list[int], DecodingParams]
PLAIN: dict[str, Any] = {
    "temperature": 0.0,
    "confidence": "max_prob",
    "branch_score": "mean",
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
    "min_p": 0.0,
}
FIELDS: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5, "ignore_eos": True, "num_branches": 5}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dream(tmp_path_factory.mktemp("model"), eos_token_id=3))


def engine(path: str, **changes: Any) -> Engine:
    options = {"graph_mode": "inductor", "dtype": "float32", "kv_cache_memory": 2**25}
    options |= {"max_model_len": 512, "max_num_seqs": 4, "enable_prefix_caching": False}
    return Engine(EngineConfig(model=path, **{**options, **changes}))


def compiled_for(branch_acceptance: str, window_attention: str = "block_causal") -> GraphParams:
    return GraphParams(num_branches=5, window_attention=window_attention, branch_acceptance=branch_acceptance)


def shown(output: GenerationOutput) -> object:
    """Tokens and decisions; probabilities may differ in their last bits."""
    winners = [record.winner for record in output.trace or ()]
    return output.token_ids, output.finish_reason, output.num_forwards, output.num_positions, winners


def num_wins(outputs: list[GenerationOutput]) -> int:
    """Passes that a lookahead branch has won."""
    return sum(record.winner < len(record.branches) - 1 for output in outputs for record in output.trace or ())


def mixed(seed: int, window_attention: str, branch_acceptance: str) -> list[Asked]:
    """Requests of which most are for graphs that are compiled for ``branch_acceptance``."""
    rng = random.Random(seed)
    kind = {"window_attention": window_attention, "branch_acceptance": branch_acceptance}
    asked = []
    for prompt, params in requests(seed, 12):
        changes = PLAIN | kind | {"tau_conf": rng.choice([0.2, 0.3, 0.6])} if rng.random() < 0.8 else {}
        asked.append((prompt, replace(params, **changes)))
    return asked


def cases() -> list[tuple[int, bool, str, str]]:
    kinds = [(False, "full"), (True, "block_causal"), (False, "block_causal")]
    return [(seed, *kind, name) for seed, kind in enumerate(kinds) for name in ("verified", "exact")]


@pytest.mark.parametrize(
    ("seed", "ahead", "window_attention", "branch_acceptance"),
    slow_but(cases(), [case for case in cases() if case[0] < 2 and (case[0] == 0) == (case[3] == "exact")]),
)
def test_requests_of_all_kinds_get_what_the_eager_engine_gives(
    path: str, seed: int, ahead: bool, window_attention: str, branch_acceptance: str
) -> None:
    asked = mixed(seed, window_attention, branch_acceptance)
    arrivals = [random.Random(seed).randrange(12) for _ in asked]
    compiled = compiled_for(branch_acceptance, window_attention)
    served = engine(path, graph_window_blocks=4, graph_params=compiled)
    if not ahead:
        one_at_a_time(served)
    outputs = run(served, asked, arrivals)
    expected = run(engine(path, graph_mode="eager"), asked, arrivals)
    assert [shown(output) for output in outputs] == [shown(output) for output in expected]
    confirmed = [o for o, (_, params) in zip(outputs, asked, strict=True) if params.branch_acceptance != "published"]
    assert num_wins(confirmed) > 5
    stats = served.stats()
    assert not stats.pages_in_use
    assert stats.graphs is not None
    assert stats.graphs.num_steps > sum(stats.graphs.eager_steps.values())
    assert set(stats.graphs.eager_steps) <= {
        "branch_acceptance", "graph_window_blocks", "window_attention", "confidence", "branch_score",
        "temperature", "presence_penalty", "repetition_penalty", "logit_bias", "min_p",
    }  # fmt: skip


def test_what_graphs_of_another_kind_decode_runs_eagerly_and_is_counted(path: str) -> None:
    asked = DecodingParams(**FIELDS, branch_acceptance="exact")
    changes: dict[str, dict[str, Any]] = {
        "branch_acceptance": {"branch_acceptance": "verified"},
        "lookahead_depth": {"lookahead_depth": 2},
        "tau_add": {"tau_add": 0.0},
        "num_branches": {"num_branches": 6},
    }
    served = one_at_a_time(engine(path, graph_params=compiled_for("exact")))
    eager = run(served, [([5, 3, 8], replace(asked, **change)) for change in changes.values()])
    published = run(served, [([5, 3, 8], DecodingParams(**FIELDS))])
    stats = served.stats().graphs
    assert stats is not None
    assert not stats.num_steps
    # The first pass of each computes the prompt.
    counted = {name: output.num_forwards - 1 for name, output in zip(changes, eager, strict=True)}
    counted["branch_acceptance"] += published[0].num_forwards - 1
    assert stats.eager_steps == counted


@pytest.mark.parametrize("branch_acceptance", ["published", "verified", "exact"])
def test_d2f_has_no_branches_to_accept_and_runs_in_graphs_of_every_kind(path: str, branch_acceptance: str) -> None:
    served = one_at_a_time(engine(path, graph_params=compiled_for(branch_acceptance)))
    params = DecodingParams(**FIELDS | {"num_branches": 0}, decoding="d2f")
    asked = [([5, 3, 8], params), ([5, 3, 8], params.changed(decoding="lopa", branch_acceptance="exact"))]
    d2f, exact = run(served, asked)
    stats = served.stats().graphs
    assert stats is not None
    assert (bool(stats.num_steps), stats.eager_steps) == (True, {})
    assert exact.token_ids == d2f.token_ids


@pytest.mark.parametrize("room", slow_but([2, 5], [5]))
def test_exact_with_auto_has_as_many_branches_as_graphs_have_room_for(path: str, room: int) -> None:
    auto = DecodingParams(**FIELDS | {"num_branches": "auto"}, branch_acceptance="exact")
    fixed = replace(auto, num_branches=min(3, room))
    served = engine(path, graph_params=replace(compiled_for("exact"), num_branches=room))
    d2f = fixed.changed(decoding="d2f", num_branches=0, branch_acceptance="published")
    outputs = run(served, [([5, 3, 8], auto), ([5, 3, 8], fixed), ([5, 3, 8], d2f)])
    assert shown(outputs[0]) == shown(outputs[1])
    assert outputs[0].token_ids == outputs[2].token_ids
    assert outputs[0].num_forwards < outputs[2].num_forwards
    stats = served.stats().graphs
    assert stats is not None
    assert (bool(stats.num_steps), stats.eager_steps) == (True, {})


def test_auto_runs_eagerly_where_its_tokens_depend_on_the_number_of_branches(path: str) -> None:
    verified = DecodingParams(**FIELDS | {"num_branches": "auto"}, branch_acceptance="verified")
    sampled = verified.changed(branch_acceptance="exact", repetition_penalty=1.5)
    for params, reason in ((verified, "num_branches"), (sampled, "repetition_penalty")):
        served = engine(path, graph_params=compiled_for(params.branch_acceptance))
        run(served, [([5, 3, 8], params)])
        stats = served.stats().graphs
        assert stats is not None
        assert (stats.num_steps, list(stats.eager_steps)) == (0, [reason])
