"""Checkpoints with int8 weights: what is written, how the formats are read, and every way in which one is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lopa_ascend import LLM
from lopa_ascend.checkpoint import CheckpointError, Shard, write
from lopa_ascend.config import EngineConfig, ParameterError
from scripts.bench.plan.models import load_model
from scripts.eval.described import number_format
from scripts.launch.arguments import Launch
from scripts.launch.model import check_model
from tests.dream_checkpoint import load, open_checkpoint, write_int8
from tests.tiny import write_dream
from tests.torch.paging import randn
from tests.torch.test_checkpoint import edit_json, read_all
from tests.versions import compiles_steps

ALL = EngineConfig(quantization="w8a8").quantized_layers()
LAYER = "model.layers.0."
DOWN, Q = f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.q_proj"
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""Breaks a checkpoint: takes its description and its tensors."""


@pytest.fixture(scope="module")
def float_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("float"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def int8_path(float_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_int8(float_path, tmp_path_factory.mktemp("int8"), int8=ALL, max_file_bytes=20_000)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def write_compressed(source: Path, path: Path, change: Change = lambda *_: None) -> Path:
    """A copy of a written checkpoint, with one file of weights, changed."""
    tensors = read_all(source)
    config = json.loads((source / "config.json").read_text())
    change(config["quantization_config"], tensors)
    path.mkdir(exist_ok=True)
    save_file(tensors, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_modelslim(source: Path, path: Path, change: Change = lambda *_: None, *, static: str = "") -> Path:
    """A written checkpoint as ModelSlim has it: down_proj of the kind ``static``, if given, all others dynamic."""
    tensors = read_all(source)
    types: dict[str, str] = {}
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        kind = static if static and module.endswith("down_proj") else "W8A8_DYNAMIC"
        parts = {"weight_scale": tensors[name], "weight_offset": torch.zeros_like(tensors[name])}
        if kind != "W8A8_DYNAMIC":
            sums = tensors[f"{module}.weight"].sum(1, dtype=torch.int32)
            offset = torch.tensor([3], dtype=torch.int8)
            dynamic = parts if kind == "W8A8_MIX" else {}
            parts = {"input_scale": torch.tensor([0.5]), "input_offset": offset, **dynamic}
            parts |= {"deq_scale": tensors.pop(name).flatten() * 0.5, "quant_bias": -3 * sums}
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        types |= {f"{module}.{part}": kind for part in ("weight", *parts)}
    description = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0"}
    description |= {name: types.get(name, "FLOAT") for name in tensors}
    change(description, tensors)
    path.mkdir(exist_ok=True)
    save_file(tensors, str(path / "quant_model_weight_w8a8.safetensors"))
    (path / "quant_model_description.json").write_text(json.dumps(description))
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_adapter(path: Path, q: int = 32, hidden: int = 32, inner: int = 48) -> Path:
    """A random adapter of q_proj and down_proj of both layers."""
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for layer in range(2):
        for name, (rows, columns) in {"self_attn.q_proj": (q, hidden), "mlp.down_proj": (hidden, inner)}.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = randn(2, columns, seed=layer)
            tensors[f"{prefix}.lora_B.weight"] = randn(rows, 2, seed=layer + 2)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    return path


# ---- what is loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_written_checkpoint_is_what_quantising_at_load_gives(float_path: Path, int8_path: Path, size: int) -> None:
    assert len(list(int8_path.glob("*.safetensors"))) > 2
    for rank in range(size):
        _, streamed = load(float_path, int8=ALL, shard=Shard(rank, size))
        config, stored = load(int8_path, shard=Shard(rank, size))
        assert same(stored, streamed)
        assert config.dtype == "bfloat16"
        assert stored["layers.1.gate_up.weight"].dtype == torch.int8
        assert stored["layers.1.gate_up.weight_scale"].shape == stored["layers.1.gate_up.weight"].shape[:1]


def test_a_scale_is_that_of_a_whole_row_on_every_rank(float_path: Path) -> None:
    _, whole = load(float_path, int8=ALL)
    parts = [load(float_path, int8=ALL, shard=Shard(rank, 2))[1] for rank in range(2)]
    for name in ("layers.0.down", "layers.1.o"):
        assert torch.equal(torch.cat([part[f"{name}.weight"] for part in parts], 1), whole[f"{name}.weight"])
        assert all(torch.equal(part[f"{name}.weight_scale"], whole[f"{name}.weight_scale"]) for part in parts)


def test_both_formats_of_other_tools(int8_path: Path, tmp_path: Path) -> None:
    expected = load(int8_path)[1]
    assert same(load(write_modelslim(int8_path, tmp_path / "slim"))[1], expected)

    def by_pattern(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config["config_groups"]["group_0"]["targets"] = ["re:.*(self_attn|mlp)[.].*_proj$"]

    assert same(load(write_compressed(int8_path, tmp_path / "compressed", by_pattern))[1], expected)


def test_layers_in_ignore_stay_float(float_path: Path, tmp_path: Path) -> None:
    out = write_int8(float_path, tmp_path / "out", int8=ALL - {"down_proj"})
    assert (
        "model.layers.1.mlp.down_proj" in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    )
    weights = load(out)[1]
    assert weights["layers.0.down.weight"].dtype == torch.bfloat16
    assert same(weights, load(float_path, int8=ALL - {"down_proj"})[1])


@pytest.mark.parametrize("is_modelslim", [False, True])
def test_checks_before_a_launch_and_plans_know_int8_directories(
    int8_path: Path, tmp_path: Path, is_modelslim: bool
) -> None:
    path = write_modelslim(int8_path, tmp_path / "slim") if is_modelslim else int8_path
    assert load_model(str(path)).num_heads == 4
    assert number_format(EngineConfig(model=str(path))) == "w8a8"
    launch = Launch(device="cpu", tp=2, bp=1, model=path)
    assert all(str(finding).startswith("ok") for finding in check_model(launch))
    if is_modelslim:
        (path / "quant_model_weight_w8a8.safetensors").unlink()
        missing, _ = check_model(launch)
        assert "quant_model_weight*.safetensors is not there" in str(missing)


def test_static_scales_load_with_a_warning(int8_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_modelslim(int8_path, tmp_path, static="W8A8")
    weights, expected = load(path)[1], load(int8_path)[1]
    assert torch.equal(weights["layers.0.down.weight"], expected["layers.0.down.weight"])
    torch.testing.assert_close(weights["layers.0.down.weight_scale"], expected["layers.0.down.weight_scale"])
    with caplog.at_level(logging.WARNING):
        LLM(path)
    assert (
        f"static scales for the activations of {DOWN}, model.layers.1.mlp.down_proj; they are not used" in caplog.text
    )


def test_a_mixed_checkpoint_is_the_dynamic_one(
    int8_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its static scales are wrong here, and nothing reads them."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.deq_scale"].fill_(-1)
        tensors[f"{DOWN}.quant_bias"].fill_(7)

    path = write_modelslim(int8_path, tmp_path, change, static="W8A8_MIX")
    assert same(load(path)[1], load(int8_path)[1])
    LLM(path)
    assert "static" not in caplog.text


def test_an_adapter_is_merged_before(float_path: Path, int8_path: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    merged = load(float_path, lora=adapter, int8=ALL)[1]
    out = write_int8(float_path, tmp_path / "out", int8=ALL, lora=adapter)
    assert same(load(out)[1], merged)
    assert not same(load(int8_path)[1], merged)
    some = ALL - {"qkv_proj"}  # the adapted q_proj stays bfloat16
    out = write_int8(float_path, tmp_path / "some", int8=some, lora=adapter)
    assert same(load(out)[1], load(float_path, lora=adapter, int8=some)[1])
    assert read_all(out)[f"{Q}.weight"].dtype == torch.bfloat16
    halves = [load(float_path, lora=adapter, int8=ALL, shard=Shard(rank, 2))[1] for rank in range(2)]
    assert torch.equal(torch.cat([half["layers.0.down.weight"] for half in halves], 1), merged["layers.0.down.weight"])
    for refuse in (lambda: load(int8_path, lora=adapter), lambda: LLM(int8_path, lora=adapter)):
        with pytest.raises(
            CheckpointError, match=r"cannot be merged into the int8 weights.*scripts\.eval quantize.*--lora"
        ):
            refuse()


@compiles_steps
def test_settings_that_do_not_go_with_int8_weights(int8_path: Path, tmp_path: Path) -> None:
    LLM(int8_path, quantization="w8a8")
    with pytest.raises(ParameterError, match=r"model: .*are int8, runs with one of the graph modes eager"):
        LLM(int8_path, graph_mode="inductor")
    with pytest.raises(ParameterError, match="quantization_exclude: has no effect.*int8 already"):
        LLM(int8_path, quantization="w8a8", quantization_exclude="down_proj")
    with pytest.raises(CheckpointError, match="int8 already"):
        write_int8(int8_path, tmp_path / "out", int8=ALL)
    with pytest.raises(CheckpointError, match="expected a missing or empty directory"):
        write_int8(write_dream(tmp_path / "other"), int8_path, int8=ALL)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = write_dream(tmp_path / "model")
    tensors = read_all(path)
    tensors[f"{DOWN}.weight"][3, 4] = torch.nan
    save_file(tensors, str(path / "model.safetensors"))
    for refuse in (lambda: load(path, int8=ALL), lambda: write_int8(path, tmp_path / "out", int8=ALL)):
        with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.weight: holds NaN"):
            refuse()
    assert not (tmp_path / "out" / "config.json").exists()


# ---- what is refused -------------------------------------------------------------------------------------------------


def put(name: str, value: Callable[[Tensor], Tensor] | None) -> Change:
    """Changes a tensor, or removes it."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if value is not None:
            tensors[name] = value(tensor)

    return change


def first(number: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.flatten().index_fill(0, torch.tensor(0), number).view(tensor.shape)


def describe(name: str, value: object) -> Change:
    return lambda description, _: description.update({name: value})


def group(where: str, **fields: Any) -> Change:
    return lambda config, _: config["config_groups"]["group_0"][where].update(fields)


EITHER: dict[str, tuple[Change, str]] = {
    "scale: zero": (put(f"{DOWN}.weight_scale", first(0.0)), rf"{DOWN}\.weight_scale: holds 0\.0, expected positive"),
    "scale: negative": (put(f"{Q}.weight_scale", first(-1.0)), rf"{Q}\.weight_scale: holds -1\.0"),
    "scale: NaN": (put(f"{Q}.weight_scale", first(torch.nan)), rf"{Q}\.weight_scale: holds nan"),
    "scale: infinite": (put(f"{Q}.weight_scale", first(torch.inf)), rf"{Q}\.weight_scale: holds inf"),
    "scale: shape": (put(f"{Q}.weight_scale", lambda t: t[:-1]), rf"{Q}\.weight_scale: has shape \[31, 1\], expected"),
    "scale: dtype": (put(f"{Q}.weight_scale", Tensor.int), rf"{Q}\.weight_scale: is I32, expected F32 or"),
    "scale: missing": (put(f"{Q}.weight_scale", None), rf"{Q}\.weight_scale: is .*missing"),
    "weight: missing": (put(f"{Q}.weight", None), rf"{Q}\.weight: is .*missing"),
    "weight: shape": (put(f"{Q}.weight", lambda t: t[:, 1:].clone()), rf"{Q}\.weight: has shape \[32, 31\], expected"),
    "weight: float": (put(f"{Q}.weight", Tensor.float), rf"{Q}\.weight: is F32, expected I8"),
    "weight: int4 in int32": (put(f"{Q}.weight", Tensor.int), rf"{Q}\.weight: is I32, expected I8"),
    "norm: int8": (put("model.norm.weight", lambda t: t.to(torch.int8)), r"model\.norm\.weight: is I8, expected F32"),
    "head: int8": (put("lm_head.weight", lambda t: t.to(torch.int8)), r"lm_head\.weight: is I8, expected F32"),
    "surplus": (lambda _, tensors: tensors.update({f"{Q}.extra": torch.ones(1)}), rf"{Q}\.extra: is not"),
}
COMPRESSED: dict[str, tuple[Change, str]] = {
    "int4": (group("weights", num_bits=4), "group_0.weights.num_bits is 4, expected 8: only W8A8"),
    "groups of inputs": (group("weights", strategy="group", group_size=32), "weights.strategy is 'group', expected"),
    "asymmetric": (group("input_activations", symmetric=False), "input_activations.symmetric is False, expected"),
    "float8": (group("weights", type="float"), "weights.type is 'float', expected 'int'"),
    "other format": (describe("format", "naive-quantized"), "quantization_config.format is 'naive-quantized'"),
    "KV cache": (describe("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}, expected none"),
    "targets": (lambda c, _: c["config_groups"]["group_0"].update(targets="Linear"), "targets is 'Linear', expected a"),
    "pattern": (describe("ignore", ["re:("]), r"quantization_config: '\(' is not a regular expression"),
    "slow pattern": (describe("ignore", ["re:(.|[a-z])*(?<=!)"]), r"quantization_config: .* takes more than 0\.5 s"),
    "long pattern": (describe("ignore", ["re:" + "a|" * 9999]), r"quantization_config: .* has 19998 characters"),
    "pattern of odd flags": (describe("ignore", ["re:(?V0)(?V1)a"]), r"config\.json: quantization_config: '\(\?V0"),
    "pattern of odd errors": (
        describe("ignore", ["re:(?:a){1s+99999999999999999999999d<5}"]),
        r"config\.json: quantization_config: .* is not a regular expression",
    ),
    "packed members": (
        lambda config, _: config["ignore"].append(Q),
        f"{Q} is float, {LAYER}self_attn.k_proj is dynamic, .*run as one layer",
    ),
    "zero point": (
        lambda _, tensors: tensors.update({f"{Q}.weight_zero_point": torch.ones(32, 1, dtype=torch.int8)}),
        rf"{Q}\.weight_zero_point: is not zero everywhere",
    ),
}
MODELSLIM: dict[str, tuple[Change, str]] = {
    "type: int4": (describe(f"{Q}.weight", "W4A8_DYNAMIC"), rf"{Q}\.weight: is 'W4A8_DYNAMIC', expected one of FLOAT"),
    "type: no text": (describe(f"{Q}.weight", 8), rf"{Q}\.weight: is 8, expected one of"),
    "not described": (lambda d, _: d.pop(f"{Q}.weight"), rf"tensor {Q}\.weight: is not described"),
    "norm not described": (lambda d, _: d.pop("model.norm.weight"), r"model\.norm\.weight: is not described in quant_"),
    "described in vain": (describe(f"{Q}.more", "W8A8_DYNAMIC"), rf"{Q}\.more: is described, but missing"),
    "members of a layer": (describe(f"{Q}.weight_scale", "FLOAT"), rf"{Q}\.weight_scale: is FLOAT, expected W8A8_DYN"),
    "norm": (describe("model.norm.weight", "W8A8_DYNAMIC"), r"model\.norm\.weight: is W8A8_DYNAMIC, expected FLOAT"),
    "packed members": (
        lambda d, _: d.update({name: "FLOAT" for name in d if name.startswith(f"{Q}.")}),
        f"{Q} is float, {LAYER}self_attn.k_proj is dynamic, .*run as one layer",
    ),
    "offset": (put(f"{Q}.weight_offset", first(1.0)), rf"{Q}\.weight_offset: is not zero everywhere"),
    "KV cache": (describe("kv_quant_type", "C8"), "kv_quant_type is 'C8', expected none"),
}
STATIC: dict[str, tuple[Change, str]] = {
    "input scale": (put(f"{DOWN}.input_scale", first(0.0)), rf"{DOWN}\.input_scale: holds 0\.0"),
    "deq scale": (put(f"{DOWN}.deq_scale", first(-1.0)), rf"{DOWN}\.deq_scale: holds -1\.0"),
    "deq scale: missing": (put(f"{DOWN}.deq_scale", None), rf"{DOWN}\.deq_scale: is described, but missing"),
    "a bias that is not ours": (put(f"{DOWN}.quant_bias", lambda t: t + 5), rf"{DOWN}\.quant_bias: does not agree"),
}


@pytest.mark.parametrize("case", EITHER)
@pytest.mark.parametrize("write", [write_compressed, write_modelslim])
def test_refused_in_either_format(write: Callable[..., Path], case: str, int8_path: Path, tmp_path: Path) -> None:
    change, message = EITHER[case]
    with pytest.raises(CheckpointError, match=message):
        load(write(int8_path, tmp_path, change))


@pytest.mark.parametrize("case", COMPRESSED)
def test_refused_in_compressed_tensors(case: str, int8_path: Path, tmp_path: Path) -> None:
    change, message = COMPRESSED[case]
    with pytest.raises(CheckpointError, match=message):
        load(write_compressed(int8_path, tmp_path, change))


@pytest.mark.parametrize("case", MODELSLIM | STATIC)
def test_refused_in_modelslim(case: str, int8_path: Path, tmp_path: Path) -> None:
    change, message = (MODELSLIM | STATIC)[case]
    with pytest.raises(CheckpointError, match=message):
        load(write_modelslim(int8_path, tmp_path, change, static="W8A8" if case in STATIC else ""))


def test_names_and_fields_of_other_versions(int8_path: Path, tmp_path: Path) -> None:
    earlier = write_modelslim(int8_path, tmp_path / "modelslim")
    (earlier / "quant_model_description.json").rename(earlier / "quant_model_description_w8a8_dynamic.json")
    dense = write_compressed(int8_path, tmp_path / "dense", describe("sparsity_config", {"format": "dense"}))
    nothing_ignored = write_compressed(int8_path, tmp_path / "ignore", describe("ignore", None))
    for path in (earlier, dense, nothing_ignored):
        assert same(load(path)[1], load(int8_path)[1])
    (earlier / "quant_model_description.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"description\.json and quant_model_description_w8a8_dynamic\.json"):
        open_checkpoint(earlier)


def test_written_files_can_be_read_by_everybody_who_can_read_the_others(int8_path: Path) -> None:
    assert len({file.stat().st_mode for file in int8_path.iterdir()}) == 1


def test_nothing_remains_of_a_checkpoint_that_could_not_be_written(
    float_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_in_the_second_file(tensors: dict[str, Tensor], file: str, **options: Any) -> None:
        if "00002" in file:
            raise SafetensorError("No space left on device")
        save_file(tensors, file, **options)

    monkeypatch.setattr(write, "save_file", fail_in_the_second_file)
    out = tmp_path / "out"
    with pytest.raises(OSError, match=r"model-00002\.safetensors: cannot be written: No space left on device"):
        write_int8(float_path, out, int8=ALL, max_file_bytes=20_000)
    assert list(out.iterdir()) == []


def test_two_descriptions_are_refused(int8_path: Path, tmp_path: Path) -> None:
    write_modelslim(int8_path, tmp_path)
    (tmp_path / "config.json").write_text((int8_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"quant_model_description\.json: describes int8 layers, and so does"):
        open_checkpoint(tmp_path)


def test_int8_tensors_without_a_description_are_refused(int8_path: Path, tmp_path: Path) -> None:
    write_compressed(int8_path, tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=...)
    with pytest.raises(CheckpointError, match="unsupported dtype I8; expected F32 or BF16 or F16"):
        open_checkpoint(tmp_path)
