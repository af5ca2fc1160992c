"""Measures what W8A8 costs: the error of every linear layer, and answers of the bundled model.

    python -m scripts.quant_quality layers --plot layers.png             of the bundled model on its held-out problems
    python -m scripts.quant_quality layers --model DIR --prompts FILE    of a float checkpoint, on a file of prompts
    python -m scripts.quant_quality table                                exact answers and TPF, on 500 held-out problems
    python -m scripts.quant_quality planted                              a layer of 7B width with outliers in it

"layers" decodes the prompts (lopa, k = 3, in the blocks that the checkpoint recommends) with float32 weights, and
computes each linear layer in W8A8 as well, from the same inputs; so positions are masked as they are in use. For a
Dream without a D2F adapter give --base parallel, as for the server. Worst layers come first. Columns, as root mean
squares over all outputs, divided by that of the layer's product in float32:

  error          of the layer in W8A8
  weights        with int8 weights and float activations
  activations    with int8 activations and float weights
  outlier        the largest activation of a token, divided by the root mean square of the token; the largest of all

A prompt file has a prompt on each line, as text or as a JSON object with "prompt" or "question"; each becomes the first
message of a conversation.

"table" decodes in bfloat16, or the number format --dtype, and in W8A8, with and without down_proj.

"planted" computes one layer of Dream-7B's width with random weights and outlier channels, in bfloat16, in W8A8,
smoothed as by scripts.quantize --smooth, and with down_proj in bfloat16: the error of its output against float32.
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
from scripts.arguments import number_from, picture
from scripts.calibration import check_float_dream, read_texts
from scripts.demo_sets import asked, read
from scripts.eval_demo import decoding, evaluate

if TYPE_CHECKING:
    from torch import Tensor

    from lopa_ascend import LLM
    from lopa_ascend.backend import Ops
    from lopa_ascend.config import ModelConfig

INT8: dict[str, dict[str, Any]] = {
    "w8a8": {"quantization": "w8a8"},
    "w8a8, down_proj float": {"quantization": "w8a8", "quantization_exclude": ["down_proj"]},
}
"""Options of the engine by row of the table, beside the float one."""


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


def draw(errors: dict[str, LayerError], file: Path) -> None:
    """Draws the error of each kind of linear layer by the number of the layer."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for kind in ("qkv", "o", "gate_up", "down"):
        points = sorted(
            (int(name.split(".")[1]), e.relative()[0]) for name, e in errors.items() if name.endswith(f".{kind}")
        )
        axes.plot([number for number, _ in points], [100 * error for _, error in points], marker="o", label=kind)
    axes.set(xlabel="layer", ylabel="error of the output in W8A8, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def table(model: str | None, limit: int, dtype: str) -> None:
    """Prints exact answers and TPF with float weights and in W8A8."""
    from lopa_ascend import LLM

    problems = read(limit)
    print(f"| weights, {len(problems)} problems | d2f: exact | TPF | lopa, k = 3: exact | TPF |\n|---|---|---|---|---|")
    for name, options in {dtype: {}, **INT8}.items():
        llm = LLM(model, dtype=dtype, **options)
        row = []
        for num_branches in (0, 3):
            outcome = evaluate(llm, problems, decoding(num_branches, 0.9), quiet=False)
            row += [f"{outcome.accuracy:.1%}", f"{outcome.tpf:.2f}"]
        label = llm.engine.dtype if not options else name
        print(f"| {label} | {' | '.join(row)} |", flush=True)
        del llm  # its weights must not be in memory beside those of the next


def planted(config: ModelConfig, num_layers: int) -> None:
    """Prints the error of layers with planted outliers."""
    from scripts.planted_outliers import OUTLIER, PLACES, SMALLER, VARIANTS, output_errors

    print(f"| outliers of {OUTLIER:.0f}, weights 1/{SMALLER:.0f}, at | {' | '.join(PLACES)} |")
    print(f"|---|{'---|' * len(PLACES)}")
    errors = {place: [dict(output_errors(config, place, seed)) for seed in range(num_layers)] for place in PLACES}
    for name in VARIANTS:
        cells = [f"{sum(found[name] for found in errors[place]) / num_layers:.2%}" for place in PLACES]
        print(f"| {name} | {' | '.join(cells)} |")


def layers(args: argparse.Namespace) -> None:
    """Prints, and perhaps draws, the error of every linear layer of a checkpoint."""
    from lopa_ascend import LLM

    prompts = read_prompts(args.prompts, args.limit)
    llm = LLM(args.model, lora=args.lora, dtype="float32")
    base = {} if args.base is None else {"base": args.base}
    params = llm.params(num_branches=3, max_new_tokens=args.max_new_tokens, **base)
    errors = measure_layers(llm, prompts, params)
    print_layers(errors)
    if args.plot:
        draw(errors, args.plot)


def planted_layers(args: argparse.Namespace) -> None:
    """Prints the error of layers of Dream-7B's width."""
    from scripts.planted_outliers import one_layer

    planted(one_layer(), args.limit)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.quant_quality", description=__doc__, formatter_class=HelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="{layers,table,planted}")
    count = number_from(1)

    of_layers = what.add_parser("layers", help="the error of every linear layer", formatter_class=HelpFormatter)
    of_layers.add_argument("--model", metavar="DIR", help="a float checkpoint (default: the bundled model)")
    of_layers.add_argument("--lora", metavar="DIR", help="directory of a PEFT LoRA adapter, which is merged first")
    of_layers.add_argument("--base", choices=BASES, help="the decoding that lopa extends (default: the checkpoint's)")
    of_layers.add_argument(
        "--prompts", type=Path, default=HELD_OUT, metavar="FILE", help="a file of prompts (default: held-out problems)"
    )
    of_layers.add_argument("--limit", type=count, default=8, metavar="N", help="number of prompts (default: 8)")
    of_layers.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N", help="most tokens of an answer (default: 128)"
    )
    of_layers.add_argument("--plot", type=picture, metavar="FILE", help="also draw the errors by layer")
    of_layers.set_defaults(measure=layers)

    of_answers = what.add_parser("table", help="exact answers and TPF", formatter_class=HelpFormatter)
    of_answers.add_argument("--model", metavar="DIR", help="a float checkpoint (default: the bundled model)")
    of_answers.add_argument("--limit", type=count, default=500, metavar="N", help="number of problems (default: 500)")
    of_answers.add_argument(
        "--dtype", default="bfloat16", help="number format of the float weights (default: bfloat16)"
    )
    of_answers.set_defaults(measure=lambda args: table(args.model, args.limit, args.dtype))

    of_outliers = what.add_parser("planted", help="the error of layers with outliers", formatter_class=HelpFormatter)
    of_outliers.add_argument(
        "--limit", type=count, default=1, metavar="N", help="number of layers, each with other weights (default: 1)"
    )
    of_outliers.set_defaults(measure=planted_layers)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    try:
        args.measure(args)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
