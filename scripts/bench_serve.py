"""Throughput and latency of the server against the number of clients, and how long its event loop is blocked.

python -m scripts.bench_serve --plot F                  the bundled model, the server started here
python -m scripts.bench_serve --sequential              also one request at a time, by a server that batches none
python -m scripts.bench_serve --url http://host:8000    a running server (with a prefix cache it knows repeated prompts)

Every level sends the same requests (chat, streamed, greedy), a client its next one as soon as it has an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from tqdm import tqdm

from scripts.judge.client import Answer, Ask, ask, chat, connect, questions
from scripts.judge.report import percentile
from scripts.judge.server import serving

LEVELS = (1, 2, 4, 8, 16, 32)
PING_EVERY = 0.05
"""Seconds."""
HEADER = (
    "| clients | requests/s | visible tokens/s | TTFT p50, ms | TTFT p99 | latency p50 | latency p99 | ping p99 |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Level:
    """One level's answers, its wall time in seconds, and how long GET /version took meanwhile."""

    name: str
    clients: int
    answers: list[Answer]
    seconds: float
    pings: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Visible tokens of all clients together."""
        return sum(answer.tokens or 0 for answer in self.answers) / self.seconds

    def milliseconds(self, what: str, share: float) -> float:
        """A percentile of "first", "seconds" or "pings"."""
        values = (
            self.pings if what == "pings" else [value for a in self.answers if (value := getattr(a, what)) is not None]
        )
        return 1000 * percentile(values, share)

    def row(self) -> str:
        times = [self.milliseconds(what, share) for what in ("first", "seconds") for share in (0.5, 0.99)]
        cells = [f"{len(self.answers) / self.seconds:.2f}", f"{self.tokens_per_second:.0f}"]
        cells += [f"{value:.0f}" for value in times] + [f"{self.milliseconds('pings', 0.99):.1f}"]
        return f"| {self.name} | {' | '.join(cells)} |"


def measure(url: str, requests: list[Ask], clients: int, name: str) -> Level:
    """Raises RuntimeError if a request fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # In a process of its own: the clients' work would delay pings from this one.
    pinger = context.Process(target=_ping, args=(url, theirs), daemon=True)
    pinger.start()
    ours.recv()
    answers, seconds = asyncio.run(_run(url, requests, clients, name))
    ours.send(None)
    pings = ours.recv()
    pinger.join()
    return Level(name, clients, answers, seconds, pings)


async def _run(url: str, requests: list[Ask], clients: int, name: str) -> tuple[list[Answer], float]:
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
    """Sends its first word when it is ready, and the seconds of all pings when it is asked to end."""
    times = []
    with httpx.Client(base_url=url, timeout=60) as client:
        client.get("/version")
        pipe.send(None)
        while not pipe.poll(PING_EVERY):
            start = time.perf_counter()
            client.get("/version")
            times.append(time.perf_counter() - start)
    pipe.send(times)


def draw(levels: list[Level], sequential: Level | None, path: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server (default: one is started, without prefix cache)")
    parser.add_argument("--requests", type=int, default=96, help="at each level (default: 96)")
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, metavar="N", help="numbers of clients")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer (default: 192)")
    parser.add_argument("--num-branches", type=int, default=3, help="the paper's k (default: 3)")
    parser.add_argument("--sequential", action="store_true", help="compare with --max-num-seqs 1 and one client")
    parser.add_argument("--plot", type=Path, help="write the table as a picture")
    args = parser.parse_args()
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": args.max_tokens}
    fields |= {"num_branches": args.num_branches}
    requests = [chat(question, **fields) for question in (10 * questions())[: args.requests]]
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
