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
from lopa_ascend.serve.openai.fields import CALL, INSTEAD, ignoring
from lopa_ascend.text.tool_calls import ToolCallReader, call_grammar
from lopa_ascend.types import Grammar

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


def _check_parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuses what describes no object: the arguments of a call are one."""
    if schema is not None and schema.get("type", "object") != "object":
        raise ValueError(f"must be a JSON Schema with the type 'object', got the type {shown(schema['type'])}")
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
    "Whether the answer calls functions: none, auto (the model decides; the default with tools), required, or the named "
    "one. Calls that are forced keep to the functions' schemas, also with a chat template that knows no tools."
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
    paths: Sequence[str] = ()
    """For each function the field that holds its parameters."""

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

    def schemas(self) -> dict[str, Json]:
        """By name of each function that may be called: the schema of its arguments."""
        nothing: Json = {"properties": {}, "additionalProperties": False}
        return {
            function.name: {"type": "object", **(nothing if function.parameters is None else function.parameters)}
            for function in self.functions
            if not self.named or function.name == self.choice
        }

    def grammar(self, answer: str | None = None) -> Grammar:
        """What the whole answer must be: calls, or a text with the JSON Schema ``answer`` in their place."""
        several = self.parallel and not self.named
        return Grammar("grammar", call_grammar(self.schemas(), several=several, otherwise=answer))

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self.schemas().keys(), self.is_forced)


NO_TOOLS = Tools()


def chat_tools(
    tools: Sequence[ChatTool] | None, choice: str | ChatToolChoice | None, *, parallel: bool | None
) -> Tools:
    """The functions of a chat completion.

    Raises:
        ParameterError: a name occurs twice, or ``tool_choice`` does not fit the functions.
    """
    functions = [tool.function for tool in tools or ()]
    name = choice.function.name if isinstance(choice, ChatToolChoice) else choice
    return _tools(functions, "function.", name, "tool_choice.function.name", isinstance(choice, ChatToolChoice), parallel)


def response_tools(
    tools: Sequence[ResponseTool] | None, choice: str | ResponseToolChoice | None, *, parallel: bool | None
) -> Tools:
    """The functions of a response. Raises as ``chat_tools`` does."""
    name = choice.name if isinstance(choice, ResponseToolChoice) else choice
    return _tools(tools or (), "", name, "tool_choice.name", isinstance(choice, ResponseToolChoice), parallel)


def _tools(
    functions: Sequence[Function], place: str, choice: str | None, field: str, named: bool, parallel: bool | None
) -> Tools:
    seen: dict[str, int] = {}
    for index, function in enumerate(functions):
        if (first := seen.setdefault(function.name, index)) != index:
            raise ParameterError(f"tools[{index}].{place}name", f"is {function.name!r}, as is that of tools[{first}]")
    if named and choice not in seen:
        known = ", ".join(map(repr, seen)) or "no function"
        raise ParameterError(field, f"is {shown(choice)}; tools has {known}")
    if choice == "required" and not seen:
        raise ParameterError("tool_choice", "'required' needs tools")
    if choice == "none":
        return NO_TOOLS
    paths = [f"tools[{index}].{place}parameters" for index in range(len(functions))]
    return Tools(functions, choice or "auto", parallel is not False, named, paths)


# ---- calls in a conversation -----------------------------------------------------------------------------------------


class CalledFunction(Body):
    name: str
    arguments: str = Field(description="JSON of an object.")

    def as_template_input(self, field: str) -> Json:
        """The call as chat templates take it.

        Raises:
            ParameterError: the arguments are no JSON object.
        """
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ParameterError(f"{field}.arguments", f"must be JSON of an object, got {shown(self.arguments)}")
        return {"name": self.name, "arguments": arguments}


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

    def as_template_input(self, field: str) -> Json:
        return template_call(self.id, self.function.as_template_input(f"{field}.function"))


def template_call(call_id: str | None, function: Json) -> Json:
    """A call as chat templates take it in an assistant's message."""
    return {"type": "function", "function": function, **({} if call_id is None else {"id": call_id})}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
