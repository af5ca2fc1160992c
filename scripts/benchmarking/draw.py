"""Draws the figures of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scripts.benchmarking.report import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CURVES = 5
"""Settings whose steps one picture shows."""


def draw_all(found: Sequence[Result], folder: Path) -> list[Path]:
    """Writes every figure for which the sweep has the settings; returns the files."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (
        ("benchmark-branches", draw_branches),
        ("benchmark-steps", draw_steps),
        ("benchmark-pareto", draw_pareto),
        ("benchmark-strategies", draw_strategies),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4.2))
        if draw(found, axes):
            axes.grid(alpha=0.3)
            figure.tight_layout()
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def by_branches(found: Sequence[Result]) -> list[Result]:
    """The results that differ in the number of lookahead branches alone: of all such groups the largest, with the
    result without branches that has the same other parameters, if there is one. Fewest branches first."""
    groups: dict[str, list[Result]] = {}
    for result in found:
        params = result.setting.params
        if params.decoding in ("lopa", "d2f") and not params.is_auto:
            others = {name: value for name, value in asdict(params).items() if name not in ("decoding", "num_branches")}
            groups.setdefault(repr(others), []).append(result)
    largest = max(groups.values(), key=len, default=[])
    distinct = {result.setting.params.lookaheads: result for result in largest}
    return [distinct[k] for k in sorted(distinct)]


def draw_branches(found: Sequence[Result], axes: Axes) -> bool:
    """TPF and score against branches, with the baseline without branches (the paper's Figure 4)."""
    group = by_branches(found)
    if len(group) < 2:
        return False
    ks = [result.setting.params.lookaheads for result in group]
    scores = axes.twinx()
    for metric, axis, color, label in (
        ("user_tpf", axes, "tab:blue", "tokens per forward pass"),
        ("score", scores, "tab:orange", "score, %"),
    ):
        values = [result.value(metric) for result in group]
        axis.plot(ks, values, color=color, marker="o")
        spreads = [result.metrics[metric] for result in group]
        axis.fill_between(ks, [s.low for s in spreads if s], [s.high for s in spreads if s], color=color, alpha=0.2)
        if ks[0] == 0:
            axis.axhline(values[0], color=color, linestyle="--", alpha=0.6)
        axis.set_ylabel(label, color=color)
    axes.set_ylim(bottom=0)
    scores.set_ylim(0, 104)  # whole markers at 100 %
    axes.set_xlabel("lookahead branches k (dashed: none)")
    return True


def draw_steps(found: Sequence[Result], axes: Axes) -> bool:
    """Tokens filled in each forward pass: mean, and the band between the quartiles (the paper's Figure 5)."""
    group = by_branches(found) or list(found)
    chosen = group
    if len(group) > MAX_CURVES:
        evenly_spaced = np.linspace(0, len(group) - 1, MAX_CURVES)
        chosen = [group[round(index)] for index in evenly_spaced]
    for result in chosen:
        answers = [sample.filled for sample in result.samples]
        # As far as half of the answers go: the mean of the last few would say little.
        length = max(1, int(np.median([len(answer) for answer in answers])))
        table = np.full((len(answers), length), np.nan)
        for row, answer in zip(table, answers, strict=True):
            row[: min(length, len(answer))] = answer[:length]
        low, high = np.nanquantile(table, (0.25, 0.75), axis=0)
        steps = np.arange(1, length + 1)
        k = result.setting.params.lookaheads
        (line,) = axes.plot(
            steps, np.nanmean(table, axis=0), label=f"k = {k}" if len(group) > 1 else result.setting.label
        )
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="forward pass", ylabel="tokens filled")
    axes.legend()
    return bool(chosen)


def pareto_front(found: Sequence[Result]) -> list[Result]:
    """The Pareto front of tokens/s and score, fastest first: the results that no other result dominates.

    One result dominates another if it is at least as good in both, and better in one. Of equal results one is kept.
    """
    front: list[Result] = []
    for result in sorted(found, key=lambda r: (r.value("user_avg_tps"), r.value("score")), reverse=True):
        if not front or result.value("score") > front[-1].value("score"):
            front.append(result)
    return front


def draw_pareto(found: Sequence[Result], axes: Axes) -> bool:
    """Score against tokens/s as a user sees them: a point for each setting, and the Pareto front as a line."""
    if len(found) < 2:
        return False
    for decoding in dict.fromkeys(_strategy(result) for result in found):
        group = [result for result in found if _strategy(result) == decoding]
        axes.scatter([r.value("user_avg_tps") for r in group], [r.value("score") for r in group], s=20, label=decoding)
    front = pareto_front(found)
    axes.plot([r.value("user_avg_tps") for r in front], [r.value("score") for r in front], color="gray", linewidth=1)
    axes.set(xlabel="tokens/s as a user sees them", ylabel="score, %")
    axes.legend(fontsize="small")
    return True


def _strategy(result: Result) -> str:
    params = result.setting.params
    name = params.decoding
    if params.base != "d2f":
        name += f" over {params.base}"
    if params.branch_acceptance != "published":
        name += f", {params.branch_acceptance}"
    return name if params.lookahead_depth == 1 else f"{name}, depth {params.lookahead_depth}, k = {params.num_branches}"


def draw_strategies(found: Sequence[Result], axes: Axes) -> bool:
    """TPF of each strategy as a bar, with its score. Of several settings of a strategy the first one counts."""
    first: dict[str, Result] = {}
    for result in found:
        first.setdefault(_strategy(result), result)
    if len(first) < 2:
        return False
    names = list(first)
    tpf = [first[name].value("user_tpf") for name in names]
    bars = axes.barh(names, tpf, color="tab:blue", alpha=0.7)
    axes.bar_label(bars, [f"{first[name].value('score'):.0f} % right" for name in names], padding=3, fontsize="small")
    axes.set_xlim(right=1.25 * max(tpf))
    axes.invert_yaxis()
    axes.set_xlabel("tokens per forward pass")
    return True
