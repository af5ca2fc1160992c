"""Measures what W8A8 costs each linear layer of a float checkpoint, to choose layers for --exclude of `quantize`.

    python -m scripts.eval quant-quality                                of the bundled model on its held-out problems
    python -m scripts.eval quant-quality --model DIR --prompts FILE     of a float checkpoint, on a file of prompts

Decodes the prompts (lopa, k = 3, in the blocks that the checkpoint recommends) with float32 weights, and computes each
linear layer in W8A8 as well, from the same inputs; so positions are masked as they are in use. For a Dream without a
D2F adapter give --base parallel, as for the server. Worst layers come first. Columns, as root mean squares over all
outputs, divided by that of the layer's product in float32:

  error          of the layer in W8A8
  weights        with int8 weights and float activations
  activations    with int8 activations and float weights
  outlier        the largest activation of a token, divided by the root mean square of the token; the largest of all

A prompt file has a prompt on each line, as text or as a JSON object with "prompt" or "question"; each becomes the first
message of a conversation. What W8A8 costs in answers shows `demo --quantization w8a8`, or `tasks`.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.config.research_params import BASES
from lopa_ascend.demo import HELD_OUT
from scripts.arguments import number_from
from scripts.eval.calibration import check_float_dream, read_texts
from scripts.eval.problems import asked

if TYPE_CHECKING:
    from torch import Tensor

    from lopa_ascend import LLM
    from lopa_ascend.backend import Ops


@dataclass
class LayerError:
    """Sums over all outputs of one linear layer: squares of the float32 product, and of the errors of int8 ones."""

    product: float = 0.0
    """Squares of the float32 product."""
    both: float = 0.0
    """Squares of the errors with int8 weights and int8 activations."""
    weights: float = 0.0
    """Squares of the errors with int8 weights and float activations."""
    activations: float = 0.0
    """Squares of the errors with int8 activations and float weights."""
    outlier: float = 0.0
    """No sum: a token's largest activation divided by the token's root mean square; the largest of all tokens."""

    def relative(self) -> tuple[float, float, float]:
        """The three errors, divided by the product, as root mean squares."""
        parts = self.both, self.weights, self.activations
        return cast(tuple[float, float, float], tuple(math.sqrt(part / self.product) for part in parts))


class MeasuringOps:
    """The ops of a model, whose linear layers are also computed in W8A8 and compared.

    Args:
        ops: the model's.
        weights: its weights by name.
    """

    def __init__(self, ops: Ops, weights: dict[str, Tensor]):
        from lopa_ascend.backend.cpu.products import unpacked
        from lopa_ascend.checkpoint import quantize_weight

        self._ops = ops
        names = [name for name in weights if name.startswith("layers.") and weights[name].dim() == 2]
        self._names = {id(weights[name]): name.removesuffix(".weight") for name in names}
        self._int8 = {name.removesuffix(".weight"): quantize_weight(unpacked(weights[name])) for name in names}
        self.errors = {name.removesuffix(".weight"): LayerError() for name in names}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self._names.get(id(weight))
        if name is not None and len(x):
            self._compare(name, x, weight)
        return self._ops.linear(x, weight, bias)

    def _compare(self, name: str, x: Tensor, weight: Tensor) -> None:
        import torch

        error, (codes, scale) = self.errors[name], self._int8[name]
        product = self._ops.linear(x, weight)
        x_codes, x_scale = self._ops.quantize(x)
        both = self._ops.quant_linear(x_codes, x_scale, codes, scale, None, torch.float32)
        error.product += squares(product)
        error.both += squares(both - product)
        error.weights += squares(self._ops.linear(x, codes * scale[:, None]) - product)
        error.activations += squares(self._ops.linear(x_codes * x_scale[:, None], weight) - product)
        outliers = x.abs().amax(1) / x.square().mean(1).sqrt().clamp_min(1e-30)
        error.outlier = max(error.outlier, float(outliers.max()))


def squares(x: Tensor) -> float:
    """The sum of squares of all elements."""
    return float(x.double().square().sum())


def read_prompts(file: Path, limit: int) -> list[str]:
    """The first prompts of a file.

    Raises:
        ValueError: as of ``read_texts``.
    """
    return [prompt for prompt, _ in read_texts(file, limit)]


def measure_layers(llm: LLM, prompts: list[str], params: DecodingParams) -> dict[str, LayerError]:
    """The error of every linear layer while a model answers prompts; by name, worst first.

    Raises:
        ValueError: the model is not a Dream with float weights.
    """
    model: Any = llm.engine.runner.model
    check_float_dream(model.weights)
    ops = model.ops
    model.ops = measuring = MeasuringOps(ops, dict(model.weights))
    try:
        llm.chat([asked(prompt) for prompt in prompts], params)
    finally:
        model.ops = ops
    return dict(sorted(measuring.errors.items(), key=lambda item: -item[1].relative()[0]))


def print_layers(errors: dict[str, LayerError]) -> None:
    """Prints the errors as a table."""
    print(f"{'layer':24s} {'error':>8s} {'weights':>8s} {'activations':>12s} {'outlier':>8s}")
    for name, error in errors.items():
        both, weights, activations = error.relative()
        print(f"{name:24s} {both:8.3%} {weights:8.3%} {activations:12.3%} {error.outlier:8.1f}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval quant-quality", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="a float checkpoint (default: the bundled model)")
    parser.add_argument("--lora", metavar="DIR", help="directory of a PEFT LoRA adapter, which is merged first")
    parser.add_argument("--base", choices=BASES, help="the decoding that lopa extends (default: the checkpoint's)")
    parser.add_argument(
        "--prompts", type=Path, default=HELD_OUT, metavar="FILE", help="a file of prompts (default: held-out problems)"
    )
    parser.add_argument("--limit", type=number_from(1), default=8, metavar="N", help="number of prompts (default: 8)")
    parser.add_argument(
        "--max-new-tokens",
        type=number_from(1),
        default=128,
        metavar="N",
        help="most tokens of an answer (default: 128)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    from lopa_ascend import LLM  # imports torch, which takes seconds

    try:
        prompts = read_prompts(args.prompts, args.limit)
        llm = LLM(args.model, lora=args.lora, dtype="float32")
        base = {} if args.base is None else {"base": args.base}
        params = llm.params(num_branches=3, max_new_tokens=args.max_new_tokens, **base)
        print_layers(measure_layers(llm, prompts, params))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
