"""Checkpoints with int4 weights: how the formats are read, what is written, and every way in which one is refused.

The formats are packed here code by code, as AutoGPTQ, AutoAWQ and compressed-tensors describe them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.checkpoint import CheckpointError, Shard
from lopa_ascend.checkpoint.streams import quantize_int4
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.engine.models import open_model
from scripts.eval.described import number_format
from tests.dream_checkpoint import load, open_checkpoint, write_int8
from tests.tiny import write_dream
from tests.torch.paging import randn
from tests.torch.test_checkpoint import read_all
from tests.torch.test_int8_checkpoints import same, write_adapter

G = 32
ALL = EngineConfig(quantization="w4a8").quantized_layers()
LAYER = "model.layers.0."
DOWN, Q = f"{LAYER}mlp.down_proj", f"{LAYER}self_attn.q_proj"
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of an int32 of AWQ hold, from the lowest ones on."""
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": G, "dynamic": False}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
}
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""Breaks a checkpoint: takes its description and its tensors."""


@pytest.fixture(scope="module")
def float_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float")
    return write_dream(path, hidden=64, intermediate=128, head_dim=32, scale=0.1, dtype=torch.bfloat16)


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes [.., 8 n] as int32 [.., n], of which each holds eight in this order."""
    packed = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, which in enumerate(order):
        packed += codes[..., which::8].long() << 4 * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


