"""Decode steps as graphs: what they give is what eager steps give. Here a graph is the step as it is, not compiled."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from examples.near_first.near_first import NearFirst
from lopa_ascend import LLM, DecodingParams, register_decoding
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig, GraphParams, ParameterError, decodings
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import executor as graph_executor
from lopa_ascend.graph import setup
from lopa_ascend.graph.tensors import view_output
from lopa_ascend.types import DREAM, Update
from tests import golden
from tests.e2e.batching import one_at_a_time, run
from tests.e2e.test_batching import requests
from tests.tiers import slow_but
from tests.tiny import VOCAB_SIZE, write_dream

EOS = 3
OPTIONS = {"graph_mode": "inductor", "dtype": "float32", "graph_params": GraphParams(num_branches=5)}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_dream(tmp_path_factory.mktemp("model"), eos_token_id=EOS, hidden=64, heads=4, kv_heads=2))


def engine(path: str | None, **changes) -> Engine:
    options = {"model": path, "max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory": 2**25, **OPTIONS, **changes}
    return Engine(EngineConfig(**options))


def mixed(seed: int, count: int, window_attention: str, confidence: str):
    """Requests of which most are for graphs."""
    plain: dict[str, Any] = {
        "temperature": 0.0,
        "window_attention": window_attention,
        "confidence": confidence,
        "branch_score": "mean",
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "min_p": 0.0,
    }
    rng = random.Random(seed)
    asked = [(p, params if rng.random() < 0.2 else replace(params, **plain)) for p, params in requests(seed, count)]
    return asked, [rng.randrange(12) for _ in asked]


def free_seats(served: Engine) -> int:
    assert served.runner.graphs is not None
    return served.runner.graphs.seats.num_free


def shown(output):
    return output.token_ids, output.finish_reason, output.num_forwards, output.num_positions


CASES = {case: golden.decoding_params(golden.read(case)) for case in golden.CASES if case != golden.MASK_CHOSEN}
LATE = [case for case, params in CASES.items() if params.window_attention == "block_causal"]


@pytest.mark.parametrize(("case", "ahead"), [*((case, False) for case in CASES), *((case, True) for case in LATE)])
def test_golden_case(case: str, ahead: bool) -> None:
    trace, params = golden.read(case), CASES[case]
    compiled = GraphParams(params.lookaheads, window_attention=params.window_attention, confidence=params.confidence)
    options = OPTIONS | {"graph_params": compiled}
    llm = LLM(str(golden.model_path(trace)), enable_prefix_caching=False, max_num_seqs=2, **options)
    if not ahead:
        one_at_a_time(llm.engine)
    output = llm.generate([trace["prompt_ids"]], params, trace=True, quiet=True)[0]
    expected = golden.rounds(trace)
    assert list(output.token_ids) == trace["output_ids"]
    stats, later = llm.engine.stats().graphs, output.num_forwards - 1  # the first pass computes the prompt
    if case == golden.NO_GRAPH:
        assert (stats.num_steps, stats.eager_steps) == (0, {"branch_score": later})
    else:
        assert (stats.num_steps, stats.eager_steps) == (later + ahead, {})
    assert [record.winner for record in output.trace] == [record["winner"] for record in expected]
    assert [[(f.position, f.token) for f in r.fills] for r in output.trace] == [r["fills"] for r in expected]


def test_what_accepts_otherwise_runs_eagerly_and_is_counted(path: str) -> None:
    llm = LLM(path, max_num_seqs=2, enable_prefix_caching=False, **OPTIONS)
    one_at_a_time(llm.engine)
    params = DecodingParams(block_size=8, max_new_tokens=32, tau_conf=0.5, ignore_eos=True, num_branches=5)
    changes: list[dict[str, Any]]
    changes = [{"acceptance": "factor"}, {"branch_acceptance": "exact"}, {"decoding": "d2f", "num_branches": 0}]
    factor, exact, d2f = (llm.generate([[5, 3, 8]], replace(params, **c), quiet=True)[0] for c in changes)
    assert exact.token_ids == d2f.token_ids
    stats = llm.engine.stats().graphs
    # The first pass of each computes the prompt.
    assert stats.eager_steps == {"acceptance": factor.num_forwards - 1, "branch_acceptance": exact.num_forwards - 1}
    assert stats.num_steps == d2f.num_forwards - 1


def test_what_only_decode_defines_runs_eagerly_and_is_counted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among requests that run in graphs, with the tokens of an eager engine."""
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding("near_first", NearFirst)
    plain = DecodingParams(block_size=8, max_new_tokens=32, tau_conf=0.5, ignore_eos=True, num_branches=5)
    changes: dict[str, list[dict[str, Any]]] = {
        "num_branches": [{"num_branches": "auto"}, {"num_branches": "auto", "branch_acceptance": "exact"}],
        "branch_score": [{"branch_score": "tail"}, {"branch_score": "window"}],
        "base": [{"base": "fast_dllm", "block_cache": "dual", "window_attention": "full"}],
        "decoding": [{"decoding": "near_first"}],
    }
    reasons = [reason for reason, kinds in changes.items() for _ in kinds]
    asked = [([5, 3, 8], replace(plain, **kind)) for kinds in changes.values() for kind in kinds]
    expected = run(engine(path, graph_mode="eager"), [*asked, ([5, 3, 8], plain)])
    served = one_at_a_time(engine(path, enable_prefix_caching=False))
    outputs = run(served, [*asked, ([5, 3, 8], plain)])
    exact = reasons.index("num_branches") + 1  # its passes depend on the load, its tokens do not
    for index, (output, eager) in enumerate(zip(outputs, expected, strict=True)):
        assert output.token_ids == eager.token_ids
        assert index == exact or shown(output) == shown(eager)
    stats = served.stats().graphs
    assert stats is not None
    counted: Counter[str] = Counter()
    for reason, output in zip(reasons, outputs, strict=False):
        counted[reason] += output.num_forwards - 1  # the first pass computes the prompt
    assert stats.eager_steps == counted
    assert stats.num_steps == outputs[-1].num_forwards - 1


