"""Fields that ask for an answer in a form: OpenAI's response formats, and vLLM's older names of structured_outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath, printed
from lopa_ascend.serve.api.tools import Tools
from lopa_ascend.serve.http.body import WITHOUT_EFFECT, Body
from lopa_ascend.text.schemas import closed

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Fields that vLLM had before structured_outputs, and the form that each stands for."""
STRICT = f"{WITHOUT_EFFECT} Every answer keeps to the schema."


class NamedSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = Field(None, description=STRICT)


class ResponseFormat(Body):
    """What an answer of chat or completions must be: text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="With the type json_schema.")


class TextFormat(Body):
    """As ``ResponseFormat``, in the Responses API."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="With the type json_schema.")
    strict: bool | None = Field(None, description=STRICT)


@dataclass(frozen=True)
class AskedForm:
    field: FieldPath
    kind: str
    """A name in structured_outputs."""
    value: Any

    @property
    def parameter(self) -> dict[str, Any]:
        """The value of structured_outputs."""
        return {self.kind: self.value}


def asked_form(request: Body, format_: AskedForm | None, tools: Tools) -> AskedForm | None:
    """The form that ``format_``, structured_outputs or a field of ``GUIDED`` asks for, besides calls."""
    forms = [] if format_ is None else [format_]
    given: Mapping[str, Any] | None = getattr(request, "structured_outputs", None)
    if given is not None:
        forms += [
            AskedForm(("structured_outputs", kind), kind, value) for kind, value in given.items() if value is not None
        ]
    for field, kind in GUIDED.items():
        if (value := getattr(request, field)) is not None:
            forms.append(AskedForm((field,), kind, value))
    if len(forms) > 1:
        raise ParameterError(forms[1].field, f"cannot be combined with {printed(forms[0].field)}: send one of them")
    if not forms:
        return None
    (form,) = forms
    if tools.functions and form.kind not in ("json", "json_object"):
        message = "cannot be combined with tools: the answer may be a call, or JSON, so send a schema or no tools"
        raise ParameterError(form.field, message)
    return form


def texts_of(request: Body, *, with_logprobs: bool) -> Sequence[str]:
    """The texts that a valid request chooses from, if it asks for log probabilities."""
    given = getattr(request, "guided_choice", None) or (getattr(request, "structured_outputs", None) or {}).get(
        "choice"
    )
    return given or () if with_logprobs else ()


def placed(error: ParameterError, field: FieldPath) -> ParameterError:
    """A refusal of ``structured_outputs``, by the field instead of the parameter and the kind."""
    return error.at((*field, *error.path[2:]))


def calling_form(tools: Tools, answer: AskedForm | None) -> AskedForm:
    """Calls, or checked JSON in their place unless they are forced."""
    schema = None
    if answer is not None and not tools.is_forced:
        schema = {"type": "object"} if answer.kind == "json_object" else answer.value
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict):
            raise ParameterError(answer.field, "must be an object beside tools")
    field = ("tools",) if answer is None or tools.is_forced else answer.field
    return AskedForm(field, "grammar", tools.grammar(schema))


def response_form(asked: ResponseFormat | None) -> AskedForm | None:
    if asked is None:
        return None
    schema = None if asked.json_schema is None else asked.json_schema.schema_
    return _json_form(asked.type, schema, ("response_format", "json_schema"), "schema")


def text_form(asked: TextFormat | None) -> AskedForm | None:
    return None if asked is None else _json_form(asked.type, asked.schema_, ("text", "format", "schema"))


def _json_form(type_: str, schema: dict[str, Any] | None, field: FieldPath, *below: str) -> AskedForm | None:
    """A response format of a type; ``field``, or a name ``below`` it, has its schema."""
    if (type_ == "json_schema") != (schema is not None):
        raise ParameterError(field, "is missing" if schema is None else f"does not go with the type {type_!r}")
    if schema is not None:
        return AskedForm((*field, *below), "json", closed(schema))
    return AskedForm(field[:-1], "json_object", True) if type_ == "json_object" else None
