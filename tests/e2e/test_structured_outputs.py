"""Models under grammars: every answer that ends keeps to its own, and neighbours without one keep their tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lopa_ascend import LLM, DecodingParams, ParameterError
from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.engine import Engine
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_tokenizer
from tests.e2e.batching import decisions, run
from tests.e2e.conftest import ServerProcess
from tests.e2e.serving import events, refused
from tests.grammar_samples import check, forms
from tests.tiers import slow_but
from tests.tiny import VOCAB_SIZE, write_dream, write_tokenizer

FORMS = forms(num_schemas=300, num_regexes=100)[1:]  # the recursive schema bounds no text
PARTS = 100
CASES: dict[str, list[dict[str, Any]]] = {
    "demo": [{"decoding": "d2f"}, {"num_branches": 7}, {"branch_acceptance": "exact"}],
    "dream": [{"num_branches": 7}, {"base": "fast_dllm"}, {"decoding": "d2f", "window_attention": "full"}],
    "sdar": [
        {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85, "block_size": 4},
        {"num_branches": 3, "block_size": 4},
        {"decoding": "s2d2", "block_size": 4},
    ],
    "fast_dllm_v2": [
        {"decoding": "fast_dllm_v2"},
        {"base": "fast_dllm_v2", "temperature": 1.0, "seed": 1},
        {"decoding": "s2d2", "base": "fast_dllm_v2", "window_attention": "causal"},
    ],
    "pangu": [
        {"decoding": "ar"},
        {"decoding": "linear_spec", "block_size": 16},
        {"decoding": "causal_blocks", "tau_conf": 0.3},
        {"base": "causal_blocks", "tau_conf": 0.3, "temperature": 1.0, "seed": 1},
    ],
}
"""By model: decodings."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    end = VOCAB_SIZE - 4
    sdar: dict[str, Any] = {"model_type": "sdar", "block_size": 4, "head_dim": 8, "bias": False}
    found = {
        "demo": Path(DEMO_MODEL),
        "dream": write_dream(folder / "dream", eos_token_id=end),
        "sdar": write_dream(folder / "sdar", eos_token_id=end, **sdar),
        "fast_dllm_v2": write_dream(folder / "v2", eos_token_id=end, model_type="Fast_dLLM_Qwen", bd_size=32),
        "pangu": write_dream(folder / "pangu", eos_token_id=end, model_type="PanguEmbedded"),
    }
    tensors = load_file(found["sdar"] / "model.safetensors")
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            key = f"model.layers.{layer}.self_attn.{name}.weight"
            tensors[key] = tensors["model.norm.weight"][:8].clone()
    save_file(tensors, found["sdar"] / "model.safetensors")
    tensors = load_file(found["pangu"] / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.o_proj.bias"] = tensors["model.norm.weight"] - 1
    save_file(tensors, found["pangu"] / "model.safetensors")
    for name in ("dream", "sdar", "fast_dllm_v2", "pangu"):
        write_tokenizer(found[name])
    return found


@cache
def engine(model: Path) -> Engine:
    return Engine(
        EngineConfig(model=str(model), graph_mode="eager", kv_cache_memory=2**26, enable_prefix_caching=False)
    )


@cache
def tokenizer(model: Path) -> Tokenizer:
    found = load_tokenizer(model, 2**18)
    assert found is not None
    return found


def test_linear_speculation_is_ar_under_a_grammar(models: dict[str, Path]):
    model = models["pangu"]
    prompt = tokenizer(model).encode("what is 3 and 4?")
    for options in ({}, {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2}):
        answers = []
        branches = {"base": "linear_spec", "num_branches": 3}
        ways = {"decoding": "ar"}, {"decoding": "linear_spec"}, branches, {**branches, "branch_rows": "ahead"}
        for decoding in ways:
            fixed = {"max_new_tokens": 40, "block_size": 16, **decoding, **options}
            asked = [(prompt, DecodingParams.of(**fixed, structured_outputs=form)) for form in FORMS[::50]]
            outputs = run(engine(model), asked)
            answers.append([(output.token_ids, output.max_probs, output.finish_reason) for output in outputs])
            accepted = [record.accepted for output in outputs for record in output.trace or () if record.accepted]
        assert answers == [answers[0]] * len(ways)
        assert accepted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("part", slow_but(range(PARTS), [0]))
def test_answers_keep_to_the_grammar(models: dict[str, Path], name: str, part: int):
    model, cut = models[name], 0
    prompt = tokenizer(model).encode("what is 3 and 4?")
    for options in CASES[name]:
        asked = [
            (prompt, DecodingParams.of(**{"max_new_tokens": 512, "block_size": 32, **options}, structured_outputs=form))
            for form in FORMS[part::PARTS]
        ]
        for form, output in zip(FORMS[part::PARTS], run(engine(model), asked), strict=True):
            if output.finish_reason == "stop":
                check(form, tokenizer(model).decode(output.token_ids))
            else:
                cut += 1
    assert cut <= max(1, 0.02 * len(CASES[name]) * len(FORMS[part::PARTS]))


@pytest.mark.parametrize("name", ["dream", "sdar", "pangu"])
def test_neighbours_without_a_grammar_keep_their_tokens(models: dict[str, Path], name: str):
    prompt = tokenizer(models[name]).encode("the answer and")
    options: dict[str, Any] = {"max_new_tokens": 40, "block_size": 4 if name == "sdar" else 8, "num_branches": 3}
    options |= {"base": "causal_blocks"} if name == "pangu" else {}
    free = (prompt, DecodingParams.of(**options))
    bound = (prompt, DecodingParams.of(**options, structured_outputs={"regex": "[a-z]{20,30}"}))
    [alone] = run(engine(models[name]), [free])
    together = run(engine(models[name]), [bound, free, bound])
    assert decisions(together[1]) == decisions(alone)
    [bound_alone] = run(engine(models[name]), [bound])
    assert decisions(together[0]) == decisions(bound_alone) == decisions(together[2])


@pytest.mark.parametrize("name", slow_but(list(CASES), ["sdar"]))
def test_an_answer_goes_on_to_min_new_tokens_as_far_as_its_grammar_does(models: dict[str, Path], name: str):
    model, prompt = models[name], tokenizer(models[name]).encode("what is 3 and 4?")
    forms: list[Any] = [{"regex": "[a-z]{1,30}"}, {"choice": ["no"]}, {"regex": "x{3}[a-c]?"}, {"grammar": 'start: ""'}]
    for options in CASES[name]:
        asked = {"max_new_tokens": 64, "block_size": 32, **options, "min_new_tokens": 6}
        params = [DecodingParams.of(**asked, structured_outputs=form) for form in forms]
        long, short, middle, empty = run(engine(model), [(prompt, own) for own in params])
        assert 6 <= len(long.token_ids) <= 30
        assert tokenizer(model).decode(short.token_ids) == "no"
        assert len(tokenizer(model).decode(middle.token_ids)) == 4 or len(middle.token_ids) >= 6
        assert not empty.token_ids
        assert {output.finish_reason for output in (long, short, middle, empty)} == {"stop"}


@pytest.mark.parametrize("name", slow_but(list(CASES), ["sdar"]))
def test_bad_words_stay_out_unless_the_grammar_allows_nothing_else(models: dict[str, Path], name: str):
    model, prompt = models[name], tokenizer(models[name]).encode("what is 3 and 4?")
    for options in CASES[name]:
        asked = {"max_new_tokens": 64, "block_size": 32, **options}
        forms: list[Any] = [{"regex": "[0-9]{20}"}, {"choice": ["7"]}]
        params = [DecodingParams.of(**asked, structured_outputs=form) for form in forms]
        words = tuple(
            (token,) for token in range(tokenizer(model).num_token_ids) if b"7" in tokenizer(model).piece(token)
        )
        banned = [own.with_valid(bad_words=words) for own in params]
        digits, only = [
            tokenizer(model).decode(output.token_ids)
            for output in run(engine(model), [(prompt, own) for own in banned])
        ]
        assert len(digits) == 20
        assert "7" not in digits
        assert only == "7"


def test_exact_is_the_constrained_d2f(models: dict[str, Path]):
    model = models["demo"]
    prompt = tokenizer(model).encode("Tom has 3 apples.")
    for form in FORMS[:3]:
        plain, exact = (
            DecodingParams.of(max_new_tokens=48, structured_outputs=form, **options)
            for options in (
                {"decoding": "d2f"},
                {"branch_acceptance": "exact", "num_branches": 3, "lookahead_depth": 2},
            )
        )
        alone, branches = run(engine(model), [(prompt, plain), (prompt, exact)])
        assert branches.token_ids == alone.token_ids
        assert branches.num_forwards <= alone.num_forwards


def test_the_python_api_takes_and_refuses_grammars(models: dict[str, Path]):
    with LLM(models["dream"]) as llm:
        params = llm.params(structured_outputs={"choice": ["yes", "no"]}, top_logprobs=2)
        [output] = llm.generate("hello", params, quiet=True)
        assert output.text in ("yes", "no")
        assert output.finish_reason == "stop"
        assert len(output.max_probs) == len(output.token_ids)
        assert 1.0 in output.max_probs, "what is forced is certain"
        with pytest.raises(ParameterError, match="structured_outputs.json.items: uniqueItems is not"):
            llm.generate("hello", llm.params(structured_outputs={"json": {"items": {"uniqueItems": True}}}), quiet=True)


def test_a_grammar_without_a_way_on_ends_the_request(models: dict[str, Path]):
    """After the first letter the grammar allows a special token alone, which no text has."""
    with LLM(models["dream"]) as llm:
        params = llm.params(structured_outputs={"grammar": 'start: "a" <|im_start|>'})
        with pytest.raises(RuntimeError, match="no token fits the grammar here"):
            llm.generate("hello", params, quiet=True)
        assert llm.generate("hello", llm.params(max_new_tokens=8), quiet=True)[0].token_ids


def test_neighbours_go_on_while_a_grammar_is_compiled(models: dict[str, Path]):
    served, prompt = engine(models["dream"]), tokenizer(models["dream"]).encode("the answer and")
    free = DecodingParams.of(max_new_tokens=200, ignore_eos=True)
    heavy = {"regex": r"(?i)(\p{L}{3000}|[a-z]{5})"}
    served.add(Request("free", tuple(prompt), free))
    for name in ("aborted", "bound"):
        served.add(Request(name, tuple(prompt), DecodingParams.of(max_new_tokens=8, structured_outputs=heavy)))
    assert served.stats().num_waiting == 3
    assert [update.request_id for update in served.step()] == ["free"]
    assert served.abort("aborted")
    assert served.stats().num_waiting == 1
    served.abort("free")
    ended: list[str] = []
    while served.has_work():
        ended += [update.request_id for update in served.step() if update.finish_reason]
    assert ended == ["bound"]


def test_no_grammar_ends_a_server(server: ServerProcess):
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'
    error = refused(server.http.post("/v1/completions", json={"prompt": "a", "guided_grammar": chain}))
    assert "crashes the compiler (SIGSEGV)" in error["message"]
    assert error["param"] == "guided_grammar"


def test_a_server_answers_and_refuses(server: ServerProcess):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {"prompt": "hello", "max_tokens": 64, "structured_outputs": {"json": schema}, "logprobs": 2}
    answer = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    check({"json": schema}, answer["text"])
    assert len(answer["logprobs"]["tokens"]) == len(answer["logprobs"]["token_logprobs"])
    assert 0.0 in answer["logprobs"]["token_logprobs"], "what is forced is certain"
    chunks = events(server.http.post("/v1/completions", json={**body, "stream": True, "logprobs": None}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == answer["text"]
    wrong = {"prompt": "hello", "structured_outputs": {"json": {"properties": {"a": {"uniqueItems": True}}}}}
    error = refused(server.http.post("/v1/completions", json=wrong))
    assert error["param"] == "structured_outputs.json.properties.a"
    assert "uniqueItems is not supported" in error["message"]