def test_whole_canvases_run_eagerly_and_are_counted(path: str) -> None:
    fields: dict[str, Any] = {"block_size": 8, "max_new_tokens": 32, "tau_conf": 0.5, "ignore_eos": True}
    asked = [
        ([5, 3, 8], DecodingParams(decoding=decoding, **fields))
        for decoding in decodings.built_in_decodings()
        if decodings.variants_of(decoding)[0].fits(DREAM)
    ]
    asked.append(([5, 3, 8], DecodingParams(base="parallel", **fields)))
    expected = run(engine(path, graph_mode="eager"), asked)
    # Nor are graphs for full windows those of a whole canvas.
    for window in ("block_causal", "full"):
        served = engine(path, graph_params=GraphParams(num_branches=5, window_attention=window))
        outputs = run(served, asked)
        assert [shown(output) for output in outputs] == [shown(output) for output in expected]
        stats = served.stats().graphs
        assert stats is not None
        canvases = [o for o, (_, params) in zip(outputs, asked, strict=True) if not params.is_pipelined]
        # The first pass of each computes the prompt.
        *others, lopa = [output.num_forwards - 1 for output in canvases]
        assert (stats.eager_steps["decoding"], stats.eager_steps["base"]) == (sum(others), lopa)
        assert bool(stats.num_steps) == (window == "block_causal")


