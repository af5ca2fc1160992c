"""AUP, accuracy under parallelism (d3LLM, arXiv 2601.07568): one number for how accuracy falls as TPF rises.

Points are sorted by TPF, and those more than 5 points of accuracy below the first one are dropped. With TPF rho_i and
accuracy y_i in per cent, AUP = rho_1 y_1 + sum over i > 1 of (rho_i - rho_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2,
where W(y) = min(exp(-3 (1 - y / y_max)), 1) and y_max is the best accuracy of any method of the table. The published
script refuses a method whose fastest point is more than 5 below the first; here the point is dropped, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import read_json_object
from scripts.eval.paper_rows import rows_of

MOST_LOST = 5.0
"""Points of accuracy below the first point at which a point still counts."""
ALPHA = 3.0
FILE = Path(__file__).with_name("published.json")
"""The points of d3LLM's leaderboard by table, its task and method; ``tasks`` has our names of its tasks."""
LEAST_SPAN = 10.0
"""Points of accuracy that a picture shows at least, so that chance does not look like a gain."""
TABLES = ("dream", "llada", "dream-coder")
LOPA = "D2F-Dream, then LoPA (its paper's prompts and TPF)"


class Point(NamedTuple):
    """What a method reaches in one setting."""

    tpf: float
    """The summed one."""
    accuracy: float
    """In per cent."""


@dataclass(frozen=True)
class Method:
    """A curve: a way to decode a model, in several settings."""

    name: str
    points: tuple[Point, ...]
    """By TPF."""

    @classmethod
    def of(cls, name: str, points: Iterable[Sequence[float]]) -> Method:
        """A method with points in any order."""
        return cls(name, tuple(sorted((Point(*point) for point in points), key=lambda point: point.tpf)))

    @cached_property
    def kept(self) -> tuple[Point, ...]:
        """The points that count."""
        return tuple(point for point in self.points if point.accuracy >= self.points[0].accuracy - MOST_LOST)

    @property
    def dropped(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point not in self.kept)

    def aup(self, y_max: float) -> float:
        """Its AUP in a table whose best accuracy is ``y_max``."""
        first = self.kept[0]
        weighted = [point.accuracy * weight(point.accuracy, y_max) for point in self.kept]
        widths = [after.tpf - before.tpf for before, after in zip(self.kept, self.kept[1:], strict=False)]
        heights = [(before + after) / 2 for before, after in zip(weighted, weighted[1:], strict=False)]
        return first.tpf * first.accuracy + sum(map(math.prod, zip(widths, heights, strict=True)))


def weight(accuracy: float, y_max: float) -> float:
    """W: what an accuracy counts for beside the best one."""
    return min(math.exp(-ALPHA * (1 - accuracy / y_max)), 1.0) if y_max else 1.0


def best_accuracy(methods: Iterable[Method]) -> float:
    """y_max of a table of these methods."""
    return max(point.accuracy for method in methods for point in method.points)


def published_methods(table: str, task: str) -> list[Method]:
    """The rows of d3LLM's leaderboard for a task of ours; with Dream's also LoPA's of its paper, whose points have no
    common prompt with the others, count positions after EOS, and begin above one token a pass.

    Raises:
        ParameterError: the table has no such task.
    """
    content = read_json_object(FILE, ValueError)
    names = content["tasks"]
    rows = {names[name]: methods for name, methods in content["tables"][table].items() if name in names}
    if task not in rows:
        raise ParameterError("published", f"{table!r} has no rows for task {task!r}; it has {', '.join(rows)}")
    found = [Method.of(name, points) for name, points in rows[task].items()]
    lopa = [row.published for row in rows_of("table1") if row.model == "D2F-Dream" and row.task == task]
    if table == "dream" and lopa:
        found.append(Method.of(LOPA, [(row["TPF"], row["score"]) for row in lopa]))
    return found


def source() -> str:
    """Where the published points are from."""
    content = read_json_object(FILE, ValueError)
    return f"{content['source']} ({content['date']})"


def markdown(methods: Sequence[Method]) -> str:
    """The table, best method first."""
    y_max = best_accuracy(methods)
    lines = ["| method | TPF, accuracy | dropped | AUP |", "|---|---|---|---|"]
    for method in sorted(methods, key=lambda method: -method.aup(y_max)):
        kept, dropped = (
            "; ".join(f"{tpf:.2f}, {accuracy:.1f}" for tpf, accuracy in points)
            for points in (method.kept, method.dropped)
        )
        lines.append(f"| {method.name} | {kept} | {dropped} | {method.aup(y_max):.1f} |")
    return "\n".join(lines)


def as_json(methods: Sequence[Method]) -> dict[str, Any]:
    """The table for files."""
    y_max = best_accuracy(methods)
    rows = {
        method.name: {"aup": method.aup(y_max), "points": method.kept, "dropped": method.dropped} for method in methods
    }
    return {"y_max": y_max, "methods": rows}


def draw(file: Path, title: str, methods: Sequence[Method]) -> None:
    """Draws accuracy over TPF, a line for each method. Points that AUP drops are hollow, and no line leads to them.

    Args:
        file: its ending is the format: .svg, .png, .pdf.
        title: above the legend.
        methods: the lines, with their AUP in the legend.
    """
    import matplotlib as mpl  # this and the next take a second
    from matplotlib.figure import Figure

    y_max = best_accuracy(methods)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    for method in methods:
        (line,) = axes.plot(*zip(*method.kept, strict=True), "o-", label=f"{method.name}: AUP {method.aup(y_max):.1f}")
        for point in method.dropped:
            axes.plot(*point, "o", color=line.get_color(), markerfacecolor="none")
    axes.set(xlabel="TPF: tokens / forward passes", ylabel="accuracy, %", xlim=(0, None))
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, top - LEAST_SPAN), top)
    axes.grid(alpha=0.3)
    axes.legend(title=title, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
