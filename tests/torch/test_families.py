"""The families in fused ops: golden forward passes of their published code, transformers on random configurations, and
what follows from the tables of their tensors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lopa_ascend import checkpoint
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.checkpoint.write import write_checkpoint, write_quantized
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.families import FAMILIES, read_config
from lopa_ascend.families.registry import family_of, family_of_checkpoint
from lopa_ascend.families.table import Shard
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.model.registry import find_model
from lopa_ascend.parallel.collectives import ALONE, Group
from scripts.eval import make_checkpoint
from tests import llada2_reference, rounding

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
MODEL_TYPES = (
    *("sdar", "Fast_dLLM_Qwen", "DreamReasoner", "llada", "llada2_moe", "nemotron_labs_diffusion", "PanguEmbedded"),
    *("orthrus", "a2d-qwen3-bd3lm", "a2d-qwen2-mdlm", "stable_diffcoder"),
)
LLAMAS = ("llada", "nemotron_labs_diffusion", "PanguEmbedded", "stable_diffcoder")
QWEN2S = ("Fast_dLLM_Qwen", "a2d-qwen2-mdlm")
INT8_BOUND = 0.06
"""Of the largest logit: what int8 weights and activations may change in these small models."""
pytest.importorskip("transformers.models.qwen3")


@dataclass(frozen=True)
class Threads(Group):
    """One of several ranks, each a thread."""

    barrier: Barrier = field(default_factory=lambda: Barrier(1))
    parts: list[Tensor] = field(default_factory=list)

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        self.parts[self.rank] = x
        self.barrier.wait(60)
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait(60)
        return total


def model_of(path: Path, tp: Group = ALONE, **options: Any) -> Decoder:
    family = find_model(checkpoint.config_json(path))
    assert family is not None
    found = checkpoint.open_checkpoint(path, family)
    if family.draft_adapter and (folder := path / family.draft_adapter).is_dir():
        options["draft_adapter"] = checkpoint.open_draft_adapter(folder, found.expected, family.name)
    options["layers"] = found.expected.quantized(options.pop("int8", ()), options.pop("group_size", 0))
    return Decoder(family, *checkpoint.load(found, shard=Shard(tp.rank, tp.size), **options), CpuOps(), tp)


def logits_of(model: Decoder, tokens: list[int], block: int | None = None, begins_at: int = 0) -> Tensor:
    """A forward pass over a whole text, causal, block-causal or full: [tokens, this rank's part of the vocabulary].

    Args:
        block: the length of blocks; None: that of the model.
        begins_at: where a block begins.
    """
    size = block or model.config.block_size or len(tokens)
    if is_causal := model.properties.is_causal:
        size = PAGE_SIZE
    return Passes(model, len(tokens)).logits(tokens, 0, size, begins_at % size, is_causal=is_causal)


class Passes:
    """Forward passes of one sequence, which share a cache of ``length`` positions."""

    def __init__(self, model: Decoder, length: int) -> None:
        c, self.model = model.config, model
        self.table = torch.arange(pages_for(length), dtype=torch.int32)
        shape = (2, c.num_layers, len(self.table), PAGE_SIZE, c.local_kv_heads(model.tp.size), c.head_dim)
        self.caches = torch.full(shape, torch.nan)

    def logits(
        self, tokens: list[int], start: int, size: int, phase: int = 0, *, is_causal: bool = False, drafts: bool = False
    ) -> Tensor:
        """Of tokens from position ``start`` on, in blocks of ``size``."""
        end = start + len(tokens)
        cuts = sorted({start, *(at for at in range(phase, end, size) if at > start), end})
        lengths = tuple(last - first for first, last in pairwise(cuts))
        prefixes = tuple(first // PAGE_SIZE * PAGE_SIZE * is_causal for first in cuts[:-1])
        tables, groups = self.table.expand(len(lengths), -1), tuple(range(len(lengths)))
        entries = Entries(lengths, tuple(cuts[1:]), tables, groups, prefixes, causal=(is_causal,) * len(lengths))
        at = torch.arange(start, end)
        inputs = ForwardInputs(torch.tensor(tokens), at, at, None, entries, None, len(tokens) if drafts else 0)
        return self.model.logits(self.model.forward(inputs, *map(list, self.caches)))


def on_ranks(path: Path, size: int, compute: Callable[[Decoder], Tensor], **options: Any) -> Tensor:
    """The logits that ``size`` ranks compute, each with its part of the vocabulary."""
    barrier, parts = Barrier(size), [torch.empty(0)] * size

    def run(rank: int) -> Tensor:
        return compute(model_of(path, Threads(rank, size, barrier=barrier, parts=parts), **options))

    with ThreadPoolExecutor(size) as ranks:
        return torch.cat(list(ranks.map(run, range(size))), 1)


def logits_on_two_ranks(path: Path, tokens: list[int], **options: Any) -> Tensor:
    return on_ranks(path, 2, lambda model: logits_of(model, tokens), **options)


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < bound


# ---- the published code ----------------------------------------------------------------------------------------------


FORWARDS = {
    "forward": ("sdar", "fastdllm2", "llada", "llada2", "a2d-mdlm", "diffcoder"),
    "forward_bd3lm": ("a2d-bd3lm",),
}


@pytest.mark.parametrize("which", "ab")
@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in FORWARDS.items() for name in names])
def test_golden_forward_passes(file: str, name: str, which: str, tmp_path: Path) -> None:
    folder, _, way = name.partition("-")
    path = tmp_path / (way or "model")
    path.symlink_to(GOLDEN / folder / f"model_{which}")
    golden = json.loads((path / f"{file}.json").read_text())
    tokens = golden["input_ids"]
    size, begins_at = (
        int(found[1]) if (found := re.search(words, golden["attention"])) else 0
        for words in (r"blocks of (\d+)", r"begins at position (\d+)")
    )

    def compute(model: Decoder) -> Tensor:
        return logits_of(model, tokens, size or None, begins_at)

    ours = model_of(path)
    bound = rounding.forward_bound(ours.config, len(tokens))
    logits = compute(ours)
    for row, expected in golden["logits"].items():
        assert_near(logits[int(row)], torch.tensor(expected), bound)
    assert logits.argmax(-1).tolist() == golden["argmax"]
    for ranks in ours.config.tensor_parallel_sizes()[1:2]:
        split = on_ranks(path, ranks, compute)
        assert split.argmax(-1).tolist() == golden["argmax"]
        assert_near(split, logits, bound)


@pytest.mark.parametrize("which", "ab")
@pytest.mark.parametrize("name", ["nemotron", "pangu", "orthrus"])
def test_golden_forward_passes_of_causal_models(name: str, which: str) -> None:
    """A causal pass, and a block over the keys and values of its beginning, with the weights or the adapter of drafts
    where the model has any."""
    path = GOLDEN / name / f"model_{which}"
    golden = json.loads((path / "forward.json").read_text())
    tokens, block, prefix = golden["input_ids"], golden["block_ids"], golden["prefix"]
    views = {"causal": False, "block": name == "orthrus"}
    if "block_lora" in golden["logits"]:
        views["block_lora"] = True

    def compute(model: Decoder) -> Tensor:
        passes = Passes(model, len(tokens))
        _, *drafts = views.values()
        causal = passes.logits(tokens, 0, PAGE_SIZE, is_causal=True)
        return torch.cat([causal, *(passes.logits(block, prefix, len(tokens), drafts=each) for each in drafts)])

    ours = model_of(path)
    bound = rounding.forward_bound(ours.config, len(tokens))
    logits = compute(ours)
    for view, first in zip(views, (0, len(tokens), len(tokens) + len(block)), strict=False):
        for row, expected in golden["logits"][view].items():
            assert_near(logits[first + int(row)], torch.tensor(expected), bound)
        argmax = golden["argmax"][view]
        assert logits[first : first + len(argmax)].argmax(-1).tolist() == argmax
    for ranks in ours.config.tensor_parallel_sizes()[1:2]:
        split = on_ranks(path, ranks, compute)
        assert split.argmax(-1).tolist() == logits.argmax(-1).tolist()
        assert_near(split, logits, bound)


# ---- transformers ----------------------------------------------------------------------------------------------------


def write_random(path: Path, name: str, seed: int, scale: float = 0.3, **sizes: int) -> Path:
    """A random checkpoint of a family with random sizes, but for ``sizes``. Its weights, biases and norms are far from
    their neutral values."""
    rng, family = random.Random(seed), FAMILIES[name]
    kv_heads, vocab = rng.choice([1, 2]), rng.randrange(60, 130)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": vocab,
        "hidden_size": 16 * rng.choice([2, 3]),
        "intermediate_size": rng.choice([24, 80]),
        "num_hidden_layers": rng.choice([1, 3]),
        "num_attention_heads": 2 * kv_heads * rng.choice([1, 2]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 24]),
        "max_position_embeddings": 512,
        "rope_theta": rng.choice([1e4, 1e6]),
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": name in (*QWEN2S, "PanguEmbedded") or rng.random() < 0.5,
        "mask_token_id": vocab - 1,
        "block_size": rng.choice([1, 4, 7, 32]),
        "torch_dtype": "float32",
        "_name_or_path": name,
    }
    config |= sizes
    if name in ("nemotron_labs_diffusion", "stable_diffcoder"):
        config |= {"attention_bias": False, "architectures": ["StableDiffcoderForCausalLM"]}
    heads, unknown = config["num_attention_heads"], ("attention_bias", "block_size", "head_dim")
    config = {family.names.get(key, key): x for key, x in config.items() if name != "llada" or key not in unknown}
    if name == "llada":  # whose heads have the hidden size together
        config |= {"block_type": "llama", "layer_norm_type": "rms", "rope": True, "activation_type": "silu"}
        drawn = heads * rng.choice([8, 24])
        config |= {"d_model": sizes.get("hidden_size", drawn), "vocab_size": vocab}
    if name == "llada2_moe":
        groups, kept = rng.choice([(1, 1), (2, 1), (3, 2)])
        config["num_experts"] = groups * rng.choice([2, 5])
        config |= {"n_group": groups, "topk_group": kept, "num_experts_per_tok": rng.choice([1, 2])}
        config |= {"first_k_dense_replace": rng.choice([0, 1]) % config["num_hidden_layers"]}
        config |= {"moe_intermediate_size": rng.choice([8, 24]), "num_shared_experts": rng.choice([1, 2])}
        config |= {"routed_scaling_factor": rng.choice([1.0, 2.5]), "partial_rotary_factor": rng.choice([0.25, 0.5, 1])}
        config["attention_bias"] = False
    expected = family.tensors(read_config(config, {}, "config.json", family))
    generator = torch.Generator().manual_seed(seed)
    tensors = {key: torch.randn(spec.shape, generator=generator) * scale for key, spec in expected.specs.items()}
    moved = ((key, x + 1 if x.dim() == 1 and "bias" not in key else x) for key, x in tensors.items())
    write_checkpoint(path, moved, {"config.json": config}, [], max_file_bytes=20_000)
    return path


def reference(path: Path, tokens: list[int]) -> Tensor:
    """What transformers' Qwen2, Qwen3 or Llama computes with a dense mask of blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    values, tensors = json.loads((path / "config.json").read_text()), read(path)
    family = family_of(path)
    assert family is not None
    del values["model_type"]
    values = {ours: values[name] for ours, name in family.names.items() if name in values} | values
    attention, block = family.properties.attention, values.pop("block_size", len(tokens))
    block = {"full": len(tokens), "block_causal": block, "causal": 1}[attention]
    if family.name == "llada2_moe":
        return llada2_reference.logits(values, tensors, tokens, block)
    model: Any
    if family.name in LLAMAS:
        model, tensors = LlamaForCausalLM(LlamaConfig(**values)), with_the_names_of_llama(tensors)
    elif family.name in QWEN2S:
        model = Qwen2ForCausalLM(Qwen2Config(**values))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**values))
        tensors = {name: x for name, x in tensors.items() if "_diff." not in name}
    model.load_state_dict(tensors, strict=not values["tie_word_embeddings"])
    number = torch.arange(len(tokens)) // block
    hidden = (number[:, None] < number)[None, None]
    bias = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.tensor([tokens]), attention_mask=bias).logits[0]
    return logits


