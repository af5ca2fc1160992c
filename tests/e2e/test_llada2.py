"""LLaDA2 in the engine: branches beside editing, what is shown before a block is final, experts in graphs and in int8,
and a server."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend import LLM, DecodingParams, ParameterError
from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.types import GenerationOutput
from tests.e2e.batching import run
from tests.e2e.conftest import running
from tests.tiers import examples

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models" / "llada2"
MODELS = ("model_a", "model_b")
EDITING: dict[str, Any] = {"block_size": 8, "tau_add": 1.0, "tau_conf": 0.6, "editing_threshold": 0.2}
Asked = tuple[list[int], DecodingParams]


@cache
def engine(model: str, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(GOLDEN / model), kv_cache_memory=2**25, **options))


def edits(output: GenerationOutput) -> int:
    return sum(len(record.edits) for record in output.trace or ())


@settings(max_examples=examples(12))
@given(
    model=st.sampled_from(MODELS),
    prompt=st.lists(st.integers(0, 100), min_size=1, max_size=40),
    fields=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([4, 8]),
            "tau_conf": st.sampled_from([0.2, 0.5, 0.9]),
            "editing_threshold": st.sampled_from([0.0, 0.3, 0.7]),
            "max_post_steps": st.sampled_from([1, 3, 16]),
            "max_new_tokens": st.integers(1, 40),
            "ignore_eos": st.booleans(),
        }
    ),
    depth=st.sampled_from([1, 2]),
)
def test_exact_branches_give_the_tokens_of_the_base_with_editing(
    model: str, prompt: list[int], fields: dict[str, Any], depth: int
) -> None:
    own = {"tau_add": 1.0, **fields}
    base = DecodingParams(decoding="d2f", **own)
    exact = DecodingParams(num_branches=3, branch_acceptance="exact", lookahead_depth=depth, **own)
    expected, found = run(engine(model), [(prompt, base), (prompt, exact)])
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    assert found.num_forwards <= expected.num_forwards


@pytest.mark.parametrize("kind", ["published", "verified", "exact"])
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_branch_keeps_the_rules_of_editing(model: str, kind: str) -> None:
    """Replays the passes: fills go into masks, edits replace what is there, and a block that is final stays so."""
    prompt = [(7 * i) % 100 for i in range(13)]
    params = DecodingParams(
        num_branches=3,
        branch_acceptance=kind,
        max_new_tokens=50,
        max_post_steps=3,
        ignore_eos=True,
        **{**EDITING, "tau_conf": 0.9},
    )
    (output,) = run(engine(model), [(prompt, params)])
    canvas: dict[int, int] = {}
    num_changed, num_wins, checks = 0, 0, 0
    for record in output.trace or ():
        winner = record.branches[record.winner]
        num_wins += bool(winner.own_fills)
        for fill in winner.own_fills:
            assert canvas.setdefault(fill.position, fill.token) == fill.token
        for edit in record.edits:
            assert canvas[edit.position] == edit.replaced != edit.token
            assert edit.position // 8 == max(canvas) // 8  # the block that is open
            assert edit.max_prob > 0.2
            canvas[edit.position] = edit.token
        checks = checks + 1 if not winner.masks else 0
        assert checks <= params.max_post_steps
        num_changed += len(record.edits)
        for fill in record.fills:
            assert fill.position not in canvas
            canvas[fill.position] = fill.token
    assert num_changed
    assert num_wins or (model, kind) == ("model_b", "exact")  # every pass of it edits
    assert tuple(canvas[len(prompt) + i] for i in range(50)) == output.token_ids


def test_only_final_blocks_are_shown() -> None:
    """Tokens that were shown never change, although the same positions are edited before."""
    served = engine("model_a")
    params = DecodingParams(decoding="d2f", max_new_tokens=60, ignore_eos=True, **EDITING)
    served.add(Request("r", (5, 3, 8, 2, 9), params, trace=True))
    shown: list[int] = []
    lengths, num_edits = set(), 0
    while served.has_work():
        for update in served.step():
            shown += update.token_ids
            num_edits += len(update.record.edits) if update.record else 0
            lengths.add(len(shown))
    (output,) = run(served, [([5, 3, 8, 2, 9], params)])
    assert num_edits
    assert shown == list(output.token_ids)
    assert {length for length in lengths if 0 < length < 60} <= {3 + 8 * i for i in range(8)}


def test_banned_words_and_logprobs_hold_with_editing() -> None:
    prompt, rng = [5, 3, 8, 2, 9], random.Random(0)
    fields: dict[str, Any] = {"decoding": "d2f", "max_new_tokens": 40, "ignore_eos": True, **EDITING}
    (free,) = run(engine("model_b"), [(prompt, DecodingParams(**fields))])
    pairs = list(zip(free.token_ids, free.token_ids[1:], strict=False))
    words = tuple(rng.sample(pairs, 6))
    (found,) = run(engine("model_b"), [(prompt, DecodingParams(**fields, bad_words=words, top_logprobs=2))])
    assert not {*words} & {*zip(found.token_ids, found.token_ids[1:], strict=False)}
    assert edits(found)
    assert all(token in dict(options) for token, options in zip(found.token_ids, found.alternatives, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoding": "d2f"}, "does not go with tau_add 0.1; use tau_add 1"),
        (
            {"decoding": "parallel", "tau_add": 1.0},
            'does not go with decoding "parallel"; use decoding "lopa" or "d2f"',
        ),
        ({"decoding": "d2f", "tau_add": 1.0, "max_post_steps": 0}, "max_post_steps"),
    ],
)
def test_what_does_not_go_with_editing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        DecodingParams(editing_threshold=0.5, **fields)


def test_int8_experts_serve() -> None:
    served = engine("model_a", quantization="w8a8")
    (output,) = run(served, [([5, 3, 8], DecodingParams(decoding="d2f", max_new_tokens=20, ignore_eos=True))])
    assert len(output.token_ids) == 20


def test_the_recommended_decoding_is_that_of_2_0() -> None:
    defaults = LLM(GOLDEN / "model_a").params()
    assert (defaults.decoding, defaults.block_size, defaults.tau_conf) == ("d2f", 32, 0.95)


def test_a_diffusion_stream_shows_edits() -> None:
    with running("--model", str(GOLDEN / "model_a")) as server:
        asked = {"prompt": [5, 3, 8, 2, 9], "max_tokens": 40, "ignore_eos": True, "decoding": "d2f", **EDITING}
        answer = server.http.post("/v1/diffusion/completions", json=asked)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    canvas: dict[int, int] = {}
    num_edits = 0
    for event in events:
        for edit in event.get("edits", ()):
            assert canvas[edit["position"]] == edit["replaced"]
            num_edits += 1
        for filled in (*event.get("fills", ()), *event.get("edits", ())):
            canvas[filled["position"]] = filled["token_id"]
    assert num_edits
    assert [canvas[i] for i in range(40)] == events[-1]["token_ids"]
