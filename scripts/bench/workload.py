"""A random Dream of 125 M parameters, and random prompts for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANDOM_MODEL = Path("build/bench-model")
"""Where the random model is kept."""


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


def read_workload() -> dict[str, Any]:
    """The random model's geometry and weights, and how its prompts are drawn."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("workload.json").read_text())
    return found


def write_random_model(folder: Path) -> None:
    """Writes the random model as a Dream directory, unless it is there.

    Raises:
        RuntimeError: this torch draws other weights, whose decodes would be no comparison.
    """
    if (folder / "config.json").exists():
        return
    work = read_workload()
    config = work["model"]
    init = config.pop("init")
    generator = torch.Generator().manual_seed(init["seed"])
    digest, tensors = hashlib.sha256(), {}
    for name, shape in parameters(config):
        values = torch.randn(shape, generator=generator)
        values = 1.0 + init["norm"] * values if name.endswith("norm.weight") else spread(name, init) * values
        digest.update(name.encode() + values.numpy().tobytes())
        tensors[name] = values.contiguous()
    if digest.hexdigest() != work["weights_sha256_fp32"]:
        raise RuntimeError("this torch draws other random weights than those of earlier measurements")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"model_type": "Dream", "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def random_prompts(count: int, length: int | None = None) -> list[list[int]]:
    """Prompts of random token ids for the random model.

    Args:
        count: how many.
        length: tokens of each; None: 128.
    """
    work = read_workload()
    prompts = []
    for index in range(count):
        generator = torch.Generator().manual_seed(work["prompt_seed"] + index)
        shape = (length or work["prompt_len"],)
        prompts.append(torch.randint(0, work["prompt_vocab"], shape, generator=generator).tolist())
    return prompts