@pytest.mark.parametrize(
    ("seed", "ahead", "window_attention", "confidence"),
    slow_but(
        [
            (0, False, "block_causal", "max_prob"),
            (1, True, "block_causal", "max_prob"),
            (2, True, "block_causal", "neg_entropy"),
            (3, False, "full", "max_prob"),
            (4, False, "full", "margin"),
        ],
        [(1, True, "block_causal", "max_prob"), (4, False, "full", "margin")],
    ),
)
def test_requests_of_all_kinds_get_what_the_eager_engine_gives(
    path: str, seed: int, ahead: bool, window_attention: str, confidence: str
) -> None:
    asked, arrivals = mixed(seed, 12, window_attention, confidence)
    compiled = GraphParams(num_branches=5, window_attention=window_attention, confidence=confidence)
    served = engine(path, graph_window_blocks=4, graph_params=compiled)
    if not ahead:
        one_at_a_time(served)
    outputs = run(served, asked, arrivals)
    expected = run(engine(path, graph_mode="eager"), asked, arrivals)
    assert [shown(output) for output in outputs] == [shown(output) for output in expected]
    stats = served.stats()
    assert stats.pages_in_use == 0
    assert free_seats(served) == 4
    assert stats.graphs is not None
    assert stats.graphs.num_steps
    assert 0 < stats.graphs.padded_tokens < stats.graphs.tokens
    assert set(stats.graphs.eager_steps) <= {
        "temperature", "window_attention", "confidence", "branch_score", "graph_window_blocks", "min_p",
        "presence_penalty", "repetition_penalty", "logit_bias",
    }  # fmt: skip
    assert bool(stats.graphs.wasted_steps) == ahead


def test_a_window_that_outgrows_the_graphs_runs_eager_and_is_reported(path: str) -> None:
    params = DecodingParams(block_size=4, tau_conf=1.0, tau_add=0.0, max_new_tokens=48, ignore_eos=True)
    outputs = []
    for blocks in (2, 12):
        served = engine(path, graph_window_blocks=blocks, graph_params=GraphParams(num_branches=5, block_size=4))
        outputs += run(served, [([5, 6, 7], params)])
        assert bool(served.stats().graphs.eager_steps.get("graph_window_blocks")) == (blocks == 2)
    assert shown(outputs[0]) == shown(outputs[1])


def test_inputs_are_written_only_where_they_changed_and_for_each_request(path: str) -> None:
    """The second request differs from the first in nothing but parameters, and takes the same seat."""
    served, alone = engine(path), engine(path)
    slow = DecodingParams(max_new_tokens=32, ignore_eos=True, block_size=16, tau_conf=1.0)
    for params in (slow, replace(slow, tau_conf=0.0)):
        expected = run(alone, [([5, 6, 7], params)])[0]
        (output,) = run(served, [([5, 6, 7], params)])
        assert output.token_ids == expected.token_ids
        alone = engine(path)
    graphs = served.runner.graphs
    assert graphs is not None
    num_steps = graphs.stats().num_steps
    warm_up = len(graphs.launchers)
    assert 0 < graphs.inputs.num_written - warm_up < 0.7 * num_steps


def test_what_is_ended_in_flight_leaves_its_seat_and_nobody_notices(path: str) -> None:
    served = engine(path, max_num_seqs=2)
    params = DecodingParams(max_new_tokens=64, ignore_eos=True, block_size=8, tau_conf=1.0)
    for name in "abc":
        served.add(Request(name, (5, 6, 7), params))
    for _ in range(5):
        served.step()
    assert served.abort("a")
    tokens: dict[str, list[int]] = {"b": [], "c": []}
    for update in served.step():
        tokens[update.request_id] += update.token_ids
    while served.has_work():
        for update in served.step():
            tokens[update.request_id] += update.token_ids
            assert update.error is None
    assert len(tokens["c"]) == 64
    assert served.stats().pages_in_use == 0
    assert free_seats(served) == 2


def test_logits_that_are_not_finite_end_their_request_and_no_other(path: str, monkeypatch) -> None:
    params = DecodingParams(max_new_tokens=32, ignore_eos=True, block_size=8, tau_conf=1.0)
    alone = run(engine(path), [([5, 6, 7], params)])[0]
    served = engine(path)
    assert served.runner.graphs is not None
    served.add(Request("bad", (9, 9, 9, 9), params))
    served.add(Request("good", (5, 6, 7), params))
    ended: dict[str, Update] = {}
    tokens: list[int] = []
    steps = 0
    while served.has_work():
        for update in served.step():
            if update.request_id == "good":
                tokens += update.token_ids
            if update.finish_reason:
                ended[update.request_id] = update
        steps += 1
        if steps == 3:
            bad, seats = served.scheduler.running["bad"], served.runner.graphs.seats
            seats.storage.hidden[seats.hidden_row(bad, seats.of[bad].window_start)] = torch.nan
    assert "not finite" in str(ended["bad"].error)
    assert ended["good"].error is None
    assert tokens == list(alone.token_ids)


