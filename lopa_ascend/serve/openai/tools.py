"""Functions that an answer may call: as requests list them, and calls in conversations and answers.

Chat completions and Responses write the same things with other names. Here they become one form.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.serve.http.body import WITHOUT_EFFECT, Body, unsupported
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.serve.openai.fields import CALL, CALL_ITEM, CALLED, INSTEAD, ignoring
from lopa_ascend.text.schemas import closed, parts
from lopa_ascend.text.tool_calls import ToolCallReader, call_grammar
from lopa_ascend.types import GenerationOutput

MAX_TOOLS = 128
"""Most functions of a request; OpenAI's limit."""
MAX_CALLS = 2**10
"""Most calls of one message."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")

# ---- functions of a request ------------------------------------------------------------------------------------------


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 64 letters, digits, '_' or '-'")
    return name


TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def _check_parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuses what describes no object, as arguments are one, and what is no JSON Schema. Without a forced call nothing
    else reads a schema but the model."""
    if schema is None:
        return None
    if schema.get("type", "object") != "object":
        raise ValueError(f"must be a JSON Schema with the type 'object', got the type {shown(schema['type'])}")
    for place, part in parts(schema):
        if not isinstance(part, dict | bool):
            raise ValueError(f"{place} must be a JSON Schema, got {shown(part)}")
        kind = part.get("type", "object") if isinstance(part, dict) else "object"
        for name in kind if isinstance(kind, list) else [kind]:
            if name not in TYPES:
                raise ValueError(f"{place}/type must be one of {', '.join(TYPES)}, got {shown(name)}")
    return schema


Name = Annotated[str, AfterValidator(_check_name)]


class Function(Body):
    """What a model is told of a function."""

    name: Name = Field(description="1 to 64 letters, digits, '_' or '-'.")
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_check_parameters)] = Field(
        None, description="JSON Schema of the arguments, an object. Default: there are none."
    )
    strict: bool | None = Field(
        None, description=f"{WITHOUT_EFFECT} Calls that tool_choice forces always have such arguments."
    )


class ChatTool(Body):
    type: Literal["function"]
    function: Function

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        _refuse_type(values)


class ResponseTool(Function):
    type: Literal["function"]

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        _refuse_type(values)


def _refuse_type(values: dict[str, Any]) -> None:
    """Refuses tools that are no functions, before their fields would be called unknown."""
    if (kind := values.get("type")) not in (None, "function"):
        raise unsupported("type", f"must be 'function', got {shown(kind)}", "describe it as a function, and call it")


class NamedFunction(Body):
    name: str


class ChatToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        _refuse_type(values)


class ResponseToolChoice(NamedFunction):
    type: Literal["function"]

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        _refuse_type(values)


def _check_choice(choice: Any) -> Any:
    if isinstance(choice, str) and choice not in CHOICES:
        raise ValueError(f"must be {' or '.join(map(repr, CHOICES))} or name a function")
    return choice


Choice = Annotated[str, AfterValidator(_check_choice), Field(json_schema_extra={"enum": [*CHOICES]})]
TOOL_CHOICE = (
    "Whether the answer calls functions: none, auto (the model decides; the default), required, or the named one. "
    "Forced calls keep to the functions' schemas, also if the chat template knows no tools."
)
PARALLEL = "Whether the answer may have several calls. Default: true."


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call."""

    functions: Sequence[Function] = ()
    choice: str = "auto"
    """"auto", "required", or the name of the function to call."""
    parallel: bool = True
    named: bool = False
    """``choice`` is a name."""
    place: str = ""
    """Where a function stands in an item of ``tools``: "function." or "" for the item itself."""

    @property
    def is_forced(self) -> bool:
        return self.named or self.choice == "required"

    def as_template_input(self) -> list[Json]:
        """The functions as chat templates take them."""
        given = [function.model_dump(include={"name", "description", "parameters"}) for function in self.functions]
        return [
            {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
            for function in given
        ]

    def callable(self) -> dict[str, tuple[str, Json]]:
        """By name of each function that may be called: the field that has its parameters, and their JSON Schema."""
        return {
            function.name: (f"tools[{index}].{self.place}parameters", _arguments(function.parameters))
            for index, function in enumerate(self.functions)
            if not self.named or function.name == self.choice
        }

    def grammar(self, answer: Json | None = None) -> str:
        """What the whole answer must be, in Lark: calls, or JSON with the schema ``answer`` in their place."""
        several = self.parallel and not self.named
        schemas = {name: schema for name, (_, schema) in self.callable().items()}
        return call_grammar(schemas, several=several, otherwise=answer)

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self.callable().keys(), self.is_forced, self.parallel)


NO_TOOLS = Tools()


def _arguments(schema: Json | None) -> Json:
    """The schema of a call's arguments."""
    arguments: Json = closed({"type": "object", "properties": {}, **(schema or {})})
    return arguments


