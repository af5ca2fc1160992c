"""Writes the bundled model as a Dream checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lopa_ascend.config import recommended
from scripts.demo_tokenizer import VOCABULARY

GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_dropout": 0.0,
}  # fmt: skip
WEIGHTS = "model.safetensors"
RECOMMENDED = {"block_size": 8}
"""Decoding parameters that the checkpoint recommends. In longer blocks positions far ahead are filled too early
(docs/bundled-model.md)."""


def write(out: Path, weights: Mapping[str, Tensor], *, eos: int, mask: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors.

    Args:
        out: directory that the tokenizer is in.
        weights: by the names of transformers' Qwen2Model, float32. They are stored in bfloat16, half the size, and run
            in float32.
        eos: token id that ends an answer, and pads.
        mask: token id of the mask.
    """
    stored = {f"model.{name}": weight.bfloat16().contiguous() for name, weight in weights.items()}
    replace_weights(out, stored)
    generation = {
        "eos_token_id": eos,
        "pad_token_id": eos,
        "mask_token_id": mask,
        recommended.NAME: RECOMMENDED,
    }
    config = {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        **GEOMETRY,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "mask_token_id": mask,
        "pad_token_id": eos,
        "bos_token_id": eos,
        "eos_token_id": eos,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def replace_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes model.safetensors. The one before may be the only copy of its weights, so it stays until the new one is
    there as a whole."""
    unfinished = folder / f"{WEIGHTS}.tmp"
    save_file(dict(weights), unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS)
