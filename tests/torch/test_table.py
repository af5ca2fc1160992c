"""A second architecture in fused ops is a table and a class: here Dream under other names, with all that Dream can."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lopa_ascend import LLM, DecodingParams, checkpoint
from lopa_ascend.checkpoint import HEAD, Architecture, CheckpointError, Row, Shard, Table, open_adapter, open_checkpoint
from lopa_ascend.checkpoint.write import write_int8
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.model import registry
from lopa_ascend.model.dream import TENSORS, Dream
from tests import dream_checkpoint
from tests.tiny import write_dream

NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.layers": "model.transformer.blocks",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.down_proj": "ff_out",
    "self_attn.": "",
    "mlp.": "",
}
"""What LLaDA calls the tensors of Dream."""


def renamed(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def rename(row: Row) -> Row:
    return replace(
        row,
        name=renamed(row.name),
        source=row.source and renamed(row.source),
        tied_to=row.tied_to and renamed(row.tied_to),
    )


TABLE = Table(
    before=tuple(map(rename, TENSORS.before)),
    layer=tuple(map(rename, TENSORS.layer)),
    after=tuple(map(rename, TENSORS.after)),
    layers=renamed(TENSORS.layers),
)


class Renamed(Dream):
    architecture: ClassVar = Architecture("Renamed", TABLE.tensors, replace(FAMILIES["Dream"], model_type="Renamed"))


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A Dream, and the same model as a Renamed."""
    monkeypatch.setitem(registry.FUSED, "Renamed", f"{__name__}:Renamed")
    dream, other = write_dream(tmp_path / "dream", dtype=torch.bfloat16), tmp_path / "other"
    shutil.copytree(dream, other)
    config = json.loads((dream / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "Renamed"}))
    tensors = load_file(str(dream / "model.safetensors"))
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, str(other / "model.safetensors"))
    return dream, other


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def load(path: Path, **options: object) -> dict[str, Tensor]:
    return checkpoint.load(open_checkpoint(path, Renamed.architecture), **options)[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"quantization": "w8a8"}])
def test_it_runs(paths: tuple[Path, Path], options: dict[str, str]) -> None:
    params = DecodingParams(max_new_tokens=16, ignore_eos=True)
    dream, other = (LLM(path, **options).generate([[5, 6, 7]], params, quiet=True)[0] for path in paths)
    assert other.token_ids == dream.token_ids


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_is_split_and_quantised(paths: tuple[Path, Path], tmp_path: Path, size: int) -> None:
    dream, other = paths
    for rank in range(size):
        for int8 in ((), INT8_LAYERS):
            expected = dream_checkpoint.load(dream, shard=Shard(rank, size), int8=int8)[1]
            assert same(load(other, shard=Shard(rank, size), int8=int8), expected)
    written = write_int8(other, tmp_path / "int8", Renamed.architecture, int8=INT8_LAYERS)
    ignored = json.loads((written / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["model.transformer.ff_out"]
    assert same(load(written), dream_checkpoint.load(dream, int8=INT8_LAYERS)[1])


def test_an_adapter_changes_all_linear_layers_but_the_head(paths: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    expected = open_checkpoint(paths[1], Renamed.architecture).expected
    tensors: dict[str, Tensor] = {}
    for module, spec in expected.linears.items():
        if spec.row.linear != HEAD:
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.ones(2, spec.shape[1])
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.ones(spec.shape[0], 2)
    save_file(tensors, str(adapter / "adapter_model.safetensors"))
    deltas = open_adapter(adapter, expected).deltas
    assert len(deltas) == 2 * 7
    assert load(paths[1], lora=str(adapter)).keys() == load(paths[1]).keys()


def test_what_is_missing_is_named(paths: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight: is missing.*for Dream"):
        dream_checkpoint.open_checkpoint(rename_type(paths[1], "Dream"))
    with pytest.raises(CheckpointError, match=r"tensor model\.transformer\.wte\.weight: is missing.*for Renamed"):
        open_checkpoint(rename_type(paths[0], "Renamed"), Renamed.architecture)


def rename_type(path: Path, model_type: str) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return path
