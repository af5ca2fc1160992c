"""On ranks that split each forward pass: seeds that all ranks agree on, the model's distribution, the most probable
tokens, and words that are banned."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests.categorical import SAMPLED, SAMPLED_FIELDS, assert_follows_the_distribution, write_categorical
from tests.dist import ranks
from tests.tiny import VOCAB_SIZE, write_dream, write_tokenizer

pytestmark = pytest.mark.multirank

PROMPT = [1, 2, 3]
REQUEST = {"prompt": PROMPT, "params": SAMPLED_FIELDS}


def test_ranks_draw_the_same_seeds_and_sample_the_distribution(tmp_path: Path) -> None:
    """``ranks.generate`` compares what the ranks made, seeds too."""
    model = str(write_categorical(tmp_path / "model", VOCAB_SIZE))
    jobs = [
        {"model": model, "options": {"tensor_parallel_size": 2, **options}, "requests": requests, "together": True}
        for options, requests in (({"seed": 1}, 500 * [REQUEST]), ({}, 8 * [REQUEST]))
    ]
    seeded, unseeded = ranks.generate(2, jobs, tmp_path)
    assert_follows_the_distribution([token for output in seeded for token in output["tokens"]])
    alone = LLM(model, seed=1).generate([PROMPT] * 8, SAMPLED, quiet=True)
    assert [list(output.token_ids) for output in alone] == [output["tokens"] for output in seeded[:8]]
    assert len({output["seed"] for output in unseeded}) == 8


def test_most_probable_tokens_and_bad_words_are_the_same_on_ranks(tmp_path: Path) -> None:
    model, prompt = str(write_dream(tmp_path / "model")), [1, 2, 3, 4]
    fields: dict[str, Any] = {"max_new_tokens": 24, "block_size": 8, "tau_conf": 0.2, "ignore_eos": True}
    with LLM(model) as llm:
        plain = llm.generate(prompt, DecodingParams(**fields), quiet=True)[0].token_ids
        bad = [list(pair) for pair in sorted(set(pairwise(plain)))[:5]]
        fields |= {"top_logprobs": 4, "bad_words": bad}
        alone = llm.generate(prompt, DecodingParams(**fields), quiet=True)[0]
        texts = [list(alone.token_ids[:9]), [5], [VOCAB_SIZE - 2]]
        scores = llm.score(prompt, texts)
    assert not {tuple(word) for word in bad} & set(pairwise(alone.token_ids))
    jobs = [
        {
            "model": model,
            "options": {name: 2},
            "requests": [{"prompt": prompt, "params": fields, "continuations": texts}],
        }
        for name in ("tensor_parallel_size", "branch_parallel_size")
    ]
    for output, scored in ranks.generate(2, jobs, tmp_path):
        assert scored["scores"] == [pytest.approx(values, abs=1e-4) for values in scores]
        assert output["tokens"] == list(alone.token_ids)
        for found, expected in zip(output["alternatives"], alone.alternatives, strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [prob for _, prob in found] == pytest.approx([prob for _, prob in expected], abs=1e-5)


def test_grammars_hold_on_ranks(tmp_path: Path) -> None:
    """Every rank follows the grammar by itself, and a shard of the vocabulary may have no token that fits."""
    model = write_dream(tmp_path / "model", eos_token_id=VOCAB_SIZE - 4)
    write_tokenizer(model)
    colors = {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}
    forms: list[dict[str, Any]] = [{"regex": "[0-9]{2,6}"}, {"json": colors}]
    variants: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 3}, {"confidence": "neg_entropy"}, {"confidence": "margin"},
    ]  # fmt: skip
    requests: list[dict[str, Any]] = [
        {"prompt": [1, 2, 3, 4], "params": {"max_new_tokens": 48, "structured_outputs": form, **more}}
        for form in forms
        for more in variants
    ]
    with LLM(model) as llm:
        alone = [llm.generate(r["prompt"], DecodingParams(**r["params"]), quiet=True)[0] for r in requests]
    jobs = [
        {"model": str(model), "options": {name: 2}, "requests": requests}
        for name in ("tensor_parallel_size", "branch_parallel_size")
    ]
    for outputs in ranks.generate(2, jobs, tmp_path):
        assert [output["tokens"] for output in outputs] == [list(output.token_ids) for output in alone]
