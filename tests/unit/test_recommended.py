"""Decoding parameters that a model directory recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.config import ConfigError, ignored_sampling, recommended_decoding
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
