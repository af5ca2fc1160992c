"""The body of a request for a response, as OpenAI's Responses API has it.

Nothing is kept between requests, there are no tools, and all input and output is text: fields that ask for more are
refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from lopa_ascend.config.files import shown
from lopa_ascend.serve.api.protocol import MAX_MESSAGES, UNSUPPORTED, WITHOUT_EFFECT, Body, GenerationRequest, Message
from lopa_ascend.serve.api.schema import NULL, Json, NeutralValues, documenting

# Fields that this server does not act on, each with the values besides null that change nothing.
UNSUPPORTED_RESPONSE: NeutralValues = {
    **{name: values for name, values in UNSUPPORTED.items() if name != "response_format"},
    "tools": ([],),
    "max_tool_calls": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "n": (1,),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "return_token_ids": (False,),
    "moderation": (),
    "background_options": (),
}

# ---- input -----------------------------------------------------------------------------------------------------------

RESPONSE_PART_FIELDS = {
    "input_text": frozenset(("type", "text")),
    "output_text": frozenset(("type", "text", "annotations", "logprobs")),
}
"""The parts of a message's content by type, each with its fields. An earlier answer's other fields have no effect."""


def _response_text(content: object) -> str:
    """The text of a message, which may be given in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_text_of_part(part) for part in content)


def _text_of_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in RESPONSE_PART_FIELDS:
        raise ValueError('every part must be {"type": "input_text", "text": ...} or have the type "output_text"')
    if unknown := part.keys() - RESPONSE_PART_FIELDS[kind]:
        raise ValueError(f"a part of the type {kind} has no field {shown(min(unknown))}")
    if not isinstance(part.get("text"), str):
        raise ValueError("the text of a part must be a string")
    for name in part.keys() - {"type", "text"}:
        if not isinstance(part[name], list | None):
            raise ValueError(f"the {name} of a part must be a list or null")
    return str(part["text"])


def _part_schema(kind: str) -> Json:
    others = dict.fromkeys(sorted(RESPONSE_PART_FIELDS[kind] - {"type", "text"}), {"type": ["array", "null"]})
    fields = {"type": {"const": kind}, "text": {"type": "string"}, **others}
    return {"type": "object", "properties": fields, "required": ["type", "text"], "additionalProperties": False}


_PARTS = {"type": "array", "items": {"anyOf": [_part_schema(kind) for kind in RESPONSE_PART_FIELDS]}, "minItems": 1}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, _PARTS]}


class InputMessage(Body):
    """A message of the conversation: one of the client's, or an item of an earlier response's output."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer means the same as system.")
    content: Annotated[str, PlainValidator(_response_text), WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        description="Parts are joined by line breaks."
    )
    id: str | None = Field(None, description=WITHOUT_EFFECT)
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description=WITHOUT_EFFECT)
    phase: Literal["commentary", "final_answer"] | None = Field(None, description=WITHOUT_EFFECT)

    def as_template_input(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        return Message(role=self.role, content=self.content).as_template_input()


def _check_item(item: object) -> object:
    """Refuses items that are no messages, before their fields would be called unknown."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind not in (None, "message"):
        raise ValueError(f'items must be messages (type "message"); {shown(kind)} is not supported')
    return item


def _check_input(value: object) -> object:
    if not isinstance(value, str) and not (isinstance(value, list) and value):
        raise ValueError("must be a string or a list of messages")
    return value


Item = Annotated[InputMessage, BeforeValidator(_check_item)]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

# ---- fields that allow little ----------------------------------------------------------------------------------------


def _null(reason: str) -> PlainValidator:
    """Accepts null alone; ``reason`` explains it to clients."""

    def check(value: object) -> None:
        if value is not None:
            raise ValueError(f"must be null: {reason}")

    return PlainValidator(check)


def _check_format(value: object) -> object:
    if isinstance(value, dict) and value.get("type") != "text":
        raise ValueError('only {"type": "text"} is supported')
    return value


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: Annotated[TextFormat | None, BeforeValidator(_check_format)] = None
    verbosity: str | None = Field(None, description=WITHOUT_EFFECT)


class Reasoning(Body):
    effort: str | None = Field(default=None, description=WITHOUT_EFFECT)
    summary: str | None = Field(
        default=None, description=f"{WITHOUT_EFFECT} There is no reasoning apart from the answer."
    )
    generate_summary: str | None = Field(default=None, description=WITHOUT_EFFECT)


# ---- the request -----------------------------------------------------------------------------------------------------

NOT_KEPT = "this server keeps no responses; send the whole conversation in input"


MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
"""Most pairs in ``metadata``, and most characters of their names and values; OpenAI's limits."""


def _check_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Bounds what the server keeps and repeats."""
    pairs = (metadata or {}).items()
    if len(pairs) > MAX_PAIRS or any(len(name) > MAX_NAME or len(value) > MAX_VALUE for name, value in pairs):
        sizes = f"names of at most {MAX_NAME} and values of at most {MAX_VALUE} characters"
        raise ValueError(f"must have at most {MAX_PAIRS} pairs, {sizes}")
    return metadata


class ResponseRequest(GenerationRequest):
    """A conversation, whose next message is the answer."""

    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_RESPONSE))

    input: Annotated[str | Items, BeforeValidator(_check_input)] = Field(
        description="What the user says, or the messages of a conversation."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    metadata: Annotated[dict[str, str] | None, AfterValidator(_check_metadata)] = Field(
        None, description="The answer repeats it."
    )
    user: str | None = Field(None, max_length=MAX_VALUE, description="The answer repeats it.")
    store: bool | None = Field(
        None, description="Taken, and without effect: nothing is kept, and the answer says store: false."
    )
    previous_response_id: Annotated[None, _null(NOT_KEPT), WithJsonSchema(NULL)] = Field(
        None, description=f"Only null: {NOT_KEPT}."
    )
    tool_choice: Literal["none", "auto"] | None = Field(None, description="Without effect: there are no tools.")
    parallel_tool_calls: bool | None = Field(None, description="Without effect: there are no tools.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None

    def as_template_input(self) -> list[dict[str, str]]:
        """The conversation as the chat template takes it."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return system + [message.as_template_input() for message in self.input]
