"""Checkpoints with FP8 weights: what is written, how the formats are read, and every way in which one is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.interface import FP8
from lopa_ascend.checkpoint import CheckpointError, Shard, quantize_weight
from lopa_ascend.config import EngineConfig, ParameterError
from scripts.eval import quantize
from tests.dream_checkpoint import load, open_checkpoint, write_int8
from tests.tiny import write_dream, write_tokenizer
from tests.torch.test_checkpoint import read_all
from tests.torch.test_int8_checkpoints import Change, describe, first, group, put, write_adapter, write_compressed

ALL = EngineConfig(quantization="fp8").quantized_layers()
FORM = ("fp8", 0)
LAYER = "model.layers.0."
DOWN, Q = f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.q_proj"
BLOCK = 32
METHOD = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(scope="module")
def float_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float")
    write_tokenizer(path)
    return write_dream(path, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def fp8_path(float_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_int8(float_path, tmp_path_factory.mktemp("fp8"), int8=ALL, form=FORM, max_file_bytes=20_000)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x.view(torch.uint8) if x.dtype == FP8 else x

    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(bits(left[name]), bits(right[name])) for name in left
    )


def replace_config(values: dict[str, Any]) -> Change:
    def change(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config.clear()
        config.update(values)

    return change


def per_tensor(name: str, *shape: int) -> Change:
    """One scale for each weight, as vLLM's checkpoints of this method have it, called ``name``."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        replace_config(METHOD)(config, tensors)
        for scale in [part for part in tensors if part.endswith(".weight_scale")]:
            weight = scale.removesuffix("_scale")
            wide = tensors[weight].float() * tensors.pop(scale)
            factor = wide.abs().amax() / 448
            tensors[weight] = (wide / factor).to(FP8)
            tensors[f"{weight}_{name}"] = factor.reshape(shape)

    return change


