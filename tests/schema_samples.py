"""JSON schemas by seed, of all keywords that restrict a value, and values that may keep to them."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "x-c", "d")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 5, 7, 2.5, 0.5, -0.5, 10, 100, 2**60 + 1, 2**60),
    *("", "a", "b", "ab", "x-c", "\u00e9", [], [1], [1, 2], [1, "a"], ["a", "a"], [None, 2, 3]),
    *({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": "a"}, {"x-c": 1}, {"a": 1, "x-c": "b"}, {"d": []}),
    *({"a": 1, "b": 1, "x-c": 1}, {"a": {"a": 1}}, {"zz": 1}, {"b": True, "zz": "a"}),
]
_TYPES = [
    "null",
    "boolean",
    "integer",
    "number",
    "string",
    "array",
    "object",
    ["string", "null"],
    ["integer", "object"],
]
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS: list[dict[str, Any]] = [
    *({"minLength": 1}, {"maxLength": 1}, {"maxLength": 2, "minLength": 1}),
    *({"pattern": "^a"}, {"pattern": "b$|^x"}, {"pattern": "^.?$"}),
]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema, which may refer to two others in it."""
    if depth > 3 or rng.random() < 0.06:
        return rng.random() < 0.6
    kinds = ["type", "number", "text", "array", "object", "object", "const", "enum"]
    kinds += ["anyOf", "allOf", "oneOf", "not", "if", "dependent", "contains", "ref"] if depth < 3 else []
    found: dict[str, Any] = {}
    for kind in rng.choices(kinds, k=rng.randint(1, 3)):
        found |= _keywords(rng, kind, depth + 1)
    if depth == 0:
        found["$defs"] = {"p": random_schema(rng, 3), "q": random_schema(rng, 3)}
    return found


def _keywords(rng: random.Random, kind: str, depth: int) -> dict[str, Any]:
    if kind in ("anyOf", "allOf", "oneOf"):
        return {kind: [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        one = {"items": random_schema(rng, depth), "prefixItems": [random_schema(rng, depth)]}
        return rng.choice(
            [one, {"items": one["items"]}, {"minItems": rng.randint(0, 2)}, {"maxItems": rng.randint(0, 2)}]
        )
    if kind == "object":
        return _object(rng, depth)
    if kind == "if":
        return {"if": random_schema(rng, depth), "then": random_schema(rng, depth)}
    simple: dict[str, Any] = {
        "type": {"type": rng.choice(_TYPES)},
        "number": {rng.choice(_BOUNDS): rng.choice([-1, 0, 1, 2, 2.5, 5, 2**60, 7.25])},
        "text": rng.choice(_TEXTS),
        "const": {"const": rng.choice(VALUES)},
        "enum": {"enum": rng.sample(VALUES, 3)},
        "ref": {"$ref": rng.choice(["#/$defs/p", "#/$defs/q"])},
    }
    if kind in simple:
        return simple[kind]
    part = random_schema(rng, depth)
    return {"dependentSchemas": {"b": part}, "dependentRequired": {"a": ["b"]}} if kind == "dependent" else {kind: part}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    pattern = rng.choice(["^x-", "a|b", "^[a-c]$"])
    return rng.choice(
        [
            {"properties": {name: random_schema(rng, depth) for name in rng.sample(NAMES, 2)}},
            {"required": rng.sample(NAMES, rng.randint(1, 2))},
            {"additionalProperties": random_schema(rng, depth)},
            {"patternProperties": {pattern: random_schema(rng, depth)}},
            {"propertyNames": rng.choice([{"maxLength": 1}, {"enum": ["a", "b"]}])},
            {"minProperties": rng.randint(1, 2)},
            {"maxProperties": rng.randint(0, 3)},
        ]
    )
