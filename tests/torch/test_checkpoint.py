"""Reading and packing Dream directories, and every way in which one is refused."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import EngineConfig
from lopa_ascend.hub import model_name
from tests.dream_checkpoint import load, open_checkpoint
from tests.tiny import write_dream

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST_SHARD = "model-00001-of-00003.safetensors"


def read_all(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(str(file)).items()}


def edit_json(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text())
    values.update(changes)
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(file: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; dots in their names are written as __."""
    tensors: dict[str, Any] = load_file(str(file))
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, str(file))


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"tie": True, "bias": False}, {"head_dim": 16, "kv_heads": 1}])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_packed_weights(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    path = write_dream(tmp_path, **options)
    raw = read_all(path)
    config, weights = load(path, lora=None, dtype=dtype, device="cpu")
    kind = torch.float32 if dtype == "auto" else torch.bfloat16
    expected = {"embed.weight": raw["model.embed_tokens.weight"], "norm.weight": raw["model.norm.weight"]}
    for n in range(2):
        old, new = f"model.layers.{n}.", f"layers.{n}."
        for part in ("weight", "bias") if options.get("bias", True) else ("weight",):
            expected[f"{new}qkv.{part}"] = torch.cat([raw[f"{old}self_attn.{p}_proj.{part}"] for p in "qkv"])
        expected[f"{new}gate_up.weight"] = torch.cat([raw[f"{old}mlp.{p}_proj.weight"] for p in ("gate", "up")])
        expected[f"{new}attn_norm.weight"] = raw[f"{old}input_layernorm.weight"]
        expected[f"{new}mlp_norm.weight"] = raw[f"{old}post_attention_layernorm.weight"]
        expected[f"{new}o.weight"] = raw[f"{old}self_attn.o_proj.weight"]
        expected[f"{new}down.weight"] = raw[f"{old}mlp.down_proj.weight"]
    if not options.get("tie"):
        expected["head.weight"] = raw["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.to(kind)), name
        assert weights[name].dtype == kind
    assert config.dtype == str(kind).removeprefix("torch.")


def test_layer_order_whatever_the_files(tmp_path: Path) -> None:
    write_dream(tmp_path, shards=3)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    edit_json(tmp_path / INDEX, weight_map=dict(reversed(weight_map.items())))
    names = [name for name, _ in open_checkpoint(tmp_path).tensors()]
    assert sorted(names) == sorted(weight_map)
    assert sorted(names[1:-2], key=lambda name: int(name.split(".")[2])) == names[1:-2]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": "float32"}, "float32"), ({"torch_dtype": ..., "dtype": "float16"}, "float16")],
)
def test_own_dtype(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    write_dream(tmp_path, dtype=torch.bfloat16)
    edit_json(tmp_path / "config.json", **({"torch_dtype": ...} | changes))
    config, weights = load(tmp_path, lora=None, dtype="auto", device="cpu")
    assert config.dtype == open_checkpoint(tmp_path).config.dtype == dtype
    assert {str(tensor.dtype) for tensor in weights.values()} == {f"torch.{dtype}"}


def test_unknown_dtype(tmp_path: Path) -> None:
    write_dream(tmp_path)
    with pytest.raises(ValueError, match="'int8'.*auto, float32, bfloat16"):
        load(tmp_path, lora=None, dtype="int8", device="cpu")


def test_eos_ids_come_from_generation_config(tmp_path: Path) -> None:
    write_dream(tmp_path, eos_token_id=[3, 4])
    assert open_checkpoint(tmp_path).config.eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").unlink()
    assert open_checkpoint(tmp_path).config.eos_token_ids == ()


def test_tied_head_in_the_file_must_equal_the_embedding(tmp_path: Path) -> None:
    write_dream(tmp_path, tie=True)
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    edit_tensors(tmp_path / SINGLE, lm_head__weight=embedding)
    assert "lm_head.weight" not in dict(open_checkpoint(tmp_path).tensors())
    assert "head.weight" not in load(tmp_path, lora=None, dtype="auto", device="cpu")[1]
    edit_tensors(tmp_path / SINGLE, lm_head__weight=torch.zeros(319, 32))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor lm_head\.weight.*\[319, 32\].*\[320, 32\]"):
        open_checkpoint(tmp_path)


def test_packed_weights_do_not_depend_on_the_file(tmp_path: Path) -> None:
    write_dream(tmp_path)
    weights = load(tmp_path, lora=None, dtype="auto", device="cpu")[1]
    before = {name: tensor.clone() for name, tensor in weights.items()}
    with (tmp_path / SINGLE).open("r+b") as file:
        file.write(bytes((tmp_path / SINGLE).stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())


def _pickle_only(path: Path) -> None:
    (path / SINGLE).rename(path / "pytorch_model.bin")


def _file_instead(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_text("x")


def _shift(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = [o + 4 for o in header["model.norm.weight"]["data_offsets"]]


def _grow(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [33]


def _fields(header: dict[str, Any]) -> None:
    del header["model.norm.weight"]["dtype"]


def _sizes(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [-32]


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


K_WEIGHT = "model.layers.1.self_attn.k_proj.weight"
K_EDIT = "model__layers__1__self_attn__k_proj__weight"
NORM = "tensor model.norm.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a file": (_file_instead, ["expected a directory", "it is a file"]),
    "no config": (lambda p: (p / "config.json").unlink(), ["config.json: cannot be read"]),
    "broken config": (lambda p: (p / "config.json").write_text("{"), ["config.json: is not valid JSON"]),
    "config is a list": (
        lambda p: (p / "config.json").write_text("[]"),
        ["config.json: expected a JSON object", "list"],
    ),
    "config is not text": (lambda p: (p / "config.json").write_bytes(b"\xff"), ["config.json: is not valid JSON"]),
    "broken generation config": (
        lambda p: (p / "generation_config.json").write_text("{"),
        ["generation_config.json: is not valid JSON"],
    ),
    "missing field": (
        lambda p: edit_json(p / "config.json", hidden_size=...),
        ["config.json: hidden_size", "expected"],
    ),
    "other model": (lambda p: edit_json(p / "config.json", model_type="llama"), ["config.json: model_type", "'Dream'"]),
    "dtype of the config": (
        lambda p: edit_json(p / "config.json", torch_dtype="int8"),
        ["config.json: torch_dtype is 'int8'", "expected float32 or bfloat16"],
    ),
    "no weights": (lambda p: (p / SINGLE).unlink(), ["holds no weights", f"expected {SINGLE}, or {INDEX}"]),
    "pickle": (_pickle_only, ["only pickles (pytorch_model.bin)", "never read", f"expected {SINGLE}"]),
    "missing tensor": (
        lambda p: edit_tensors(p / SINGLE, **{K_EDIT: None}),
        [f"{SINGLE}: tensor {K_WEIGHT}: is missing", "expected [16, 32]"],
    ),
    "missing head": (
        lambda p: edit_tensors(p / SINGLE, lm_head__weight=None),
        [f"{SINGLE}: tensor lm_head.weight: is missing", "expected [320, 32]"],
    ),
    "extra tensor": (
        lambda p: edit_tensors(p / SINGLE, model__layers__2__mlp__up_proj__weight=torch.zeros(1)),
        [f"{SINGLE}: tensor model.layers.2.mlp.up_proj.weight: is not part"],
    ),
    "unwanted bias": (
        lambda p: edit_json(p / "config.json", attention_bias=False),
        [f"{SINGLE}: tensor model.layers.", "_proj.bias: is not part"],
    ),
    "misshapen tensor": (
        lambda p: edit_tensors(p / SINGLE, **{K_EDIT: torch.zeros(32, 16)}),
        [f"{SINGLE}: tensor {K_WEIGHT}: has shape [32, 16], expected [16, 32]"],
    ),
    "dtype of a tensor": (
        lambda p: edit_tensors(p / SINGLE, **{K_EDIT: torch.zeros(16, 32, dtype=torch.int8)}),
        [f"{SINGLE}: tensor {K_WEIGHT}: unsupported dtype I8", "F32 or BF16 or F16"],
    ),
    "truncated": (lambda p: _cut(p / SINGLE, (p / SINGLE).stat().st_size - 1), [f"{SINGLE}: tensor", "truncated"]),
    "truncated header": (lambda p: _cut(p / SINGLE, 100), [f"{SINGLE}: is truncated"]),
    "empty": (lambda p: _cut(p / SINGLE, 0), [f"{SINGLE}: is truncated"]),
    "too long": (lambda p: (p / SINGLE).open("ab").write(b"x"), [f"{SINGLE}: holds", "expected"]),
    "not safetensors": (
        lambda p: (p / SINGLE).write_bytes(b"\x80\x02" * 99),
        [f"{SINGLE}: is truncated or not safetensors"],
    ),
    "header is not JSON": (
        lambda p: (p / SINGLE).write_bytes(struct.pack("<Q", 4) + b"abcd"),
        [f"{SINGLE}: is not safetensors", "not JSON"],
    ),
    "header is a list": (
        lambda p: (p / SINGLE).write_bytes(struct.pack("<Q", 2) + b"[]"),
        [f"{SINGLE}: is not safetensors", "not a JSON object"],
    ),
    "offsets": (lambda p: edit_header(p / SINGLE, _shift), [f"{SINGLE}: tensor", "starts at byte", "expected"]),
    "size": (lambda p: edit_header(p / SINGLE, _grow), [f"{SINGLE}: {NORM}", "takes 132 bytes", "give 128"]),
    "header fields": (lambda p: edit_header(p / SINGLE, _fields), [f"{SINGLE}: {NORM}", "expected dtype"]),
    "negative size": (lambda p: edit_header(p / SINGLE, _sizes), [f"{SINGLE}: {NORM}", "not a list of sizes"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, words = REFUSED[case]
    path = write_dream(tmp_path / "model")
    change(path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def edit_map(path: Path, **changes: str) -> None:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    edit_json(path / INDEX, weight_map=weight_map | {name.replace("__", "."): shard for name, shard in changes.items()})


REFUSED_SHARDS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "broken index": (lambda p: (p / INDEX).write_text("["), [f"{INDEX}: is not valid JSON"]),
    "no map": (lambda p: edit_json(p / INDEX, weight_map=...), [f"{INDEX}: weight_map is None", "expected"]),
    "missing shard": (
        lambda p: (p / FIRST_SHARD).unlink(),
        [f"{INDEX}: tensor model.embed_tokens.weight", FIRST_SHARD, "does not exist"],
    ),
    "tensor that does not exist": (
        lambda p: edit_map(p, model__extra=FIRST_SHARD),
        [f"{INDEX}: tensor model.extra: is not in {FIRST_SHARD}"],
    ),
    "wrong shard": (
        lambda p: edit_map(p, lm_head__weight=FIRST_SHARD),
        [f"{INDEX}: tensor lm_head.weight: is not in {FIRST_SHARD}"],
    ),
    "tensor without entry": (
        lambda p: edit_tensors(p / FIRST_SHARD, extra=torch.zeros(1)),
        [f"{FIRST_SHARD}: tensor extra: the index does not expect it"],
    ),
    "shard elsewhere": (
        lambda p: edit_map(p, lm_head__weight="../x.safetensors"),
        [f"{INDEX}: tensor lm_head.weight", "'../x.safetensors' is not the name of a .safetensors file"],
    ),
    "pickled shard": (
        lambda p: edit_map(p, lm_head__weight="x.bin"),
        [f"{INDEX}: tensor lm_head.weight", "'x.bin' is not the name of a .safetensors file"],
    ),
    "truncated shard": (lambda p: _cut(p / FIRST_SHARD, 2000), [f"{FIRST_SHARD}: ", "truncated"]),
    "misshapen": (
        lambda p: edit_tensors(p / FIRST_SHARD, model__embed_tokens__weight=torch.zeros(2)),
        [f"{FIRST_SHARD}: tensor model.embed_tokens.weight: has shape [2], expected [320, 32]"],
    ),
}


@pytest.mark.parametrize("case", REFUSED_SHARDS)
def test_refused_shards(tmp_path: Path, case: str) -> None:
    change, words = REFUSED_SHARDS[case]
    change(write_dream(tmp_path, shards=3))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/x: expected a directory")):
        open_checkpoint(tmp_path / "x")


def test_what_is_neither_a_directory_nor_a_name_on_the_hub() -> None:
    with pytest.raises(CheckpointError, match=r"a name on the hub, ORG/NAME or ORG/NAME@REVISION, but it is missing$"):
        open_checkpoint("/no/such/model")


def test_names_of_models() -> None:
    names = {
        "models/Dream-v0-Instruct-7B": "Dream-v0-Instruct-7B",
        "hub/models--Dream-org--Dream-v0-Instruct-7B/snapshots/8b7672e": "Dream-org/Dream-v0-Instruct-7B",
        "snapshots/other": "other",
        None: "demo",
    }
    assert {path: model_name(EngineConfig(model=path)) for path in names} == names
