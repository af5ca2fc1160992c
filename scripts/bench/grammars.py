"""Measures what grammars cost: compiling, masks and following a text; and requests under them.

    bench grammars                     JSON schemas of 1, 20 and 500 fields, with the bundled model and its vocabulary
    bench grammars --json              the same as one line
    bench grammars --tokenizer DIR     the first table alone, with the vocabulary of a model's directory

The first table is the grammar alone, for a schema of so many required fields: milliseconds until the guard has let it
pass, megabytes that it takes there, milliseconds to compile it and to make the first mask, and microseconds for each
token of a text that keeps to it: for a mask, to accept the token, and to take it back and accept it again. The second
decodes requests, alone and 8 together: CPU milliseconds of a step, the part of them that the grammar takes, and passes,
also without forced spans. Requests of 500 fields are longer than the bundled model takes. The last lines have the CPU
time for each token that the model computes, of 4 requests without a grammar beside 4 under one, against 8 without; and
milliseconds of the median and of the longest step of a request, alone and while 20 new grammars arrive, each of which
takes about half a second to compile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.text.grammars import GrammarMatcher, Grammars
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_vocabulary
from lopa_ascend.types import Grammar
from scripts.bench.machine import describe_machine

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

FIELDS = (1, 20, 500)
REPEATS = 5
NEW_TOKENS = 384
PROMPT = "What is 3 + 4?"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="directory of a model: measure grammars alone, with its vocabulary"
    )


def run(args: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    tokenizer = load_vocabulary(args.tokenizer or DEMO_MODEL, 2**18)
    assert tokenizer is not None
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "grammar": [alone(tokenizer, count) for count in FIELDS],
    }
    if args.tokenizer is None:
        from lopa_ascend.engine.engine import Engine  # imports torch, which takes seconds

        engine = Engine(EngineConfig(max_num_seqs=8, enable_prefix_caching=False))
        found["requests"] = [requests(engine, count, num) for count in FIELDS[:-1] for num in (1, 8)]
        found["neighbours"] = neighbours(engine)
        found["steps"] = steps_beside_new_grammars(engine)
    if args.json:
        print(json.dumps(found))
        return 0
    print(found["machine"]["processor"])
    for table in ("grammar", "requests") if "requests" in found else ("grammar",):
        print(*found[table][0], sep="\t")
        for row in found[table]:
            print(*(f"{value:.3g}" if isinstance(value, float) else value for value in row.values()), sep="\t")
    for line in ("neighbours", "steps"):
        print(*(f"{name}: {value:.3g}" for name, value in found.get(line, {}).items()))
    return 0


def schema(num_fields: int) -> dict[str, Any]:
    kinds = [{"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"}, {"enum": ["red", "green", "blue"]}]
    names = [f"field_{number}" for number in range(num_fields)]
    properties = {name: kinds[number % 3] for number, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def alone(tokenizer: Tokenizer, num_fields: int) -> dict[str, float]:
    """What a grammar costs by itself."""
    grammar = Grammar("json", json.dumps(schema(num_fields)))
    kinds: list[list[Any]] = [[7, 42, 365], [True, False], ["red", "blue"]]
    values = [random.Random(number).choice(kinds[number % 3]) for number in range(num_fields)]
    text = json.dumps({f"field_{number}": value for number, value in enumerate(values)}, separators=(",", ":"))
    tokens = tokenizer.encode(text)
    guard = Guard(tokenizer)
    guard.checked(Grammar("choice", '["a"]'))  # starts its process
    guarding = seconds(lambda: guard.checked(grammar))
    compiling, masking = [], []
    for _ in range(REPEATS):
        grammars = Grammars(tokenizer)
        compiling.append(seconds(lambda: grammars.matcher(grammar)))  # noqa: B023  called at once
        matcher = grammars.matcher(grammar)
        masking.append(seconds(matcher.allowed))
    mask = accept = again = 0.0
    for token in tokens:
        mask += seconds(matcher.allowed)
        accept += seconds(lambda: matcher.accept([token]))  # noqa: B023
        again += seconds(lambda: _again(matcher, token))  # noqa: B023
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


def _again(matcher: GrammarMatcher, token: int) -> None:
    matcher.roll_back(1)
    matcher.accept([token])


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def requests(engine: Engine, num_fields: int, num_requests: int) -> dict[str, float]:
    """Equal requests under one grammar, together."""
    params = DecodingParams.of(
        decoding="d2f", max_new_tokens=NEW_TOKENS, structured_outputs={"json": schema(num_fields)}
    )
    with time_in_constraints() as spent:
        done = decode(engine, [params] * num_requests)
    with mock.patch.object(Constraint, "forced", _no_text_is_forced):
        slow = decode(engine, [params] * num_requests)
    return {
        "fields": num_fields,
        "clients": num_requests,
        "step, ms": 1e3 * done["seconds"] / done["steps"],
        "grammar, ms": 1e3 * sum(spent) / done["steps"],
        "tokens": done["tokens"] / num_requests,
        "passes": done["passes"] / num_requests,
        "passes without forced spans": slow["passes"] / num_requests,
    }


def _no_text_is_forced(constraint: Constraint, beginning: Sequence[int]) -> list[int]:
    return []


def neighbours(engine: Engine) -> dict[str, float]:
    """CPU microseconds for each token that the model computes, and their ratio; the runs take turns."""
    free = DecodingParams.of(decoding="d2f", max_new_tokens=128, ignore_eos=True)
    bound = DecodingParams.of(decoding="d2f", max_new_tokens=128, structured_outputs={"regex": "[a-z ]{600}"})
    costs: dict[str, list[float]] = {"8 without": [], "4 and 4": []}
    for _ in range(REPEATS):
        for name, asked in (("8 without", [free] * 8), ("4 and 4", [free] * 4 + [bound] * 4)):
            done = decode(engine, asked, most_steps=20)
            costs[name].append(1e6 * done["seconds"] / done["computed"])
    medians = {name: statistics.median(values) for name, values in costs.items()}
    return {**medians, "ratio": medians["4 and 4"] / medians["8 without"]}


def steps_beside_new_grammars(engine: Engine) -> dict[str, float]:
    """Milliseconds of the steps of a request, alone and while new grammars are compiled."""
    tokenizer = load_vocabulary(DEMO_MODEL, 2**18)
    assert tokenizer is not None
    guard = Guard(tokenizer)
    params = DecodingParams.of(decoding="d2f", max_new_tokens=1024, ignore_eos=True, tau_conf=1.0, block_size=8)
    found: dict[str, float] = {}
    for name, num_grammars in (("alone", 0), ("beside", 20)):
        engine.add(Request(name, tuple(tokenizer.encode(PROMPT)), params))
        engine.step()
        added = [guard.checked(Grammar("regex", "(?i)" + r"\p{L}" * (2500 + number))) for number in range(num_grammars)]
        times = []
        for number in range(200):
            if number < len(added):
                bound = DecodingParams.of(decoding="d2f", max_new_tokens=1, structured_outputs=added[number])
                engine.add(Request(str(number), tuple(tokenizer.encode(PROMPT)), bound))
            times.append(1e3 * seconds(engine.step))
        for request_id in (name, *map(str, range(num_grammars))):
            engine.abort(request_id)
        found |= {f"{name}, median": statistics.median(times), f"{name}, longest": max(times)}
    return found


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


def decode(engine: Engine, asked: list[DecodingParams], most_steps: int = 10**9) -> dict[str, Any]:
    """Decodes requests together; the first step, which computes the prompts, is not counted."""
    tokenizer = load_vocabulary(DEMO_MODEL, 2**18)
    assert tokenizer is not None
    for number, params in enumerate(asked):
        engine.add(Request(str(number), tuple(tokenizer.encode(PROMPT)), params, trace=True))
    updates = engine.step()
    start, steps = time.process_time(), 0
    while engine.has_work() and steps < most_steps:
        updates += engine.step()
        steps += 1
    spent = time.process_time() - start
    records = [update.record for update in updates if update.record is not None]
    for number in range(len(asked)):
        engine.abort(str(number))
    return {
        "seconds": spent,
        "steps": max(1, steps),
        "passes": len(records),
        "tokens": sum(len(update.tokens) for update in updates),
        "computed": sum(record.model_tokens for record in records if record.index),
    }