def with_the_names_of_llama(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a LLaDA or a Nemotron as Llama calls them. LLaDA's head and the MLP's last layer share a name."""
    if any(name.startswith("encoder.") for name in tensors):
        return {name.replace("encoder", "model").replace("diffusion_head", "lm_head"): x for name, x in tensors.items()}
    if "model.layers.0.input_layernorm.weight" in tensors:
        return tensors
    for old, new in (
        ("model.transformer.ff_out", "lm_head"), ("transformer.wte", "embed_tokens"), ("transformer.ln_f", "norm"),
        ("transformer.blocks", "layers"), ("attn_norm", "input_layernorm"), ("ff_norm", "post_attention_layernorm"),
        ("attn_out", "self_attn.o_proj"), ("ff_proj", "mlp.gate_proj"), ("up_proj", "mlp.up_proj"),
        ("ff_out", "mlp.down_proj"), *((f"{x}_proj", f"self_attn.{x}_proj") for x in "qkv"),
    ):  # fmt: skip
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    return tensors


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory."""
    from safetensors.torch import load_file

    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(str(file)).items()}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MODEL_TYPES)
def test_random_models_compute_what_transformers_does(tmp_path: Path, name: str, seed: int) -> None:
    path = write_random(tmp_path / "model", name, seed)
    rng = random.Random(seed)
    tokens = [rng.randrange(60) for _ in range(rng.choice([5, 70, 150]))]
    expected = reference(path, tokens)
    model = model_of(path)
    bound = rounding.forward_bound(model.config, len(tokens))
    assert_near(logits_of(model, tokens), expected, bound)
    assert_near(logits_on_two_ranks(path, tokens), expected, bound)


