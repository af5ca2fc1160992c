"""``top_logprobs`` and ``bad_words`` from the Python API, with a tiny random model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import ParameterError
from lopa_ascend.types import GenerationOutput
from tests.tiny import write_dream, write_tokenizer

PROMPT = "hello the answer"
FIELDS: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.2, "ignore_eos": True}
VARIANTS: list[dict[str, Any]] = [
    {"decoding": "d2f"},
    {"num_branches": 3},
    {"num_branches": 3, "window_attention": "full"},
    {"num_branches": 3, "temperature": 1.0, "seed": 5, "presence_penalty": 1.0},
    {"num_branches": 7, "tau_conf": 1.0, "tau_act": 0.5},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("model")
    write_dream(folder, eos_token_id=3)
    write_tokenizer(folder)
    return LLM(folder, enable_prefix_caching=False)


def generate(llm: LLM, **fields: Any) -> GenerationOutput:
    return llm.generate(PROMPT, DecodingParams(**{**FIELDS, **fields}), quiet=True)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_top_logprobs_are_those_of_the_pass_that_filled_the_position(llm: LLM, variant: dict[str, Any]) -> None:
    plain, output = generate(llm, **variant), generate(llm, top_logprobs=5, **variant)
    assert output.token_ids == plain.token_ids, "asking for more changes no token"
    assert plain.alternatives == ()
    assert len(output.alternatives) == len(output.token_ids)
    for token, prob, alternatives in zip(output.token_ids, output.max_probs, output.alternatives, strict=True):
        assert len(alternatives) == 5
        probs = [value for _, value in alternatives]
        assert probs == sorted(probs, reverse=True)
        listed = dict(alternatives)
        if not variant.get("temperature"):
            assert alternatives[0][0] == token
        if token in listed:
            assert listed[token] == pytest.approx(prob, abs=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bad_words_are_not_in_the_answer(llm: LLM, variant: dict[str, Any]) -> None:
    plain = generate(llm, **variant).token_ids
    pairs = sorted(set(pairwise(plain)))[:6]
    single = plain[len(plain) // 2]
    found = generate(llm, bad_words=[*pairs, [single]], **variant).token_ids
    assert len(found) == len(plain)
    assert single not in found
    assert not set(pairs) & set(pairwise(found))
    triple = (single,) * 3
    found = generate(llm, bad_words=[triple], **variant).token_ids
    assert triple not in zip(found, found[1:], found[2:], strict=False)


def test_a_text_is_banned_alone_and_after_a_space(llm: LLM) -> None:
    assert llm.tokenizer is not None
    params = llm.prompts.for_engine(DecodingParams(bad_words=("the", (1, 2))))
    assert set(params.bad_words) == {tuple(llm.tokenizer.encode(text)) for text in ("the", " the")} | {(1, 2)}


def test_as_many_and_as_long_texts_as_are_allowed_are_banned(llm: LLM) -> None:
    words = (*(f"number {number}" for number in range(255)), "\N{GRINNING FACE}" * 64)
    params = DecodingParams(bad_words=words, max_new_tokens=8)
    assert len(llm.prompts.for_engine(params).bad_words) == 512
    assert generate(llm, bad_words=words).token_ids
    long = tuple(f"{number} " + "\N{GRINNING FACE}" * 60 for number in range(256))
    with pytest.raises(ParameterError, match="bad_words: must have at most 16384 token ids in all, got"):
        generate(llm, bad_words=long)


@pytest.mark.parametrize("words", [[""], [[]], [[-1]], 5, ["x" * 65], [["a"]], ["x"] * 257, [[1] * 770], [[1]] * 513])
def test_wrong_words_are_refused(words: Any) -> None:
    with pytest.raises(ParameterError, match="bad_words"):
        DecodingParams(bad_words=words)
