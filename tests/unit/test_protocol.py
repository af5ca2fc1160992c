"""Bodies of requests: what the schemas promise is what ``DecodingParams`` takes, and nothing is silently ignored."""

import dataclasses
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from lopa_ascend.admission import Limits
from lopa_ascend.config import ContextLengthError, DecodingParams, ParameterError
from lopa_ascend.config.kinds import MAX_TOKEN_IDS
from lopa_ascend.core import Request
from lopa_ascend.serve.api.chat import ChatRequest
from lopa_ascend.serve.api.completions import CompletionRequest
from lopa_ascend.serve.api.request import GenerationRequest, Planner
from lopa_ascend.serve.api.responses import ResponseRequest
from lopa_ascend.serve.diffusion import DiffusionCompletionRequest
from lopa_ascend.serve.http.api_error import MAX_TEXT, ApiError
from lopa_ascend.serve.http.body import read_body
from lopa_ascend.serve.observe.info import AbortRequest
from lopa_ascend.serve.tokens import TokenizeRequest
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.types import ModelProperties
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

MODELS: Any = [(CompletionRequest, "validation"), (ChatRequest, "validation")]
SCHEMAS = models_json_schema(MODELS)[1]["$defs"]
LIMITS = Limits(
    vocab_size=100,
    mask_token_id=99,
    max_model_len=500,
    num_pages=100,
    max_num_seqs=4,
    max_num_batched_tokens=2048,
    max_num_branches=15,
)
PLANNER = Planner(Prompts(None, 100, 99, "m"), LIMITS, {"tau_conf": 0.5, "top_p": 0.9, "temperature": 1.0})
BLOCK_CAUSAL = ModelProperties(logit_shift=0, attention="block_causal")
MODELS_OF = {
    "s2d2": BLOCK_CAUSAL,
    "fast_dllm_v2": replace(BLOCK_CAUSAL, logit_shift=1),
    "causal_blocks": ModelProperties(logit_shift=0, attention="causal"),
    "ar": ModelProperties(logit_shift=0, attention="causal"),
    "linear_spec": ModelProperties(logit_shift=0, attention="causal"),
}
"""By decoding, or the one that "lopa" extends: a model for it. The others are for Dream."""
NEEDED: dict[str, dict[str, Any]] = {  # by parameter, or by one of its values
    "top_p": {"temperature": 1.0},
    "top_k": {"temperature": 1.0},
    "min_new_tokens": {"max_new_tokens": 400},
    "acceptance": {"confidence": "neg_entropy"},
    "branch_acceptance": {"temperature": 0},
    "lookahead_depth": {"branch_acceptance": "verified"},
    "steps": {"decoding": "vanilla"},
    "alg": {"decoding": "vanilla"},
    "alg_temp": {"decoding": "vanilla"},
    "block_cache": {"decoding": "fast_dllm"},
    "sub_block_size": {"decoding": "fast_dllm_v2"},
    "editing_threshold": {"tau_add": 1},
    "causal": {"decoding": "s2d2"},
    "routing": {"decoding": "s2d2"},
    "routing_run": {"decoding": "s2d2", "routing": "run"},
    "routing_on": {"decoding": "s2d2", "routing": "score"},
    "routing_off": {"decoding": "s2d2", "routing": "hysteresis"},
    "routing_cost": {"decoding": "s2d2", "routing": "score"},
    "draft_threshold": {"decoding": "linear_spec"},
    "branch_rows": {"decoding": "lopa", "base": "linear_spec"},
    "routing_cost_of": {"decoding": "s2d2", "routing": "score"},
}


parse_completion = partial(read_body, CompletionRequest)
parse_chat = partial(read_body, ChatRequest)


def plan(planner: Planner, request: GenerationRequest) -> list[Request]:
    return request.plan(planner)


def parsed(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode())


def params(**fields: Any) -> DecodingParams:
    models = [model for name, model in MODELS_OF.items() if name in fields.values()]
    planner = replace(PLANNER, limits=replace(LIMITS, properties=models[0])) if models else PLANNER
    return plan(planner, parsed(**fields))[0].params