# ---- what the tables give --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_int8_at_start_is_int8_on_disk(tmp_path: Path, name: str) -> None:
    path, tokens = write_random(tmp_path / "float", name, 1, scale=0.1), list(range(40))
    written = write_quantized(path, tmp_path / "int8", FAMILIES[name], linears=INT8_LAYERS)
    at_start, on_disk = model_of(path, int8=INT8_LAYERS), model_of(written)
    assert at_start.weights.keys() == on_disk.weights.keys()
    assert "layers.0.o.weight_scale" in on_disk.weights
    assert all(torch.equal(x, on_disk.weights[key]) for key, x in at_start.weights.items())
    logits = logits_of(on_disk, tokens)
    assert_near(logits, logits_of(model_of(path), tokens), INT8_BOUND)
    # Each rank quantises its own inputs of o and down.
    assert_near(logits_on_two_ranks(written, tokens), logits, INT8_BOUND)


def dequantized(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are loaded, with the numbers that int4 ones mean."""
    floats = {name: weight for name, weight in weights.items() if not name.endswith(("weight_scale", "weight_zero"))}
    for name in [name for name in floats if f"{name}_scale" in weights]:
        scale, codes = weights[f"{name}_scale"], weights[name]
        values = torch.stack((codes & 15, codes >> 4), -1).view(*scale.shape, -1) - 8.0
        floats[name] = (values * scale[:, :, None]).flatten(1)
    return floats


@pytest.mark.parametrize("name", [name for name in MODEL_TYPES if name != "llada2_moe"])
def test_int4_at_start_is_int4_on_disk(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}
    path, tokens = write_random(tmp_path / "float", name, 1, 0.1, **sizes, num_key_value_heads=2), list(range(40))
    family = FAMILIES[name]
    written = write_quantized(path, tmp_path / "int4", family, linears=INT8_LAYERS, form=("int4", 32))
    found, floats = (checkpoint.open_checkpoint(each, family) for each in (written, path))
    config, weights = checkpoint.load(found)
    at_start = checkpoint.load(floats, layers=floats.expected.quantized(INT8_LAYERS, 32))[1]
    assert weights.keys() == at_start.keys()
    assert all(torch.equal(x, weights[key]) for key, x in at_start.items())
    expected = logits_of(Decoder(family, config, dequantized(weights), CpuOps()), tokens)
    logits = logits_of(model_of(written), tokens)
    assert_near(logits, expected, INT8_BOUND)
    assert_near(logits_on_two_ranks(written, tokens), logits, INT8_BOUND)


def test_the_adapter_of_drafts_is_copied(tmp_path: Path) -> None:
    path, family = GOLDEN / "nemotron" / "model_b", FAMILIES["nemotron_labs_diffusion"]
    written = write_quantized(path, tmp_path / "int8", family, linears=INT8_LAYERS)
    assert any(name.endswith("_lora_a.weight") for name in model_of(written).weights)
    assert (tmp_path / "int8" / "linear_spec_lora" / "adapter_config.json").is_file()


def write_adapter(path: Path, model: Path, **settings: Any) -> dict[str, Tensor]:
    """A random adapter of all linear layers but the head, and the weights with it."""
    path.mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 0.3, "target_modules": "all-linear", **settings}
    (path / "adapter_config.json").write_text(json.dumps(values))
    generator = torch.Generator().manual_seed(0)
    weights, factors = read(model), {}
    for key, weight in weights.items():
        if (
            key.endswith(("_proj.weight", "_proj_diff.weight", "dense.weight", "_value.weight"))
            or ".blocks." in key
            and "_out." in key
        ):
            module = f"base_model.model.{key.removesuffix('.weight')}"
            a = factors[f"{module}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator)
            b = factors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator)
            weights[key] = weight + 0.15 * b @ a
    save_file(factors, str(path / "adapter_model.safetensors"))
    return weights


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_an_adapter_is_merged(tmp_path: Path, name: str) -> None:
    path, tokens = write_random(tmp_path / "model", name, 2), list(range(20))
    weights = write_adapter(tmp_path / "adapter", path)
    merged = tmp_path / "merged"
    write_checkpoint(merged, iter(weights.items()), {"config.json": json.loads((path / "config.json").read_text())}, [])
    model = model_of(path, lora=tmp_path / "adapter")
    bound = rounding.forward_bound(model.config, len(tokens))
    adapted = logits_of(model, tokens)
    assert_near(adapted, reference(merged, tokens), bound)
    assert_near(logits_on_two_ranks(path, tokens, lora=tmp_path / "adapter"), adapted, bound)


@pytest.mark.parametrize(
    ("name", "base", "family"),
    [
        ("Fast_dLLM_Qwen", "Dream-org/Dream-v0-Instruct-7B", "Dream"),
        ("sdar", "/models/Dream-org/DreamReasoner-8B/", "DreamReasoner"),
        ("DreamReasoner", "JetLM/SDAR-8B-Chat-b32", "sdar"),
        ("sdar", "Efficient-Large-Model/Fast_dLLM_v2_7B", "Fast_dLLM_Qwen"),
        ("sdar", "GSAI-ML/LLaDA-8B-Instruct", "llada"),
        ("llada", "Dream-org/Dream-v0-Instruct-7B", "Dream"),
    ],
)
def test_an_adapter_of_another_family_is_refused(tmp_path: Path, name: str, base: str, family: str) -> None:
    """Its shapes fit, so nothing else would tell."""
    path = write_random(tmp_path / "model", name, 3)
    write_adapter(tmp_path / "adapter", path, base_model_name_or_path=base)
    words = rf"adapter_config.json: base_model_name_or_path: is '{base}', a {family} model, expected a {name} model"
    with pytest.raises(CheckpointError, match=words):
        model_of(path, lora=tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=words):
        write_quantized(path, tmp_path / "int8", FAMILIES[name], linears=INT8_LAYERS, lora=tmp_path / "adapter")


def test_an_adapter_of_the_same_family_or_of_an_unknown_model_is_taken(tmp_path: Path) -> None:
    sdar, llada = (write_random(tmp_path / name, name, 3) for name in ("sdar", "llada"))
    for number, base in enumerate(("Gen-Verse/TraDo-8B-Instruct", "/home/me/mine", None)):
        write_adapter(tmp_path / str(number), sdar, base_model_name_or_path=base)
        model_of(sdar, lora=tmp_path / str(number))
    write_adapter(tmp_path / "d2f", llada, base_model_name_or_path="GSAI-ML/LLaDA-8B-Instruct")
    model_of(llada, lora=tmp_path / "d2f")
    assert family_of_checkpoint("inclusionAI/LLaDA2.0-mini") == "llada2_moe"
    assert family_of_checkpoint("inclusionAI/LLaDA2.2-mini") is None  # another decoding


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("sdar", {"model_type": "Fast_dLLM_Qwen", "bd_size": 4, "block_size": None}, "_norm.weight: is not part"),
        ("Fast_dLLM_Qwen", {"model_type": "sdar", "bd_size": None}, "q_norm.weight: is missing"),
        ("DreamReasoner", {"block_size": None}, "_norm.weight: is not part of a Dream model"),
        ("Fast_dLLM_Qwen", {"model_type": "Dream", "bd_size": None, "block_size": 4}, "q_norm.*for DreamReasoner"),
        ("sdar", {"model_type": "sdar_moe"}, "model_type is 'sdar_moe', expected one of Dream"),
        ("sdar", {"model_type": "qwen3"}, r"model_type is 'qwen3', expected one of .*qwen3 \(OrthrusLM\)"),
        ("sdar", {"model_type": "qwen3", "architectures": ["OrthrusLM"]}, "q_proj_diff.weight: is missing"),
        ("llada", {"model_type": "sdar", "mask_token_id": 1}, "d_model is|hidden_size is None"),
        ("llada", {"mlp_hidden_size": 7}, "blocks.0.ff_proj.weight: .*expected .*7"),
        ("llada", {"n_layers": 9}, r"blocks.\d.attn_norm.weight: is missing"),
        (
            "llada",
            {"weight_tying": True, "embedding_size": 59, "vocab_size": 59, "mask_token_id": 1},
            "wte.weight: .*59",
        ),
        ("llada", {"model_type": "llada3"}, "model_type is 'llada3', expected one of Dream"),
        ("sdar", {"model_type": "DreamReasoner"}, "model_type is 'DreamReasoner', expected one of Dream, Fast"),
    ],
)
def test_a_model_is_not_taken_for_one_of_another_family(
    tmp_path: Path, name: str, fields: dict[str, Any], words: str
) -> None:
    path = write_random(tmp_path / "model", name, 4)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | fields))
    with pytest.raises(ValueError, match=words):
        model_of(path)


# ---- random checkpoints of published sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", make_checkpoint.SIZES)
def test_a_tiny_random_checkpoint_is_loaded(tmp_path: Path, family: str) -> None:
    first, *others = (tmp_path / f"{family}-{seed}" for seed in ("5", "5-again", "6"))
    for folder, seed in zip((first, *others), "556", strict=True):
        make_checkpoint.main([str(folder), "--family", family, "--seed", seed, "--dtype", "float32"])
    one, same, other = map(model_of, (first, *others))
    assert all(torch.equal(x, same.weights[name]) for name, x in one.weights.items())
    assert not torch.equal(one.head, other.head)
    assert {"vocab.json", "tokenizer_config.json"} <= {file.name for file in first.iterdir()}
    if one.config.block_size is not None:
        assert 1 < logits_of(one, list(range(40))).std() < 10


@pytest.mark.parametrize(
    ("family", "size"), [(f, size) for f, sizes in make_checkpoint.SIZES.items() for size in sizes if size != "tiny"]
)
def test_published_sizes(family: str, size: str) -> None:
    """The number of parameters is what the name says, which may leave out embeddings or drafting weights."""
    config, generation = make_checkpoint.files_of(family, size, "bfloat16")
    found = FAMILIES[make_checkpoint.LABELS[family]]
    model = read_config(config, generation, "config.json", found)
    count = found.tensors(model).num_bytes(1)
    assert 0.95 < count / 1e9 / float(size.removesuffix("B")) < 1.3


def test_a_random_tiny_a2d_is_named_so_that_it_is_read_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("model", "name with mdlm or bd3lm in it"), ("bd3lm", "read as a2d-qwen3-bd3lm")):
        with pytest.raises(SystemExit):
            make_checkpoint.main([str(tmp_path / name), "--family", "a2d-qwen3-mdlm"])
        assert words in capsys.readouterr().err
        assert not (tmp_path / name).exists()


def test_a_size_of_another_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_checkpoint.main([str(tmp_path / "out"), "--family", "dream", "--size", "8B"])
    assert "--size: '8B' is no size of dream; choose tiny, 7B" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SystemExit, match="full: exists, expected a missing or empty directory"):
        make_checkpoint.main([str(tmp_path / "full")])
