"""Decoding parameters that a model directory recommends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.config import ConfigError
from lopa_ascend.families import ignored_sampling, recommendations, recommended_decoding
from lopa_ascend.serve.cli import parse_args


def directory(path: Path, values: object) -> Path:
    path.joinpath("generation_config.json").write_text(json.dumps({"eos_token_id": 1, "lopa_ascend": values}))
    return path


def test_a_directory_may_recommend_nothing(tmp_path: Path) -> None:
    assert recommended_decoding(tmp_path) == {}
    assert recommended_decoding(tmp_path / "absent") == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.7}')
    assert recommended_decoding(tmp_path) == {}


def test_flags_win_over_it_and_a_preset_replaces_it(tmp_path: Path) -> None:
    model = ["--model", str(directory(tmp_path, {"block_size": 8, "num_branches": 3, "tau_conf": 0.8}))]
    assert parse_args(model).decoding == {"block_size": 8, "num_branches": 3, "tau_conf": 0.8}
    assert parse_args([*model, "--block-size", "16"]).decoding["block_size"] == 16
    assert parse_args([*model, "--preset", "S13"]).decoding == parse_args(["--model", "M", "--preset", "S13"]).decoding


def test_what_does_not_go_with_a_flag_is_left_out(tmp_path: Path) -> None:
    model = ["--model", str(directory(tmp_path, {"block_size": 8, "num_branches": 3}))]
    assert parse_args([*model, "--decoding", "d2f"]).decoding == {"block_size": 8, "decoding": "d2f"}


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sdar": (
        {"model_type": "sdar", "block_size": None},
        {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85, "block_size": 4},
    ),
    "sdar-b16": (
        {"model_type": "sdar", "block_size": 16},
        {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85, "block_size": 16},
    ),
    "fast_dllm": (
        {"model_type": "Fast_dLLM_Qwen", "bd_size": 32},
        {"decoding": "fast_dllm_v2", "tau_conf": 0.9, "block_size": 32},
    ),
    "reasoner": (
        {"model_type": "Dream", "block_size": 32},
        {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.9, "block_size": 32},
    ),
    "dream": ({"model_type": "Dream"}, {}),
    "other": ({"model_type": ["sdar"]}, {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_block_causal_models_decode_as_their_authors_recommend(tmp_path: Path, name: str) -> None:
    config, expected = FAMILIES[name]
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    assert recommended_decoding(tmp_path) == expected
    assert parse_args(["--model", str(tmp_path)]).decoding == expected


def test_the_directory_wins_over_the_family_and_flags_over_both(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text('{"model_type": "sdar", "block_size": 8}')
    directory(tmp_path, {"tau_conf": 0.95, "num_branches": 2, "decoding": "lopa"})
    merged = {"decoding": "lopa", "num_branches": 2, "tau_add": 1.0, "tau_conf": 0.95, "block_size": 8}
    assert recommended_decoding(tmp_path) == merged
    flags = ["--model", str(tmp_path), "--decoding", "d2f", "--block-size", "16"]
    assert parse_args(flags).decoding == {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.95, "block_size": 16}
    assert list(recommendations(tmp_path)) == ["generate.py of SDAR and config.json", "generation_config.json"]
    tmp_path.joinpath("config.json").write_text('{"model_type": "sdar", "block_size": "8"}')
    with pytest.raises(ConfigError, match="config.json: block_size is '8', expected a positive integer"):
        recommended_decoding(tmp_path)


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (
            {"model_type": "sdar"},
            "--decoding parallel",
            '--decoding.*"parallel" does not go with .* use "lopa" or "d2f"',
        ),
        ({"model_type": "sdar"}, "--base fast_dllm_v2 --decoding lopa", '--base.* predicts each position; use "d2f"'),
        ({"model_type": "sdar"}, "--window-attention full", '--window-attention.* use "block_causal"'),
        ({"model_type": "Dream"}, "--preset fast-dllm-v2-demo", '--decoding.* all positions; use "lopa" or "d2f" or'),
        ({"model_type": "Fast_dLLM_Qwen"}, "--preset S1", '--window-attention.* use "block_causal"'),
    ],
)
def test_a_decoding_that_the_family_cannot_run_is_refused_at_start(
    tmp_path: Path, config: dict[str, Any], flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        parse_args(["--model", str(tmp_path), *flags.split()])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], r"lopa_ascend is \[1\], expected an object of decoding parameters"),
        ({"block_sizes": 8}, "lopa_ascend has 'block_sizes'; choose from .*block_size"),
        ({"block_size": 0}, "lopa_ascend: block_size: must be .*, got 0"),
        ({"decoding": "d2f", "num_branches": 3}, "lopa_ascend: num_branches: 3 does not go with decoding"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_the_file(
    tmp_path: Path, values: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory(tmp_path, values)
    with pytest.raises(ConfigError, match=rf"generation_config.json: {message}"):
        recommended_decoding(tmp_path)
    with pytest.raises(SystemExit):
        parse_args(["--model", str(tmp_path)])
    assert "argument --model: cannot be served: " in capsys.readouterr().err


def test_sampling_defaults_for_transformers_are_not_used(tmp_path: Path):
    file = tmp_path / "generation_config.json"
    assert ignored_sampling(tmp_path) == {}
    file.write_text(json.dumps({"eos_token_id": 1, "do_sample": False, "top_k": None, "lopa_ascend": {"tau_act": 1}}))
    assert ignored_sampling(tmp_path) == {}
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.2, "top_p": 0.9, "_from_model_config": True}))
    assert ignored_sampling(tmp_path) == {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