def test_every_decoding_parameter_is_a_field():
    assert set(DecodingParams.names()) - {"top_logprobs"} <= GenerationRequest.model_fields.keys()
    assert CompletionRequest.model_config["extra"] == "forbid"


OTHERS = {"num_branches", "max_new_tokens", "top_logprobs", "max_thinking_tokens"}


@pytest.mark.parametrize("name", sorted(set(DecodingParams.names()) - OTHERS))
def test_stated_ranges_are_the_real_ones(name: str):
    schema = SCHEMAS["CompletionRequest"]["properties"][name]
    step = 1 if any(part.get("type") == "integer" for part in schema.get("anyOf", [])) else 1e-6
    with_it = NEEDED.get(name, {})
    is_list = DecodingParams.parameters()[name].kind.many  # which the body refuses already
    refusal: type[ApiError | ParameterError] = ApiError if is_list else ParameterError
    for limit, outwards in (("minimum", -step), ("maximum", step)):
        if limit not in schema:
            continue
        edge = schema[limit]
        if name != "eos_token_id":
            params(**{**with_it, name: edge})
        with pytest.raises(refusal) as wrong:
            params(**{**with_it, name: edge + outwards})
        assert vars(wrong.value)["param"] == name
    for choice in schema.get("enum", []):
        params(**{**with_it, **NEEDED.get(choice, {}), name: choice})


def test_integers_may_be_written_with_a_fraction_of_zero():
    assert params(max_tokens=5.0, top_k=3.0, temperature=1.0).max_new_tokens == 5
    with pytest.raises(ApiError, match="max_tokens"):
        parsed(max_tokens=5.5)


@pytest.mark.parametrize("name", sorted(CompletionRequest.harmless.keys() | ChatRequest.harmless.keys()))
def test_unsupported_fields_are_refused_by_name(name: str):
    for parse, fields, table in (
        (parse_completion, {"prompt": "x"}, CompletionRequest.harmless),
        (parse_chat, {"messages": [{"role": "user", "content": "x"}]}, ChatRequest.harmless),
    ):
        if name not in table:
            continue
        for neutral in (None, *table[name]):
            parse(json.dumps({**fields, name: neutral}).encode())
        for value in ("something", 0.3, [1], {"a": 1}):
            with pytest.raises(ApiError) as refused:
                parse(json.dumps({**fields, name: value}).encode())
            assert (refused.value.status, refused.value.param) == (400, name)


def test_the_best_n_of_n_answers_are_all_of_them():
    assert parsed(n=3, best_of=3).n == 3
    for fields in ({"n": 2, "best_of": 3}, {"n": True, "best_of": True}, {"best_of": 2}):
        with pytest.raises(ApiError) as refused:
            parsed(**fields)
        assert refused.value.param == "best_of"


NEUTRAL = {
    "priority": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_p": 0,
    "stop_token_ids": [],
    "length_penalty": 1.0,
    "response_format": {"type": "text", "json_schema": None},
}


