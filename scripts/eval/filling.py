"""Draws how D2F and LoPA fill the same answer of the bundled model, pass by pass: an animated SVG, as in README.md.

    python -m scripts.eval filling docs/filling.svg
    python -m scripts.eval filling out.svg --question "Ann has 7 pens. Ann buys 15 more. How many pens does Ann have?"

Both decode by the parameters that the model's directory recommends. A cell is a position; its colour is the probability
at which it was filled, and a frame marks the own token of a branch that won.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lopa_ascend.config.settings import HelpFormatter
from scripts.eval.command import run_command

if TYPE_CHECKING:
    from lopa_ascend import LLM

QUESTION = "There are 12 eggs in a carton. Mum buys 3 cartons and uses 7 eggs for a cake. How many eggs remain?"
COLUMNS, WIDTH, HEIGHT, GAP = 8, 52, 22, 2
"""Cells of a side, and their size in pixels."""
TOP, MARGIN = 52, 12
PASS, HOLD = 0.8, 4.0
"""Seconds that a pass is shown, and that the whole answer is before it begins anew."""
LEVELS = (0.5, 0.8, 0.95, 0.99, 0.999)
STYLE = """\
svg { --back: #fff; --text: #1a1d21;
  --soft: #5a6068; --mask: #e4e7eb; --own: #a84700 }
svg { font: 12px ui-monospace, monospace }
.l0 { fill: #f3cf9c } .l1 { fill: #efdcb5 } .l2 { fill: #dfe2cd }
.l3 { fill: #c9ddec } .l4 { fill: #aed0ef } .l5 { fill: #93c2ef }
@media (prefers-color-scheme: dark) {
svg { --back: #14171b; --text: #e6e8eb;
  --soft: #a3abb5; --mask: #2b313a; --own: #ffa45c }
.l0 { fill: #6b4a17 } .l1 { fill: #5b4c2c } .l2 { fill: #444e48 }
.l3 { fill: #34506b } .l4 { fill: #27527f } .l5 { fill: #1b5594 }
}
text { fill: var(--text) }
.back { fill: var(--back) }
.title { font: bold 15px system-ui, sans-serif }
.soft { fill: var(--soft); font: 13px system-ui, sans-serif }
.mask { fill: var(--mask) }
.own { stroke: var(--own); stroke-width: 2 }
.once { opacity: 0 }
@media (prefers-reduced-motion: reduce) { g, text { animation: none !important } }
"""


@dataclass(frozen=True)
class Cell:
    """A position of the answer."""

    text: str
    prob: float
    shown_from: int
    """Number of the pass that filled it, from 1."""
    is_own: bool
    """It is the own token of a branch that won."""


@dataclass(frozen=True)
class Side:
    """An answer."""

    title: str
    passes: int
    cells: list[Cell]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval filling", description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, metavar="OUT.svg", help="the picture")
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help="what the model is asked")
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), argv, lambda args, _: run(args.out, args.question))


def run(out: Path, question: str) -> None:
    from lopa_ascend import LLM  # imports torch, which takes seconds

    llm = LLM()
    sides = [
        traced(llm, "D2F", question, decoding="d2f"),
        traced(llm, "LoPA, 7 branches", question, decoding="lopa", num_branches=7),
    ]
    out.write_text(drawn(question, sides), encoding="utf-8")
    print(f"{out}: {', '.join(f'{side.title}: {len(side.cells)} tokens in {side.passes} passes' for side in sides)}")


def traced(llm: LLM, title: str, question: str, **fields: object) -> Side:
    """The answer to a question, with the pass that filled each of its visible positions."""
    messages = [{"role": "user", "content": question}]
    (output,) = llm.chat(messages, llm.params(**fields), trace=True, quiet=True)
    assert output.trace is not None
    assert llm.tokenizer is not None
    begin, filled = len(output.prompt_token_ids), dict[int, tuple[int, bool]]()
    for record in output.trace:
        own = record.branches[record.winner].own_fills
        filled |= {fill.position - begin: (record.index + 1, fill in own) for fill in (*own, *record.fills)}
    cells = []
    for position, (token, prob) in enumerate(zip(output.token_ids, output.max_probs, strict=True)):
        # A branch without masks wins without a further pass.
        shown_from, is_own = filled.get(position, (output.num_forwards, True))
        cells.append(Cell(llm.tokenizer.piece(token).decode(errors="replace"), prob, shown_from, is_own))
    return Side(title, output.num_forwards, cells)


def drawn(question: str, sides: list[Side]) -> str:
    """The SVG of two answers side by side."""
    passes = max(side.passes for side in sides)
    side_width = COLUMNS * (WIDTH + GAP) - GAP
    rows = max(-(-len(side.cells) // COLUMNS) for side in sides)
    width, height = 2 * side_width + 4 * MARGIN, TOP + rows * (HEIGHT + GAP) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(" and ".join(f"{side.title}: {side.passes} passes" for side in sides))}</title>\n'
        f"<desc>{escape(question)}</desc>\n<style>\n{STYLE}{''.join(animations(passes))}</style>\n"
        '<rect class="back" width="100%" height="100%"/>\n'
    ]
    for number, side in enumerate(sides):
        parts.append(f'<g transform="translate({MARGIN + number * (side_width + 2 * MARGIN)} 0)">\n')
        parts += _side(side)
        parts.append("</g>\n")
    return "".join(parts) + "</svg>\n"


def animations(passes: int) -> Iterator[str]:
    """For each pass the classes of what appears with it: to stay (``s3``), or until the next pass (``once n3``)."""
    seconds = passes * PASS + HOLD
    for number in range(passes + 1):
        begin, end = (100 * at * PASS / seconds for at in (number, number + 1))
        hidden = f"0%,{begin - 0.01:.2f}%{{opacity:0}}" if number else ""
        yield f"@keyframes s{number}{{{hidden}{begin:.2f}%,100%{{opacity:1}}}}\n"
        shown = f"{begin:.2f}%,{end - 0.01:.2f}%{{opacity:1}}"
        yield f"@keyframes n{number}{{{hidden}{shown}{end:.2f}%,100%{{opacity:0}}}}\n"
        yield "".join(f".{kind}{number}{{animation:{kind}{number} {seconds:.1f}s infinite}}\n" for kind in "sn")


def _side(side: Side) -> Iterator[str]:
    yield f'<text class="title" x="0" y="20">{escape(side.title)}</text>\n'
    for number in range(side.passes + 1):
        count = sum(cell.shown_from <= number for cell in side.cells)
        text = f"pass {number}: {count} of {len(side.cells)} tokens"
        names = f"soft once n{number}"
        if number == side.passes:  # visible to the end, and where nothing moves
            text, names = f"{len(side.cells)} tokens in {number} passes", f"soft s{number}"
        yield f'<text class="{names}" x="0" y="40">{text}</text>\n'
    for position, cell in enumerate(side.cells):
        x, y = position % COLUMNS * (WIDTH + GAP), TOP + position // COLUMNS * (HEIGHT + GAP)
        level = sum(cell.prob >= bound for bound in LEVELS)
        size = f'width="{WIDTH}" height="{HEIGHT}"'
        own = " own" if cell.is_own else ""
        text = escape(cell.text.replace(" ", "\u00b7").replace("\n", "\u23ce")[:6])
        yield f'<rect class="mask" x="{x}" y="{y}" {size}/><g class="s{cell.shown_from}">'
        yield f'<rect class="l{level}{own}" x="{x}" y="{y}" {size}/><text x="{x + 3}" y="{y + 15}">{text}</text></g>\n'