@pytest.mark.parametrize("falsified", ["winner", "token"])
def test_a_device_that_decides_otherwise_is_noticed(path: str, falsified: str, monkeypatch) -> None:
    """The host works out every decision of the device again; here it reads another one than the device sent."""
    params = DecodingParams(max_new_tokens=32, ignore_eos=True, block_size=8, tau_conf=1.0, tau_act=0.1)
    alone = run(engine(path), [([5, 6, 7], params)])[0]
    launches = 0

    def falsify(*message):
        nonlocal launches
        launches += 1
        output = original(*message)
        if launches != 3:
            return output
        bad = next(row for row, sequence in enumerate(seen[-1].sequences) if sequence.request_id == "bad")
        if falsified == "winner":
            return output._replace(winners=changed(output.winners, bad))
        filled = (output.tokens[bad] != VOCAB_SIZE - 1).nonzero()[0]  # a token, not a mask
        return output._replace(tokens=changed(output.tokens, (bad, int(filled))))

    def changed(x: torch.Tensor, where: Any) -> torch.Tensor:
        x = x.clone()
        x[where] ^= 1
        return x

    seen: list[Any] = []
    served = engine(path)
    graphs = served.runner.graphs
    assert graphs is not None
    collect = type(graphs).collect

    def collect_and_note(self, steps):
        results = []
        for step in steps:
            seen.append(step)
            results += collect(self, [step])
        return results

    original = view_output
    with monkeypatch.context() as patch:
        patch.setattr(graph_executor, "view_output", falsify)
        patch.setattr(type(graphs), "collect", collect_and_note)
        served.add(Request("bad", (9, 9, 9, 9), params))
        served.add(Request("good", (5, 6, 7), params))
        ended: dict[str, Update] = {}
        tokens: list[int] = []
        while served.has_work():
            for update in served.step():
                tokens += update.token_ids if update.request_id == "good" else ()
                if update.finish_reason:
                    ended[update.request_id] = update
    assert "the compiled step and the Python code in decode/ decided differently" in str(ended["bad"].error)
    assert ended["good"].error is None
    assert tokens == list(alone.token_ids)
    assert served.stats().pages_in_use == 0


@pytest.mark.parametrize("prompt", slow_but([50, 60, 64, 190], [60]))
def test_pages_are_there_for_the_block_that_a_step_in_flight_may_open(path: str, prompt: int) -> None:
    """A step that is launched ahead may open a block that the host does not know of, on a page of its own."""
    fields: dict[str, Any] = {"tau_add": 0.0, "tau_conf": 0.3, "max_new_tokens": 200, "ignore_eos": True}
    rng = random.Random(prompt)
    asked = [([rng.randrange(4, 300) for _ in range(prompt)], DecodingParams(num_branches=k, **fields)) for k in (0, 3)]
    eager = run(engine(path, graph_mode="eager"), asked)
    ahead = run(engine(path, graph_window_blocks=8), asked)
    assert [shown(output) for output in ahead] == [shown(output) for output in eager]


def test_full_windows_and_branch_parallelism_do_not_go_together_in_graph_mode(path: str) -> None:
    limits = replace(engine(path).limits, branch_parallel_size=2)
    with pytest.raises(ParameterError, match="window_attention.*branch_parallel_size 2.*inductor"):
        limits.check(3, DecodingParams(window_attention="full"))
    limits.check(3, DecodingParams())
    limits.check(3, DecodingParams(decoding="parallel"))  # commits nothing, so nothing would have to travel
