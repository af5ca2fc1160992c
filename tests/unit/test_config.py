"""Parameters and model configurations are checked on construction, and errors name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopa_ascend.config import (
    ConfigError,
    ContextLengthError,
    DecodingParams,
    EngineConfig,
    GraphParams,
    GraphSupport,
    ModelConfig,
    ParameterError,
    fitting_defaults,
)
from lopa_ascend.config.decodings import built_in_decodings
from lopa_ascend.config.kinds import Choice, exact_size, format_size, parse_size
from lopa_ascend.config.settings import settings
from lopa_ascend.families import FAMILIES, Family, family_in, read_config, with_name


def test_defaults_are_the_papers_gsm8k_row() -> None:
    p = DecodingParams()
    assert (p.decoding, p.num_branches, p.block_size, p.tau_add, p.tau_act, p.tau_conf) == (
        "lopa",
        3,
        32,
        0.1,
        0.95,
        0.9,
    )
    assert (p.max_new_tokens, p.temperature, p.confidence, p.branch_score) == (256, 0.0, "max_prob", "mean")
    assert (p.window_attention, p.finish_at_eos, p.ignore_eos) == ("block_causal", True, False)
    assert DecodingParams(decoding="d2f").num_branches == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decoding", "lopaa"),
        ("num_branches", -1),
        ("num_branches", 1.5),
        ("num_branches", True),
        ("block_size", 0),
        ("tau_add", 1.1),
        ("tau_act", float("nan")),
        ("tau_conf", "0.9"),
        ("max_new_tokens", 0),
        ("min_new_tokens", 300),
        ("stop", ("",)),
        ("stop", (1,)),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", -0.1),
        ("top_k", -2),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-46),
        ("logit_bias", {5: 101}),
        ("logit_bias", {-5: 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {" 7 ": 1}),
        ("logit_bias", {"+8": 1}),
        ("logit_bias", {"\N{ARABIC-INDIC DIGIT THREE}": 1}),
        ("logit_bias", [(1, 2), ("1", 3)]),
        ("logit_bias", [5]),
        ("logit_bias", 5),
        ("confidence", "entropy"),
        ("acceptance", "entropy"),
        ("acceptance_factor", -1),
        ("steps", 0),
        ("steps", 2**31 - 1),
        ("alg", "random"),
        ("alg_temp", -1),
        ("base", "vanilla"),
        ("block_cache", "suffix"),
        ("branch_acceptance", "verify"),
        ("branch_score", "median"),
        ("tail_fraction", 2),
        ("score_window", 0),
        ("creation_weight", -0.5),
        ("window_attention", "causal"),
        ("max_active_blocks", 0),
        ("eos_token_id", -3),
        ("ignore_eos", 1),
        ("finish_at_eos", None),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParameterError, match=field) as error:
        DecodingParams(**{field: value})
    assert error.value.param == field


def test_an_error_gets_the_place_and_the_names_of_a_request() -> None:
    error: ParameterError = ContextLengthError("a", lambda spelt: f"9 exceeds {spelt('b')} {{5}}, {spelt('True')}")
    assert str(error) == "a: 9 exceeds b {5}, True"
    renamed = error.renamed({"b": "most", "True": "true"}).renamed({"most": ("size", "max"), "a": ("parts", 0)})
    assert (renamed.path, str(renamed)) == (("parts", 0), "parts[0]: 9 exceeds size.max {5}, true")
    below = renamed.under("messages", 3)
    assert (type(below), below.param) == (ContextLengthError, "messages[3].parts[0]")
    assert str(below.at("x")) == "x: 9 exceeds size.max {5}, true"
    with pytest.raises(ParameterError) as refused:
        DecodingParams(structured_outputs={"choice": ["a", ""]})
    assert refused.value.path == ("structured_outputs", "choice", 1)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-40, 1e-6, 0.0099])
def test_below_the_least_temperature_nothing_is_sampled(temperature: float) -> None:
    params = DecodingParams(temperature=temperature, top_p=0.9, top_k=5, seed=3)
    assert params == DecodingParams(seed=3)
    assert DecodingParams(top_p=0.9) == DecodingParams()
    assert DecodingParams(temperature=0.01, top_p=0.9).top_p == 0.9


def test_d2f_has_no_branches() -> None:
    with pytest.raises(ParameterError, match="num_branches"):
        DecodingParams(decoding="d2f", num_branches=2)


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        (
            {"decoding": "parallel", "window_attention": "block_causal"},
            "window_attention",
            "block_causal.*parallel.*full",
        ),
        ({"decoding": "parallel", "num_branches": 2}, "num_branches", "2.*parallel.*lopa.*0"),
        ({"decoding": "fast_dllm", "max_active_blocks": 2}, "max_active_blocks", "2.*fast_dllm.*lopa.*d2f.*parallel"),
        ({"decoding": "d2f", "base": "parallel"}, "base", "parallel.*d2f.*lopa"),
        ({"base": "parallel", "window_attention": "block_causal"}, "window_attention", "block_causal.*base.*parallel"),
        ({"base": "fast_dllm", "max_active_blocks": 2}, "max_active_blocks", "2.*base.*fast_dllm"),
        ({"base": "parallel", "eos_last": True}, "eos_last", "True.*lopa.*parallel.*fast_dllm"),
        ({"acceptance": "entropy"}, "acceptance", "entropy.*confidence.*max_prob.*neg_entropy"),
        ({"decoding": "vanilla", "denoising_steps": 2}, "denoising_steps", "2.*vanilla.*d2f.*parallel.*fast_dllm"),
        ({"base": "parallel", "branch_acceptance": "exact"}, "branch_acceptance", "exact.*base.*parallel.*d2f"),
        ({"base": "parallel", "block_cache": "dual"}, "block_cache", "dual.*base.*parallel.*fast_dllm"),
        ({"decoding": "vanilla", "acceptance": "factor"}, "acceptance", "factor.*vanilla"),
        ({"decoding": "vanilla", "confidence": "margin"}, "confidence", "margin.*vanilla"),
        ({"decoding": "parallel", "block_cache": "dual"}, "block_cache", "dual.*parallel.*fast_dllm"),
        (
            {"decoding": "fast_dllm", "block_cache": "dual", "window_attention": "block_causal"},
            "window_attention",
            "block_causal.*does not go with.*fast_dllm.*full",
        ),
        ({"decoding": "parallel", "steps": 3}, "steps", "3.*parallel.*vanilla"),
        ({"alg": "origin"}, "alg", "origin.*lopa.*vanilla"),
        ({"decoding": "d2f", "alg_temp": 0.5}, "alg_temp", "0.5.*d2f.*vanilla"),
        ({"decoding": "vanilla", "alg": "origin", "alg_temp": 0.5}, "alg_temp", "0.5.*alg.*origin"),
    ],
)
def test_what_does_not_go_with_the_decoding_is_refused_with_both_names(values: dict, field: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as error:
        DecodingParams(**values)
    assert error.value.param == field


def test_attention_follows_the_decoding() -> None:
    attentions = {decoding: DecodingParams(decoding=decoding).window_attention for decoding in built_in_decodings()}
    in_blocks = ("lopa", "d2f", "fast_dllm_v2", "causal_blocks", "ar", "linear_spec", "s2d2")
    assert {attentions.pop(name) for name in in_blocks} == {"block_causal"}
    assert set(attentions.values()) == {"full"}
    assert DecodingParams(base="parallel").window_attention == "full"


def test_defaults_for_another_decoding_are_left_out() -> None:
    defaults = {"num_branches": 7, "window_attention": "block_causal", "max_active_blocks": 3, "tau_conf": 0.5}
    assert fitting_defaults(defaults, {"tau_act": 0.5}) == defaults
    assert fitting_defaults(defaults, {"decoding": "lopa"}) == defaults
    assert fitting_defaults(defaults, {"decoding": "d2f"}).keys() == defaults.keys() - {"num_branches"}
    assert fitting_defaults(defaults, {"base": "parallel"}) == {"num_branches": 7, "tau_conf": 0.5}
    assert fitting_defaults({"base": "parallel"}, {"decoding": "parallel"}) == {}
    params = DecodingParams(decoding="parallel", **fitting_defaults(defaults, {"decoding": "parallel"}))
    assert params == DecodingParams(decoding="parallel", tau_conf=0.5)
    assert DecodingParams.preset("S13", decoding="parallel").window_attention == "full"


def test_no_default_makes_a_request_fail() -> None:
    """Whatever a server's defaults are: a request is refused only for what it asks for itself."""
    names = ("confidence", "acceptance", "branch_score", "branch_acceptance")
    kinds = [DecodingParams.parameters()[name].kind for name in names]
    values = [kind.known for kind in kinds if isinstance(kind, Choice)]

    def works(params: dict[str, Any]) -> bool:
        try:
            DecodingParams(**params)
        except ParameterError:
            return False
        return True

    settings = [dict(zip(names, chosen, strict=True)) for chosen in product(*values)]
    servers = [setting for setting in settings if works(setting)]
    asked: list[dict[str, Any]] = [
        {name: value} for name, choices in zip(names, values, strict=True) for value in choices
    ]
    asked += [{"temperature": 0.5}, {"decoding": "d2f"}, {"decoding": "d2f", "confidence": "margin"}]
    asked += [{"base": "parallel"}, {"decoding": "fast_dllm", "acceptance": "factor"}]
    possible = [request for request in asked if works(request)]
    assert len(servers) > 30
    assert len(possible) > 10
    for defaults, request in product(servers, possible):
        assert works({**fitting_defaults(defaults, request), **request}), (defaults, request)
        assert fitting_defaults(defaults, {}) == defaults


