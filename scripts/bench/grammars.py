"""Measures what grammars cost: compiling, masks and following a text; and requests under them.

    bench grammars                     JSON schemas of 1, 20 and 500 fields, with the bundled model and its vocabulary
    bench grammars --tokenizer DIR     the first table alone, with the vocabulary of a model's directory

The first table is the grammar alone, for a schema of so many required fields: milliseconds until the guard has let it
pass, megabytes that it takes there, milliseconds to compile it and to make the first mask, and microseconds for each
token of a text that keeps to it: for a mask, to accept the token, and to take it back and accept it again. The second
decodes requests, alone and 8 together: CPU milliseconds of a step, the part of them that the grammar takes, and passes,
also without forced spans. Requests of 500 fields are longer than the bundled model takes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_vocabulary
from lopa_ascend.types import Grammar
from scripts.bench.machine import describe_machine
from scripts.bench.tables import table

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

FIELDS = (1, 20, 500)
REPEATS = 5
NEW_TOKENS = 384
PROMPT = "What is 3 + 4?"
KINDS: tuple[tuple[dict[str, Any], list[Any]], ...] = (
    ({"type": "integer", "minimum": 0, "maximum": 999}, [7, 42, 365]),
    ({"type": "boolean"}, [True, False]),
    ({"enum": ["red", "green", "blue"]}, ["red", "blue"]),
)
"""Schemas of fields, which take turns, and some of their values."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="directory of a model: measure grammars alone, with its vocabulary"
    )


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    tokenizer = load_vocabulary(args.tokenizer or str(DEMO_MODEL), 2**18)
    if tokenizer is None:
        parser.error(f"{args.tokenizer} has no tokenizer")
    found = [[alone(tokenizer, count) for count in FIELDS]]
    if args.tokenizer is None:
        from lopa_ascend.engine.engine import Engine  # imports torch, which takes seconds

        engine, prompt = Engine(EngineConfig(max_num_seqs=8, enable_prefix_caching=False)), tokenizer.encode(PROMPT)
        load = Load(engine, tuple(prompt))
        found.append([load.under_schema(count, num) for count in FIELDS[:-1] for num in (1, 8)])
    print(describe_machine()["processor"])
    for rows in found:
        cells = ([f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in rows)
        print(f"\n{table(list(rows[0]), cells)}")
    return 0


def schema(num_fields: int) -> dict[str, Any]:
    properties = {f"field_{number}": KINDS[number % 3][0] for number in range(num_fields)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def alone(tokenizer: Tokenizer, num_fields: int) -> dict[str, float]:
    """What a grammar costs by itself."""
    grammar = Grammar("json", json.dumps(schema(num_fields)))
    values = {f"field_{n}": random.Random(n).choice(KINDS[n % 3][1]) for n in range(num_fields)}
    tokens = tokenizer.encode(json.dumps(values, separators=(",", ":")))
    guard = Guard(tokenizer)
    guard.checked(Grammar("choice", '["a"]'))  # starts its process
    guarding = seconds(guard.checked, grammar)
    compiling, masking = [], []
    for _ in range(REPEATS):
        grammars = Grammars(tokenizer)
        compiling.append(seconds(grammars.matcher, grammar))
        matcher = grammars.matcher(grammar)
        masking.append(seconds(matcher.allowed))
    mask = accept = again = 0.0
    for token in tokens:
        mask += seconds(matcher.allowed)
        accept += seconds(matcher.accept, [token])
        again += seconds(matcher.roll_back, 1) + seconds(matcher.accept, [token])
    assert matcher.is_complete
    return {
        "fields": num_fields,
        "tokens": len(tokens),
        "guard, ms": 1e3 * guarding,
        "memory, MB": guard.checked(grammar).compiled_bytes / 1e6,
        "compile, ms": 1e3 * statistics.median(compiling),
        "first mask, ms": 1e3 * statistics.median(masking),
        "mask, us": 1e6 * mask / len(tokens),
        "accept, us": 1e6 * accept / len(tokens),
        "roll back, us": 1e6 * again / len(tokens),
    }


def seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


class Load:
    """Requests of the bundled model, with one prompt."""

    def __init__(self, engine: Engine, prompt: tuple[int, ...]) -> None:
        self.engine, self.prompt = engine, prompt

    def under_schema(self, num_fields: int, num_requests: int) -> dict[str, float]:
        """Equal requests under one grammar, together."""
        fields = {"max_new_tokens": NEW_TOKENS, "structured_outputs": {"json": schema(num_fields)}}
        asked = [DecodingParams.of(decoding="d2f", **fields)] * num_requests
        with time_in_constraints() as spent:
            done = self.decode(asked)
        with mock.patch.object(Constraint, "forced", return_value=[]):
            slow = self.decode(asked)
        return {
            "fields": num_fields,
            "clients": num_requests,
            "step, ms": 1e3 * done["seconds"] / done["steps"],
            "grammar, ms": 1e3 * sum(spent) / done["steps"],
            "tokens": done["tokens"] / num_requests,
            "passes": done["passes"] / num_requests,
            "passes without forced spans": slow["passes"] / num_requests,
        }

    def decode(self, asked: list[DecodingParams]) -> dict[str, Any]:
        """Decodes requests together; the first step, which computes the prompts, is not counted."""
        for number, params in enumerate(asked):
            self.engine.add(Request(str(number), self.prompt, params, trace=True))
        updates = self.engine.step()
        start, steps = time.process_time(), 0
        while self.engine.has_work():
            updates += self.engine.step()
            steps += 1
        spent = time.process_time() - start
        records = [update.record for update in updates if update.record is not None]
        return {
            "seconds": spent,
            "steps": max(1, steps),
            "passes": len(records),
            "tokens": sum(len(update.tokens) for update in updates),
        }


@contextmanager
def time_in_constraints() -> Iterator[list[float]]:
    """Collects the CPU seconds of the calls of all constraints."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return method(*arguments)
            finally:
                spent.append(time.process_time() - start)

        return call

    with ExitStack() as patches:
        for name in ("admitted", "allowed", "forced"):
            patches.enter_context(mock.patch.object(Constraint, name, timed(getattr(Constraint, name))))
        yield spent