def test_fields_that_ask_for_nothing_change_no_parameter():
    assert params(**NEUTRAL) == params()
    chat = {"messages": [{"role": "user", "content": "x"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    taken: list[dict[str, Any]] = [NEUTRAL, {"tools": tools, "tool_choice": "none"}]
    for fields in taken:
        parse_chat(json.dumps({**chat, **fields}).encode())
    wrong: list[dict[str, Any]] = [{"tools": 5, "tool_choice": "none"}, {"tools": tools, "tool_choice": "always"}]
    for fields in wrong:
        with pytest.raises(ApiError, match="tool"):
            parse_chat(json.dumps({**chat, **fields}).encode())


def test_the_chat_template_gets_the_name_of_who_speaks():
    messages = [{"role": "user", "content": "x", "name": "Tom"}, {"role": "assistant", "content": "y", "name": None}]
    found = [
        message.as_template_input() for message in parse_chat(json.dumps({"messages": messages}).encode()).messages
    ]
    assert found == [messages[0], {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize("name", ["str", "int", "a[b]", "list[int]"])
def test_unknown_fields_are_named_even_if_they_look_like_types(name: str):
    with pytest.raises(ApiError) as refused:
        parsed(**{name: 1})
    assert (refused.value.param, refused.value.code) == (name, "unknown_parameter")
    with pytest.raises(ApiError) as refused:
        read_body(ResponseRequest, json.dumps({"input": [{"role": "user", "content": "x", name: 1}]}).encode())
    assert refused.value.param == f"input[0].{name}"


def test_defaults_step_back_where_a_request_excludes_them():
    assert (params().top_p, params().tau_conf, params().temperature) == (0.9, 0.5, 1.0)
    assert params(top_p=1).top_p is None
    assert params().max_new_tokens == 256
    assert plan(PLANNER, parsed(prompt=[1] * 400))[0].params.max_new_tokens == 100


def test_defaults_that_do_not_go_with_the_decoding_of_a_request_are_left_out():
    defaults = {"window_attention": "block_causal", "num_branches": 2, "acceptance": "factor", "block_size": 16}
    planner = dataclasses.replace(PLANNER, decoding=defaults)
    vanilla = plan(planner, parsed(decoding="vanilla"))[0].params
    assert (vanilla.window_attention, vanilla.lookaheads, vanilla.acceptance) == ("full", 0, "threshold")
    assert plan(planner, parsed(decoding="parallel"))[0].params.acceptance == "factor"
    with pytest.raises(ParameterError, match="window_attention.*vanilla"):
        plan(planner, parsed(decoding="vanilla", window_attention="block_causal"))


def test_naming_the_default_decoding_changes_nothing():
    planner = dataclasses.replace(PLANNER, decoding={"num_branches": 7})
    assert plan(planner, parsed(decoding="lopa")) == plan(planner, parsed())
    assert plan(planner, parsed(decoding="d2f"))[0].params.lookaheads == 0


def test_defaults_that_cannot_sample_step_back_for_a_request_that_samples():
    drafts = {"branch_acceptance": "exact", "lookahead_depth": 4}
    planner = dataclasses.replace(PLANNER, decoding=drafts)
    (sampled,) = plan(planner, parsed(temperature=0.7))
    assert (sampled.params.branch_acceptance, sampled.params.lookahead_depth) == ("verified", 4)
    for fields in ({}, {"temperature": 0}, {"temperature": 0.001}):
        assert plan(planner, parsed(**fields))[0].params.branch_acceptance == "exact"
    with pytest.raises(ParameterError, match="exact.*temperature 0"):
        plan(planner, parsed(temperature=0.7, branch_acceptance="exact"))


def test_seeds_differ_by_answer_from_one_start():
    prompts = [[1], [2]]
    assert [params(seed=seed).seed for seed in (-1, 0, -(2**63), None)] == [-1, 0, -(2**63), None]
    assert [c.params.seed for c in plan(PLANNER, parsed(prompt=prompts, n=3, seed=40))] == [40, 41, 42] * 2
    assert {c.params.seed for c in plan(PLANNER, parsed(prompt=prompts, n=3))} == {None}
    last = 2**63 - 1
    assert [c.params.seed for c in plan(PLANNER, parsed(n=2, seed=last))] == [last, -last - 1]


def test_errors_use_the_name_that_was_sent():
    for fields, param in (({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": 900}, "max_completion_tokens")):
        with pytest.raises(ParameterError) as wrong:
            params(**fields)
        assert wrong.value.param == param
    assert params(max_tokens=7, max_completion_tokens=7).max_new_tokens == 7
    with pytest.raises(ParameterError, match="^block_size:"):
        params(block_size=0)


def test_what_is_too_long_for_the_model_has_an_error_of_its_own():
    for fields, param in (({"prompt": [1] * 500}, "prompt"), ({"prompt": [1] * 400, "max_tokens": 101}, "max_tokens")):
        with pytest.raises(ContextLengthError, match="maximum context length is 500 tokens") as refused:
            params(**fields)
        assert refused.value.param == param


def test_diffusion_and_tokenize_bodies():
    assert read_body(DiffusionCompletionRequest, b'{"prompt": "x", "stream": true, "n": 1}').prompt == ["x"]
    with pytest.raises(ApiError, match="one prompt"):
        read_body(DiffusionCompletionRequest, b'{"prompt": ["x", "y"]}')
    assert read_body(TokenizeRequest, b'{"prompt": "x", "add_special_tokens": true}').prompt == "x"
    with pytest.raises(ApiError, match="did you mean 'request_id'"):
        read_body(AbortRequest, b'{"requestid": "x"}')


@pytest.mark.parametrize(
    "fields",
    [{"bad_words": [[""] * 999]}, {"bad_words": [0] * 999}, {"stop": [0] * 999}, {"stop_token_ids": [""] * 999}],
)
def test_a_list_stops_at_its_first_wrong_item(fields: dict[str, Any]):
    with pytest.raises(ValidationError) as wrong:
        CompletionRequest.model_validate({"prompt": "a", **fields})
    assert wrong.value.error_count() < 5


def test_names_of_megabytes_are_refused_at_once_and_shortened():
    name = "ab" * 2**21
    start = time.process_time()
    for parse, body in (
        (parse_completion, {"prompt": "a", name: 1}),
        (parse_completion, {"prompt": "a", "logit_bias": {name: "x"}}),
        (parse_chat, {"messages": [{"role": "user", "content": "a", name: 1}]}),
    ):
        with pytest.raises(ApiError) as refused:
            parse(json.dumps(body).encode())
        assert len(json.dumps(refused.value.body())) < 3 * MAX_TEXT
    assert time.process_time() - start < 1  # a comparison with the names of all fields takes longer


def test_stop_strings_are_limited_in_number_and_length():
    planner = replace(PLANNER, prompts=Prompts(tiny_tokenizer(), 100, 99, "m"))
    most = ["a" * 4033, *map(chr, range(0x100, 0x100 + 63))]
    (choice,) = plan(planner, parsed(stop=most))
    assert choice.params.stop == tuple(most)
    for stop in (["a"] * 65, "a" * 4097, ["a" * 4096, "b"]):
        with pytest.raises(ApiError, match="at most 64 non-empty strings of 4096 characters together") as wrong:
            parsed(stop=stop)
        assert wrong.value.param == "stop"


def test_log_probabilities_are_limited_in_number():
    """Each takes memory while its answer is made, and n choices have n times as many."""
    planner = replace(PLANNER, limits=replace(LIMITS, max_model_len=10_000, num_pages=1000, vocab_size=VOCAB_SIZE))
    most = {"max_tokens": 8192, "n": 128}
    assert len(plan(planner, parsed(logprobs=0, **most))) == 128
    assert len(plan(planner, parsed(n=128, max_tokens=9000))) == 128
    with pytest.raises(ParameterError, match="2097152 log probabilities") as wrong:
        plan(planner, parsed(logprobs=1, **most))
    assert wrong.value.param == "logprobs"
    planner = replace(planner, prompts=Prompts(tiny_tokenizer(), VOCAB_SIZE, VOCAB_SIZE - 1, "m"))
    fields = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 2048, "n": 128}
    assert len(plan(planner, parse_chat(json.dumps({**fields, "top_logprobs": 3}).encode()))) == 128
    with pytest.raises(ParameterError, match="at most 1048576") as wrong:
        plan(planner, parse_chat(json.dumps({**fields, "top_logprobs": 4}).encode()))
    assert wrong.value.param == "top_logprobs"


def test_token_ids_count_once_and_for_each_choice():
    many = list(range(90)) * 700
    for name in ("eos_token_id", "stop_token_ids"):
        assert getattr(params(**{name: many}), name) == tuple(range(90))
        with pytest.raises(ApiError, match="at most 65536 token ids, got 65537"):
            parsed(**{name: list(range(MAX_TOKEN_IDS + 1))})
        with pytest.raises(ParameterError, match="a request with") as wrong:
            params(**{name: list(range(600)), "n": 128})
        assert wrong.value.param == name
    with pytest.raises(ParameterError, match="a request with") as wrong:
        params(logit_bias={str(token): 1 for token in range(600)}, n=128)
    assert wrong.value.param == "logit_bias"
    words: list[list[int]] | list[str]
    for words in ([[1] * 30] * 20, ["x" * 30] * 10):
        with pytest.raises(ParameterError, match="a request with 128 choices may have 512") as wrong:
            params(bad_words=words, n=128)
        assert wrong.value.param == "bad_words"
    first, second = plan(PLANNER, parsed(stop_token_ids=many, n=2, seed=1, temperature=1.0))
    assert first.params.stop_token_ids is second.params.stop_token_ids


HUGE: dict[str, tuple[dict[str, Any], str]] = {
    "combining characters": ({"bad_words": ["a" + "\u0300" * 30_000 + "\u0316" * 30_000]}, "at most 64 characters"),
    "ids that hash alike": ({"stop_token_ids": [k * (2**61 - 1) for k in range(1, 25_000)]}, "at most 2147483647"),
    "biases that hash alike": (
        {"logit_bias": {str(k * (2**61 - 1)): 1 for k in range(1, 25_000)}},
        "at most 2147483647",
    ),
    "numbers with hundreds of digits": ({"seed": [[1e308] * 140_000]}, "must be a valid integer"),
    "a text for a number": ({"n": "9" * 10**6}, "must be a valid integer"),
    "texts for ids": ({"stop_token_ids": ["x"] * 10**5}, "must be a valid integer"),
    "prompts": ({"prompt": [[]] * 250_000}, "at most 1024 prompts"),
    "names": ({f"x{number}": 0 for number in range(80_000)}, "unknown field"),
    "nested lists": ({"metadata": {"a": [[]] * 250_000}, "n": "x"}, "must be a valid integer"),
}


@pytest.mark.parametrize(("fields", "words"), HUGE.values(), ids=HUGE)
def test_huge_values_are_refused_at_once_and_shown_in_short(fields: dict[str, Any], words: str):
    raw = json.dumps({"prompt": "x", **fields}, separators=(",", ":")).encode()
    assert len(raw) < 2**20
    start = time.thread_time()
    json.loads(raw)
    read = time.thread_time()
    with pytest.raises(ApiError, match=words) as refused:
        parse_completion(raw)
    assert time.thread_time() - read < 50 * (read - start) + 0.1  # what grows with the square takes thousands of times
    assert len(refused.value.message) < 700


@pytest.mark.parametrize(
    ("opening", "closing", "words"),
    [(b"[", b"]", "nested too deeply"), (b'{"a":', b"}", "nested too deeply"), (b"[", b"", "nested too deeply")],
)
def test_deep_nesting_is_refused(opening: bytes, closing: bytes, words: str):
    for depth, message in ((41, "nested more than 40 levels|not valid JSON"), (100_000, words)):
        with pytest.raises(ApiError, match=message) as refused:
            parse_completion(b'{"prompt": "x", "metadata": ' + opening * depth + b"1" + closing * depth + b"}")
        assert refused.value.code == "invalid_json"


def test_a_name_that_is_there_twice_is_refused():
    for raw in (b'{"prompt": "x", "n": 1, "n": 1}', b'{"prompt": "x", "metadata": {"a": {"n": 1, "n": 2}}}'):
        with pytest.raises(ApiError, match="the body is not valid JSON: the name 'n' occurs twice in an object"):
            parse_completion(raw)


def test_brackets_in_texts_are_no_parts():
    text = '[{:"\\' * 50_000
    assert parse_completion(json.dumps({"prompt": text}).encode()).prompt == [text]


def test_prompts_of_different_lengths_get_the_room_that_each_leaves():
    first, second = plan(PLANNER, parsed(prompt=[[1] * 400, [1] * 450]))
    assert (first.params.max_new_tokens, second.params.max_new_tokens) == (100, 50)
