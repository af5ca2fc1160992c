"""Measures how fine the pieces of a streamed answer are, and what they cost, by block size.

    python -m scripts.bench_stream                          the bundled model, on a server that is started here
    python -m scripts.bench_stream --write                  put the table into docs/results.md
    python -m scripts.bench_stream --url http://host:8000   a running server; its prefix cache may know the prompts

Every held-out problem is asked once with each block size, one request at a time, so that all block sizes meet the same
load of the machine. Takes minutes on two cores, and prints a Markdown table with a row for each block size:

  pieces            events with text in an answer, on average
  first piece       median time to the first text, as a share of that of the whole answer with the same block size
  first piece, x N  the same time, divided by that with the largest block size N
  answer, x N       median time of the whole answer, divided by that with N
  TPF               visible tokens divided by forward passes, of all answers together
  exact             share of answers that end in the right number
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from
from scripts.doc_tables import with_table
from scripts.eval.problems import parse_result, read
from scripts.judge.client import Answer, ask, chat, connect
from scripts.judge.server import ROOT, serving

BLOCK_SIZES = (4, 8, 16, 32)
PAGE = ROOT / "docs" / "results.md"
TABLE = "streams"
"""Name of the table in the page."""


async def measure(url: str, problems: Sequence[tuple[str, int]], block_sizes: Sequence[int]) -> dict[int, list[Answer]]:
    """The answers by block size, to each question in turn.

    Args:
        url: the server's.
        problems: questions and results.
        block_sizes: of the requests.

    Raises:
        RuntimeError: a request failed.
    """
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 192}
    answers: dict[int, list[Answer]] = {size: [] for size in block_sizes}
    async with connect(url) as http:
        for size in block_sizes:  # the first request of a kind does not count
            await ask(http, chat(problems[0][0], block_size=size, **fields))
        for question, _ in tqdm(problems, disable=None, leave=False):
            for size in block_sizes:
                answer = await ask(http, chat(question, block_size=size, **fields))
                if not answer.ok:
                    raise RuntimeError(f"block_size {size}, {question}: {answer}")
                answers[size].append(answer)
    return answers


def table(answers: dict[int, list[Answer]], results: Sequence[int]) -> str:
    """The table in Markdown.

    Args:
        answers: by block size, in the order of the results.
        results: the right numbers.
    """
    largest = max(answers)
    titles = (
        "block size",
        "pieces",
        "first piece",
        f"first piece, x {largest}",
        f"answer, x {largest}",
        "TPF",
        "exact",
    )
    lines = [titles, ("---",) * len(titles)]
    first, whole = _medians(answers[largest])
    for size, own in sorted(answers.items()):
        own_first, own_whole = _medians(own)
        pieces = statistics.mean(answer.pieces for answer in own)
        tpf = sum(answer.tokens or 0 for answer in own) / sum(answer.forwards or 0 for answer in own)
        exact = [parse_result(answer.texts[0]) == result for answer, result in zip(own, results, strict=True)]
        lines.append(
            (
                str(size),
                f"{pieces:.1f}",
                f"{own_first / own_whole:.0%}",
                f"{own_first / first:.2f}",
                f"{own_whole / whole:.2f}",
                f"{tpf:.1f}",
                f"{statistics.mean(exact):.1%}",
            )
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _medians(answers: Sequence[Answer]) -> tuple[float, float]:
    """Seconds to the first text, and to the end."""
    firsts = [answer.first for answer in answers if answer.first is not None]
    return statistics.median(firsts), statistics.median(answer.seconds for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_stream", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--url", metavar="URL", help="a running server (default: one is started here, without prefix cache)"
    )
    parser.add_argument(
        "--problems", type=number_from(1), default=60, metavar="N", help="held-out problems (default: 60)"
    )
    sizes_text = ", ".join(map(str, BLOCK_SIZES))
    parser.add_argument(
        "--block-sizes",
        type=number_from(1),
        nargs="+",
        default=BLOCK_SIZES,
        metavar="N",
        help=f"block sizes (default: {sizes_text})",
    )
    parser.add_argument("--write", action="store_true", help="write docs/results.md instead of printing")
    args = parser.parse_args()
    if args.write:
        with_table(PAGE.read_text("utf-8"), TABLE, "")  # that the page has a place for it, before minutes of work
    problems = read(args.problems)
    with tempfile.TemporaryDirectory() as directory:
        with serving(args.url, Path(directory) / "server.log", "--no-enable-prefix-caching") as server:
            answers = asyncio.run(measure(server.url, problems, args.block_sizes))
    text = table(answers, [result for _, result in problems])
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), TABLE, text), "utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
