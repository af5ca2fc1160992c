"""Functions that an answer may call: as requests list them, and calls in conversations and answers.

Chat completions and Responses write the same things with other names. Here they become one form.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.config.files import shown
from lopa_ascend.serve.api.fields import INSIDE, INSTEAD
from lopa_ascend.serve.http.body import Body, unsupported
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.text.reasoning import ReasoningReader
from lopa_ascend.text.schemas import closed, parts
from lopa_ascend.text.tool_calls import ToolCallReader, arguments_of, call_grammar
from lopa_ascend.types import GenerationOutput, Thinking

logger = logging.getLogger("uvicorn.error")

MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_CALLS = 2**10
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")

# ---- functions of a request ------------------------------------------------------------------------------------------


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be 1 to 64 letters, digits, '_' or '-', got {shown(name)}")
    return name


TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def _check_parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Arguments are an object, so the schema must describe one. Checked here: an unforced call never compiles it."""
    if schema is None:
        return None
    if schema.get("type", "object") != "object":
        raise ValueError(f"must be a JSON Schema with the type 'object', got the type {shown(schema['type'])}")
    for place, part in parts(schema):
        if not isinstance(part, dict | bool):
            raise ParameterError(place, f"must be a JSON Schema, got {shown(part)}")
        kind = part.get("type", "object") if isinstance(part, dict) else "object"
        for name in kind if isinstance(kind, list) else [kind]:
            if name not in TYPES:
                raise ParameterError((*place, "type"), f"must be one of {', '.join(TYPES)}, got {shown(name)}")
    return schema


Name = Annotated[str, AfterValidator(_check_name)]
Parameters = Annotated[dict[str, Any] | None, AfterValidator(_check_parameters)]


class Function(Body):
    """What a model is told of a function."""

    ignored = INSIDE
    name: Name = Field(description="1 to 64 letters, digits, '_' or '-'.")
    description: str | None = None
    parameters: Parameters = Field(
        None, description="JSON Schema of the arguments, an object. Default: there are none."
    )


class ChatTool(Body):
    ignored = INSIDE
    type: Literal["function"]
    function: Function


class ResponseTool(Function):
    type: Literal["function"]


class LeftOut(Body):
    """What may have any fields, because it is left out."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def complete_schema(cls, schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = True


class OtherTool(LeftOut):
    """A tool that is no function. Codex and others always send some. The model cannot call them, so the prompt leaves
    them out."""

    type: str = Field(description="Left out, with a warning in the log.")


def _kind_of_tool(tool: Any) -> str:
    """The tag of a tool, in the form that locations of errors leave out."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "[function]" if kind in (None, "function") else "[other]"


Other = Annotated[OtherTool, Tag("[other]")]
AnyChatTool = Annotated[Annotated[ChatTool, Tag("[function]")] | Other, Discriminator(_kind_of_tool)]
AnyResponseTool = Annotated[Annotated[ResponseTool, Tag("[function]")] | Other, Discriminator(_kind_of_tool)]


def note_others(tools: Sequence[Any], own: str = "function") -> None:
    """Warns of tools of another type than ``own``."""
    others = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") not in (None, own)]
    if others:
        warn_once(", ".join(shown(f"{tool['type']} {tool.get('name', '')}".strip()) for tool in others))


@lru_cache(maxsize=32)
def warn_once(names: str) -> None:
    logger.warning("left out of requests, because the model can call functions alone: %s", names)


def _refuse_type(field: str, kind: object) -> None:
    raise unsupported(field, f"must be 'function', got {shown(kind)}", "describe it as a function, and call it")


class NamedFunction(Body):
    name: str


class ChatToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ResponseToolChoice(NamedFunction):
    type: Literal["function"]


class ChatAllowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChatToolChoice], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatAllowedTools(Body):
    """Some of the functions: the request is as one that has no others."""

    type: Literal["allowed_tools"]
    allowed_tools: ChatAllowed

    @property
    def mode(self) -> str:
        return self.allowed_tools.mode