@pytest.mark.parametrize(
    ("defaults", "asked", "left_out"),
    [
        ({"decoding": "vanilla", "alg_temp": 0.5}, {"alg": "origin"}, "alg_temp"),
        ({"decoding": "vanilla", "alg": "origin"}, {"alg_temp": 0.5}, "alg"),
        ({"temperature": 0.7, "tau_conf": 0.8}, {"branch_acceptance": "exact"}, "temperature"),
    ],
)
def test_a_default_gives_way_to_what_a_request_asks_for(
    defaults: dict[str, Any], asked: dict[str, Any], left_out: str
) -> None:
    DecodingParams(**defaults)
    usable = fitting_defaults(defaults, asked)
    assert usable == {name: value for name, value in defaults.items() if name != left_out}
    DecodingParams(**{**usable, **asked})


def test_defaults_that_go_together_are_left_out_together() -> None:
    defaults = {"branch_acceptance": "verified", "lookahead_depth": 4}
    assert fitting_defaults(defaults, {"base": "parallel"}) == {}


def test_a_default_least_length_gives_way_to_a_shorter_answer() -> None:
    assert fitting_defaults({"min_new_tokens": 100}, {"max_new_tokens": 50}) == {"min_new_tokens": 50}
    assert fitting_defaults({"min_new_tokens": 100}, {"max_new_tokens": 200}) == {"min_new_tokens": 100}


