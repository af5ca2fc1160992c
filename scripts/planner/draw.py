"""Predicted tokens/s against (tp, bp), as a picture."""

from __future__ import annotations

from pathlib import Path

from scripts.planner.search import Plan
from scripts.planner.step import COLLECTIVES


def draw(plans: list[Plan], title: str, path: Path) -> None:
    """Writes the best plan of each (tp, bp) as a pair of bars: optimistic and pessimistic collectives.

    Args:
        plans: all that fit.
        title: of the picture.
        path: of the picture.
    """
    from matplotlib import pyplot

    pairs = sorted({(plan.work.tp, plan.work.bp) for plan in plans})
    figure, axis = pyplot.subplots(figsize=(max(6.0, 0.42 * len(pairs) + 2), 4.2))
    for side, case in enumerate(COLLECTIVES):
        best = [best_of(plans, tp, bp, case) for tp, bp in pairs]
        heights = [plan.tokens_per_second(case) for plan in best]
        places = [place + 0.4 * side for place in range(len(pairs))]
        bars = axis.bar(places, heights, width=0.38, label=f"{case} collectives")
        axis.bar_label(bars, [f"k = {plan.work.k}" for plan in best], fontsize=6, rotation=90, padding=2)
    axis.set_xticks([place + 0.2 for place in range(len(pairs))], [f"{tp} x {bp}" for tp, bp in pairs], rotation=90)
    axis.set(xlabel="tp x bp", ylabel="predicted tokens/s, upper bound", title=title)
    axis.margins(x=0.01, y=0.2)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def best_of(plans: list[Plan], tp: int, bp: int, collectives: str) -> Plan:
    """The plan of one (tp, bp) with most tokens/s."""
    same = [plan for plan in plans if (plan.work.tp, plan.work.bp) == (tp, bp)]
    return max(same, key=lambda plan: plan.tokens_per_second(collectives))