class ResponseAllowedTools(Body):
    """As ``ChatAllowedTools``."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _check_choice(choice: Any) -> Any:
    if isinstance(choice, str) and choice not in CHOICES:
        raise ValueError(f"must be {' or '.join(map(repr, CHOICES))} or name a function, got {shown(choice)}")
    return choice


def _kind_of_choice(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", "mode")
    return f"[{kind or 'function'}]"


def _check_kind(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") not in (None, "function", "allowed_tools"):
        _refuse_type("type", choice["type"])
    return choice


Mode = Annotated[str, AfterValidator(_check_choice), Field(json_schema_extra={"enum": [*CHOICES]}), Tag("[mode]")]
AnyChatChoice = Annotated[
    Mode | Annotated[ChatToolChoice, Tag("[function]")] | Annotated[ChatAllowedTools, Tag("[allowed_tools]")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_check_kind),
]
AnyResponseChoice = Annotated[
    Mode | Annotated[ResponseToolChoice, Tag("[function]")] | Annotated[ResponseAllowedTools, Tag("[allowed_tools]")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_check_kind),
]
TOOL_CHOICE = (
    "Whether the answer calls functions: none, auto (the model decides; the default), required, the named one, or some "
    "of them (allowed_tools). "
    "Forced calls keep to the functions' schemas, also if the chat template knows no tools."
)
PARALLEL = "Whether the answer may have several calls. Default: true."


@dataclass(frozen=True)
class Tools:
    functions: Mapping[int, Function] = field(default_factory=dict)
    """By place in ``tools``."""
    choice: str = "auto"
    """"auto", "required", or the name of the function to call."""
    parallel: bool = True
    named: bool = False
    place: FieldPath = ()
    """Where a function stands in an item of ``tools``; () for the item itself."""
    schema: str = "parameters"
    """The field with the schema of the arguments."""

    @property
    def is_forced(self) -> bool:
        return self.named or self.choice == "required"

    def as_template_input(self) -> list[Json]:
        given = [
            function.model_dump(include={"name", "description", "parameters"}) for function in self.functions.values()
        ]
        return [
            {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
            for function in given
        ]

    def callable(self) -> dict[str, tuple[FieldPath, Json]]:
        """By name of each function that may be called: the field with its parameters, and their JSON Schema."""
        return {
            function.name: (("tools", index, *self.place, self.schema), _arguments(function.parameters))
            for index, function in self.functions.items()
            if not self.named or function.name == self.choice
        }

    def grammar(self, answer: Json | None = None) -> str:
        """The whole answer, in Lark: calls, or JSON with the schema ``answer`` in their place."""
        several = self.parallel and not self.named
        schemas = {name: schema for name, (_, schema) in self.callable().items()}
        return call_grammar(schemas, several=several, otherwise=answer)

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self.callable().keys(), self.is_forced, self.parallel)


NO_TOOLS = Tools()


def _arguments(schema: Json | None) -> Json:
    arguments: Json = closed({"type": "object", "properties": {}, **(schema or {})})
    return arguments


NamingChoice = ChatToolChoice | ResponseToolChoice | ChatAllowedTools | ResponseAllowedTools
AnyChoice = str | NamingChoice | None


def chat_tools(tools: Sequence[ChatTool | OtherTool] | None, choice: AnyChoice, *, parallel: bool | None) -> Tools:
    functions = {index: tool.function for index, tool in enumerate(tools or ()) if isinstance(tool, ChatTool)}
    return tools_of(functions, ("function",), choice, parallel=parallel is not False)


def response_tools(
    tools: Sequence[ResponseTool | OtherTool] | None, choice: AnyChoice, *, parallel: bool | None
) -> Tools:
    functions = {index: tool for index, tool in enumerate(tools or ()) if isinstance(tool, ResponseTool)}
    return tools_of(functions, (), choice, parallel=parallel is not False)


def tools_of(functions: Mapping[int, Function], place: FieldPath, choice: AnyChoice, *, parallel: bool) -> Tools:
    """Functions by their place in ``tools``, and what the request says about calls of them."""
    known: dict[str, int] = {}
    for index, function in functions.items():
        if (first := known.setdefault(function.name, index)) != index:
            message = f"is {function.name!r}, as is that of tools[{first}]"
            raise ParameterError(("tools", index, *place, "name"), message)
    if choice is None or isinstance(choice, str):
        mode = choice or "auto"
    else:
        names = _names_in(choice)
        for field_, name in names.items():
            if name not in known:
                message = f"is {shown(name)}; tools has {', '.join(map(repr, known)) or 'no function'}"
                raise ParameterError(("tool_choice", *field_), message)
        if isinstance(choice, ChatToolChoice | ResponseToolChoice):
            (name,) = names.values()
            return Tools(functions, name, named=True, place=place)
        mode = choice.mode
        functions = {index: function for index, function in functions.items() if function.name in names.values()}
    if mode == "required" and not functions:
        raise ParameterError("tool_choice", "'required' needs tools")
    return Tools(functions, mode, parallel, place=place) if functions and mode != "none" else NO_TOOLS


def _names_in(choice: NamingChoice | ChatAllowed) -> dict[FieldPath, str]:
    """The functions that a choice names, by field."""
    if isinstance(choice, ChatToolChoice):
        return {("function", "name"): choice.function.name}
    if isinstance(choice, ResponseToolChoice):
        return {("name",): choice.name}
    if isinstance(choice, ChatAllowedTools):
        return {("allowed_tools", *field): name for field, name in _names_in(choice.allowed_tools).items()}
    items = enumerate(_names_in(tool).items() for tool in choice.tools)
    return {("tools", index, *field): name for index, names in items for field, name in names}


# ---- calls in a conversation -----------------------------------------------------------------------------------------


def _arguments_text(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


ArgumentsText = Annotated[
    str,
    BeforeValidator(_arguments_text),
    Field(description="JSON of an object. Other text, such as that of a call that was cut, is shown as it is."),
]


class CalledFunction(Body):
    ignored = INSIDE
    name: str
    arguments: ArgumentsText = ""


class MessageCall(Body):
    """A call in an earlier answer."""

    ignored = INSIDE
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        if (kind := values.get("type")) not in (None, "function"):
            raise unsupported("type", f"must be 'function', got {shown(kind)}", INSTEAD["tool_calls"])

    def as_template_input(self) -> Json:
        return template_call(self.id, self.function.name, self.function.arguments)


class CallItem(Body):
    """A call in an earlier response."""

    ignored = INSIDE
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: ArgumentsText

    def as_template_input(self) -> Json:
        return template_call(self.call_id, self.name, self.arguments)


def template_call(call_id: str | None, name: str, arguments: str) -> Json:
    """As chat templates take it: with an object, or else the text of the arguments."""
    values = arguments_of(arguments)
    function = {"name": name, "arguments": arguments if values is None else values}
    return {"type": "function", "function": function, **({} if call_id is None else {"id": call_id})}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


# ---- calls in an answer ----------------------------------------------------------------------------------------------


class Calls:
    """The calls of one answer in the form of chat completions, and the text beside them. ``thinking`` None: in the
    text."""

    def __init__(self, tools: Tools, thinking: Thinking | None = None):
        self._reasoning = None if thinking is None else ReasoningReader(thinking)
        self._reader = tools.reader()
        self._ids: list[str] = []
        """Of the calls that have been sent."""
        self._num_sent = 0
        """Pieces of the last one's arguments that have been sent."""

    @property
    def has_thought(self) -> bool:
        reader = self._reasoning
        return reader is not None and reader.has_thought and reader.begin is not None

    def push(self, text: str, *, is_final: bool) -> tuple[str, str, list[Json]]:
        """What is new in ``text``, all so far: reasoning, text beside calls, and calls. A call's first piece has its
        name, the others pieces of its arguments."""
        reasoning, begin = "", 0
        if self._reasoning is not None:
            reasoning = self._reasoning.push(text, is_final=is_final)
            begin = len(text) if self._reasoning.begin is None else self._reasoning.begin
        new = self._reader.push(text[begin:], is_final=is_final)
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
        return reasoning, new, pieces

    def whole(self) -> list[Json]:
        return [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(self._ids, self._reader.calls, strict=True)
        ]

    def is_complete(self, index: int) -> bool:
        return self._reader.calls[index].is_complete

    def finish_reason(self, output: GenerationOutput) -> str:
        """ "tool_calls" if the answer ends with whole calls, else the reason of ``output``."""
        calls = self._reader.calls
        return (
            "tool_calls" if output.finish_reason == "stop" and calls and calls[-1].is_complete else output.finish_reason
        )
