"""Measures how long short requests wait for the long prompts of others.

    python -m scripts.bench_long_prompts                                  the bundled model; some minutes
    python -m scripts.bench_long_prompts --max-prefill-tokens 256 4096    for several limits of a prefill step

Some clients send long prompts and others short ones, each the next as soon as it has its answer, to an engine in this
process. Time is the CPU time of the engine's one thread, so that other processes do not count. Prints a Markdown table
with a row for the short requests alone and one for each limit: milliseconds until a short answer is complete (median,
99th percentile, largest), until the first token of a long one (median), and tokens per second of all requests.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from
from scripts.eval.problems import asked
from scripts.judge.client import questions
from scripts.judge.report import percentile

HEADER = (
    "| most tokens of a prefill step | short p50, ms | p99 | largest | first token of long ones p50 | tokens/s |\n"
    "|---|---|---|---|---|---|"
)


@dataclass
class Client:
    """Sends one request after the other."""

    prompts: Iterator[list[int]]
    request_id: str = ""
    sent: float = 0.0
    """When the running request was sent, in seconds."""
    first: list[float] = field(default_factory=list)
    """Seconds until the first token of each finished request."""
    whole: list[float] = field(default_factory=list)
    """Seconds until its end."""
    tokens: int = 0
    has_token: bool = False


def run(llm: LLM, clients: list[Client], num_short: int, params: DecodingParams, name: str) -> float:
    """Lets the clients send requests until ``num_short`` requests of the first client are finished.

    Returns:
        Seconds of CPU time.
    """
    engine, numbers = llm.engine, itertools.count()
    by_id: dict[str, Client] = {}

    def send(client: Client) -> None:
        client.request_id, client.sent, client.has_token = f"{next(numbers)}", time.process_time(), False
        by_id[client.request_id] = client
        engine.add(client.request_id, next(client.prompts), params)

    start = time.process_time()
    for client in clients:
        send(client)
    with tqdm(total=num_short, desc=name, disable=None, leave=False) as bar:
        while len(clients[0].whole) < num_short:
            for update in engine.step():
                client, now = by_id[update.request_id], time.process_time()
                client.tokens += len(update.token_ids)
                if update.token_ids and not client.has_token:
                    client.has_token = True
                    client.first.append(now - client.sent)
                if update.finish_reason is not None:
                    client.whole.append(now - client.sent)
                    bar.update(client is clients[0])
                    send(client)
    seconds = time.process_time() - start
    for client in clients:
        engine.abort(client.request_id)
    return seconds


def long_prompts(llm: LLM, length: int, first: int) -> Iterator[list[int]]:
    """Endless different prompts of ``length`` tokens."""
    texts = questions()
    for number in itertools.count(first, 61):  # which has no divisor in common with the number of questions
        words = itertools.cycle(llm.tokenize("\n".join(texts[(number + i) % len(texts)] for i in range(60))))
        yield list(itertools.islice(words, length))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_long_prompts", description=__doc__, formatter_class=HelpFormatter
    )
    for name, default, text in (
        ("--short", 2, "clients with short prompts"),
        ("--long", 4, "clients with long prompts"),
        ("--length", 1505, "tokens of a long prompt"),
        ("--requests", 40, "requests of the first short client, after which a measurement ends"),
    ):
        parser.add_argument(
            name, type=number_from(1), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--max-prefill-tokens", type=number_from(1), nargs="*", default=[], metavar="N",
        help="limits of a prefill step (default: the engine's)",
    )  # fmt: skip
    args = parser.parse_args()
    params = DecodingParams(max_new_tokens=128)
    print(HEADER)
    rows: list[tuple[str, int, dict[str, Any]]] = [(f"{args.short} short clients alone", 0, {})]
    rows += [(str(limit), args.long, {"max_prefill_tokens": limit}) for limit in args.max_prefill_tokens]
    rows += [] if args.max_prefill_tokens else [("the default", args.long, {})]
    for name, num_long, options in rows:
        with LLM(threads=1, enable_prefix_caching=False, **options) as llm:
            texts = [llm.tokenize_chat(asked(question)) for question in questions()]
            short = [Client(itertools.cycle(texts[index :: args.short])) for index in range(args.short)]
            long = [Client(long_prompts(llm, args.length, index)) for index in range(num_long)]
            seconds = run(llm, [*short, *long], args.requests, params, name)
        whole = [value for client in short for value in client.whole]
        times = [percentile(whole, 0.5), percentile(whole, 0.99), max(whole)]
        first = [value for client in long for value in client.first]
        cells = [f"{1000 * value:.0f}" for value in times] + [f"{1000 * percentile(first, 0.5):.0f}" if first else ""]
        tokens = sum(client.tokens for client in (*short, *long))
        print(f"| {name} | {' | '.join(cells)} | {tokens / seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
