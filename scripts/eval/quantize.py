"""Quantises a checkpoint to W8A8, int4 or fp8 and writes it to another directory, in the format compressed-tensors.

    python -m scripts.eval quantize Dream-v0-Instruct-7B Dream-7B-W8A8
    python -m scripts.eval quantize Dream-v0-Instruct-7B D2F-W8A8 --lora D2F_Dream_Instruct_7B_Lora --exclude down_proj
    python -m scripts.eval quantize Dream-v0-Instruct-7B Dream-7B-W8A8 --smooth prompts.jsonl
    python -m scripts.eval quantize Dream-v0-Instruct-7B Dream-7B-int4 --bits 4 --group-size 128
    python -m scripts.eval quantize Dream-v0-Instruct-7B Dream-7B-FP8 --bits fp8

Weights of linear layers become int8, or with --bits fp8 float8 e4m3, with a float32 scale for each output; or with
--bits 4 int4, with a bfloat16 scale for each group of inputs. Embedding, norms and head stay as they are. With --lora,
the adapter is merged first. A server that loads the new directory gives the same answers as one that quantises the
float checkpoint at start (--quantization w8a8, fp8, w4a8 or w4a8_g128), and reads a half or a quarter of the bytes.

--smooth first moves outliers from the activations into the weights, as SmoothQuant does: it runs the float model on the
texts of a file, masks several shares of each text, and folds a factor for each channel into the norms and into up_proj.
Each line of the file is a prompt, or a JSON object with "prompt" or "question", and optionally "answer". If there is an
answer, only its tokens are masked. A line that begins with "{" must be such an object.

What quantising costs in answers is shown by `tasks` with and without it, and for the bundled model by `demo
--quantization`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from lopa_ascend.config import EngineConfig
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.config.int4_files import GROUP_SIZES
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.model.registry import find_model
from scripts.arguments import adapter_directory, model_directory, number_from

if TYPE_CHECKING:
    from torch import Tensor


def measured(model: Path, lora: Path | None, file: Path, limit: int, layers: Collection[str]) -> dict[str, Tensor]:
    """The largest inputs of the linear layers of a float model on the first texts of a file.

    Args:
        layers: the linear layers that are quantised, as --exclude calls them.

    Raises:
        ValueError: the model or the file cannot be used, or no layer that can be smoothed is quantised.
    """
    from lopa_ascend import LLM  # imports torch, which takes seconds
    from scripts.eval.calibration import largest_inputs, read_texts

    if not {*layers} - {"o_proj"}:
        raise ValueError("--smooth: has no effect without qkv_proj, gate_up_proj and down_proj, which are excluded")
    texts = read_texts(file, limit)
    return largest_inputs(LLM(model, lora=lora), texts)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval quantize", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("model", type=model_directory, metavar="MODEL", help="the float checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write, missing or empty")
    parser.add_argument("--bits", choices=("8", "4", "fp8"), default="8", help="of a weight (default: 8)")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        metavar="N",
        help=f"with --bits 4: inputs that share a scale, of {', '.join(map(str, GROUP_SIZES))} (default: 32)",
    )
    parser.add_argument(
        "--lora", type=adapter_directory, metavar="ADAPTER", help="a PEFT LoRA adapter, which is merged first"
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        choices=INT8_LAYERS,
        metavar="NAME",
        help=f"linear layers that keep their number format, of {', '.join(INT8_LAYERS)} (default: none)",
    )
    parser.add_argument("--smooth", type=Path, metavar="FILE", help="smooth with the activations of these texts")
    parser.add_argument(
        "--smooth-limit",
        type=number_from(1),
        default=64,
        metavar="N",
        help="with --smooth: how many texts of the file are used (default: 64)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    from lopa_ascend.checkpoint import config_json  # this and the next import torch, which takes seconds
    from lopa_ascend.checkpoint.write import open_to_quantize, write_quantized

    try:
        if args.group_size is not None and args.bits != "4":
            raise ValueError("--group-size: needs --bits 4")
        forms = {"8": ("int8", 0), "4": ("int4", args.group_size or GROUP_SIZES[0]), "fp8": ("fp8", 0)}
        layers = EngineConfig(quantization="w8a8", quantization_exclude=tuple(args.exclude)).quantized_layers()
        family = find_model(config_json(args.model))
        if family is None:
            raise ValueError(f"{args.model}: models in plain torch are not quantised")
        open_to_quantize(args.model, args.out, family)
        activations = None
        if args.smooth is not None:
            activations = measured(args.model, args.lora, args.smooth, args.smooth_limit, layers)
        options = {"lora": args.lora, "activations": activations, "form": forms[args.bits]}
        out = write_quantized(args.model, args.out, family, linears=layers, **options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {size / 2**20:,.1f} MiB of weights")