def by_blocks(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A scale for each block, as DeepSeek's and Transformers' checkpoints have it. Sizes are no multiples of it."""
    replace_config({**METHOD, "weight_block_size": [BLOCK, BLOCK]})(config, tensors)
    for scale in [part for part in tensors if part.endswith(".weight_scale")]:
        rows, columns = tensors[scale.removesuffix("_scale")].shape
        tensors.pop(scale)
        values = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), generator=torch.Generator().manual_seed(rows))
        tensors[f"{scale}_inv"] = values + 0.1


# ---- what is loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_written_checkpoint_is_what_quantising_at_load_gives(float_path: Path, fp8_path: Path, size: int) -> None:
    for rank in range(size):
        _, streamed = load(float_path, int8=ALL, is_fp8=True, shard=Shard(rank, size))
        config, stored = load(fp8_path, shard=Shard(rank, size))
        assert same(stored, streamed)
        assert config.dtype == "bfloat16"
        assert stored["layers.1.gate_up.weight"].dtype == FP8
        assert stored["layers.1.gate_up.weight_scale"].shape == stored["layers.1.gate_up.weight"].shape[:1]
        assert {name for name, weight in stored.items() if weight.dtype == FP8} == {
            f"layers.{n}.{layer}.weight" for n in range(2) for layer in ("qkv", "o", "gate_up", "down")
        }


def test_the_command_writes_what_the_server_quantises(float_path: Path, tmp_path: Path) -> None:
    quantize.main([str(float_path), str(tmp_path / "out"), "--bits", "fp8", "--exclude", "o_proj"])
    stored = load(tmp_path / "out")[1]
    assert same(stored, load(float_path, int8=ALL - {"o_proj"}, is_fp8=True)[1])
    assert stored["layers.0.o.weight"].dtype == torch.bfloat16
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (described["format"], described["ignore"][:2]) == (
        "float-quantized",
        ["lm_head", f"{LAYER}self_attn.o_proj"],
    )
    with pytest.raises(SystemExit, match="--group-size: needs --bits 4"):
        quantize.main([str(float_path), str(tmp_path / "other"), "--bits", "fp8", "--group-size", "32"])


@pytest.mark.parametrize(("name", "shape"), [("scale", ()), ("scale", (1,)), ("scale_inv", (1, 1))])
def test_a_scale_of_a_whole_tensor_is_that_of_each_output(
    fp8_path: Path, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    path = write_compressed(fp8_path, tmp_path, per_tensor(name, *shape))
    tensors, (_, weights) = read_all(path), load(path)
    parts = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
    scales = [tensors[f"{part}_{name}"].reshape(1).expand(len(tensors[part])) for part in parts]
    assert torch.equal(weights["layers.0.qkv.weight_scale"], torch.cat(scales))
    assert torch.equal(weights["layers.0.qkv.weight"].float(), torch.cat([tensors[part].float() for part in parts]))


def test_scales_of_blocks_make_floats(fp8_path: Path, tmp_path: Path) -> None:
    """Which are then like any: they are quantised, split and merged."""
    path = write_compressed(fp8_path, tmp_path / "blocks", by_blocks)
    found, tensors = open_checkpoint(path), read_all(path)
    assert found.quantized is None
    weights = load(path)[1]
    scale, codes = tensors[f"{DOWN}.weight_scale_inv"], tensors[f"{DOWN}.weight"].float()
    expected = torch.empty_like(codes)
    for row, column in torch.cartesian_prod(*map(torch.arange, codes.shape)).tolist():
        expected[row, column] = codes[row, column] * scale[row // BLOCK, column // BLOCK]
    assert torch.equal(weights["layers.0.down.weight"], expected.bfloat16())
    halves = [load(path, shard=Shard(rank, 2))[1]["layers.0.down.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), expected.bfloat16())
    anew = load(path, int8=ALL, is_fp8=True)[1]
    assert torch.equal(anew["layers.0.down.weight"].float(), quantize_weight(expected.bfloat16(), FP8)[0].float())
    written = write_int8(path, tmp_path / "out", int8=ALL - {"o_proj"}, form=FORM)
    assert same(load(written)[1], load(path, int8=ALL - {"o_proj"}, is_fp8=True)[1])
    assert load(path, lora=write_adapter(tmp_path / "adapter"))


def test_static_scales_of_activations_are_not_used(
    fp8_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def static(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        group("input_activations", strategy="tensor", dynamic=False)(config, tensors)
        tensors[f"{DOWN}.input_scale"] = torch.tensor([0.5])

    path = write_compressed(fp8_path, tmp_path, static)
    assert same(load(path)[1], load(fp8_path)[1])
    write_tokenizer(path)
    with caplog.at_level(logging.WARNING):
        llm = LLM(path)
    assert f"has static scales for the activations of {DOWN}; they are not used" in caplog.text
    answers = llm.generate([[5, 6, 7]], DecodingParams(max_new_tokens=8, block_size=8), quiet=True)
    assert len(answers[0].token_ids) > 0


def test_an_adapter_is_merged_before_and_not_behind(float_path: Path, fp8_path: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    out = write_int8(float_path, tmp_path / "out", int8=ALL, form=FORM, lora=adapter)
    assert same(load(out)[1], load(float_path, lora=adapter, int8=ALL, is_fp8=True)[1])
    assert not same(load(out)[1], load(fp8_path)[1])
    with pytest.raises(CheckpointError, match=r"cannot be merged into the fp8 weights.* --quantization fp8$"):
        LLM(fp8_path, lora=adapter)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_settings_that_do_not_go_with_fp8_weights(fp8_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="quantization: 'w8a8' has no effect on .*fp8 already"):
        LLM(fp8_path, quantization="w8a8")
    with pytest.raises(ParameterError, match="quantization_exclude: has no effect.*fp8 already"):
        LLM(fp8_path, quantization="fp8", quantization_exclude="down_proj")
    with pytest.raises(CheckpointError, match="fp8 already, by .*config.json"):
        write_int8(fp8_path, tmp_path / "out", int8=ALL)


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return put(f"{name}.weight", change)


def nan_code(tensor: Tensor) -> Tensor:
    return tensor.float().index_fill(1, torch.tensor(0), torch.nan).to(FP8)


def as_floats(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for scale in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[scale.removesuffix("_scale")] = tensors[scale.removesuffix("_scale")].float() * tensors.pop(scale)


GROUPS: dict[str, tuple[Change, str]] = {
    "floats": (as_floats, "describes fp8 layers, and no linear layer is F8_E4M3"),
    "bits": (group("weights", num_bits=4), "group_0.weights: num_bits is 4, expected 8"),
    "integers": (group("weights", type="int"), "group_0.weights: type is 'int', expected 'float'"),
    "groups of inputs": (group("weights", strategy="group"), "weights: strategy is 'group', expected 'channel' or"),
    "no block": (group("weights", strategy="block"), "weights: block_structure is None, expected two sizes"),
    "float activations": (
        lambda c, _: c["config_groups"]["group_0"].update(input_activations=None),
        "group_0: input_activations is None, expected an object",
    ),
    "groups of activations": (
        group("input_activations", strategy="group"),
        "input_activations: strategy is 'group', expected 'token' or 'tensor'",
    ),
    "static tokens": (group("input_activations", dynamic=False), "input_activations: dynamic is False, expected True"),
    "KV cache": (describe("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is .*, expected None"),
    "no groups": (describe("config_groups", {}), "config_groups is {}, expected an object of objects"),
    "other format": (describe("format", "mxfp8-quantized"), "format is 'mxfp8-quantized', expected 'int-quantized'"),
    "scale: zero": (put(f"{DOWN}.weight_scale", first(0.0)), f"{DOWN}: has the scale 0.0, expected positive"),
    "scale: NaN": (put(f"{Q}.weight_scale", first(torch.nan)), f"{Q}: has the scale nan"),
    "scale: shape": (put(f"{Q}.weight_scale", lambda t: t[:-1]), r"weight_scale: has shape \[31, 1\], expected"),
    "scale: dtype": (put(f"{Q}.weight_scale", Tensor.int), r"weight_scale: is I32, expected F32 or"),
    "scale: missing": (put(f"{Q}.weight_scale", None), rf"{Q}.weight_scale or .*_inv: is missing, expected \[32, 1\]"),
    "weight: NaN": (weight(Q, nan_code), f"tensor {Q}.weight: holds NaN as float8_e4m3fn"),
    "weight: shape": (weight(Q, lambda t: t[:, 1:].clone()), rf"{Q}\.weight: has shape \[32, 31\], expected"),
    "weight: int8": (weight(Q, lambda t: t.view(torch.int8)), rf"{Q} is float, .*k_proj is fp8, .*run as one layer"),
    "weight: e5m2": (weight(Q, lambda t: t.to(torch.float8_e5m2)), "unsupported dtype F8_E5M2"),
    "head": (weight("lm_head", lambda t: t.to(FP8)), "lm_head is fp8, expected a float head"),
    "norm": (weight("model.norm", lambda t: t.to(FP8)), "model.norm.weight: is F8_E4M3, expected F32 or"),
    "surplus": (lambda _, tensors: tensors.update({f"{Q}.k_scale": torch.ones(1)}), rf"{Q}\.k_scale: is not part"),
}
METHODS: dict[str, tuple[Change, str]] = {
    "activations": (describe("activation_scheme", "none"), "activation_scheme is 'none', expected 'dynamic' or"),
    "numbers": (describe("fmt", "e5m2"), "fmt is 'e5m2', expected 'e4m3'"),
    "one size": (describe("weight_block_size", [128]), r"weight_block_size is \[128\], expected two sizes"),
    "no size": (describe("weight_block_size", [0, 128]), r"weight_block_size is \[0, 128\], expected two sizes"),
    "other blocks": (describe("weight_block_size", [16, 16]), r"weight_scale_inv: has shape .*, expected \[\d+, \d+\]"),
    "method": (describe("quant_method", "fbgemm_fp8"), "quantization_config is .*, expected one whose quant_method is"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_refused_as_compressed_tensors(case: str, fp8_path: Path, tmp_path: Path) -> None:
    change, message = GROUPS[case]
    with pytest.raises(CheckpointError, match=message):
        load(write_compressed(fp8_path, tmp_path, change))


@pytest.mark.parametrize("case", METHODS)
def test_refused_as_the_method_fp8(case: str, fp8_path: Path, tmp_path: Path) -> None:
    change, message = METHODS[case]

    def both(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        by_blocks(config, tensors)
        change(config, tensors)

    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_compressed(fp8_path, tmp_path, both))


def test_float8_that_nothing_describes_is_refused(fp8_path: Path, tmp_path: Path) -> None:
    path = write_compressed(fp8_path, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="unsupported dtype F8_E4M3; expected F32 or BF16 or F16"):
        open_checkpoint(path)


def test_experts_are_refused(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "data" / "golden" / "models" / "llada2" / "model_a"
    with pytest.raises(ParameterError, match=r"fp8 is not supported for experts \(.*\); choose w8a8"):
        LLM(model, quantization="fp8")
