"""What pydantic does not say of a request body: ranges, and fields without effect.

Which values go together is said in words: tools multiply such rules out, and no schema expresses a sum.

For readers and tools only: the values are checked by ``DecodingParams``, the engine's limits and ``options``. A test
holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from lopa_ascend.config import MIN_TEMPERATURE

Json = dict[str, Any]
Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that are taken with these values, or null, and refused with any other."""

UNSUPPORTED = "Not supported: taken only with a value that changes nothing."


def ranged(low: float | None = None, high: float | None = None, description: str | None = None) -> Any:
    """A field that may be absent, with a range that others check."""
    ranges: Json = {name: limit for name, limit in (("minimum", low), ("maximum", high)) if limit is not None}
    return Field(None, description=description, json_schema_extra=ranges)


def temperature(description: str) -> Any:
    """The field of that name: 0 or a range, or absent."""
    rule: Json = {"anyOf": [{"type": "null"}, {"const": 0}, {"minimum": MIN_TEMPERATURE, "maximum": 100}]}
    return Field(None, description=description, json_schema_extra={"allOf": [rule]})


def one_of(choices: tuple[str, ...]) -> Any:
    """A field that may be absent, with choices that others check."""
    return Field(None, json_schema_extra={"enum": [None, *choices]})


NULL: Json = {"type": "null"}
PROMPT_OR_MESSAGES: Json = {
    "anyOf": [
        {"properties": {"prompt": {"type": "string"}, "messages": NULL}, "required": ["prompt"]},
        {"properties": {"messages": {"type": "array"}, "prompt": NULL}, "required": ["messages"]},
    ]
}


def documenting(unsupported: Neutral, rule: Json | None = None, **replaced: Json) -> Callable[[Json], None]:
    """For ``json_schema_extra``: adds fields and a rule, and replaces the schemas of fields."""

    def extend(schema: Json) -> None:
        for name, values in unsupported.items():
            schema["properties"][name] = {"enum": [None, *values], "description": UNSUPPORTED}
        schema["properties"] |= replaced
        if rule is not None:
            schema["allOf"] = [rule]

    return extend
