"""Draws accuracy against TPF, a line for each method: an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from scripts.eval.aup import Method, best_accuracy

WIDTH, HEIGHT, LEGEND = 420, 300, 400
"""Pixels of the plot's area and of the legend beside it."""
LEFT, TOP, BOTTOM = 56, 16, 46
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
LEAST_SPAN = 10.0
"""Points of accuracy that the plot's area has at least, so that chance does not look like a gain."""
DASHES = ("", "6 3", "2 3")
"""One after the other where there are more methods than colours."""
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
"""Distances of marks on an axis."""


def drawn(title: str, methods: Sequence[Method]) -> str:
    """The SVG. Points that AUP drops are hollow, and no line leads to them.

    Args:
        title: above the legend.
        methods: the lines, with their AUP in the legend.
    """
    points = [point for method in methods for point in method.points]
    most = max(1.0, *(point.tpf for point in points))
    best, least = best_accuracy(methods), min(point.accuracy for point in points)
    least = max(0.0, min(least, best - LEAST_SPAN))
    x_step, y_step = _step(most), _step(max(1.0, best - least))
    right, low, high = _up(most, x_step), y_step * (least // y_step), max(_up(best, y_step), y_step)

    def across(tpf: float) -> float:
        return LEFT + WIDTH * tpf / right

    def down(accuracy: float) -> float:
        return TOP + HEIGHT * (high - accuracy) / (high - low)

    width, height = LEFT + WIDTH + LEGEND, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n'
    ]
    for mark in _marks(0, right, x_step):
        parts.append(f'<path d="M{across(mark):.1f} {TOP}v{HEIGHT}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{across(mark):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{mark:g}</text>\n')
    for mark in _marks(low, high, y_step):
        parts.append(f'<path d="M{LEFT} {down(mark):.1f}h{WIDTH}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>\n')
    label = "TPF: tokens / forward passes"
    parts.append(f'<text x="{LEFT + WIDTH / 2}" y="{height - 10}" text-anchor="middle">{label}</text>\n')
    parts.append(
        f'<text transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle">accuracy, %</text>'
    )
    parts.append(f'<text x="{LEFT + WIDTH + 20}" y="{TOP + 12}" font-weight="bold">{escape(title)}</text>\n')
    for number, method in enumerate(methods):
        color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        way = " ".join(f"{across(tpf):.1f},{down(accuracy):.1f}" for tpf, accuracy in method.kept)
        line = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{way}" {line}/>')
        for point in method.points:
            fill = color if point in method.kept else "#fff"
            place = f'cx="{across(point.tpf):.1f}" cy="{down(point.accuracy):.1f}"'
            parts.append(f'<circle {place} r="3.5" stroke="{color}" fill="{fill}"/>')
        x, y = LEFT + WIDTH + 20, TOP + 34 + 20 * number
        parts.append(f'<path d="M{x} {y - 4}h22" {line}/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(method.name)}: AUP {method.aup(best):.1f}</text>\n')
    return "".join(parts) + "</svg>\n"


def _step(span: float) -> float:
    """The distance of marks that gives at most eight of them."""
    return next((step for step in STEPS if span / step <= 8), STEPS[-1])


def _up(value: float, step: float) -> float:
    return -(-value // step) * step


def _marks(first: float, last: float, step: float) -> Iterator[float]:
    for number in range(round((last - first) / step) + 1):
        yield round(first + number * step, 6)
