"""Compares branch scores: tokens per forward pass (TPF) against accuracy of the bundled model, with error bars.

    python -m scripts.branch_scores --plot branch_scores.png    all scores at tau_conf 0.7 and 0.9, on 500 problems
    python -m scripts.branch_scores --block-size 32             in longer blocks, where branches differ more
    python -m scripts.branch_scores --limit 10                  a first look
    python -m scripts.branch_scores --scores tail               one score beside "mean"

Prints one row for each score and tau_conf; "tokens, ..." are scores of branches over the tokens of one position. In
brackets are 95 % intervals: the problems are drawn again 10,000 times, with replacement, the same draws for every row.
The last two columns compare a row with "mean" at the same tau_conf, by differences within each draw. Takes some minutes
for each row on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lopa_ascend.config import BRANCH_SCORES, DecodingParams
from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from, picture
from scripts.demo_sets import asked, read
from scripts.eval_demo import decoding, solved

if TYPE_CHECKING:
    from lopa_ascend import LLM

TAUS = (0.7, 0.9)
"""Values of tau_conf."""
DRAWS = 10_000
BASELINE = "mean"
SCORES = {score: {"branch_score": score} for score in BRANCH_SCORES}
"""Decoding parameters by the name of a row; the baseline is the first."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure of all problems, and what it is in each draw."""

    value: float
    drawn: Numbers
    """[draws]."""

    def interval(self) -> tuple[float, float]:
        """Between these lie 95 % of the draws."""
        low, high = np.quantile(self.drawn, (0.025, 0.975))
        return float(low), float(high)

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, self.drawn - other.drawn)


@dataclass(frozen=True)
class Measured:
    """What came of decoding the problems in one way, problem by problem."""

    exact: Numbers
    """1 for an exact answer, otherwise 0 [problems]."""
    tokens: Numbers
    """Visible tokens [problems]."""
    forwards: Numbers
    """Forward passes [problems]."""

    def accuracy(self, draws: NDArray[np.int64]) -> Estimate:
        """Percent of exact answers."""
        return Estimate(100 * float(self.exact.mean()), 100 * self.exact[draws].mean(1))

    def tpf(self, draws: NDArray[np.int64]) -> Estimate:
        """Visible tokens divided by forward passes, of all problems together."""
        drawn = self.tokens[draws].sum(1) / self.forwards[draws].sum(1)
        return Estimate(float(self.tokens.sum() / self.forwards.sum()), drawn)


def measure(llm: LLM, problems: Sequence[tuple[str, int]], params: DecodingParams) -> Measured:
    """Decodes problems (questions and results) together."""
    outputs = llm.chat([asked(question) for question, _ in problems], params, quiet=True)
    exact = solved(outputs, [result for _, result in problems])
    return Measured(
        np.array(exact, float),
        np.array([len(output.token_ids) for output in outputs], float),
        np.array([output.num_forwards for output in outputs], float),
    )


def make_draws(num_problems: int) -> NDArray[np.int64]:
    """Indices of problems [draws, problems], the same in every run."""
    return np.random.default_rng(0).integers(0, num_problems, (DRAWS, num_problems))


def row(score: str, tau: float, measured: Measured, baseline: Measured, draws: NDArray[np.int64]) -> str:
    """The row of the table for one score."""
    estimates = (measured.accuracy(draws), measured.tpf(draws))
    against = (baseline.accuracy(draws), baseline.tpf(draws))
    cells = [f"{tau}", score]
    for estimate, digits in zip(estimates, (1, 2), strict=True):
        low, high = estimate.interval()
        cells.append(f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
    for estimate, other, digits in zip(estimates, against, (1, 2), strict=True):
        difference = estimate - other
        low, high = difference.interval()
        shown = f"{difference.value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
        cells.append("" if score == BASELINE else shown)
    return f"| {' | '.join(cells)} |"


def draw(found: dict[tuple[float, str], Measured], draws: NDArray[np.int64], num_branches: int, path: Path) -> None:
    """Writes the table as a picture: a point with error bars for each row."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 5))
    for (tau, score), measured in found.items():
        x, y = measured.tpf(draws), measured.accuracy(draws)
        bars: list[Any] = [np.abs(np.subtract(e.interval(), e.value))[:, None] for e in (x, y)]
        marker = "o" if tau == max(TAUS) else "s"
        color = f"C{list(SCORES).index(score)}"
        axis.errorbar(
            x.value, y.value, xerr=bars[0], yerr=bars[1], fmt=marker, color=color, capsize=2, label=f"{score}, {tau}"
        )
    axis.set(xlabel="tokens per forward", ylabel="exact answers, %", title=f"branch scores, k = {num_branches}")
    axis.grid(alpha=0.3)
    axis.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.branch_scores", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="another model directory (default: the bundled model)")
    parser.add_argument(
        "--limit", type=number_from(1), default=500, metavar="N", help="number of problems (default: 500)"
    )
    parser.add_argument(
        "--branches", type=number_from(0), default=7, metavar="K", help="lookahead branches (default: 7)"
    )
    parser.add_argument(
        "--block-size", type=number_from(1), metavar="N", help="positions in a block (default: bundled model's)"
    )
    parser.add_argument(
        "--scores",
        nargs="+",
        choices=list(SCORES),
        default=list(SCORES),
        metavar="NAME",
        help=f'scores that are compared with "{BASELINE}": {", ".join(map(repr, SCORES))} (default: all)',
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="also write the table as a picture")
    args = parser.parse_args()
    from lopa_ascend import LLM  # imports torch, which takes seconds

    llm, problems = LLM(args.model), read(args.limit)
    draws = make_draws(len(problems))
    found: dict[tuple[float, str], Measured] = {}
    print("| tau_conf | score | exact, % | TPF | exact, against mean | TPF, against mean |\n|---|---|---|---|---|---|")
    names = [name for name in SCORES if name == BASELINE or name in args.scores]
    with tqdm(total=len(TAUS) * len(names), disable=None) as bar:
        for tau in TAUS:
            for score in names:
                fields: dict[str, Any] = {**SCORES[score]}
                if args.block_size is not None:
                    fields["block_size"] = args.block_size
                params = replace(decoding(args.branches, tau), **fields)
                found[tau, score] = measure(llm, problems, params)
                print(row(score, tau, found[tau, score], found[tau, BASELINE], draws), flush=True)
                bar.update()
    if args.plot:
        draw(found, draws, args.branches, args.plot)


if __name__ == "__main__":
    main()
