"""Prints how many JSON schemas of a file are taken, and whether exactly their valid instances are admitted.

    python -m ci.schemas FILE

Each line is one, {"name": ..., "schema": ..., "tests": [{"valid": ..., "data": ...}]}; xz may compress the file. A set
is the part of a name before "---" or "_". Instances are compact, with their properties in the schema's order.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from lopa_ascend.config import ParameterError
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.tokenizer_files import load_vocabulary
from lopa_ascend.types import Grammar, GrammarError

COUNTED = ("schemas", "taken", "valid", "admitted", "invalid", "wrongly admitted")


def main() -> int:
    counts: dict[str, Counter[str]] = {}
    slowest = 0.0
    for line in lines(Path(sys.argv[1])):
        row = json.loads(line)
        count = counts.setdefault(re.split("---|_", row["name"])[0], Counter())
        started = time.process_time()
        problems = list(check(row["schema"], row["tests"], count))
        slowest = max(slowest, time.process_time() - started)
        for problem in problems:
            print(f"{row['name']}: {problem[:200]}")
    print("set", *COUNTED, sep="\t")
    for name, count in sorted(counts.items()):
        print(name, *(count[what] for what in COUNTED), sep="\t")
    print(f"the slowest schema with its instances: {slowest:.2f} s of CPU")
    return int(any(count["wrongly admitted"] for count in counts.values()))


def lines(path: Path) -> list[str]:
    raw = path.read_bytes()
    return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode().splitlines()


def check(schema: Any, tests: Iterable[dict[str, Any]], count: Counter[str]) -> Iterator[str]:
    """What is wrong with one schema."""
    count["schemas"] += 1
    grammar = Grammar("json", json.dumps(schema))
    try:
        grammar = GUARD.checked(grammar)
    except ParameterError as error:
        yield str(error)
        return
    count["taken"] += 1
    for test in tests:
        text = json.dumps(ordered(schema, [schema], test["data"]), separators=(",", ":"), ensure_ascii=False)
        matcher, tokens = GRAMMARS.matcher(grammar), TOKENIZER.encode(text)
        try:
            admitted = matcher.accept(tokens) == len(tokens) and matcher.is_complete
        except GrammarError as error:
            admitted = False
            yield str(error)
        count["valid" if test["valid"] else "invalid"] += 1
        count["admitted" if test["valid"] else "wrongly admitted"] += admitted
        if admitted != test["valid"]:
            yield f"{'not' if test['valid'] else 'wrongly'} admitted: {text}"


def ordered(root: Any, schemas: list[Any], value: Any) -> Any:
    """A value with its properties in the order in which schemas name them; the schemas that it keeps to come first."""
    applied = list(_applied(root, schemas, value))
    if isinstance(value, list):
        return [ordered(root, [part for one in applied for part in _of_item(one, n)], x) for n, x in enumerate(value)]
    if not isinstance(value, dict):
        return value
    names = dict.fromkeys(name for one in applied for name in one.get("properties") or ())
    names |= dict.fromkeys(name for one in applied for name in one.get("required") or () if isinstance(name, str))
    first = [name for name in names if name in value]
    return {
        name: ordered(root, [part for one in applied for part in _of_property(one, name)], value[name])
        for name in first + [name for name in value if name not in names]
    }


def _applied(root: Any, schemas: list[Any], value: Any) -> Iterator[dict[str, Any]]:
    """Schemas and those that they apply to the same value."""
    waiting, seen = list(schemas), set[int]()
    while waiting:
        schema = waiting.pop(0)
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        inner = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword) or ()]
        inner += [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
        inner += list((schema.get("dependencies") or {}).values())
        waiting = [_target(root, schema), *sorted(inner, key=lambda part: not _fits(root, part, value)), *waiting]


def _fits(root: Any, schema: Any, value: Any) -> bool:
    definitions = {key: root[key] for key in root if key not in schema} if isinstance(schema, dict) else {}
    inner = {**{key: x for key, x in definitions.items() if key in ("definitions", "$defs")}, **dict(schema or {})}
    return isinstance(schema, dict) and bool(jsonschema.Draft202012Validator(inner).is_valid(value))


def _target(root: Any, schema: dict[str, Any]) -> Any:
    found, reference = root, schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].replace("~1", "/").replace("~0", "~").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _of_property(schema: dict[str, Any], name: str) -> list[Any]:
    own = [schema["properties"][name]] if name in (schema.get("properties") or ()) else []
    own += [part for pattern, part in (schema.get("patternProperties") or {}).items() if re.search(pattern, name)]
    return own or [schema.get("additionalProperties")]


def _of_item(schema: dict[str, Any], index: int) -> list[Any]:
    items = schema.get("items")
    first = items if isinstance(items, list) else schema.get("prefixItems") or []
    return [first[index] if index < len(first) else schema.get("additionalItems") if isinstance(items, list) else items]


TOKENIZER: Any = load_vocabulary(DEMO_MODEL, 2**18)
GRAMMARS, GUARD = Grammars(TOKENIZER), Guard(TOKENIZER)

if __name__ == "__main__":
    sys.exit(main())
