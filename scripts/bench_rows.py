"""Prices linear layers whose rows are independent of one another, on this processor.

    python -m scripts.bench_rows                                      float32, 768 inputs, 4,096 outputs
    python -m scripts.bench_rows --dtype bfloat16 --threads 2

Prints what is found on this processor (see ``lopa_ascend.backend.cpu.products``), and a Markdown table: milliseconds of
CPU time of the layer by number of rows, with all rows in one call of the matrix library, and with a fixed number of
rows in each call. Every figure is the smallest of some calls.
"""

from __future__ import annotations

import argparse
from functools import partial

from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from
from scripts.timing import fastest_call

ROWS = (1, 16, 33, 64, 100, 128, 300, 512, 1024)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_rows", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--inputs", type=number_from(1), default=768, metavar="N", help="inputs of the layer (default: 768)"
    )
    parser.add_argument(
        "--outputs", type=number_from(1), default=4096, metavar="N", help="outputs of the layer (default: 4096)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="number format of the weight (default: float32)",
    )
    parser.add_argument("--threads", type=number_from(1), default=1, metavar="N", help="threads of torch (default: 1)")
    parser.add_argument(
        "--calls", type=number_from(1), default=7, metavar="N", help="calls for each figure (default: 7)"
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    import torch  # takes seconds
    import torch.nn.functional as F

    from lopa_ascend.backend.cpu.processor import emulated_dtypes
    from lopa_ascend.backend.cpu.products import PIECES, Products

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    weight = torch.randn(args.outputs, args.inputs).to(dtype)
    products, library = Products(emulated_dtypes(), F.linear), Products((), F.linear)
    print(f"{products.settle([weight])}\n")
    print("| rows | all in one call |" + "".join(f" {piece} a call |" for piece in PIECES))
    print("|" + "---|" * (2 + len(PIECES)))
    for rows in ROWS:
        x = torch.randn(rows, args.inputs).to(dtype)
        seconds = [fastest_call(partial(library, x, weight, None), args.calls)]
        for piece in PIECES:
            seconds.append(fastest_call(partial(library.in_pieces, x, weight, None, piece), args.calls))
        print(f"| {rows} |" + "".join(f" {1000 * taken:.2f} |" for taken in seconds))


if __name__ == "__main__":
    main()
