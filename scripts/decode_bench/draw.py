"""Draws the parts of a step, a bar for each part with its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.decode_bench.parts import PARTS


@dataclass(frozen=True)
class StepParts:
    """The parts of the mean step of one decode, in CPU milliseconds by name."""

    label: str
    """What was decoded, and how."""
    taken: Mapping[str, float]
    floors: Mapping[str, float]
    before: Mapping[str, float] | None = None
    """What the parts took in another run, of the code before a change; None for no such bars."""


def draw_parts(decodes: Sequence[StepParts], title: str, path: Path) -> None:
    """Writes a picture with one panel for each decode."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(decodes), 1, figsize=(7.5, 2.3 * len(decodes) + 0.6), squeeze=False)
    for panel, decode in zip(panels[:, 0], decodes, strict=True):
        sides = [("before", decode.before), ("after", decode.taken)] if decode.before else [("taken", decode.taken)]
        width = 0.8 / len(sides)
        for side, (name, taken) in enumerate(sides):
            places = [part + (side - (len(sides) - 1) / 2) * width for part in range(len(PARTS))]
            bars = panel.bar(places, [taken[part] for part in PARTS], width=0.95 * width, label=name)
            panel.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
        floors = [decode.floors[part] for part in PARTS]
        middles = range(len(PARTS))
        panel.hlines(floors, [x - 0.42 for x in middles], [x + 0.42 for x in middles], colors="black", label="floor")
        panel.set_xticks(middles, PARTS, fontsize=8)
        panel.set(ylabel="CPU ms a step")
        panel.set_title(decode.label, fontsize=9)
        panel.margins(y=0.15)
        panel.grid(alpha=0.3, axis="y")
    panels[0, 0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
