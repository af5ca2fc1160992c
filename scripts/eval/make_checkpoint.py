"""Writes a random checkpoint in the form in which a family is published, for tests, benchmarks and plans of memory.

    python -m scripts.eval make-checkpoint --family sdar --size tiny SDAR-tiny
    python -m scripts.eval make-checkpoint --family sdar --size 8B SDAR-8B

"tiny" has the vocabulary and the tokenizer of the bundled model, so it serves text, which makes no sense. The other
sizes are as published and have no tokenizer: they take prompts of token ids. One file of at most 2 GiB is in memory at
a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import ConfigError
from lopa_ascend.config.files import read_json_object
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import FAMILIES, read_config
from scripts.arguments import number_from

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lopa_ascend.families.table import TensorSpec

TINY = (64, 128, 3, 4, 2, 16)
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "sdar": {
        "tiny": TINY,
        "1.7B": (2048, 6144, 28, 16, 8, 128),
        "4B": (2560, 9728, 36, 32, 8, 128),
        "8B": (4096, 12288, 36, 32, 8, 128),
    },
    "fast-dllm-v2": {"tiny": TINY, "1.5B": (1536, 8960, 28, 12, 2, 128), "7B": (3584, 18944, 28, 28, 4, 128)},
    "dream": {"tiny": TINY, "7B": (3584, 18944, 28, 28, 4, 128)},
    "llada": {"tiny": TINY, "8B": (4096, 12288, 32, 32, 32, 128)},
    "llada2": {"tiny": TINY, "16B": (2048, 5120, 20, 16, 4, 128)},
}
"""By family and size: hidden size, width of the MLP, layers, query heads, KV heads, elements of a head."""
SIZE_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "sdar": {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": 4,
        "mask_token_id": 151669,
        "eos_token_id": 151643,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "fast-dllm-v2": {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 32,
        "eos_token_id": 151645,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "dream": {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "mask_token_id": 151666,
        "eos_token_id": 151643,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
    },
    "llada": {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "mask_token_id": 126336,
        "eos_token_id": 126081,
        "vocab_size": 126464,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 500000.0,
    },
    "llada2": {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "first_k_dense_replace": 1,
        "mask_token_id": 156895,
        "eos_token_id": 156892,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000.0,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_group": 4,
        "vocab_size": 157184,
        "max_position_embeddings": 16384,
    },
}
"""What the families' config.json has in place of, or beside, what all have."""
STOPS = {"sdar": [151645, 151643], "fast-dllm-v2": [151645], "dream": [151643], "llada": [126081], "llada2": [156892]}
"""Their EOS ids in generation_config.json."""
TINY_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32}
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
HEAD_SPREAD = 4.0
"""Standard deviation of the logits, with which some tokens are much more probable than others."""


def files_of(family: str, size: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of config.json, and those of generation_config.json."""
    sizes = SIZES[family][size]
    config: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": (family, size) == ("fast-dllm-v2", "1.5B"),
        "torch_dtype": dtype,
        "use_sliding_window": False,
        **dict(zip(SIZE_FIELDS, sizes, strict=False)),
        **FAMILY_FIELDS[family],
    }
    generation: dict[str, Any] = {"eos_token_id": STOPS[family]}
    if family in ("sdar", "llada2"):
        config["head_dim"] = sizes[-1]
    if size == "1.5B":
        config["vocab_size"] = 151936
    if size == "tiny":
        bundled = read_json_object(DEMO_MODEL / "config.json", ConfigError)
        config |= {name: bundled[name] for name in ("vocab_size", "mask_token_id", "eos_token_id")}
        generation["eos_token_id"] = bundled["eos_token_id"]
        config |= TINY_EXPERTS if family == "llada2" else {}
    names = FAMILIES[config["model_type"]].names
    renamed = {names.get(name, name): value for name, value in config.items()}
    return {**renamed, "vocab_size": config["vocab_size"]}, generation


def random_tensors(specs: Iterable[TensorSpec], seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name, with which activations keep their size from layer to layer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=dtype)
        if len(spec.shape) == 1:
            yield spec.name, tensor.fill_("norm" in spec.ours)
            continue
        spread = HEAD_SPREAD if spec.row.linear == "lm_head" else 1.0
        spread *= spec.shape[1] ** -0.5 if spec.row.linear or spec.row.is_float32 else 1.0
        yield spec.name, tensor.normal_(std=spread, generator=generator)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval make-checkpoint", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write, missing or empty")
    parser.add_argument("--family", choices=tuple(SIZES), default="sdar", help="(default: sdar)")
    listed = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in SIZES.items())
    parser.add_argument("--size", default="tiny", help=f"{listed} (default: tiny)")
    parser.add_argument("--seed", type=number_from(0), default=0, metavar="N", help="of the weights (default: 0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: bfloat16)")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.size not in SIZES[args.family]:
        parser.error(
            f"argument --size: {args.size!r} is no size of {args.family}; choose {', '.join(SIZES[args.family])}"
        )
    import torch  # this and the next take seconds

    from lopa_ascend.checkpoint.write import write_checkpoint

    config, generation = files_of(args.family, args.size, args.dtype)
    family = FAMILIES[config["model_type"]]
    model = read_config(config, generation, str(args.out / "config.json"), family)
    tensors = random_tensors(family.tensors(model).specs.values(), args.seed, getattr(torch, args.dtype))
    tokenizer = [DEMO_MODEL / name for name in TOKENIZER_FILES] if args.size == "tiny" else []
    try:
        write_checkpoint(args.out, tensors, {"generation_config.json": generation, "config.json": config}, tokenizer)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(f"{args.out}: {size / 2**20:,.1f} MiB of random weights")
