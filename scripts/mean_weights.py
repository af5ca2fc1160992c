"""Writes the mean of the weights of two checkpoints, such as a model and the same model trained further.

    python -m scripts.mean_weights build/demo/before build/demo/after --out build/demo/model
    python -m scripts.mean_weights build/demo/before build/demo/after --share 0.25 --out build/demo/model

Weights at the end of a training are noisy, and the mean of two ends can solve more problems than either of them
(docs/bundled-model.md). With --share 0.25 a quarter comes from the second one. The mean of two models that began with
different random weights is useless.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from lopa_ascend.config.help import HelpFormatter
from scripts import arguments


def write_mean(first: Path, second: Path, share: float, out: Path) -> None:
    """Writes a checkpoint with the mean of two checkpoints' weights, each in the number format of the first one.

    Args:
        first: directory of a checkpoint in one file; its configuration and tokenizer are copied.
        second: directory of a checkpoint with tensors of the same names and shapes.
        share: of the second checkpoint in the mean, from 0 to 1.
        out: directory that is written; it may be one of the two.

    Raises:
        ValueError: the tensors differ in names or shapes, or are int8 codes, which have no mean.
    """
    from safetensors.torch import load_file

    from scripts.training.checkpoint import WEIGHTS, replace_weights  # imports torch, which takes seconds

    ours, theirs = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    different = sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape
    )
    if different:
        raise ValueError(f"{first} and {second} are no checkpoints of one model: {different[0]} differs or is missing")
    integers = [name for name in ours if not (ours[name].is_floating_point() and theirs[name].is_floating_point())]
    if integers:
        raise ValueError(
            f"{integers[0]} is not in floating point; take the checkpoints from before they were quantised"
        )
    mean = {name: ours[name].float().lerp(theirs[name].float(), share).to(ours[name].dtype) for name in ours}
    if out.resolve() != first.resolve():
        shutil.copytree(first, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS))
    replace_weights(out, mean)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mean_weights", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("first", type=Path, help="directory of a checkpoint; configuration and tokenizer come from it")
    parser.add_argument("second", type=Path, help="directory of another checkpoint of the same model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the mean goes")
    parser.add_argument(
        "--share", type=arguments.share, default=0.5, metavar="X", help="share of the second checkpoint (default: 0.5)"
    )
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        write_mean(args.first, args.second, args.share, args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