def test_values_are_stored_as_plain_python_values() -> None:
    """Others could not be sent to the other ranks."""
    params = DecodingParams(tau_conf=np.float64(0.5), confidence=np.str_("margin"), stop=(np.str_("x"),))
    assert [type(value) for value in (params.tau_conf, params.confidence, *params.stop)] == [float, str, str]
    assert str(DecodingParams(tau_conf=-0.0).tau_conf) == "0.0"  # compiled steps compare bits
    for name in ("stop", "bad_words"):
        with pytest.raises(ParameterError, match=f"{name}: .*is not text: surrogates not allowed"):
            DecodingParams(**dict[str, Any]({name: ["\ud800"]}))


def test_an_unknown_choice_lists_the_known_ones() -> None:
    with pytest.raises(ParameterError, match="lopa, d2f, parallel, vanilla, fast_dllm"):
        DecodingParams(decoding="greedy")
    with pytest.raises(ParameterError, match="origin, maskgit_plus, topk_margin, entropy"):
        DecodingParams(decoding="vanilla", alg="random")
    with pytest.raises(ParameterError, match="max_prob, margin, neg_entropy"):
        DecodingParams(confidence="probability")
    with pytest.raises(ParameterError, match="published, verified, exact"):
        DecodingParams(branch_acceptance="verify")
    with pytest.raises(ParameterError, match="threshold, factor"):
        DecodingParams(acceptance="greedy")


