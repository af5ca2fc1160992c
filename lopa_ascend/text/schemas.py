"""The parts of a JSON schema with their places, and a schema whose objects are closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath, printed

Schema = Any
"""An object, or true or false."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema for each of several names."""
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords with a list of schemas, or of these "items" with one."""
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_KEYWORDS = (*_NAMED, *_LISTED, *_SINGLE)
MAX_DEPTH = 100
MAX_VALUES = 4096
"""Most values of "enum", as of choices."""


def parts(schema: Schema, place: FieldPath = ()) -> Iterator[tuple[FieldPath, Schema]]:
    """A schema and all schemas in it, each with its place. Raises ParameterError without a path if it is too deep."""
    yield place, schema
    if not isinstance(schema, dict):
        return
    if len(place) > 2 * MAX_DEPTH:
        raise ParameterError((), f"has more than {MAX_DEPTH} levels at {printed(place)[:100]}...")
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            for name, part in value.items():
                yield from parts(part, (*place, keyword, name))
        elif keyword in _LISTED and isinstance(value, list):
            for index, part in enumerate(value):
                yield from parts(part, (*place, keyword, index))
        elif keyword in _SINGLE:
            yield from parts(value, (*place, keyword))


_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
"""Keywords by which several schemas may say something of one object: with "properties" beside them each does."""
_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
"""Keywords that say which further properties an object has."""


def closed(schema: Schema) -> Schema:
    """The schema with closed objects: they have the properties that it names alone, unless it says otherwise of any
    object, or several schemas together describe one."""
    for _, part in parts(schema):
        if not isinstance(part, dict):
            continue
        several = part.get("allOf")
        if "if" in part or (isinstance(several, list) and len(several) > 1):
            return schema
        if "properties" in part and not part.keys().isdisjoint(_COMBINING):
            return schema
    return _closed(schema)


def _closed(value: Any, keyword: str = "") -> Any:
    if isinstance(value, list):
        return [_closed(item) for item in value] if keyword in _LISTED else value
    if not isinstance(value, dict):
        return value
    if keyword in _NAMED:
        return {name: _closed(part) for name, part in value.items()}
    inner = {name: _closed(part, name) if name in _KEYWORDS else part for name, part in value.items()}
    is_open = "properties" not in value or not value.keys().isdisjoint(_OPENING)
    return inner if is_open else {**inner, "additionalProperties": False}


def parts_alone(schema: Schema) -> Iterator[tuple[FieldPath, Schema]]:
    """For each part of which llguidance compiles something: its place, and that alone."""
    found = ((place, _alone(part)) for place, part in parts(schema) if isinstance(part, dict))
    return ((place, alone) for place, alone in found if alone)


def _alone(part: dict[str, Any]) -> Schema:
    alone = {keyword: part[keyword] for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in part}
    patterns = part.get("patternProperties")
    return {**alone, "patternProperties": dict.fromkeys(patterns, True)} if isinstance(patterns, dict) else alone
