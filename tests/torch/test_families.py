"""The families in fused ops: golden forward passes of their published code, transformers on random configurations, and
what follows from the tables of their tensors."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from lopa_ascend.checkpoint.write import write_checkpoint, write_int8
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.families import FAMILIES, read_config
from lopa_ascend.families.registry import family_of_checkpoint
from lopa_ascend.families.table import Shard
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.model.registry import find_model
from lopa_ascend.parallel.collectives import ALONE, Group
from scripts.eval import make_checkpoint
from tests import llada2_reference, rounding

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
MODEL_TYPES = ("sdar", "Fast_dLLM_Qwen", "DreamReasoner", "llada", "llada2_moe")
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
    return Decoder(family, *checkpoint.load(found, shard=Shard(tp.rank, tp.size), **options), CpuOps(), tp)


def logits_of(model: Decoder, tokens: list[int], block: int | None = None) -> Tensor:
    """A forward pass over a whole text, block-causal or full: [tokens, this rank's part of the vocabulary].

    ``block``: the length of blocks; None: that of the model.
    """
    c, length, at = model.config, len(tokens), torch.arange(len(tokens))
    size = block or c.block_size or length
    begins = range(0, length, size)
    ends = tuple(min(begin + size, length) for begin in begins)
    tables = torch.arange(pages_for(length), dtype=torch.int32).expand(len(ends), -1)
    entries = Entries(tuple(map(int.__sub__, ends, begins)), ends, tables, (0,) * len(ends), (0,))
    shape = (2, c.num_layers, tables.shape[1], PAGE_SIZE, c.local_kv_heads(model.tp.size), c.head_dim)
    caches = torch.full(shape, torch.nan)
    inputs = ForwardInputs(torch.tensor(tokens), at, at, None, entries, None)
    return model.logits(model.forward(inputs, *map(list, caches)))


def logits_on_two_ranks(path: Path, tokens: list[int], block: int | None = None, **options: Any) -> Tensor:
    barrier, parts = Barrier(2), [torch.empty(0)] * 2

    def run(rank: int) -> Tensor:
        return logits_of(model_of(path, Threads(rank, 2, barrier=barrier, parts=parts), **options), tokens, block)

    with ThreadPoolExecutor(2) as ranks:
        return torch.cat(list(ranks.map(run, range(2))), 1)


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < bound


# ---- the published code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [f"{name}/model_{x}" for name in ("sdar", "fastdllm2", "llada", "llada2") for x in "ab"]
)
def test_golden_forward_passes(model: str) -> None:
    golden = json.loads((GOLDEN / model / "forward.json").read_text())
    blocks = re.search(r"blocks of (\d+)", golden["attention"])
    size = int(blocks[1]) if blocks else None
    ours = model_of(GOLDEN / model)
    bound = rounding.forward_bound(ours.config, len(golden["input_ids"]))
    logits = logits_of(ours, golden["input_ids"], size)
    for row, expected in golden["logits"].items():
        assert_near(logits[int(row)], torch.tensor(expected), bound)
    assert logits.argmax(-1).tolist() == golden["argmax"]
    on_ranks = logits_on_two_ranks(GOLDEN / model, golden["input_ids"], size)
    assert on_ranks.argmax(-1).tolist() == golden["argmax"]
    assert_near(on_ranks, logits, bound)


# ---- transformers ----------------------------------------------------------------------------------------------------


def write_random(path: Path, name: str, seed: int, scale: float = 0.3) -> Path:
    """A random checkpoint of a family with random sizes. Its weights, biases and norms are far from their neutral
    values."""
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
        "attention_bias": name == "Fast_dLLM_Qwen" or rng.random() < 0.5,
        "mask_token_id": vocab - 1,
        family.names.get("block_size", "block_size"): rng.choice([1, 4, 7, 32]),
        "torch_dtype": "float32",
    }
    if name == "llada":  # whose heads have the hidden size together
        for field in ("attention_bias", "block_size", "head_dim"):
            del config[field]
        heads, own = config["num_attention_heads"], {"block_type": "llama", "layer_norm_type": "rms", "rope": True}
        config = {family.names.get(key, key): value for key, value in config.items()}
        config |= {**own, "activation_type": "silu", "d_model": heads * rng.choice([8, 24]), "vocab_size": vocab}
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
    kind = values.pop("model_type")
    block = values.pop("bd_size", None) or values.pop("block_size", len(tokens))
    if kind == "llada2_moe":
        return llada2_reference.logits(values, tensors, tokens, block)
    model: Any
    if kind == "llada":
        values = {ours: values[name] for ours, name in FAMILIES["llada"].names.items()} | values
        model, tensors = LlamaForCausalLM(LlamaConfig(**values)), with_the_names_of_llama(tensors)
    else:
        model = (
            Qwen2ForCausalLM(Qwen2Config(**values))
            if kind == "Fast_dLLM_Qwen"
            else Qwen3ForCausalLM(Qwen3Config(**values))
        )
    model.load_state_dict(tensors, strict=not values["tie_word_embeddings"])
    number = torch.arange(len(tokens)) // block
    hidden = (number[:, None] < number)[None, None]
    bias = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.tensor([tokens]), attention_mask=bias).logits[0]
    return logits


def with_the_names_of_llama(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a LLaDA as Llama calls them. The head and the MLP's last layer share a name."""
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
    written = write_int8(path, tmp_path / "int8", FAMILIES[name], int8=INT8_LAYERS)
    at_start, on_disk = model_of(path, int8=INT8_LAYERS), model_of(written)
    assert at_start.weights.keys() == on_disk.weights.keys()
    assert "layers.0.o.weight_scale" in on_disk.weights
    assert all(torch.equal(x, on_disk.weights[key]) for key, x in at_start.weights.items())
    logits = logits_of(on_disk, tokens)
    assert_near(logits, logits_of(model_of(path), tokens), INT8_BOUND)
    # Each rank quantises its own inputs of o and down.
    assert_near(logits_on_two_ranks(written, tokens), logits, INT8_BOUND)


def write_adapter(path: Path, model: Path, **settings: Any) -> dict[str, Tensor]:
    """A random adapter of all linear layers but the head, and the weights with it."""
    path.mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 0.3, "target_modules": "all-linear", **settings}
    (path / "adapter_config.json").write_text(json.dumps(values))
    generator = torch.Generator().manual_seed(0)
    weights, factors = read(model), {}
    for key, weight in weights.items():
        if key.endswith(("_proj.weight", "dense.weight", "_value.weight")) or ".blocks." in key and "_out." in key:
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
        write_int8(path, tmp_path / "int8", FAMILIES[name], int8=INT8_LAYERS, lora=tmp_path / "adapter")


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
