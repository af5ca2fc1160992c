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
import timeit
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_vocabulary
from lopa_ascend.types import Grammar
from scripts.arguments import InputError
from scripts.bench.machine import describe_machine
from scripts.bench.processes import timed_calls
from scripts.bench.tables import records

if TYPE_CHECKING:
    from lopa_ascend import LLM

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


def run(args: argparse.Namespace) -> int:
    tokenizer = load_vocabulary(args.tokenizer or str(DEMO_MODEL), 2**18)
    if tokenizer is None:
        raise InputError(f"{args.tokenizer} has no tokenizer")
    found = [[alone(tokenizer, count) for count in FIELDS]]
    if args.tokenizer is None:
        from lopa_ascend import LLM  # imports torch, which takes seconds

        with LLM(max_num_seqs=8, enable_prefix_caching=False) as llm:
            found.append([under_schema(llm, count, num) for count in FIELDS[:-1] for num in (1, 8)])
    print(describe_machine()["processor"])
    for rows in found:
        short = [{name: f"{x:.3g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows]
        print(f"\n{records(short)}")
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
    return timeit.timeit(partial(call, *arguments), number=1)


def under_schema(llm: LLM, num_fields: int, num_requests: int) -> dict[str, float]:
    """Equal requests under one grammar, together. The first step, which computes the prompts, is not counted."""
    structured = {"json": schema(num_fields)}
    params = DecodingParams(decoding="d2f", max_new_tokens=NEW_TOKENS, structured_outputs=structured)
    decode = partial(llm.generate, [PROMPT] * num_requests, params, quiet=True)
    with timed_calls(llm.engine, "step") as steps, timed_calls(Constraint, "admitted", "allowed", "forced") as spent:
        found = decode()
    with mock.patch.object(Constraint, "forced", return_value=[]):
        slow = decode()
    counted = steps[1:] or steps
    return {
        "fields": num_fields,
        "clients": num_requests,
        "step, ms": 1e3 * statistics.mean(counted),
        "grammar, ms": 1e3 * sum(spent) / len(counted),
        "tokens": statistics.mean(len(output.tokens) for output in found),
        "passes": statistics.mean(output.num_forwards for output in found),
        "passes without forced spans": statistics.mean(output.num_forwards for output in slow),
    }
