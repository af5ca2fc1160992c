"""Causal models: prompts in pieces, shared beginnings and batches change no bit; branches beside drafted blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.types import GenerationOutput
from tests.e2e.batching import run
from tests.tiers import examples

PAGES = 2**21
"""Bytes for a few pages."""
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
NEMOTRON = GOLDEN / "nemotron" / "model_a"
BLOCKS: dict[str, Any] = {"block_size": 8, "sub_block_size": 8, "tau_conf": 0.3, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    {"decoding": "ar", "max_new_tokens": 20, "ignore_eos": True},
    {"decoding": "causal_blocks", "max_new_tokens": 40, **BLOCKS},
    {"decoding": "lopa", "base": "causal_blocks", "num_branches": 3, "max_new_tokens": 40, **BLOCKS},
    {"decoding": "ar", "max_new_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 5},
]


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(12, 99) for _ in range(length)] for length in lengths]


def answers(asked: Sequence[list[int]], **options: Any) -> list[Any]:
    """(tokens, probabilities) of every prompt in every way; and the tokens that came from the prefix cache."""
    fixed = {"graph_mode": "eager", "enable_prefix_caching": False, **options}
    with LLM(NEMOTRON, **fixed) as llm:
        found = [llm.generate(asked, DecodingParams(**way), quiet=True) for way in WAYS]
    return [[(output.token_ids, output.max_probs) for output in outputs] for outputs in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_batches_and_shared_beginnings_change_no_bit(dtype: str) -> None:
    asked = prompts(5, 130, 300)
    whole = answers(asked, dtype=dtype)
    assert answers(asked, dtype=dtype, max_num_batched_tokens=72) == whole
    assert answers(asked, dtype=dtype, enable_prefix_caching=True) == whole
    alone = [answers([prompt], dtype=dtype) for prompt in asked]
    assert [[ways[number][0] for ways in alone] for number in range(len(WAYS))] == whole


def test_a_prompt_shares_its_beginning_with_any_other_token_by_token() -> None:
    first, second = prompts(200, 90)
    with LLM(NEMOTRON, dtype="float32") as llm, LLM(NEMOTRON, dtype="float32", enable_prefix_caching=False) as fresh:
        params = DecodingParams(**WAYS[1])
        llm.generate([first], params, quiet=True)
        for shared in (199, 131, 128, 77, 1):
            prompt = first[:shared] + second
            (cached,), (computed,) = (each.generate([prompt], params, quiet=True) for each in (llm, fresh))
            assert cached.cached_tokens >= shared
            assert (cached.token_ids, cached.max_probs) == (computed.token_ids, computed.max_probs)


@st.composite
def requests(draw: st.DrawFn, can_draft: bool) -> list[tuple[list[int], DecodingParams]]:
    """Up to four prompts, each with its decoding and further settings."""
    asked = []
    for _ in range(draw(st.integers(1, 4))):
        fields: dict[str, Any] = {"decoding": "ar"}
        if can_draft and draw(st.integers(0, 3)):
            fields = {"block_size": draw(st.integers(1, 9)), "sub_block_size": draw(st.sampled_from([2, 8]))}
            fields |= {"tau_conf": draw(st.sampled_from([0.1, 0.3, 0.9])), "decoding": "causal_blocks"}
            if draw(st.booleans()):
                fields |= {"decoding": "lopa", "base": "causal_blocks"}
        fields |= draw(st.sampled_from(EXTRAS))
        new, ignore_eos = draw(st.integers(5, 24)), draw(st.booleans())
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=draw(st.sampled_from([8, 60, 300]))))
        asked.append((prompt, DecodingParams(max_new_tokens=new, ignore_eos=ignore_eos, **fields)))
    return asked


EXTRAS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
    {"logit_bias": {20: 6.0, 21: -50.0}, "bad_words": [(30,), (20, 22)]},
    {"stop_token_ids": (20, 21, 22, 23, 24), "min_new_tokens": 5},
    {"top_logprobs": 4},
    {"finish_at_eos": False},
]


@cache
def engine(model: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"graph_mode": "eager", "kv_cache_memory": 2**26, "enable_prefix_caching": False}
    return Engine(EngineConfig(model=str(model), **{**defaults, **options}))


def seen(output: GenerationOutput) -> object:
    """What neither neighbours nor pieces of the prompt may change."""
    fills = [record.fills for record in output.trace or () if record.fills]
    return output.token_ids, output.max_probs, output.finish_reason, output.num_forwards, output.tokens, fills


@settings(max_examples=examples(12))
@given(data=st.data(), model=st.sampled_from(["nemotron", "pangu", "orthrus"]))
def test_neighbours_pieces_and_scarce_pages_change_nothing(data: st.DataObject, model: str) -> None:
    path = GOLDEN / model / "model_a"
    asked = data.draw(requests(can_draft=model != "orthrus"))
    arrivals = data.draw(st.lists(st.integers(0, 4), min_size=len(asked), max_size=len(asked)))
    busy = engine(path, max_num_batched_tokens=40, max_num_seqs=3, enable_prefix_caching=True, kv_cache_memory=PAGES)
    together = run(busy, asked, [0, *arrivals[1:]])
    alone = [run(engine(path), [one])[0] for one in asked]
    assert [seen(output) for output in together] == [seen(output) for output in alone]
    assert busy.stats().pages_in_use == 0


@settings(max_examples=examples(8))
@given(data=st.data(), model=st.sampled_from(["nemotron", "pangu"]), depth=st.sampled_from([1, 3]))
def test_exact_branches_give_the_tokens_of_causal_blocks(data: st.DataObject, model: str, depth: int) -> None:
    plain = [
        (prompt, params) for prompt, params in data.draw(requests(can_draft=True)) if params.decoding == "causal_blocks"
    ]
    plain = [(prompt, params) for prompt, params in plain if not params.temperature]
    if not plain:
        return
    changes: dict[str, Any] = {"decoding": "lopa", "base": "causal_blocks", "branch_acceptance": "exact"}
    exact = [(prompt, params.changed(num_branches=4, lookahead_depth=depth, **changes)) for prompt, params in plain]
    llm = engine(GOLDEN / model / "model_a")
    expected, outputs = run(llm, plain), run(llm, exact)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    assert all(one.num_forwards <= other.num_forwards for one, other in zip(outputs, expected, strict=True))


def test_long_prompts_that_come_together_keep_to_the_limit_and_let_others_decode() -> None:
    busy = engine(NEMOTRON, max_num_batched_tokens=48, max_num_seqs=4)
    other, *long = prompts(20, 300, 300, 300)
    params = DecodingParams(decoding="ar", max_new_tokens=200, ignore_eos=True)
    busy.add(Request("other", tuple(other), params))
    busy.step()
    for number, prompt in enumerate(long):
        busy.add(Request(f"long {number}", tuple(prompt), params))
    computed: Counter[str] = Counter()
    since = 0
    while busy.scheduler.running.get("long 2") is None or busy.scheduler.running["long 2"].in_prefill:
        num_tokens = 0
        updates = busy.step()
        for update in updates:
            num_tokens += update.model_tokens - computed[update.request_id]
            computed[update.request_id] = update.model_tokens
        assert num_tokens <= 48
        since = 0 if "other" in {update.request_id for update in updates} else since + 1
        assert since < 2, "a decoding step comes after each step of pieces"
        if computed["long 0"] > 100:
            busy.abort("long 0")
    for name in ("other", "long 1", "long 2"):
        assert busy.abort(name)
    assert busy.stats().pages_in_use == 0


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("nemotron", {"decoding": "d2f"}, "decoding"),
        ("nemotron", {"decoding": "parallel"}, "decoding"),
        ("orthrus", {"decoding": "causal_blocks"}, "decoding"),
        ("sdar", {"decoding": "ar"}, "decoding"),
        ("a2d", {"decoding": "ar"}, "decoding"),
    ],
)
def test_a_decoding_that_a_family_cannot_run_is_refused_by_name(
    model: str, fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    named = tmp_path / "mdlm"
    named.symlink_to(GOLDEN / model / "model_a")
    with LLM(named, dtype="float32") as llm, pytest.raises(ParameterError) as refused:
        llm.generate([[3, 4, 5]], DecodingParams(**fields), quiet=True)
    assert refused.value.param == param
