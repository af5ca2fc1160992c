"""Schemas and expressions by seed, whose texts are bounded, and what says whether an answer keeps to one."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]

Form = Any
"""A value of ``structured_outputs``."""


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of every supported kind of keyword; at most three levels deep."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "multiple"]
    kinds += ["object", "array", "anyOf", "tuple"] * (3 if depth == 0 else 1 if depth < 3 else 0)
    return _MAKERS[rng.choice(kinds)](rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "is_ok", "tags", "unit price", 'a "b"', "\u00e9t\u00e9", "x"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 1000)}


_PATTERNS = ("^[a-z]{2,8}$", "^(GET|PUT) /[a-z0-9/]{0,10}$", "^\\d{3}-\\d{4}$", "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$")
_FORMATS = ("date", "date-time", "time", "uuid", "ipv4")
_MAKERS = {
    "string": lambda rng, _: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)},
    "integer": _number,
    "number": lambda rng, _: {"type": "number", "minimum": 0, "maximum": rng.choice([1, 99.5])},
    "boolean": lambda rng, _: {"type": "boolean"},
    "null": lambda rng, _: {"type": ["null", "boolean"]},
    "enum": lambda rng, _: {
        "enum": rng.sample(["red", "re d", 3, 4.5, None, "\u00e9", True, ["a"]], rng.randint(1, 5))
    },
    "const": lambda rng, _: {"const": rng.choice(["fixed text", 12, {"kind": "a", "n": [1, 2]}])},
    "pattern": lambda rng, _: {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 20},
    "format": lambda rng, _: {"type": "string", "format": rng.choice(_FORMATS)},
    "multiple": lambda rng, _: {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0, "maximum": 500},
    "object": _object,
    "array": lambda rng, depth: {
        "type": "array",
        "items": schema(rng, depth + 1),
        "minItems": rng.randint(0, 1),
        "maxItems": rng.randint(1, 3),
    },
    "anyOf": lambda rng, depth: {"anyOf": [schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]},
    "tuple": lambda rng, depth: {
        "type": "array",
        "prefixItems": [schema(rng, depth + 1) for _ in range(2)],
        "items": False,
        "minItems": 2,
    },
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
"""A recursive schema."""


def regex(rng: random.Random, depth: int = 0) -> str:
    """An expression that Python reads in the same way."""
    atoms = ["a", "b7", "[a-f]", "[^x-z\\n]", "[0-9]", "[A-Z_]", "\\.", "\u00e9", " "]
    parts = []
    for _ in range(rng.randint(1, 4)):
        nested = depth < 2 and rng.random() < 0.4
        part = f"({regex(rng, depth + 1)}|{regex(rng, depth + 1)})" if nested else rng.choice(atoms)
        if rng.random() < 0.5:
            part = f"(?:{part}){rng.choice(['?', '{1,3}', '{2}', '{0,4}'])}"
        parts.append(part)
    return "".join(parts)


def forms(num_schemas: int, num_regexes: int) -> list[Form]:
    """So many of each, and one each of the other kinds."""
    found: list[Form] = [{"json": TREE}, {"choice": ["yes", "no", 'no, "never"']}]
    found.append(
        {"grammar": 'start: "let " NAME " = " sum\nsum: NUM (" + " NUM)~0..3\nNAME: /[a-z]{1,4}/\nNUM: /[0-9]{1,2}/'}
    )
    found += [{"json": schema(random.Random(f"schema {seed}"))} for seed in range(num_schemas)]
    found += [{"regex": regex(random.Random(f"regex {seed}"))} for seed in range(num_regexes)]
    return found


def check(form: Form, text: str) -> None:
    """Raises if a text does not keep to a grammar."""
    [(kind, value)] = form.items()
    if kind == "json":
        jsonschema.validate(json.loads(text), value, jsonschema.Draft202012Validator)
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict), text
    elif kind == "choice":
        assert text in value, text
    else:
        pattern = value if kind == "regex" else r"let [a-z]{1,4} = [0-9]{1,2}( \+ [0-9]{1,2}){0,3}"
        assert re.fullmatch(pattern, text), (value, text)
