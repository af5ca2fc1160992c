"""Causal models: prompts in pieces, shared beginnings and batches change no bit; branches beside drafted blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import ParameterError

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
