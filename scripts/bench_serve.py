"""Measures throughput and latency of the server for several numbers of clients, and how long its event loop is blocked.

    python -m scripts.bench_serve --plot serving.png        the bundled model, on a server that is started here
    python -m scripts.bench_serve --sequential              also one request at a time, on a server that batches none
    python -m scripts.bench_serve --url http://host:8000    a running server; its prefix cache may know the prompts

For every number of clients the same requests are sent (chat, streamed, greedy); each client sends its next request as
soon as it has an answer. Takes minutes on two cores, and prints a Markdown table as in docs/serving.md, one row for
each number of clients:

  requests/s, visible tokens/s   of all clients together
  TTFT p50, p99                  milliseconds until the first text of an answer: median and 99th percentile
  latency p50, p99               milliseconds until the end of an answer
  ping p99                       milliseconds of GET /version meanwhile, which waits for nothing but the event loop
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from tqdm import tqdm

from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from, picture
from scripts.judge.client import Answer, Ask, ask, chat, connect, questions
from scripts.judge.report import percentile
from scripts.judge.server import serving

LEVELS = (1, 2, 4, 8, 16, 32)
"""Numbers of clients."""
PING_INTERVAL = 0.05
"""Seconds between two pings."""
HEADER = (
    "| clients | requests/s | visible tokens/s | TTFT p50, ms | TTFT p99 | latency p50 | latency p99 | ping p99 |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Level:
    """The measurements for one number of clients."""

    name: str
    """In the table."""
    clients: int
    answers: list[Answer]
    seconds: float
    """Wall time of all requests."""
    pings: list[float]
    """Seconds of each GET /version."""

    @property
    def tokens_per_second(self) -> float:
        """Visible tokens of all clients together."""
        return sum(answer.tokens or 0 for answer in self.answers) / self.seconds

    def milliseconds(self, what: str, share: float) -> float:
        """A percentile, such as 0.99, of "first" or "seconds" of the answers (see Answer), or of "pings"."""
        if what == "pings":
            return 1000 * percentile(self.pings, share)
        values = [getattr(answer, what) for answer in self.answers]
        return 1000 * percentile([value for value in values if value is not None], share)

    def row(self) -> str:
        """The row of the table."""
        times = [self.milliseconds(what, share) for what in ("first", "seconds") for share in (0.5, 0.99)]
        cells = [f"{len(self.answers) / self.seconds:.2f}", f"{self.tokens_per_second:.0f}"]
        cells += [f"{value:.0f}" for value in times] + [f"{self.milliseconds('pings', 0.99):.1f}"]
        return f"| {self.name} | {' | '.join(cells)} |"


def make_requests(count: int, max_tokens: int, num_branches: int) -> list[Ask]:
    """Streamed chat requests with the held-out questions, which come again if there are fewer than ``count``."""
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "num_branches": num_branches,
    }
    asked = itertools.islice(itertools.cycle(questions()), count)
    return [chat(question, **fields) for question in asked]


def measure(url: str, requests: list[Ask], clients: int, name: str) -> Level:
    """Sends requests to a server.

    Args:
        url: the server's.
        requests: what to send.
        clients: requests at the same time.
        name: the name of the row in the table.

    Raises:
        RuntimeError: a request failed.
    """
    context = multiprocessing.get_context("spawn")
    pipe, pipe_of_pinger = context.Pipe()
    # In a process of its own: the clients' work would delay pings from this one.
    pinger = context.Process(target=_ping, args=(url, pipe_of_pinger), daemon=True)
    pinger.start()
    pipe.recv()
    answers, seconds = asyncio.run(_send_all(url, requests, clients, name))
    pipe.send(None)
    pings = pipe.recv()
    pinger.join()
    return Level(name, clients, answers, seconds, pings)


async def _send_all(url: str, requests: list[Ask], clients: int, name: str) -> tuple[list[Answer], float]:
    """The answers, and the seconds until the last one, after a first request that does not count."""
    answers: list[Answer] = []
    waiting = iter(requests)
    async with connect(url) as http:
        await ask(http, requests[0])

        async def client() -> None:
            for request in waiting:
                answer = await ask(http, request)
                if not answer.ok:
                    raise RuntimeError(f"{request}: {answer}")
                answers.append(answer)
                bar.update()

        start = time.perf_counter()
        with tqdm(total=len(requests), desc=name, disable=None, leave=False) as bar:
            await asyncio.gather(*(client() for _ in range(clients)))
        return answers, time.perf_counter() - start


def _ping(url: str, pipe: Connection) -> None:
    """Pings the server until a message arrives; then sends the seconds of each ping. Sends None when it begins."""
    times = []
    with httpx.Client(base_url=url, timeout=60) as client:
        client.get("/version")
        pipe.send(None)
        while not pipe.poll(PING_INTERVAL):
            start = time.perf_counter()
            client.get("/version")
            times.append(time.perf_counter() - start)
    pipe.send(times)


def draw(levels: list[Level], sequential: Level | None, path: Path) -> None:
    """Writes throughput and latency against the number of clients as a picture."""
    from matplotlib import pyplot

    figure, (speed, delay) = pyplot.subplots(1, 2, figsize=(10, 4))
    clients = [level.clients for level in levels]
    speed.plot(clients, [level.tokens_per_second for level in levels], marker="o", label="batched")
    if sequential:
        speed.axhline(sequential.tokens_per_second, color="grey", linestyle="--", label="one request at a time")
    speed.set(ylabel="visible tokens/s", ylim=(0, None))
    for what, label, color in (("first", "first text", "tab:blue"), ("seconds", "whole answer", "tab:orange")):
        for share, style in ((0.5, "-"), (0.99, "--")):
            values = [level.milliseconds(what, share) for level in levels]
            delay.plot(clients, values, style, color=color, marker="o", label=f"{label}, p{100 * share:.0f}")
    delay.set(ylabel="ms", yscale="log")
    for axis in (speed, delay):
        axis.set_xscale("log", base=2)
        axis.set_xticks(clients, [str(count) for count in clients])
        axis.set_xlabel("clients")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_serve", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--url", metavar="URL", help="a running server (default: one is started here, without prefix cache)"
    )
    parser.add_argument(
        "--requests",
        type=number_from(1),
        default=96,
        metavar="N",
        help="requests for each number of clients (default: 96)",
    )
    levels_text = ", ".join(map(str, LEVELS))
    parser.add_argument(
        "--levels",
        type=number_from(1),
        nargs="+",
        default=LEVELS,
        metavar="N",
        help=f"numbers of clients (default: {levels_text})",
    )
    parser.add_argument(
        "--max-tokens",
        type=number_from(1),
        default=192,
        metavar="N",
        help="tokens of an answer, at most (default: 192)",
    )
    parser.add_argument(
        "--num-branches",
        type=number_from(0),
        default=3,
        metavar="K",
        help="lookahead branches, the paper's k (default: 3)",
    )
    parser.add_argument(
        "--sequential", action="store_true", help="also measure one client on a server with --max-num-seqs 1"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="also write the table as a picture")
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    if args.url and args.sequential:
        parser.error("--sequential compares with a server of the bundled model, and --url may be that of another")
    requests = make_requests(args.requests, args.max_tokens, args.num_branches)
    print(HEADER)
    levels, sequential = [], None
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        flags = ["--no-enable-prefix-caching"]
        with serving(args.url, log, *flags) as server:
            for clients in args.levels:
                levels.append(measure(server.url, requests, clients, str(clients)))
                print(levels[-1].row(), flush=True)
        if args.sequential:
            with serving(None, log, *flags, "--max-num-seqs", "1") as server:
                sequential = measure(server.url, requests, 1, "1, no batching")
                print(sequential.row())
    if sequential:
        best = max(levels, key=lambda level: level.tokens_per_second)
        ratio = best.tokens_per_second / sequential.tokens_per_second
        print(f"\n{best.clients} clients: {ratio:.2f} times the tokens/s of one request at a time")
    if args.plot:
        draw(levels, sequential, args.plot)


if __name__ == "__main__":
    main()
