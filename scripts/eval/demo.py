"""Measures exact answers and tokens per forward pass (TPF) of the bundled model on problems that it was not trained on.

    python -m scripts.eval demo                                              as the model recommends, on all problems
    python -m scripts.eval demo --block-size 8 16 --num-branches 0 3 7       a row for each combination
    python -m scripts.eval demo --sets handwritten --decoding d2f --limit 50
    python -m scripts.eval demo --quantization w8a8 --dtype bfloat16         what W8A8 costs in answers

An answer is exact if it ends in the right number. The summed TPF is visible tokens divided by forward passes, of all
problems together. Tokens computed a pass include those of prompts. Parameters that are not given are those that the
model's directory recommends. All problems take minutes on two cores.

Problems: 500 from the generator of the training problems ("held-out"), 200 that were worded by hand ("handwritten"),
and 150 by an author who knew nothing of this project ("independent").
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from lopa_ascend.hub import on_this_machine
from lopa_ascend.serve.flags import DECODING_FLAGS, ENGINE_FLAGS, add_flags, field_values
from lopa_ascend.types import GenerationOutput
from scripts.arguments import number_from
from scripts.eval.command import run_command, with_defaults
from scripts.eval.problems import SETS, asked, parse_result, read
from scripts.eval.sweep import SWEPT, add_swept_flags, sweep

if TYPE_CHECKING:
    from lopa_ascend import LLM

ANSWER = 192
"""``max_new_tokens`` where nothing is said of it: what the bundled model's answers need."""
FIXED = {"enable_prefix_caching": False}
"""Options of the engine: with cached prompts a row would compute fewer tokens than the one before it."""


@dataclass(frozen=True)
class Outcome:
    """What came of decoding some problems."""

    accuracy: float
    """Share of exact answers."""
    tpf: float
    """Visible tokens divided by forward passes."""
    model_tokens: float
    """Tokens computed in a forward pass."""


def decoding(model: str | Path = DEMO_MODEL, **fields: Any) -> DecodingParams:
    """What a model's directory recommends, with answers of at most 192 tokens, and these fields in place of others."""
    fields = {"max_new_tokens": ANSWER, **fields}
    return DecodingParams(**{**fitting_defaults(recommended_decoding(model), fields), **fields})


def share_of_exact(outputs: Sequence[GenerationOutput], problems: Sequence[tuple[str, int]]) -> float:
    """Share of the answers that end in the right number."""
    exact = [parse_result(output.text or "") == result for output, (_, result) in zip(outputs, problems, strict=True)]
    return sum(exact) / len(exact)


def evaluate(llm: LLM, problems: list[tuple[str, int]], params: DecodingParams, *, quiet: bool = True) -> Outcome:
    """Decodes problems together.

    Args:
        llm: the model.
        problems: questions and results.
        params: of every request.
        quiet: no progress bar.
    """
    outputs = llm.chat([asked(question) for question, _ in problems], params, quiet=quiet)
    num_forwards = sum(output.num_forwards for output in outputs)
    num_generated = sum(len(output.token_ids) for output in outputs)
    model_tokens = sum(output.model_tokens for output in outputs)
    return Outcome(share_of_exact(outputs, problems), num_generated / num_forwards, model_tokens / num_forwards)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval demo",
        usage="%(prog)s [--sets NAME ...] [--limit N] [--block-size N ...] [--num-branches N ...] [--tau-conf N ...] "
        "[FLAGS]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sets", nargs="+", choices=tuple(SETS), default=list(SETS), metavar="NAME",
        help=f"sets of problems: {', '.join(SETS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=number_from(1), metavar="N", help="the first N problems of a set (default: all)"
    )
    add_swept_flags(parser)
    flags = {name: flag for name, flag in {**ENGINE_FLAGS, **DECODING_FLAGS}.items() if name not in SWEPT}
    add_flags(parser, with_defaults(flags, {"enable_prefix_caching": "off", "max_new_tokens": str(ANSWER)}))
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), argv, run)


def run(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Prints a row for each set of problems and each combination of block sizes and branches.

    Args:
        args: all arguments.
        given: by name, the arguments that were given or have a default.
    """
    engine = {**FIXED, **field_values(given, ENGINE_FLAGS)}
    here = on_this_machine(EngineConfig(**engine))
    engine |= {"model": here.model, "lora": here.lora}
    fields = field_values({name: value for name, value in given.items() if name not in SWEPT}, DECODING_FLAGS)
    # All are checked before the model is loaded.
    ways = [decoding(here.model or DEMO_MODEL, **fields, **values) for values in sweep(given)]
    from lopa_ascend import LLM  # imports torch, which takes seconds

    print("| problems | block size | k | tau_conf | exact | summed TPF | tokens computed a pass |\n" + "|---" * 7 + "|")
    with LLM(**engine) as llm:
        for name in args.sets:
            problems = read(args.limit, SETS[name])
            for params in ways:
                found = evaluate(llm, problems, params, quiet=False)
                print(
                    f"| {len(problems)} {name} | {params.block_size} | {params.num_branches} "
                    f"| {params.tau_conf:g} | {found.accuracy:.1%} | {found.tpf:.2f} | {found.model_tokens:.0f} |",
                    flush=True,
                )
