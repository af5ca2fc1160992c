"""Quantises the checkpoint of a Dream to W8A8 and writes it to another directory, in the format compressed-tensors.

    python -m scripts.quantize Dream-v0-Instruct-7B Dream-7B-W8A8
    python -m scripts.quantize Dream-v0-Instruct-7B D2F-W8A8 --lora D2F_Dream_Instruct_7B_Lora --exclude down_proj

Weights of linear layers become int8, with a float32 scale for each output; embedding, norms and head stay as they are.
An adapter is merged before. A server of the directory gives the answers of one that quantises at start
(--quantization w8a8), and reads half the bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lopa_ascend.checkpoint.write import write_int8
from lopa_ascend.config import EngineConfig
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.config.help import HelpFormatter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the float checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write, missing or empty")
    parser.add_argument("--lora", type=Path, metavar="DIR", help="directory of a PEFT LoRA adapter to merge before")
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        choices=tuple(INT8_LAYERS),
        metavar="NAME",
        help=f"linear layers that keep their number format: {', '.join(INT8_LAYERS)}",
    )
    args = parser.parse_args()
    int8 = EngineConfig(quantization="w8a8", quantization_exclude=tuple(args.exclude)).int8_projections()
    try:
        out = write_int8(args.model, args.out, int8=int8, lora=args.lora)
    except ValueError as error:
        sys.exit(str(error))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {size / 2**20:,.1f} MiB of weights")


if __name__ == "__main__":
    main()
