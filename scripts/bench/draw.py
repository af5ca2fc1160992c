"""Pictures of measurements and predictions: panels of lines or bars side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Some series of values over the same places."""

    x: Sequence[str]
    """Labels of the places, which have equal distances."""
    values: Mapping[str, Sequence[float]]
    """By name of the series."""
    labels: tuple[str, str]
    """Of the two axes."""
    bars: bool = False
    """Bars instead of lines."""
    log: bool = False
    """Whether the values have a logarithmic axis; otherwise it begins at 0."""
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By name of a series of bars: a note above each bar."""


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Writes a picture; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = [max(5.0, 0.42 * len(panel.x) + 2) for panel in panels]
    figure, rows = pyplot.subplots(
        1, len(panels), figsize=(sum(widths), 4.2), squeeze=False, layout="constrained", width_ratios=widths
    )
    for axis, panel in zip(rows[0], panels, strict=True):
        places = range(len(panel.x))
        width = 0.8 / len(panel.values)
        for side, (name, values) in enumerate(panel.values.items()):
            if panel.bars:
                lefts = [place + (side - (len(panel.values) - 1) / 2) * width for place in places]
                bars = axis.bar(lefts, values, width=0.95 * width, label=name)
                axis.bar_label(bars, panel.notes.get(name), fontsize=6, rotation=90, padding=2)
            else:
                axis.plot(places, values, marker="o", label=name)
        axis.set_xticks(places, panel.x, rotation=90 if panel.bars else 0)
        axis.set(xlabel=panel.labels[0], ylabel=panel.labels[1])
        if panel.log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0)
            axis.margins(y=0.2)
        axis.grid(alpha=0.3, axis="y")
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