def chat_tools(
    tools: Sequence[ChatTool] | None, choice: str | ChatToolChoice | None, *, parallel: bool | None
) -> Tools:
    """The functions of a chat completion, which may be called.

    Raises:
        ParameterError: a name occurs twice, or ``tool_choice`` does not fit the functions.
    """
    functions = [tool.function for tool in tools or ()]
    if isinstance(choice, ChatToolChoice):
        _check_known(functions, choice.function.name, "tool_choice.function.name")
        return Tools(_distinct(functions, "function."), choice.function.name, named=True, place="function.")
    return _unnamed(_distinct(functions, "function."), choice, "function.", parallel=parallel is not False)


def response_tools(
    tools: Sequence[ResponseTool] | None, choice: str | ResponseToolChoice | None, *, parallel: bool | None
) -> Tools:
    """The functions of a response. Raises as ``chat_tools`` does."""
    functions = tools or ()
    if isinstance(choice, ResponseToolChoice):
        _check_known(functions, choice.name, "tool_choice.name")
        return Tools(_distinct(functions, ""), choice.name, named=True)
    return _unnamed(_distinct(functions, ""), choice, "", parallel=parallel is not False)


def _distinct(functions: Sequence[Function], place: str) -> Sequence[Function]:
    seen: dict[str, int] = {}
    for index, function in enumerate(functions):
        if (first := seen.setdefault(function.name, index)) != index:
            raise ParameterError(f"tools[{index}].{place}name", f"is {function.name!r}, as is that of tools[{first}]")
    return functions


def _check_known(functions: Sequence[Function], name: str, field: str) -> None:
    known = [function.name for function in functions]
    if name not in known:
        raise ParameterError(field, f"is {shown(name)}; tools has {', '.join(map(repr, known)) or 'no function'}")


def _unnamed(functions: Sequence[Function], choice: str | None, place: str, *, parallel: bool) -> Tools:
    if choice == "required" and not functions:
        raise ParameterError("tool_choice", "'required' needs tools")
    if choice == "none":
        return NO_TOOLS
    return Tools(functions, choice or "auto", parallel, place=place)


# ---- calls in a conversation -----------------------------------------------------------------------------------------


def _check_arguments(arguments: str) -> str:
    try:
        is_object = isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError("must be JSON of an object")
    return arguments or "{}"


Arguments = Annotated[str, AfterValidator(_check_arguments), Field(description="JSON of an object.")]


@ignoring(CALLED)
class CalledFunction(Body):
    name: str
    arguments: Arguments


@ignoring(CALL)
class MessageCall(Body):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        if (kind := values.get("type")) not in (None, "function"):
            raise unsupported("type", f"must be 'function', got {shown(kind)}", INSTEAD["tool_calls"])

    def as_template_input(self) -> Json:
        return template_call(self.id, self.function.name, self.function.arguments)


@ignoring(CALL_ITEM)
class CallItem(Body):
    """A call in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments

    def as_template_input(self) -> Json:
        return template_call(self.call_id, self.name, self.arguments)


def template_call(call_id: str | None, name: str, arguments: str) -> Json:
    """A call as chat templates take it in an assistant's message."""
    function = {"name": name, "arguments": json.loads(arguments)}
    return {"type": "function", "function": function, **({} if call_id is None else {"id": call_id})}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


# ---- calls in an answer ----------------------------------------------------------------------------------------------


class Calls:
    """The calls of one answer, as chat completions have them.

    Args:
        tools: what the answer may call.
    """

    def __init__(self, tools: Tools):
        self._reader = tools.reader()
        self._ids: list[str] = []
        """Of the calls that have been sent."""
        self._num_sent = 0
        """Pieces of the arguments of the last of these that have been sent."""

    def push(self, text: str, *, is_final: bool) -> tuple[str, list[Json]]:
        """What is new: of the text beside calls, and of calls. A call's first piece has its name, and the others pieces
        of its arguments.

        Args:
            text: of the model, so far.
            is_final: nothing follows.
        """
        new = self._reader.push(text, is_final=is_final)
        pieces = []
        for index, call in enumerate(self._reader.calls[max(0, len(self._ids) - 1) :], max(0, len(self._ids) - 1)):
            if index == len(self._ids):
                self._ids.append(new_call_id())
                self._num_sent = 0
                head = {"index": index, "id": self._ids[index], "type": "function"}
                pieces.append({**head, "function": {"name": call.name, "arguments": ""}})
            if arguments := "".join(call.pieces[self._num_sent :]):
                pieces.append({"index": index, "function": {"arguments": arguments}})
            self._num_sent = len(call.pieces)
        return new, pieces

    def whole(self) -> list[Json]:
        """All calls so far."""
        return [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(self._ids, self._reader.calls, strict=True)
        ]

    def is_complete(self, index: int) -> bool:
        """Whether a call has all of its arguments."""
        return self._reader.calls[index].is_complete

    def finish_reason(self, output: GenerationOutput) -> str:
        """ "tool_calls" if the answer ends with whole calls, else the reason of ``output``."""
        calls = self._reader.calls
        return (
            "tool_calls" if output.finish_reason == "stop" and calls and calls[-1].is_complete else output.finish_reason
        )