class Layer:
    """Random int4 numbers of a linear layer: codes [out, in], scales and codes that mean zero [out, in / G]."""

    def __init__(self, shape: torch.Size, seed: int, *, is_symmetric: bool):
        outputs, inputs = shape
        generator = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(16, (outputs, inputs), generator=generator)
        self.scale = (0.01 + randn(outputs, inputs // G, seed=seed).abs() / 8).half().float()
        self.zero = torch.randint(1, 16, self.scale.shape, generator=generator)
        if is_symmetric:
            self.zero.fill_(8)

    def gptq(self, offset: int) -> dict[str, Tensor]:
        order = torch.arange(self.codes.shape[1], dtype=torch.int32) // G
        members = {"qweight": words(self.codes).T, "qzeros": words((self.zero - offset).T), "g_idx": order}
        return members | {"scales": self.scale.T.half()}

    def awq(self) -> dict[str, Tensor]:
        members = {"qweight": words(self.codes.T, AWQ_OUTPUTS), "qzeros": words(self.zero.T, AWQ_OUTPUTS)}
        return members | {"scales": self.scale.T.half()}

    def packed(self, *, with_zeros: bool) -> dict[str, Tensor]:
        members = {"weight_packed": words(self.codes), "weight_scale": self.scale}
        members |= {"weight_shape": torch.tensor(self.codes.shape)}
        return members | ({"weight_zero_point": words(self.zero.T).T} if with_zeros else {})


def write(
    source: Path, path: Path, name: str, change: Change = lambda *_: None, *, is_symmetric: bool = False
) -> dict[str, Layer]:
    """A checkpoint of a format: "gptq", "gptq_v2", "awq" or "packed"; and its layers."""
    config = json.loads((source / "config.json").read_text())
    tensors, layers = read_all(source), dict[str, Layer]()
    described: dict[str, Any] = json.loads(json.dumps({"awq": AWQ, "packed": PACKED}.get(name, GPTQ)))
    if name == "packed":
        described["config_groups"]["group_0"]["weights"]["symmetric"] = is_symmetric
    elif name != "awq":
        described |= {"checkpoint_format": name, "sym": is_symmetric}
    for weight in [weight for weight in tensors if weight.endswith("_proj.weight")]:
        module = weight.removesuffix(".weight")
        layer = layers[module] = Layer(tensors.pop(weight).shape, len(layers), is_symmetric=is_symmetric)
        if name == "packed":
            members = layer.packed(with_zeros=not is_symmetric)
        else:
            members = layer.awq() if name == "awq" else layer.gptq(1 if name == "gptq" else 0)
        tensors |= {f"{module}.{part}": tensor for part, tensor in members.items()}
    change(described, tensors)
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return layers


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq", "packed"])
def test_every_format_is_read(float_path: Path, tmp_path: Path, name: str, is_symmetric: bool) -> None:
    layers = write(float_path, tmp_path, name, is_symmetric=is_symmetric)
    weights, stacks = load(tmp_path)[1], {"qkv": [f"self_attn.{part}_proj" for part in "qkv"]}
    stacks |= {"o": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
    for ours, parts in stacks.items():
        own = [layers[f"model.layers.1.{part}"] for part in parts]
        packed, scale = weights[f"layers.1.{ours}.weight"], weights[f"layers.1.{ours}.weight_scale"]
        codes = torch.cat([layer.codes for layer in own])
        assert (packed.dtype, scale.dtype) == (torch.uint8, torch.float32)
        assert torch.equal(packed % 16, codes[:, ::2])
        assert torch.equal(packed // 16, codes[:, 1::2])
        assert torch.equal(scale, torch.cat([layer.scale for layer in own]))
        zero = weights.get(f"layers.1.{ours}.weight_zero")
        assert (zero is None) == (is_symmetric and name != "awq")
        assert zero is None or torch.equal(zero, torch.cat([layer.zero for layer in own]).to(torch.uint8))
    assert torch.equal(weights["head.weight"], load(float_path)[1]["head.weight"])
    assert number_format(EngineConfig(model=str(tmp_path))) == "w4a8"


def test_earlier_files_say_the_same(float_path: Path, tmp_path: Path) -> None:
    """Files of their own, other names of fields, and zero points that are not packed."""
    for name, file, fields in (
        ("gptq", "quantize_config.json", {key: GPTQ[key] for key in GPTQ if key != "quant_method"}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": G, "version": "GEMM"}),
    ):
        write(float_path, tmp_path / name, name)
        expected, config = load(tmp_path / name)[1], json.loads((tmp_path / name / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / file).write_text(json.dumps(fields))
        assert same(load(tmp_path / name)[1], expected)

    def unpack(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for module, layer in layers.items():
            tensors[f"{module}.weight_zero_point"] = (layer.zero - 8).to(torch.int8)

    layers = write(float_path, tmp_path / "packed", "packed")
    write(float_path, tmp_path / "early", "packed", unpack)
    assert same(load(tmp_path / "early")[1], load(tmp_path / "packed")[1])


@pytest.mark.parametrize("group_size", [32, 64])
def test_what_is_written_is_what_quantising_at_load_gives(float_path: Path, tmp_path: Path, group_size: int) -> None:
    some = ALL - {"o_proj"}
    out = write_int8(float_path, tmp_path / "out", int8=some, form=("int4", group_size), max_file_bytes=20_000)
    whole = load(out)[1]
    for rank in range(2):
        at_load = load(float_path, int8=some, group_size=group_size, shard=Shard(rank, 2))[1]
        assert same(load(out, shard=Shard(rank, 2))[1], at_load)
        for part in ("weight", "weight_scale"):
            halves = whole[f"layers.0.down.{part}"].chunk(2, 1)
            assert torch.equal(at_load[f"layers.0.down.{part}"], halves[rank])
    assert whole["layers.0.o.weight"].dtype == torch.bfloat16
    assert whole["layers.0.down.weight_scale"].shape == (64, 128 // group_size)
    with pytest.raises(CheckpointError, match="int4 already"):
        write_int8(out, tmp_path / "again", int8=ALL)


def test_an_adapter_is_merged_before(float_path: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 128, 64, 128)
    out = write_int8(float_path, tmp_path / "out", int8=ALL, form=("int4", 32), lora=adapter)
    assert not same(load(out)[1], load(float_path, int8=ALL, group_size=32)[1])
    for rank in range(2):
        shard = Shard(rank, 2)
        merged = load(float_path, lora=adapter, int8=ALL, group_size=32, shard=shard)[1]
        assert same(load(out, shard=shard)[1], merged)


@pytest.mark.parametrize("group_size", [32, 128])
def test_a_weight_is_near_what_its_codes_mean(group_size: int) -> None:
    weight = randn(300, 256)
    weight[7, :group_size] = 0
    packed, scale = quantize_int4(weight, group_size)
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(1).float()
    found = ((codes - 8).unflatten(1, (-1, group_size)) * scale[:, :, None]).flatten(1)
    assert not found[7, :group_size].any()
    assert scale.isfinite().all()
    plain = weight.unflatten(1, (-1, group_size))
    naive = plain.abs().amax(2, keepdim=True) / 7
    rounded = torch.where(naive == 0, plain, (plain / naive).round() * naive).flatten(1)
    assert (found - weight).norm() < 0.9 * (rounded - weight).norm()


def check(path: Path, **options: Any) -> None:
    """What the engine checks before it reads a weight."""
    open_model(path, EngineConfig(**options), torch.device("cpu"))


STORED = "are int4 already; quantise the float checkpoint anew, or leave it out"
NO_KERNELS = (
    "means int4 weights, for which device {} has no kernels; choose device cpu, or a bfloat16 or W8A8 checkpoint"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "w8a8"}, f"quantization: 'w8a8' has no effect on .*{STORED}"),
        ({"quantization": "w4a8_g128"}, f"quantization: 'w4a8_g128' has no effect on .*{STORED}"),
        ({"quantization": "w4a8", "quantization_exclude": "o_proj"}, "quantization_exclude: has no effect .* int4"),
        ({"graph_mode": "inductor"}, "model: .*are int4, runs with one of the graph modes eager"),
        ({"lora": "nowhere"}, "cannot be merged into the int4 weights"),
        *(({"device": device}, f"model: .*{NO_KERNELS.format(device)}") for device in ("npu", "cuda")),
    ],
)
def test_what_does_not_go_with_int4(float_path: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write(float_path, tmp_path, "packed")
    check(tmp_path)
    with pytest.raises(ValueError, match=message):
        check(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "w4a8_g128"}, r"quantization: groups of 128 do not divide the 64 inputs of .*smaller groups"),
        *(
            ({"quantization": "w4a8", "device": device}, f"quantization: 'w4a8' {NO_KERNELS.format(device)}")
            for device in ("npu", "cuda")
        ),
    ],
)
def test_what_a_model_or_a_device_cannot_do(float_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        check(float_path, **options)


def test_experts_are_refused() -> None:
    path = Path(__file__).parents[1] / "data" / "golden" / "models" / "llada2" / "model_a"
    with pytest.raises(ParameterError, match=r"quantization: int4 is not supported for experts \(.*\); choose w8a8"):
        check(path, quantization="w4a8")


def test_an_engine_runs_on_int4(float_path: Path, tmp_path: Path) -> None:
    """At start or from a directory: the same tokens, and less memory than with int8."""
    out = write_int8(float_path, tmp_path / "out", int8=ALL, form=("int4", 32))
    engines = [LLM(out), LLM(float_path, quantization="w4a8"), LLM(float_path, quantization="w8a8")]
    params = DecodingParams(max_new_tokens=12, ignore_eos=True)
    tokens = [llm.generate([[5, 6, 7]], params, quiet=True)[0].token_ids for llm in engines]
    sizes = [open_model(out, EngineConfig(), torch.device("cpu")).weight_bytes(1)]
    sizes += [
        open_model(float_path, EngineConfig(quantization=name), torch.device("cpu")).weight_bytes(1)
        for name in ("w4a8", "w8a8", None)
    ]
    assert tokens[0] == tokens[1]
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3]


def test_ranks_that_would_divide_a_group_are_refused(tmp_path: Path) -> None:
    path = write_dream(tmp_path, hidden=64, intermediate=96)
    with pytest.raises(ParameterError, match="96 inputs of .*down_proj among 2 ranks; choose one of 1$"):
        load(path, int8=ALL, group_size=32, shard=Shard(0, 2))


# ---- what is refused -------------------------------------------------------------------------------------------------


def put(name: str, value: Callable[[Tensor], Tensor] | None) -> Change:
    """Changes a tensor, or removes it."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if value is not None:
            tensors[name] = value(tensor)

    return change


def say(**fields: Any) -> Change:
    return lambda described, _: described.update(fields)


def weights(**fields: Any) -> Change:
    return lambda described, _: described["config_groups"]["group_0"]["weights"].update(fields)


def as_float(module: str) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.zeros(128, 64)

    return change


REFUSED: dict[str, tuple[str, Change, str]] = {
    "8 bits": ("gptq", say(bits=8), "bits is 8, expected 4"),
    "other groups": ("gptq", say(group_size=-1), "group_size is -1, expected 32 or 64 or 128"),
    "order": ("gptq", say(desc_act=True), "desc_act is True, expected false, or static_groups true"),
    "marlin": ("gptq", say(checkpoint_format="marlin"), "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2'"),
    "head": ("gptq", say(lm_head=True), "lm_head is True, expected"),
    "permuted": ("gptq", put(f"{Q}.g_idx", lambda t: t.flip(0)), rf"{Q}: has a g_idx of another order of inputs"),
    "not symmetric": ("gptq", say(sym=True), "has zero points other than 8, and is said to be symmetric"),
    "zero of 16": (
        "gptq",
        put(f"{Q}.qzeros", lambda t: torch.full_like(t, -1)),
        "stored zero point of 15.*expected a checkpoint in the format gptq_v2",
    ),
    "words": (
        "gptq",
        put(f"{Q}.qweight", lambda t: t[1:]),
        rf"{Q}\.qweight: has shape \[7, 128\], expected \[8, 128\]",
    ),
    "no zeros": ("gptq", put(f"{Q}.qzeros", None), rf"tensor {Q}\.qzeros: is missing, expected \[2, 16\] in I32"),
    "stack": ("gptq", as_float(Q), rf"{Q} is float, .*k_proj is int4, .*run as one layer"),
    "awq 8 bits": ("awq", say(bits=8), "bits is 8, expected 4"),
    "gemv": ("awq", say(version="gemv"), "version is 'gemv', expected 'gemm'"),
    "awq infinite": ("awq", put(f"{Q}.scales", lambda t: t / 0), "holds -?inf as float32, expected finite"),
    "packed 8 bits": ("packed", weights(num_bits=8), r"group_0\.weights: num_bits is 8, expected 4"),
    "packed channel": ("packed", weights(strategy="channel"), "strategy is 'channel', expected 'group'"),
    "packed group": ("packed", weights(group_size=16), "group_size is 16, expected 32 or 64 or 128"),
    "packed float": ("packed", weights(type="float"), "type is 'float', expected 'int'"),
    "actorder": ("packed", weights(actorder="group"), "actorder is 'group', expected"),
    "packed shape": ("packed", put(f"{Q}.weight_shape", lambda t: t + 1), rf"{Q}: has weight_shape \[129, 65\]"),
    "zero point": (
        "packed",
        put(f"{Q}.weight_zero_point", lambda _: torch.full((128, 2), 8, dtype=torch.int8)),
        rf"{Q}: has zero points outside of -8\.\.7",
    ),
    "packed cache": ("packed", say(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}, expected"),
    "norm": ("packed", put("model.norm.weight", Tensor.int), r"model\.norm\.weight: is I32, expected F32 or"),
    "surplus": ("packed", lambda _, t: t.update({f"{Q}.weight_g_idx": torch.ones(64)}), r"weight_g_idx: is not part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, float_path: Path, tmp_path: Path) -> None:
    name, change, message = REFUSED[case]
    write(float_path, tmp_path, name, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_inputs_that_groups_do_not_divide(tmp_path: Path) -> None:
    path = write_dream(tmp_path / "float", hidden=64, intermediate=96, head_dim=32)
    write(path, tmp_path / "int4", "packed", weights(group_size=64))
    with pytest.raises(CheckpointError, match="down_proj: has 96 inputs, expected a multiple of group_size 64"):
        open_checkpoint(tmp_path / "int4")
