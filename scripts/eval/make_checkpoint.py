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
from lopa_ascend.families import FAMILIES, family_in, read_config, with_name
from lopa_ascend.families.family import shape
from scripts.arguments import number_from

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lopa_ascend.families.table import TensorSpec

TINY = shape(64, 128, 3, 4, 2)
ALIASES = {
    "fast-dllm-v2": "Fast_dLLM_Qwen",
    "dream": "Dream",
    "llada2": "llada2_moe",
    "nemotron": "nemotron_labs_diffusion",
    "pangu": "PanguEmbedded",
    "diffcoder": "stable_diffcoder",
}
"""What a family is called here, if not by its own name."""
LABELS = {next((alias for alias, own in ALIASES.items() if own == name), name): name for name in FAMILIES}
SIZES = {label: ("tiny", *FAMILIES[name].sizes) for label, name in LABELS.items() if FAMILIES[name].sizes}
"""By family."""
TINY_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32}
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
HEAD_SPREAD = 4.0
"""Standard deviation of the logits, with which some tokens are much more probable than others."""


def files_of(family: str, size: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of config.json, and those of generation_config.json."""
    own = FAMILIES[LABELS[family]]
    config = own.config_json(next(iter(own.sizes)) if size == "tiny" else size)
    if size == "tiny":
        bundled = read_json_object(DEMO_MODEL / "config.json", ConfigError)
        changed = {**TINY, **{name: bundled[name] for name in ("vocab_size", "mask_token_id", "eos_token_id")}}
        changed |= {"head_dim": 16} if "head_dim" in config else {}
        config |= {own.names.get(name, name): value for name, value in changed.items()}
        config |= {"vocab_size": bundled["vocab_size"]} | (TINY_EXPERTS if "num_experts" in config else {})
    return config | {"torch_dtype": dtype}, {"eos_token_id": config["eos_token_id"]}


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
    family = FAMILIES[LABELS[args.family]]
    try:
        named = family_in(with_name(config, args.out))
    except ConfigError as error:
        parser.error(f"argument OUT: {error}")
    if named is not family:
        parser.error(f"argument OUT: {args.out} would be read as {named.name if named else 'none'}, not {family.name}")
    model = read_config(config, generation, str(args.out / "config.json"), family)
    tensors = random_tensors(family.tensors(model).specs.values(), args.seed, getattr(torch, args.dtype))
    tokenizer = [DEMO_MODEL / name for name in TOKENIZER_FILES] if args.size == "tiny" else []
    try:
        write_checkpoint(args.out, tensors, {"generation_config.json": generation, "config.json": config}, tokenizer)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(f"{args.out}: {size / 2**20:,.1f} MiB of random weights")
