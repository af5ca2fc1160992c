"""What a JSON schema says before it is compiled: its parts with their places, and whether they have an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lopa_ascend.config import ParameterError

Schema = Any
"""An object, or true or false."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema for each of several names."""
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords with a list of schemas, or of these "items" with one."""
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
OPTIONS: Any = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
"""How llguidance takes every schema: JSON is compact, and what it cannot check is refused."""
_KEYWORDS = (*_NAMED, *_LISTED, *_SINGLE)
MAX_DEPTH = 100
MAX_VALUES = 4096
"""Most values of "enum", as of choices."""


def parts(schema: Schema, place: str = "#") -> Iterator[tuple[str, Schema]]:
    """A schema and all schemas in it, each with its place as a JSON pointer.

    Raises:
        ParameterError: it is too deep.
    """
    yield place, schema
    if not isinstance(schema, dict):
        return
    if place.count("/") > 2 * MAX_DEPTH:
        raise ParameterError("structured_outputs", f"json: has more than {MAX_DEPTH} levels at {place[:100]}...")
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            for name, part in value.items():
                yield from parts(part, f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}")
        elif keyword in _LISTED and isinstance(value, list):
            for index, part in enumerate(value):
                yield from parts(part, f"{place}/{keyword}/{index}")
        elif keyword in _SINGLE:
            yield from parts(value, f"{place}/{keyword}")


_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
"""Keywords by which several schemas may say something of one object: with "properties" beside them each does."""
_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
"""Keywords that say which further properties an object has."""


def closed(schema: Schema) -> Schema:
    """The schema with objects that have no other properties than those it names, unless it says of any that they do, or
    unless several schemas together say which properties one object has."""
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
    """A schema, or what stands under a keyword of one."""
    if isinstance(value, list):
        return [_closed(item) for item in value] if keyword in _LISTED else value
    if not isinstance(value, dict):
        return value
    if keyword in _NAMED:
        return {name: _closed(part) for name, part in value.items()}
    inner = {name: _closed(part, name) if name in _KEYWORDS else part for name, part in value.items()}
    is_open = "properties" not in value or not value.keys().isdisjoint(_OPENING)
    return inner if is_open else {**inner, "additionalProperties": False}


def check_schema(schema: Schema) -> None:
    """Refuses a schema some part of which only a text without end would keep to.

    Raises:
        ParameterError: with the place.
    """
    found = dict(parts(schema))
    for place, part in found.items():
        values = part.get("enum") if isinstance(part, dict) else None
        if isinstance(values, list) and len(values) > MAX_VALUES:
            message = f"json: has {len(values)} values in enum at {place}; at most {MAX_VALUES}"
            raise ParameterError("structured_outputs", message)
    ending: set[str] = set()
    grows = True
    while grows:
        new = {place for place, part in found.items() if place not in ending and _ends(part, place, found, ending)}
        ending |= new
        grows = bool(new)
    if endless := next((place for place in found if place not in ending), None):
        raise ParameterError("structured_outputs", f"json: no text that keeps to it at {endless} has an end")


def _ends(part: Schema, place: str, found: Mapping[str, Schema], ending: set[str]) -> bool:
    """Whether a part has a text with an end, if the parts ``ending`` have one."""
    if not isinstance(part, dict) or "enum" in part or "const" in part:
        return True
    target = part.get("$ref")
    if target in found and target not in ending:
        return False
    for keyword, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        choices = part.get(keyword)
        if isinstance(choices, list) and choices:
            if not enough(f"{place}/{keyword}/{index}" in ending for index in range(len(choices))):
                return False
    if part.get("type") == "object" and isinstance(part.get("required"), list):
        names = [str(name).replace("~", "~0").replace("/", "~1") for name in part["required"]]
        needed = [f"{place}/properties/{name}" for name in names]
        return all(name in ending for name in needed if name in found)
    if part.get("type") == "array" and isinstance(part.get("minItems"), int):
        needed = [f"{place}/prefixItems/{index}" for index in range(part["minItems"])]
        known = [name for name in needed if name in found]
        if len(known) < part["minItems"]:
            known.append(f"{place}/items")
        return all(name in ending for name in known if name in found)
    return True


def parts_alone(schema: Schema, most: int = 1000) -> Iterator[tuple[str, Schema]]:
    """The first parts of a schema, each with its place. In a part those below are ``true``, and it has no reference to
    another one."""
    found = dict(parts(schema))
    for place, part in list(found.items())[:most]:
        if isinstance(part, dict):
            yield place, _alone(part, found)


def _alone(part: dict[str, Any], found: Mapping[str, Schema]) -> Schema:
    """A part, in which the parts below are ``true``, and without a reference to another one."""
    alone: dict[str, Any] = {}
    for keyword, value in part.items():
        if keyword == "$ref" and value in found:
            continue
        if keyword in _NAMED and isinstance(value, dict):
            alone[keyword] = dict.fromkeys(value, True)
        elif keyword in _LISTED and isinstance(value, list):
            alone[keyword] = [True] * len(value)
        elif keyword in _SINGLE and isinstance(value, dict):
            alone[keyword] = True
        else:
            alone[keyword] = value
    return alone