def test_the_parameters_are_frozen() -> None:
    with pytest.raises(AttributeError):
        DecodingParams().seed = 3  # type: ignore[misc]


def test_every_field_is_declared() -> None:
    for owner in (DecodingParams, EngineConfig):
        assert tuple(settings(owner)) == owner.names()[: len(settings(owner))]


def test_graphs_are_compiled_for_the_default_decoding() -> None:
    assert GraphParams() == GraphParams.of(DecodingParams())


def test_graph_support() -> None:
    declared = DecodingParams.parameters()
    of = {kind: {name for name, parameter in declared.items() if parameter.graphs is kind} for kind in GraphSupport}
    processed = {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
    processed |= {"bad_words", "structured_outputs", "max_thinking_tokens", "top_logprobs"}
    unusual = {"temperature", "acceptance", "branch_score", "creation_weight", "min_new_tokens"}
    assert of[GraphSupport.DECODING] == {"decoding"}
    assert of[GraphSupport.DEFAULT] == processed | unusual | {"base", "lookahead_depth", "denoising_steps"} | {
        "editing_threshold"
    }
    assert of[GraphSupport.COMPILED] == {"confidence", "window_attention", "branch_acceptance"}
    assert of[GraphSupport.BUCKET] == {"num_branches", "block_size", "eos_token_id", "stop_token_ids"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("graph_mode", "inductor2"),
        ("graph_mode", "ge"),
        ("kv_cache_memory", 0),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 90),
        ("threads", 0),
        ("max_model_len", True),
        ("distributed_timeout_seconds", 1),
    ],
)
def test_wrong_engine_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParameterError, match=field) as error:
        EngineConfig(**{"graph_mode": "inductor", field: value})  # type: ignore[arg-type]
    assert error.value.param == field


def test_a_share_of_a_gpu_and_a_size_of_the_pool_do_not_go_together() -> None:
    with pytest.raises(ParameterError, match="gpu_memory_utilization: does not go with kv_cache_memory"):
        EngineConfig(device="cuda", gpu_memory_utilization=0.9, kv_cache_memory=2**30)


@pytest.mark.parametrize("size", [0, 1, 1000, 2**10, 3 * 2**29, 8 * 2**20, 2**41 + 1])
def test_sizes_are_written_as_they_are_read(size: int) -> None:
    assert parse_size(exact_size(size)) == size


def test_sizes_are_shown_in_the_largest_unit() -> None:
    assert [format_size(size) for size in (0, 1023, 1536, 3 * 2**29)] == ["0 B", "1023 B", "1.5 KiB", "1.5 GiB"]
    for text in ("", "1GB", "-1", "1e3", "0x10"):
        with pytest.raises(ValueError, match="GiB"):
            parse_size(text)


GOOD = {
    "model_type": "Dream", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "mask_token_id": 63,
}  # fmt: skip


def parse(config: dict, generation: dict) -> ModelConfig:
    return read_config(config, generation, "config.json", FAMILIES["Dream"])


