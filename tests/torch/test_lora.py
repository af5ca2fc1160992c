"""Merging PEFT adapters, against peft itself, and every adapter that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lopa_ascend.checkpoint import (
    Adapter,
    Checkpoint,
    CheckpointError,
    merge_adapter,
    open_adapter,
)
from tests.dream_checkpoint import load, open_checkpoint
from tests.tiny import write_dream

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def write_with_peft(
    model: Path, adapter: Path, dtype: torch.dtype, save_embedding_layers: bool | str = "auto", **options: Any
) -> dict[str, torch.Tensor]:
    """Writes a random adapter with peft, and returns the weights as peft merges them."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    weights = load_file(str(model / "model.safetensors"))
    values = json.loads((model / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {name: values[name] for name in (*names, "num_key_value_heads", "tie_word_embeddings")}
    base: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
    base = base.to(dtype)
    base.load_state_dict(weights, strict=not values["tie_word_embeddings"])
    torch.manual_seed(7)
    # Without the initialisation B is random too.
    wrapped = get_peft_model(base, LoraConfig(init_lora_weights=False, **options))
    wrapped.save_pretrained(str(adapter), save_embedding_layers=save_embedding_layers)
    merged: dict[str, torch.Tensor] = wrapped.merge_and_unload().state_dict()
    return {name: merged[name] for name in weights}


ADAPTERS: dict[str, dict[str, Any]] = {
    "names": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "lora_alpha": 16, "target_modules": ["k_proj", "down_proj"], "use_rslora": True},
    "regex": {"r": 3, "target_modules": r".*layers\.1\.(self_attn\.[qo]_proj|mlp\.\w+_proj)"},
    "all linear": {"r": 2, "target_modules": "all-linear"},
    "whole names": {"r": 2, "target_modules": ["model.layers.0.self_attn.o_proj", "layers.1.mlp.up_proj"]},
    "head": {"r": 2, "target_modules": ["lm_head", "gate_proj"]},
    "head alone": {"r": 2, "target_modules": ["lm_head", "gate_proj"], "save_embedding_layers": False},
    "with embeddings": {"r": 2, "target_modules": ["q_proj"], "save_embedding_layers": True},
    "saved, not trained": {
        "r": 2,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "norm"],
    },
    "excluded": {"r": 2, "target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "excluded regex": {"r": 2, "target_modules": "all-linear", "exclude_modules": r".*\.0\..*"},
    "some match nothing": {"r": 2, "target_modules": ["q_proj", "c_attn"]},
    "patterns": {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {r"layers\.1\..*": 3, "proj": 7, "q_proj": 5},
        "alpha_pattern": {r"model.layers.0.mlp.up_proj": 9, "v_proj|q_proj": 1},
    },
}


def merge_whole(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, torch.Tensor]:
    return dict(merge_adapter(checkpoint.tensors(), adapter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ADAPTERS)
def test_equals_peft(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    model = write_dream(tmp_path / "model", dtype=dtype)
    expected = write_with_peft(model, tmp_path / "adapter", dtype, **ADAPTERS[case])
    checkpoint = open_checkpoint(model)
    adapter = open_adapter(tmp_path / "adapter", checkpoint.expected)
    merged = merge_whole(checkpoint, adapter)
    assert list(merged) == list(checkpoint.files)
    raw = dict(checkpoint.tensors())
    for name, tensor in merged.items():
        assert tensor.dtype == (torch.float32 if name in adapter.deltas else dtype)
        assert torch.equal(tensor.to(dtype), expected[name]), name
        assert torch.equal(tensor, raw[name]) == (name not in adapter.deltas), name


def test_the_product_is_computed_in_float32(tmp_path: Path) -> None:
    """In bfloat16 the product of the factors, and its sum with the weight, would be rounded on the way."""
    model = write_dream(tmp_path / "model", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    adapter = write_adapter(tmp_path / "adapter")
    factors = {n: torch.randn(x.shape, generator=generator).bfloat16() for n, x in load_file(adapter / WEIGHTS).items()}
    save_file(factors, str(adapter / WEIGHTS))
    checkpoint = open_checkpoint(model)
    merged = merge_whole(checkpoint, open_adapter(adapter, checkpoint.expected))
    name = "model.layers.0.self_attn.q_proj.weight"
    weight, a, b = dict(checkpoint.tensors())[name].double(), factors[Q_A].double(), factors[Q_B].double()
    exact = weight + 2 * b @ a
    in_bfloat16 = (weight.bfloat16() + (2 * factors[Q_B] @ factors[Q_A])).double()
    assert torch.equal(merged[name].bfloat16(), exact.bfloat16())
    assert torch.allclose(merged[name].double(), exact, rtol=0, atol=1e-6)  # not rounded to bfloat16
    assert not torch.equal(in_bfloat16, exact.bfloat16().double())


def test_all_linear_in_the_file(tmp_path: Path) -> None:
    model = write_dream(tmp_path / "model")
    expected = write_with_peft(model, tmp_path / "adapter", torch.float32, r=2, target_modules="all-linear")
    edit(tmp_path / "adapter", target_modules="all-linear")
    checkpoint = open_checkpoint(model)
    merged = merge_whole(checkpoint, open_adapter(tmp_path / "adapter", checkpoint.expected))
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_load_merges_before_it_casts_and_packs(tmp_path: Path) -> None:
    model = write_dream(tmp_path / "model", tie=True)
    expected = write_with_peft(model, tmp_path / "adapter", torch.float32, r=2, target_modules=["k_proj"])
    weights = load(model, lora=tmp_path / "adapter", dtype="bfloat16", device="cpu")[1]
    pieces = [expected[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(weights["layers.1.qkv.weight"], torch.cat(pieces).bfloat16())


HEAD = "base_model.model.lm_head.base_layer.weight"
SAVED = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [False, True])
def test_copies_of_the_models_tensors_may_have_another_dtype(tmp_path: Path, dtype: torch.dtype, tie: bool) -> None:
    model = write_dream(tmp_path / "model", tie=tie)
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "save_embedding_layers": True}
    write_with_peft(model, tmp_path / "adapter", dtype, **options)
    checkpoint = open_checkpoint(model)
    adapter = open_adapter(tmp_path / "adapter", checkpoint.expected)
    assert sum(map(len, adapter.copies.values())) == 2
    assert len(merge_whole(checkpoint, adapter)) == len(checkpoint.files)


@pytest.mark.parametrize("name", [HEAD, SAVED])
def test_trained_or_resized_copies_are_refused(tmp_path: Path, name: str) -> None:
    model = write_dream(tmp_path / "model")
    targets = ["q_proj", "lm_head"] if name == HEAD else ["q_proj"]
    write_with_peft(model, tmp_path / "adapter", torch.float32, r=2, target_modules=targets, save_embedding_layers=True)
    trained = load_file(str(tmp_path / "adapter" / WEIGHTS))[name]
    trained[-1, -1] += 0.01
    edit_tensors(tmp_path / "adapter", {name: trained})
    with pytest.raises(CheckpointError, match=f"{name}: differs from the model's, so it was trained too"):
        load(model, lora=tmp_path / "adapter", dtype="auto", device="cpu")
    edit_tensors(tmp_path / "adapter", {name: torch.cat([trained, trained[:8]])})
    with pytest.raises(CheckpointError, match=f"{name}: has shape .*: the vocabulary was resized"):
        load(model, lora=tmp_path / "adapter", dtype="auto", device="cpu")


def write_adapter(path: Path) -> Path:
    """A plain adapter of q_proj in a model of `write_dream`, by hand."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (path / CONFIG).write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{prefix}.lora_A.weight": torch.ones(4, 32), f"{prefix}.lora_B.weight": torch.ones(32, 4)}
    save_file(tensors, str(path / WEIGHTS))
    return path


def edit(path: Path, **changes: Any) -> None:
    values = json.loads((path / CONFIG).read_text()) | changes
    (path / CONFIG).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, Any] = load_file(str(path / WEIGHTS)) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, str(path / WEIGHTS))


def test_fields_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, adapter = write_dream(tmp_path / "model"), write_adapter(tmp_path / "adapter")
    edit(adapter, lora_dropout=0.1, task_type="CAUSAL_LM", base_model_name_or_path="x", init_lora_weights="eva")
    edit(adapter, eva_config={"rho": 2.0}, layers_to_transform=None, layers_pattern=None, modules_to_save=[], new=False)
    with caplog.at_level("INFO"):
        deltas = open_adapter(adapter, open_checkpoint(model).expected).deltas
    assert "adapter: an adapter that was trained on 'x'" in caplog.text
    assert {name: delta.scaling for name, delta in deltas.items()} == {
        f"model.layers.{n}.self_attn.q_proj.weight": 2.0 for n in range(2)
    }


FIELDS: dict[str, tuple[Any, str]] = {
    "peft_type": ("IA3", "expected 'LORA'"),
    "bias": ("all", "expected 'none'"),
    "use_dora": (True, "only plain LoRA"),
    "lora_bias": (True, "only plain LoRA"),
    "fan_in_fan_out": (True, "only plain LoRA"),
    "modules_to_save": (["lm_head"], "names lm_head, of which the adapter has no weight"),
    "megatron_config": ({"x": 1}, "only plain LoRA"),
    "trainable_token_indices": ([0], "only plain LoRA"),
    "target_parameters": (["x"], "only plain LoRA"),
    "layers_to_transform": (0, "only plain LoRA"),
    "layers_pattern": ("layers", "only plain LoRA"),
    "layer_replication": ([[0, 1]], "only plain LoRA"),
    "use_qalora": (True, "only plain LoRA"),
    "alora_invocation_tokens": ([1], "only plain LoRA"),
    "some_feature_of_tomorrow": (True, "only plain LoRA"),
    "init_lora_weights": ("pissa", "changes the base weights"),
    "use_rslora": ("yes", "expected true or false"),
    "r": (0, "expected an integer from 1 to 1048576"),
    "lora_alpha": (None, "expected a number"),
    "target_modules": (["c_attn"], "matches no linear layer"),
    "exclude_modules": (1, "expected a list of module names or a regular expression"),
    "rank_pattern": ([4], "expected an object"),
    "alpha_pattern": ({"q_proj": "x"}, "expected a number"),
}
VALUES: list[tuple[str, Any, str]] = [(field, value, words) for field, (value, words) in FIELDS.items()]
VALUES += [
    ("peft_type", ..., "is None, expected 'LORA'"),
    ("r", 10**400, "expected an integer from 1 to 1048576"),
    ("r", ..., "is None, expected an integer from 1 to 1048576"),
    ("target_modules", ..., "None matches no linear layer"),
    ("target_modules", "q_proj", "matches no linear layer"),
    ("target_modules", "(", "is not a regular expression"),
    ("target_modules", [1], "expected a list of module names"),
    ("rank_pattern", {"q_proj": 1.5}, "expected an integer from 1 to 1048576"),
    ("rank_pattern", {"(": 1}, "is not a regular expression"),
]


@pytest.mark.parametrize(("field", "value", "words"), VALUES)
def test_refused_fields(tmp_path: Path, field: str, value: Any, words: str) -> None:
    model, adapter = write_dream(tmp_path / "model"), write_adapter(tmp_path / "adapter")
    edit(adapter, **{field: value})
    with pytest.raises(CheckpointError) as caught:
        open_adapter(adapter, open_checkpoint(model).expected)
    assert str(caught.value).startswith(f"{adapter / CONFIG}: {field}")
    assert words in str(caught.value)


def test_tied_head_is_not_adapted(tmp_path: Path) -> None:
    model, adapter = write_dream(tmp_path / "model", tie=True), write_adapter(tmp_path / "adapter")
    edit(adapter, target_modules=["q_proj", "lm_head"])
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: target_modules: adapts lm_head, which"):
        open_adapter(adapter, open_checkpoint(model).expected)


EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
DORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
OTHER = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda p: (p / CONFIG).unlink(), [f"{CONFIG}: cannot be read"]),
    "broken config": (lambda p: (p / CONFIG).write_text("{"), [f"{CONFIG}: is not valid JSON"]),
    "no weights": (lambda p: (p / WEIGHTS).unlink(), ["holds no weights", f"expected {CONFIG} and {WEIGHTS}"]),
    "pickle": (
        lambda p: (p / WEIGHTS).rename(p / "adapter_model.bin"),
        ["only pickles (adapter_model.bin)", "never read", WEIGHTS],
    ),
    "truncated": (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-1]), [WEIGHTS, "truncated"]),
    "missing A": (lambda p: edit_tensors(p, {Q_A: None}), [f"{WEIGHTS}: tensor {Q_A}: is missing", "[4, 32]"]),
    "missing B": (lambda p: edit_tensors(p, {Q_B: None}), [f"{WEIGHTS}: tensor {Q_B}: is missing", "[32, 4]"]),
    "other rank": (
        lambda p: edit_tensors(p, {Q_A: torch.ones(3, 32)}),
        [f"{WEIGHTS}: tensor {Q_A}: has shape [3, 32], expected [4, 32]"],
    ),
    "other model": (
        lambda p: edit_tensors(p, {Q_B: torch.ones(64, 4)}),
        [f"{WEIGHTS}: tensor {Q_B}: has shape [64, 4], expected [32, 4]"],
    ),
    "dtype": (
        lambda p: edit_tensors(p, {Q_A: torch.ones(4, 32, dtype=torch.float64)}),
        [f"{WEIGHTS}: tensor {Q_A}: unsupported dtype F64"],
    ),
    "embedding": (
        lambda p: edit_tensors(p, {EMBEDDING: torch.ones(4, 320)}),
        [f"{WEIGHTS}: tensor {EMBEDDING}", "LoRA on embeddings"],
    ),
    "dora": (lambda p: edit_tensors(p, {DORA: torch.ones(32)}), [f"{WEIGHTS}: tensor {DORA}: unexpected"]),
    "not a target": (lambda p: edit_tensors(p, {OTHER: torch.ones(4, 32)}), [f"{WEIGHTS}: tensor {OTHER}: unexpected"]),
    "more targets": (
        lambda p: edit(p, target_modules=["q_proj", "k_proj"]),
        [f"{WEIGHTS}: tensor {OTHER}: is missing"],
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_refused_files(tmp_path: Path, case: str) -> None:
    change, words = FILES[case]
    model, adapter = write_dream(tmp_path / "model"), write_adapter(tmp_path / "adapter")
    change(adapter)
    with pytest.raises(CheckpointError) as caught:
        load(model, lora=adapter, dtype="auto", device="cpu")
    assert str(adapter) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    model = write_dream(tmp_path / "model")
    with pytest.raises(CheckpointError, match="adapter: expected a directory"):
        load(model, lora=tmp_path / "adapter", dtype="auto", device="cpu")
