"""The workload of ``scripts.bench_decode``: a random Dream of 125 M parameters and a random prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WORKLOAD = Path(__file__).parents[1] / "bench_workload.json"


def parameters(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every parameter, in the order in which their random values are drawn."""
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{p}self_attn.{name}_proj.weight", (rows, hidden)
            yield f"{p}self_attn.{name}_proj.bias", (rows,)
        yield p + "self_attn.o_proj.weight", (hidden, hidden)
        yield p + "mlp.gate_proj.weight", (inner, hidden)
        yield p + "mlp.up_proj.weight", (inner, hidden)
        yield p + "mlp.down_proj.weight", (hidden, inner)
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def spread(name: str, init: dict[str, float]) -> float:
    """The standard deviation of a parameter's random values, which depends on the first of these parts in its name."""
    groups = {"bias": "bias", "embed": "emb", "lm_head": "head", "q_proj": "qk", "k_proj": "qk", "self_attn": "attn"}
    for part, group in groups.items():
        if part in name:
            return init[group]
    return init["mlp"]


def write_model(folder: Path, work: dict[str, Any]) -> None:
    """Writes the workload's model as a Dream directory, with the weights that were timed with the published code."""
    config = dict(work["model"])
    init = config.pop("init")
    generator = torch.Generator().manual_seed(init["seed"])
    digest, tensors = hashlib.sha256(), {}
    for name, shape in parameters(config):
        values = torch.randn(shape, generator=generator)
        values = 1.0 + init["norm"] * values if name.endswith("norm.weight") else spread(name, init) * values
        digest.update(name.encode() + values.numpy().tobytes())
        tensors[name] = values.contiguous()
    if digest.hexdigest() != work["weights_sha256_fp32"]:
        raise RuntimeError("this torch draws other random weights than those that were timed")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"model_type": "Dream", "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def workload_prompt(work: dict[str, Any]) -> list[int]:
    """The token ids of the workload's prompt."""
    generator = torch.Generator().manual_seed(work["prompt_seed"])
    return torch.randint(0, work["prompt_vocab"], (work["prompt_len"],), generator=generator).tolist()
