"""Checks of the model directory before a launch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.demo import DEMO_MODEL
from scripts.launch.arguments import Launch
from scripts.launch.model import check_model

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole safetensors file."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Dream of 28 heads with weights in two files, which hold no tensors: the checks do not look for any."""
    path = tmp_path / "model"
    path.mkdir()
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
    (path / "config.json").write_text(json.dumps(config))
    weight_map = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in weight_map.values():
        (path / file).write_bytes(NO_TENSORS)
    return path


def model_findings(model: Path, **changes: Any) -> list[str]:
    launch = Launch(device="cpu", tp=2, bp=1, model=model)
    return [str(finding) for finding in check_model(replace(launch, **changes))]


def test_a_model_that_is_whole(model: Path):
    assert model_findings(model) == [f"ok    model: {model}", "ok    model: tp 2 splits 28 query and 4 KV heads"]
    assert model_findings(DEMO_MODEL) == [
        f"ok    model: {DEMO_MODEL}",
        "ok    model: tp 2 splits 4 query and 2 KV heads",
    ]


def test_what_is_on_the_hub_is_left_to_the_server():
    told = "the server downloads org/model@v1, and checks then whether it fits"
    assert model_findings(Path("org/model@v1")) == [f"note  model: {told}"]


WHOLE = "give a whole Hugging Face directory of a Dream or of a registered model"
DOWNLOAD = "finish its download, or let this user read it"


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("model-00002.safetensors", None, "{}/model-00002.safetensors is not there or cannot be read; " + DOWNLOAD),
        ("model.safetensors.index.json", None, "{}/model.safetensors is not there or cannot be read; " + DOWNLOAD),
        ("model.safetensors.index.json", "{}", "{}/model.safetensors.index.json: has no weight_map; " + WHOLE),
        (
            "model.safetensors.index.json",
            "[]",
            "{}/model.safetensors.index.json: expected a JSON object, found list; " + WHOLE,
        ),
        (
            "config.json",
            None,
            "{}/config.json: cannot be read (No such file or directory), expected a JSON object; " + WHOLE,
        ),
        ("config.json", "{", "{}/config.json: is not valid JSON (Expecting property name enclosed in double quotes"),
        ("config.json", "{}", "{}/config.json: model_type is None, expected one of Dream, Fast_dLLM_Qwen, "),
    ],
)
def test_a_model_that_is_not_whole(model: Path, file: str, content: str | None, line: str):
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content)
    (found,) = [line for line in model_findings(model) if not line.startswith("ok")]
    assert found.startswith("FAIL  model: " + line.replace("{}", str(model)))


def test_a_folder_in_the_place_of_a_file(model: Path):
    (model / "model-00002.safetensors").unlink()
    (model / "model-00002.safetensors").mkdir()
    assert model_findings(model)[0].startswith(
        f"FAIL  model: {model}/model-00002.safetensors is not there or cannot be"
    )


def test_a_single_file_counts_where_there_is_an_index_too(model: Path):
    """As the server loads it: an index may be left over from before its files were joined."""
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (model / "model-00001.safetensors").unlink()
    assert model_findings(model)[0] == f"ok    model: {model}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698592\n",
        NO_TENSORS + b".",
        NO_TENSORS[:-1],
        (2).to_bytes(8, "little") + b"[]",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (58).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'[:58] + b"1234567",
    ],
)
def test_a_file_that_is_not_whole(model: Path, content: bytes):
    file = model / "model-00002.safetensors"
    file.write_bytes(content)
    remedy = "finish its download, with git-lfs if git made it"
    assert model_findings(model)[0] == f"FAIL  model: {file} is not a whole safetensors file; {remedy}"


def test_a_model_that_tp_does_not_split(model: Path):
    reason = "tp 7 does not split a model with 28 query and 4 KV heads; choose --tp from 1, 2, 4"
    assert model_findings(model, tp=7) == [f"ok    model: {model}", f"FAIL  model: {reason}"]


def test_a_model_in_plain_torch_is_not_split(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_ascend.model.registry.known_models", lambda: ("Dream", "Mine"))
    config = json.loads((model / "config.json").read_text()) | {"model_type": "Mine", "hidden_act": "gelu"}
    (model / "config.json").write_text(json.dumps(config))
    assert model_findings(model, tp=1)[-1] == "ok    model: tp 1 splits 28 query and 4 KV heads"
    assert model_findings(model, tp=2)[-1].endswith("choose --tp from 1")


def test_an_adapter_that_is_not_there(model: Path, tmp_path: Path):
    names = ("adapter_config.json", "adapter_model.safetensors")
    missing = [f"FAIL  model: {tmp_path / name} is not there or cannot be read; {DOWNLOAD}" for name in names]
    assert model_findings(model, lora_path=tmp_path)[:-1] == missing
    for name in names:
        (tmp_path / name).write_bytes(NO_TENSORS)
    assert model_findings(model, lora_path=tmp_path)[0] == f"ok    model: {model}"
