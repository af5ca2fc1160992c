"""The process that compiles grammars first: what ends it, fills it or takes too long is refused."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from lopa_ascend.config import ParameterError
from lopa_ascend.text.guard import Guard
from lopa_ascend.types import Grammar
from tests.tiny import tiny_tokenizer

TOO_HARD = {
    "a chain of rules": (
        Grammar("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'),
        "grammar: crashes the compiler (SIGSEGV)",
    ),
    "a long expression without case": (
        Grammar("regex", "(?i)" + r"\p{L}" * 26_000),
        "regex: takes more than 0.5 s to compile",
    ),
    "an expression in a part": (
        Grammar("json", json.dumps({"properties": {"a/b": {"type": "string", "pattern": "(?i)" + r"\p{L}" * 18_000}}})),
        "json.properties.a/b: takes more than",
    ),
}


@cache
def guard() -> Guard:
    return Guard(tiny_tokenizer())


def process_id(asker: Guard) -> int:
    assert asker._process is not None
    return asker._process.pid


def chain(count: int, link: Any) -> Grammar:
    """Definitions of which each refers to the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return Grammar("json", json.dumps({"$defs": {**defs, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}))


@pytest.mark.parametrize("name", TOO_HARD)
def test_what_is_too_hard_is_refused_in_time_and_the_next_grammar_is_taken(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lopa_ascend.text.guard.TIME", 0.5)
    grammar, reason = TOO_HARD[name]
    guard().checked(Grammar("regex", "a"))
    before = process_id(guard())
    with pytest.raises(ParameterError) as refused:
        guard().checked(grammar)
    assert str(refused.value).startswith(f"structured_outputs.{reason}")
    assert str(refused.value).endswith("make it simpler")
    assert guard().checked(Grammar("regex", "b")).source
    assert process_id(guard()) == before


LINKS = {
    "a definition": lambda ref: ref,
    "a choice": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "a list": lambda ref: {"type": "array", "items": ref},
}
SCHEMAS: list[Any] = [
    {"const": -9223372036854775808},
    {"enum": [1, -9223372036854775808]},
    {"type": "integer", "minimum": -1e19, "maximum": -1e19},
    {"type": "integer", "multipleOf": 3000017},
    {"type": "array", "minItems": 20_000_000},
    {"properties": {f"p{i}": {"pattern": f"(?i)^a{i}[a-z]+$"} for i in range(1000)}},
]
HOSTILE = {
    **{json.dumps(schema)[:50]: Grammar("json", json.dumps(schema)) for schema in SCHEMAS},
    **{f"{count} times {name}": chain(count, LINKS[name]) for count in (250, 1400, 2500) for name in LINKS},
    "a schema in a grammar": Grammar("grammar", 'start: a\na: %json {"type": "integer", "multipleOf": 3000017}'),
    "brackets": Grammar("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_are_taken_or_refused(grammar: Grammar):
    with suppress(ParameterError):
        assert guard().checked(grammar).compiled_bytes < 2**29
    assert guard().checked(Grammar("regex", "c")).compiled_bytes > 0


@pytest.mark.slow
def test_what_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lopa_ascend.text.guard.TIME", 20.0)
    with pytest.raises(ParameterError, match="regex: takes more than 512 MiB to compile; make it simpler"):
        guard().checked(Grammar("regex", "(?i)" + r"\p{L}" * 26_000))


def test_threads_share_the_process_which_is_replaced_when_it_is_killed():
    asker = Guard(tiny_tokenizer())
    with ThreadPoolExecutor(8) as threads:
        passed = list(threads.map(asker.checked, [Grammar("regex", f"a{i % 5}+") for i in range(20)]))
    assert [grammar.text for grammar in passed] == [f"a{i % 5}+" for i in range(20)]
    before = process_id(asker)
    os.kill(before, signal.SIGKILL)
    assert asker.checked(Grammar("regex", "b")).source
    assert process_id(asker) != before
    last = process_id(asker)
    del asker
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


USE = """
import os
from lopa_ascend.text.guard import Guard
from lopa_ascend.types import Grammar
from tests.tiny import tiny_tokenizer
guard = Guard(tiny_tokenizer())
guard.checked(Grammar("regex", "a"))
print(guard._process.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_the_process_ends_with_its_parent_and_is_silent(end: str):
    run = subprocess.run([sys.executable, "-c", USE.format(end=end)], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{run.stdout.strip()}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{run.stdout.strip()}")