def test_fields_come_from_the_file() -> None:
    config = parse({**GOOD, "rope_theta": 5.0e5, "eos_token_id": 3}, {"eos_token_id": [1, 2]})
    assert (config.head_dim, config.rope_theta, config.eos_token_ids) == (8, 5.0e5, (1, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "model_type.*'qwen2'.*'Dream'"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 64}, "mask_token_id.*64"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": 64}, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"hidden_size": 36, "num_attention_heads": 4}, "head_dim 9"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse({**GOOD, **change}, {})


@pytest.mark.parametrize("missing", [k for k in GOOD if k not in ("num_key_value_heads",)])
def test_missing_fields_are_refused_by_name(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        parse({k: v for k, v in GOOD.items() if k != missing}, {})


def test_null_is_the_default_and_generation_config_goes_first() -> None:
    nothing = {"head_dim": None, "num_key_value_heads": None, "rope_theta": None, "eos_token_id": 5}
    config = parse({**GOOD, **nothing}, {"eos_token_id": None})
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.eos_token_ids) == (8, 4, 10000.0, (5,))
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id 99"):
        parse(GOOD, {"eos_token_id": 99})
    with pytest.raises(ConfigError, match="rope_parameters"):
        parse({**GOOD, "rope_parameters": 3}, {})


FIELDS: dict[str, dict[str, Any]] = {
    "Dream": GOOD,
    "DreamReasoner": {**GOOD, "block_size": 32},
    "Fast_dLLM_Qwen": {**GOOD, "model_type": "Fast_dLLM_Qwen", "bd_size": 16},
    "sdar": {**GOOD, "model_type": "sdar", "block_size": 8},
}
BLOCKS = {"DreamReasoner": "block_size", "Fast_dLLM_Qwen": "bd_size", "sdar": "block_size"}
MODELS = Path(__file__).parents[1] / "data" / "golden" / "models"
LLADA: dict[str, Any] = {
    "model_type": "llada", "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 48,
    "vocab_size": 60, "embedding_size": 64, "max_sequence_length": 128, "rope_theta": 5e5, "weight_tying": False,
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "rope": True, "mask_token_id": 63,
    "eos_token_id": 5, "rope_full_precision": True, "alibi": False, "alibi_bias_max": 8.0, "mlp_ratio": 4,
    "attention_layer_norm": False, "attention_layer_norm_with_affine": True, "layer_norm_with_affine": True,
    "bias_for_layer_norm": False, "block_group_size": 1, "embedding_dropout": 0.1, "residual_dropout": 0.1,
    "attention_dropout": 0.1, "flash_attention": True, "include_bias": False, "include_qkv_bias": False,
    "init_fn": "mitchell", "input_emb_norm": False, "scale_logits": False, "use_cache": False, "precision": "amp_bf16",
}  # fmt: skip


def parse_llada(**changes: Any) -> ModelConfig:
    values = {key: value for key, value in (LLADA | changes).items() if value is not ...}
    return read_config(values, {}, "config.json", FAMILIES["llada"])


def test_llada_has_names_of_its_own_and_sizes_that_other_fields_say() -> None:
    config = parse_llada()
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 8)
    assert (config.vocab_size, config.intermediate_size, config.max_position_embeddings) == (64, 48, 128)
    assert (config.rms_norm_eps, config.attention_bias, config.block_size) == (1e-5, False, None)
    null = parse_llada(n_kv_heads=None, mlp_hidden_size=None, embedding_size=None, mask_token_id=59)
    assert (null.num_kv_heads, null.intermediate_size, null.vocab_size) == (4, 128, 60)
    assert parse_llada(n_kv_heads=None, multi_query_attention=True).num_kv_heads == 1
    assert parse_llada(weight_tying=True).tie_word_embeddings
    assert parse_llada(mask_token_id=..., vocab_size=126464, embedding_size=...).mask_token_id == 126336


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("alibi", True, "alibi is True, expected False"),
        ("attention_layer_norm", True, "attention_layer_norm is True, expected False"),
        ("input_emb_norm", True, "input_emb_norm is True, expected False"),
        ("scale_logits", True, "scale_logits is True, expected False"),
        ("block_group_size", 2, "block_group_size is 2, expected 1"),
        ("block_type", "sequential", "block_type is 'sequential', expected 'llama'"),
        ("activation_type", "swiglu", "activation_type is 'swiglu', expected 'silu'"),
        ("layer_norm_type", ..., "layer_norm_type is None, expected 'rms'"),
        ("rope", ..., "rope is None, expected True"),
        ("weight_tying", ..., "weight_tying is None, expected False or True"),
        ("include_bias", True, "include_bias is True"),
        ("include_qkv_bias", True, "include_qkv_bias is True"),
        ("layer_norm_with_affine", False, "layer_norm_with_affine is False"),
        ("d_model", 30, "d_model 30 is not a multiple of n_heads 4"),
        ("n_kv_heads", 3, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ("n_layers", 0, "n_layers is 0, expected a positive integer"),
        ("max_sequence_length", ..., "max_sequence_length is None"),
        ("embedding_size", 50, "embedding_size is 50, expected at least vocab_size 60"),
        ("mask_token_id", 64, "mask_token_id is 64, expected a token id below embedding_size 64"),
        ("multi_query_attention", 1, "multi_query_attention is 1, expected true or false"),
        ("mlp_ratio", 0.5, "mlp_ratio is 0.5, expected a positive integer"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling is"),
    ],
)
def test_what_llada_does_not_have_is_refused_by_name(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {words}"):
        parse_llada(**{field: value})


def parse_family(name: str, changes: dict[str, Any]) -> ModelConfig:
    values = {key: value for key, value in (FIELDS[name] | changes).items() if value is not ...}
    return read_config(values, {}, "config.json", FAMILIES[name])


def test_families_have_blocks_and_what_their_config_leaves_out() -> None:
    assert {name: parse_family(name, {}).block_size for name in FIELDS} == {
        "Dream": None, "DreamReasoner": 32, "Fast_dLLM_Qwen": 16, "sdar": 8,
    }  # fmt: skip
    bare = {"mask_token_id": ..., "block_size": ..., "bd_size": ..., "vocab_size": 151936}
    for name, block, mask, bias in (("Fast_dLLM_Qwen", 32, 151665, True), ("sdar", 4, 151669, False)):
        config = parse_family(name, bare)
        assert (config.block_size, config.mask_token_id, config.attention_bias) == (block, mask, bias)
    assert all(family_in(FIELDS[name]) is FAMILIES[name] for name in FIELDS)
    assert family_in({**FIELDS["Dream"], "block_size": None}) is FAMILIES["Dream"]
    assert family_in({"model_type": "DreamReasoner"}) is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        *((name, {blocks: 0}, rf"{blocks} is 0, expected a positive") for name, blocks in BLOCKS.items()),
        ("sdar", {"block_size": "4"}, "block_size is '4'"),
        ("sdar", {"block_size": 2**11}, "block_size is 2048, expected at most 1024"),
        ("DreamReasoner", {"block_size": ...}, "block_size is None"),
        ("sdar", {"mask_token_id": ...}, "mask_token_id is 151669, expected a token id below vocab_size 64"),
        *(
            (name, {field: value}, f"{field} is ")
            for name in FIELDS
            for field, value in {
                "hidden_act": "gelu",
                "layer_types": ["sliding_attention"] * 2,
                "mlp_bias": True,
                "quantization_config": {"quant_method": "bitsandbytes"},
                "rope_scaling": {"type": "yarn"},
                "use_sliding_window": True,
            }.items()
        ),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {words}"):
        parse_family(name, changes)


def published(folder: str, changes: dict[str, Any]) -> tuple[dict[str, Any], Family]:
    """The ``config.json`` of a golden model with changes, also within ``rope_parameters``, and its family."""
    values = json.loads((MODELS / folder / "model_a" / "config.json").read_text())
    rope = {key.partition(".")[2]: changes.pop(key) for key in [*changes] if "." in key}
    for fields, own in ((values, changes), (values.get("rope_parameters", {}), rope)):
        fields |= own
        for key in [key for key, value in own.items() if value is ...]:
            del fields[key]
    family = family_in(with_name(values, "qwen3-bd3lm"))
    assert family is not None
    return values, family


SCALED = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("folder", "changes", "words"),
    [
        (
            "nemotron",
            {"rope_parameters.rope_type": "linear"},
            "rope_parameters: rope_type is 'linear', expected 'yarn' or",
        ),
        ("nemotron", {"rope_parameters.type": "linear"}, "rope_parameters: type is 'linear', expected 'yarn'"),
        ("nemotron", {"rope_parameters.factor": ...}, "rope_parameters: factor is None, expected a positive number"),
        ("nemotron", {"rope_parameters.factor": 0.5}, "rope_parameters: factor is 0.5, expected a number from 1"),
        ("nemotron", {"rope_parameters.beta_fast": "32"}, "rope_parameters: beta_fast is '32'"),
        (
            "nemotron",
            {"rope_parameters.original_max_position_embeddings": ...},
            "rope_parameters: original_max_position_embeddings is None",
        ),
        (
            "nemotron",
            {"rope_parameters.rope_theta": ...},
            "rope_parameters: rope_theta is None, expected a number above 1",
        ),
        ("nemotron", {"rope_parameters.rope_theta": 1}, "rope_parameters: rope_theta is 1, expected a number above 1"),
        (
            "nemotron",
            {"rope_parameters.truncate": False},
            "rope_parameters has the field 'truncate', expected none but a",
        ),
        (
            "nemotron",
            {"rope_parameters": ..., "rope_scaling": SCALED},
            "rope_scaling is .*expected the same as rope_par",
        ),
        ("nemotron", {"rope_parameters": ...}, "rope_parameters: rope_theta is None"),
        (
            "nemotron",
            {"dlm_paradigm": "block_diff"},
            "dlm_paradigm is 'block_diff', expected 'bidirectional' or 'autoreg",
        ),
        ("nemotron", {"sliding_window": 4096}, "sliding_window is 4096, expected None"),
        ("nemotron", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("nemotron", {"block_size": 8.0}, "block_size is 8.0, expected a positive integer"),
        ("nemotron", {"mask_token_id": 160}, "mask_token_id is 160, expected a token id below vocab_size 160"),
        (
            "pangu",
            {"rope_parameters": SCALED},
            "rope_parameters has the field 'factor', expected none but rope_theta, ",
        ),
        ("pangu", {"rope_scaling": SCALED}, "rope_scaling is "),
        ("pangu", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config is "),
        ("pangu", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("pangu", {"bias": "yes"}, "bias is 'yes', expected true or false"),
        ("pangu", {"mask_token_id": ...}, "mask_token_id is 45830, expected a token id below vocab_size 176"),
        ("orthrus", {"mask_token_id": ...}, "mask_token_id is None, expected a token id below vocab_size 160"),
        ("orthrus", {"block_size": "32"}, "block_size is '32', expected a positive integer"),
        ("orthrus", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("a2d", {"layer_types": ["sliding_attention"] * 3}, "layer_types is "),
        ("a2d", {"rope_scaling": SCALED}, "rope_scaling is "),
        ("a2d", {"block_size": 0}, "block_size is 0, expected a positive integer"),
        ("diffcoder", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("diffcoder", {"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_what_a_later_family_does_not_have_is_refused_by_name(folder: str, changes: dict[str, Any], words: str) -> None:
    values, family = published(folder, dict(changes))
    with pytest.raises(ConfigError, match=f"config.json: {words}"):
        read_config(values, {}, "config.json", family)


def test_fields_may_say_the_same_in_another_way() -> None:
    plain = read_config(*_read("nemotron", {}))
    rope = json.loads((MODELS / "nemotron" / "model_a" / "config.json").read_text())["rope_parameters"]
    assert plain.yarn is not None
    older = {name: value for name, value in rope.items() if name != "rope_type"} | {"type": "yarn"}
    for changes in (
        {"rope_scaling": rope, "rope_theta": 1e6},
        {"rope_parameters": older},
        {"rope_parameters.type": "yarn"},
    ):
        assert read_config(*_read("nemotron", changes)) == plain
    outside = {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}
    assert read_config(*_read("nemotron", outside)) == replace(plain, yarn=None)


def _read(folder: str, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str, Family]:
    values, family = published(folder, changes)
    return values, {}, "config.json", family


@pytest.mark.parametrize(
    ("folder", "changes", "name", "decoding"),
    [
        ("nemotron", {}, "nemotron_labs_diffusion", "linear_spec"),
        ("nemotron", {"dlm_paradigm": "autoregressive"}, "nemotron_labs_diffusion_ar", "ar"),
        ("pangu", {"architectures": ["Any"]}, "PanguEmbedded", "causal_blocks"),
        ("orthrus", {}, "orthrus", "linear_spec"),
        ("orthrus", {"model_type": "qwen3"}, "orthrus_qwen3", "linear_spec"),
        ("diffcoder", {}, "stable_diffcoder", "d2f"),
        ("diffcoder", {"architectures": ["SeedDiffcoderForCausalLM"]}, "stable_diffcoder", "d2f"),
        ("a2d", {}, "a2d-qwen3-bd3lm", "d2f"),
    ],
)
def test_a_family_is_told_by_its_fields_and_recommends_a_decoding_that_fits(
    folder: str, changes: dict[str, Any], name: str, decoding: str
) -> None:
    values, family = published(folder, changes)
    assert (family.name, family.recommended["decoding"]) == (name, decoding)
    assert read_config(values, {}, "config.json", family).model_type == name
    assert DecodingParams(**family.recommended).strategy.fits(family.properties)


@pytest.mark.parametrize(
    ("directory", "own_name", "way"),
    [
        ("/models/Qwen3-0.6B-diffusion-bd3lm-v0.1", "", "bd3lm"),
        ("/models/mdlm-and-others/qwen3-BD3LM", "Qwen/Qwen3-0.6B", "bd3lm"),
        ("/hub/models--dllm-hub--Qwen3-0.6B-diffusion-mdlm-v0.1/snapshots/0a1b", "", "mdlm"),
        ("/models/mine", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "mdlm"),
        ("/models/mine", "", None),
        ("/models/mdlm-to-bd3lm", "", None),
    ],
)
def test_the_last_part_of_a_name_tells_how_an_a2d_model_decodes(directory: str, own_name: str, way: str | None) -> None:
    config = with_name({"model_type": "a2d-qwen3", "_name_or_path": own_name}, directory)
    if way is None:
        with pytest.raises(ConfigError, match="give the directory a name with mdlm or bd3lm in it"):
            family_in(config)
    else:
        assert family_in(config) is FAMILIES[f"a2d-qwen3-{way}"]


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"], "StableDiffcoderForCausalLM", 3, [[]]])
def test_a_model_type_of_many_is_of_no_family_without_its_architecture(architectures: object) -> None:
    assert family_in({"model_type": "llama", "architectures": architectures}) is None


def test_fields_for_training_and_fields_that_are_off_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    harmless = {
        "attn_implementation": "flash_attention_2", "attention_dropout": 0.1,
        "max_window_layers": 28, "sliding_window": 4096, "transformers_version": "4.53", "auto_map": {"a": "b"},
        "initializer_range": 0.02, "layer_types": ["full_attention"] * 2, "num_experts": 0, "logit_scale": None,
        "mask_token": "<|MASK|>", "architectures": ["Any"], "pretraining_tp": 1, "debug": False, "alibi": False,
    }  # fmt: skip
    for name in FIELDS:
        assert parse_family(name, harmless) == parse_family(name, {})
    of_sdar = {"fuse_cross_entropy": True, "debug": True, "ep_size": 8, "use_deepep": True, "skip_checkpoint": True}
    assert parse_family("sdar", of_sdar) == parse_family("sdar", {})
    parse_llada()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("Dream", {"bd_size": 32}),
        ("Fast_dLLM_Qwen", {"block_size": 4}),
        ("sdar", {"final_logit_softcapping": 30.0, "qk_layernorm": True}),
        ("DreamReasoner", {"num_experts": 128}),
    ],
)
def test_fields_that_a_family_does_not_know_are_named(
    name: str, unknown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_family(name, unknown) == parse_family(name, {})
    message = f"config.json: not known for model_type {FAMILIES[name].model_type!r}, so without effect: {unknown}"
    assert caplog.messages == [message]


def test_a_field_of_another_name_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_llada(hidden_size=48).hidden_size == 32
    assert caplog.messages == ["config.json: not known for model_type 'llada', so without effect: {'hidden_size': 48}"]


@pytest.mark.parametrize("file", sorted(MODELS.glob("*/*/config.json")), ids=str)
def test_all_fields_of_the_published_classes_are_known(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = json.loads(file.read_text())
    read_config(values, {}, str(file), family_in(with_name(values, "mdlm")))
    assert not caplog.messages
