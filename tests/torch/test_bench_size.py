"""The measurement of a Dream-7B's size, on a model of two small layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from lopa_ascend.checkpoint import open_checkpoint
from scripts.bench_size import FORMATS, measure, row, write_random

CONFIG = {
    "model_type": "Dream",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "mask_token_id": 159,
    "eos_token_id": 158,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    size = write_random(path, CONFIG)
    assert size == sum(file.stat().st_size for file in path.iterdir())
    return path


def test_a_file_holds_one_layer_or_one_matrix_of_the_vocabulary(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.dtype == "bfloat16"
    layers = [load_file(str(path / f"layer{number:02}.safetensors")) for number in range(2)]
    assert all(name.startswith(f"model.layers.{number}.") for number in range(2) for name in layers[number])
    assert list(load_file(str(path / "lm_head.safetensors"))) == ["lm_head.weight"]


def test_int8_weights_take_less(path: Path) -> None:
    found = {name: measure(path, name, 8) for name in FORMATS}
    assert found["w8a8"]["weights_gib"] < 0.9 * found["bfloat16"]["weights_gib"]
    for name, figures in found.items():
        assert 1 <= figures["forwards"] <= 32
        assert figures["peak_gib"] > figures["weights_gib"]
        assert row(name, figures).count("|") == 7
