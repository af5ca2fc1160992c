"""Draws one real forward pass of LoPA as a picture: docs/branches.svg.

    python -m scripts.draw_branches
    python -m scripts.draw_branches --branches 4 --block-size 10 --out build/branches.svg

The bundled model decodes a held-out problem. The picture shows the first forward pass with two open blocks that a
lookahead branch wins: every branch with its tokens and masks, its score, and what the winner filled.
"""

from __future__ import annotations

import argparse
import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.types import GenerationOutput, StepRecord
from scripts.arguments import number_from
from scripts.eval.problems import asked, read

OUT = Path(__file__).resolve().parents[1] / "docs" / "branches.svg"
FONT, CHARACTER, LINE, MARGIN, LABELS = 13, 7.9, 30, 16, 150
"""Sizes in pixels: of the font, a character's width, a row's height, the border, and the column of row names."""
SCORES = 96
"""Width of the column of scores in pixels."""
COLOURS = {"filled": "#e8eef7", "mask": "#ffffff", "lookahead": "#ffd77a", "fill": "#a8dfb0"}
LEGEND = {
    "filled": "filled before",
    "mask": "masked",
    "lookahead": "the branch's own token",
    "fill": "filled by this pass",
}
MASK = "▒"


@dataclass(frozen=True)
class Cell:
    """One position of a row."""

    text: str
    kind: str
    """Key of COLOURS."""


@dataclass(frozen=True)
class Row:
    """One line of the picture."""

    name: str
    cells: list[Cell]
    score: str = ""
    is_winner: bool = False


def interesting(output: GenerationOutput, block_size: int) -> StepRecord | None:
    """The first pass with two blocks in the window that a lookahead branch wins; None if there is none."""
    end = len(output.prompt_token_ids) + 2 * block_size
    for record in output.trace or ():
        anchor = record.branches[-1]
        if record.winner < len(record.branches) - 1 and anchor.end == end:
            return record
    return None


def rows_of(llm: LLM, output: GenerationOutput, record: StepRecord) -> list[Row]:
    """The branches of a pass in evaluation order, and the winner after the pass."""
    first, end = len(output.prompt_token_ids), record.branches[-1].end
    tokens: dict[int, int] = {}
    for earlier in (output.trace or ())[: record.index]:
        won = earlier.branches[earlier.winner].lookahead
        for fill in (*earlier.fills, *((won,) if won else ())):
            tokens[fill.position] = fill.token
    rows = []
    for index, branch in enumerate(record.branches):
        lookahead = branch.lookahead
        cells = [_cell(llm, tokens, position) for position in range(first, end)]
        if lookahead is not None:
            cells[lookahead.position - first] = Cell(_text(llm, lookahead.token), "lookahead")
        name = "anchor" if lookahead is None else f"lookahead {index + 1}"
        rows.append(Row(name, cells, f"{branch.score:.3f}", index == record.winner))
    after = list(rows[record.winner].cells)
    for fill in record.fills:
        if fill.position < end:
            after[fill.position - first] = Cell(_text(llm, fill.token), "fill")
    return [*rows, Row("after the pass", after)]


def _cell(llm: LLM, tokens: dict[int, int], position: int) -> Cell:
    return Cell(_text(llm, tokens[position]), "filled") if position in tokens else Cell(MASK, "mask")


def _text(llm: LLM, token: int) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode([token]).replace(" ", "·")


def draw(rows: Sequence[Row], block_size: int, caption: str) -> str:
    """The picture as SVG."""
    widths = [max(len(row.cells[i].text) for row in rows) * CHARACTER + 8 for i in range(len(rows[0].cells))]
    lefts = [MARGIN + LABELS + sum(widths[:i]) for i in range(len(widths) + 1)]
    width = lefts[-1] + SCORES + MARGIN
    captions = textwrap.wrap(caption, int((width - 2 * MARGIN) / CHARACTER))
    top = MARGIN + (len(captions) + 1) * LINE
    legend_top = top + (len(rows) + 1) * LINE + MARGIN
    height = legend_top + LINE + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    parts += [_label(MARGIN, MARGIN + FONT + i * LINE * 0.7, line) for i, line in enumerate(captions)]
    parts += _legend(legend_top, width)
    for block in range(len(widths) // block_size):
        left, right = lefts[block * block_size], lefts[(block + 1) * block_size]
        parts.append(_label((left + right) / 2, top - 10, f"block {block + 1}", anchor="middle"))
        parts.append(f'<path d="M{left} {top - 4}H{right}" stroke="#555555" stroke-width="2"/>')
    parts.append(_label(lefts[-1] + 10, top - 10, "score"))
    for number, row in enumerate(rows):
        # An empty line separates the row without a score, the winner after the pass.
        line_number = number if row.score else number + 1
        parts += _row(row, top + line_number * LINE, lefts, widths)
    return "\n".join([*parts, "</svg>", ""])


def _legend(top: float, width: float) -> list[str]:
    """The meanings of the colours, side by side.

    Args:
        top: in pixels.
        width: of the picture in pixels.
    """
    parts = []
    for number, (kind, meaning) in enumerate(LEGEND.items()):
        x = MARGIN + number * (width - 2 * MARGIN) / len(LEGEND)
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="14" height="14" fill="{COLOURS[kind]}" stroke="#c4c9d1"/>')
        parts.append(_label(x + 20, top + 12, meaning))
    return parts


def _row(row: Row, y: int, lefts: Sequence[float], widths: Sequence[float]) -> list[str]:
    """The name, cells and score of a row.

    Args:
        row: what is drawn.
        y: top of the row in pixels.
        lefts: left ends of the cells in pixels, and the right end of the last one.
        widths: of the cells in pixels.
    """
    weight = "bold" if row.is_winner else "normal"
    parts = [_label(MARGIN, y + 19, row.name, weight=weight)]
    for cell, left, width in zip(row.cells, lefts, widths, strict=False):
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="{LINE - 4}" '
            f'fill="{COLOURS[cell.kind]}" stroke="#c4c9d1"/>'
        )
        parts.append(_label(left + width / 2, y + 19, cell.text, anchor="middle"))
    if row.score:
        parts.append(_label(lefts[-1] + 10, y + 19, row.score + (" wins" if row.is_winner else ""), weight=weight))
    if row.is_winner:
        parts.append(
            f'<rect x="{lefts[0]}" y="{y + 1}" width="{lefts[-1] - lefts[0]:.1f}" height="{LINE - 2}" fill="none" '
            'stroke="#1f6feb" stroke-width="2.5"/>'
        )
    return parts


def _label(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="#1b1f24" '
        f'xml:space="preserve">{html.escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.draw_branches",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--branches", type=number_from(1), default=3, metavar="K", help="lookahead branches (default: 3)"
    )
    parser.add_argument(
        "--block-size", type=number_from(1), default=8, metavar="N", help="positions of a block (default: 8)"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="where to write (default: docs/branches.svg)"
    )
    arguments = parser.parse_args()
    llm = LLM()
    params = DecodingParams(num_branches=arguments.branches, block_size=arguments.block_size, max_new_tokens=64)
    for question, _ in read():
        (output,) = llm.chat([asked(question)], params, trace=True, quiet=True)
        record = interesting(output, arguments.block_size)
        if record is not None:
            caption = f"Forward pass {record.index + 1} for: {question}"
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            picture = draw(rows_of(llm, output, record), arguments.block_size, caption)
            arguments.out.write_text(picture, encoding="utf-8")
            print(f"wrote {arguments.out}")
            return
    raise SystemExit("in no held-out problem did a lookahead branch win with two blocks open")


if __name__ == "__main__":
    main()
