"""The decoding parameters as fields of requests, with their JSON Schema.

Schemas are for readers and tools. ``DecodingParams`` and the engine's limits check the values; a test compares both.
Descriptions alone say which values go together: tools would expand such rules into every combination, and JSON Schema
cannot limit a sum, such as that of prompt and answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, create_model

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.decodings import DecodingName, Variant
from lopa_ascend.config.kinds import (
    AUTO,
    Boolean,
    Choice,
    Integer,
    IntegerOrAuto,
    Kind,
    Number,
    Strings,
    StructuredOutputs,
    TokenIds,
    TokenNumbers,
    Words,
)
from lopa_ascend.config.settings import Parameter
from lopa_ascend.serve.http.encoding import Json

M = TypeVar("M", bound=BaseModel)

JSON_TYPES: dict[type[Kind], Any] = {
    Boolean: bool,
    Choice: str,
    DecodingName: str,
    Integer: int,
    IntegerOrAuto: int | str,
    Number: float,
    StructuredOutputs: dict[str, Any],
    Variant: str,
    Strings: str | Annotated[list[str], Field(fail_fast=True)],
    TokenIds: int | Annotated[list[int], Field(fail_fast=True)],
    TokenNumbers: dict[str, float],
    Words: Annotated[list[str | Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)],
}
"""Type of a field. Lists stop at their first wrong item: pydantic would make an error for each of thousands."""


def _json_type(kind: Kind) -> Any:
    """The kind checks lists and texts first, for it says how long they may be, and gives them their stored form."""
    decoded = JSON_TYPES[type(kind)]
    return Annotated[decoded, AfterValidator(kind.checked)] if kind.many else decoded


def with_decoding_parameters(model: type[M]) -> type[M]:
    """A class decorator that adds a field for every decoding parameter, also of installed packages, and for each of its
    aliases; none for parameters with ``own_field``. Type checkers do not see them: use ``getattr``."""
    fields: dict[str, Any] = {}
    for name, parameter in DecodingParams.all_parameters().items():
        if parameter.own_field:
            continue
        texts = {name: _description(parameter)} | dict.fromkeys(parameter.aliases, f"The same as {name}.")
        for field, text in texts.items():
            value = Field(None, description=text, json_schema_extra=_range(parameter))
            fields[field] = (_json_type(parameter.kind) | None, value)
    return create_model(model.__name__, __base__=model, __module__=model.__module__, **fields)


def _range(parameter: Parameter) -> Json:
    """The keywords that state the allowed values."""
    match parameter.kind:
        case Choice() as choice:
            return {"enum": [None, *choice.known]}
        case IntegerOrAuto(low, high):
            return {"minimum": low, "maximum": high, "pattern": f"^{AUTO}$"}
        case Integer(low, high):
            maximum = {} if high is None else {"maximum": high}
            return {"minimum": min((low, *parameter.off)), **maximum}
        case Number(low, high):
            return {"minimum": low, "maximum": high}
        case Strings(max_items, max_characters):
            sizes = {"minLength": 1, "maxLength": max_characters, "maxItems": max_items}
            return {**sizes, "items": {"type": "string", "minLength": 1}}
        case TokenIds(max_items):
            return {"minimum": TokenIds.token.low, "items": {"minimum": TokenIds.token.low}, "maxItems": max_items}
        case Words(max_texts, max_characters) as words:
            text = {"type": "string", "minLength": 1, "maxLength": max_characters}
            ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
            return {"maxItems": max_texts, "items": {"anyOf": [text, {**ids, "maxItems": words.max_tokens}]}}
        case StructuredOutputs(max_characters, max_choices):
            text = {"type": "string", "minLength": 1, "maxLength": max_characters}
            choices = {"type": "array", "items": text, "minItems": 1, "maxItems": max_choices}
            forms = {"json": {"type": ["object", "boolean", "string"]}, "json_object": {"const": True}}
            forms |= {"regex": text, "choice": choices, "grammar": text}
            return {"properties": forms, "additionalProperties": False, "minProperties": 1, "maxProperties": 1}
        case TokenNumbers(number, max_items):
            values = {"type": "number", "minimum": number.low, "maximum": number.high}
            keys = {"propertyNames": {"pattern": "^[0-9]+$"}, "maxProperties": max_items}
            return {**keys, "additionalProperties": values}
    return {}


def _description(parameter: Parameter) -> str:
    text = f"{parameter.help[0].upper()}{parameter.help[1:]}."
    if parameter.off:
        text += f" Off: {' or '.join(map(str, parameter.off))}."
    default = parameter.default_text or json.dumps(parameter.default)
    return f"{text} Default, unless the server has another: {default}."
