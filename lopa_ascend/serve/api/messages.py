"""/v1/messages, Anthropic's Messages API: a message of blocks, or the events of a stream that build it up.

Nothing is kept between requests. All input and output is text, what the model thinks, and calls of tools; fields and
blocks that ask for more are refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.config.files import shown
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import LopaStats
from lopa_ascend.serve.api.chat import Content, TextPart, joined
from lopa_ascend.serve.api.fields import HARMLESS, IN_MESSAGES_REQUEST, INSIDE
from lopa_ascend.serve.api.request import EFFORT, MAX_MESSAGES, VARIABLES, GenerationRequest, Planner
from lopa_ascend.serve.api.structured import AskedForm
from lopa_ascend.serve.api.tools import (
    MAX_TOOLS,
    Calls,
    Function,
    OtherTool,
    Parameters,
    ResponseToolChoice,
    Tools,
    note_others,
    template_call,
    tools_of,
)
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import WITHOUT_EFFECT, Body, unsupported
from lopa_ascend.serve.http.encoding import Json, Writer, as_line
from lopa_ascend.text.reasoning import num_reasoning_tokens
from lopa_ascend.text.schemas import closed
from lopa_ascend.text.tool_calls import arguments_of
from lopa_ascend.types import GenerationOutput, Progress, Thinking, Update

EVENTS = (
    "With stream: true. Each event is named by its type and holds JSON: message_start; for each block of the content "
    "content_block_start, a content_block_delta for every piece (text_delta, thinking_delta, input_json_delta, and a "
    "signature_delta at the end of what the model thought) and content_block_stop; message_delta with the stop_reason "
    "and the usage, and message_stop. A ping may come between any two. If the request fails, an error event comes "
    "instead of what is left."
)
BILLING = "x-anthropic-billing-header:"
"""Begins a line of the system's text that Claude Code writes for Anthropic's accounts. The model is not shown it: it
differs in every request, so no two would share a beginning in the prefix cache."""
SIGNATURE = "unsigned"
"""Clients send a block of thinking back only with a signature."""
MAX_BLOCKS = 2**10
MODES = {"auto": "auto", "any": "required", "none": "none"}
"""Types of ``tool_choice`` that name no tool, as ``Tools`` calls them."""

# ---- messages --------------------------------------------------------------------------------------------------------


class ThinkingBlock(Body):
    """What the model thought before an earlier answer, for chat templates that read ``reasoning_content``."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description=WITHOUT_EFFECT)


class RedactedBlock(Body):
    """Thoughts that Anthropic has encrypted. The model is not shown them."""

    type: Literal["redacted_thinking"]
    data: str | None = Field(None, description=WITHOUT_EFFECT)


class CallBlock(Body):
    """A call in an earlier answer."""

    ignored = INSIDE
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)
    caller: dict[str, Any] | None = Field(None, description=f"{WITHOUT_EFFECT} The model alone calls tools.")


class ResultBlock(Body):
    """The result of a call."""

    ignored = INSIDE
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = ""
    is_error: bool | None = Field(None, description='true: the model is shown "Error: " before the content.')

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        if values.get("content") == []:
            del values["content"]


BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Types of the blocks of a message, by its role."""


def _kind_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


def _tag_of(block: Any) -> str:
    """The tag of a block, in the form that locations of errors leave out."""
    return f"[{_kind_of(block)}]"


AnyBlock = (
    Annotated[TextPart, Tag("[text]")]
    | Annotated[CallBlock, Tag("[tool_use]")]
    | Annotated[ResultBlock, Tag("[tool_result]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedBlock, Tag("[redacted_thinking]")]
)
Blocks = Annotated[list[Annotated[AnyBlock, Discriminator(_tag_of)]], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class Turn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"] = Field(
        description="Messages in a row with the same role are one. The system may speak between others."
    )
    content: str | Blocks = Field(description="Texts are joined by line breaks.")
    clear_at: Literal["next_user_message", "never"] | None = Field(
        default=None, description="next_user_message: not shown to the model once the user has spoken again."
    )

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        role, content = values.get("role"), values.get("content")
        if not isinstance(role, str) or role not in BLOCKS or not isinstance(content, list):
            return
        for index, block in enumerate(content):
            if (kind := _kind_of(block)) not in BLOCKS[role]:
                message = f"must be {' or '.join(map(repr, BLOCKS[role]))} in a message of the role {role!r}"
                instead = None if kind is None or kind in BLOCKS["assistant"] else "send text alone"
                raise unsupported(f"content[{index}].type", f"{message}, got {shown(kind)}", instead)

    @property
    def blocks(self) -> Sequence[AnyBlock]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content


# ---- fields that allow little ----------------------------------------------------------------------------------------


class MessageTool(Function):
    """A tool that the client runs."""

    ignored = INSIDE
    type: Literal["custom"] | None = None
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,128}$")
    parameters: Parameters = Field(alias="input_schema", description="JSON Schema of the input, an object.")


def _tag_of_tool(tool: Any) -> str:
    return "[custom]" if _kind_of(tool) in (None, "custom") else "[other]"


AnyTool = Annotated[
    Annotated[MessageTool, Tag("[custom]")] | Annotated[OtherTool, Tag("[other]")], Discriminator(_tag_of_tool)
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="With the type tool.")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="The answer has one call at most. Default: false."
    )


class ThinkingOptions(Body):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"] = Field(
        description="enabled, disabled: the variable enable_thinking, for chat templates that read it. disabled: the "
        "answer has no blocks of thinking. Others: as if left out."
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="Most tokens of thinking, if the model thinks, as max_thinking_tokens."
    )
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None, description="omitted: blocks of thinking have no text. Default: they have all."
    )
    block_binding: dict[str, Any] | None = Field(None, description=WITHOUT_EFFECT)


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = Field(None, description=EFFORT)
    format: JsonFormat | None = Field(None, description="The answer's form.")
    task_budget: dict[str, Any] | None = Field(None, description=WITHOUT_EFFECT)


# ---- the request -----------------------------------------------------------------------------------------------------


class MessagesRequest(GenerationRequest):
    """A conversation, whose next message is the answer."""

    ignored = IN_MESSAGES_REQUEST
    harmless = {**HARMLESS, "n": (1,), "return_token_ids": (False,), "stream_options": ()}
    is_conversation = True

    messages: Annotated[list[Turn], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[list[TextPart], Field(max_length=MAX_BLOCKS, fail_fast=True)] | None = Field(
        None, description="A system message before the others. Blocks are joined by line breaks."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=2**53,
        description="Most tokens of the answer. If fewer fit into the model's context, it has those, and may end with "
        "the stop_reason model_context_window_exceeded. Default: as on the other routes.",
    )
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description="The same as stop.")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None,
        description="Tools that the answer may call. Tools that Anthropic defines are left out; a request that has no "
        "others is refused.",
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether the answer calls tools: auto (the model decides; the default), any, the named one (tool), "
        "or none. Forced calls keep to the tools' schemas, also if the chat template knows no tools.",
    )
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="An older place of output_config.format.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    thread: dict[str, Any] | None = Field(
        None, description="Refused with an error_code by which clients know that they must send whole conversations."
    )

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        choice = values.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "none":
            values.pop("tools", None)
        elif isinstance(tools := values.get("tools"), list) and tools:
            if all(_tag_of_tool(tool) == "[other]" for tool in tools):
                message = f"must be 'custom', got {shown(_kind_of(tools[0]))}"
                raise unsupported("tools[0].type", message, "describe it with an input_schema, and run it yourself")
            note_others(tools, "custom")

    def as_template_input(self) -> list[Json]:
        system = [self.system] if isinstance(self.system, str) else [part.text for part in self.system or ()]
        shown_parts = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in system]
        turns = [Turn(role="system", content="\n".join(filter(None, shown_parts)))] if any(shown_parts) else []
        last_user = max((index for index, turn in enumerate(self.messages) if turn.role == "user"), default=-1)
        turns += [
            turn
            for index, turn in enumerate(self.messages)
            if turn.clear_at != "next_user_message" or index > last_user
        ]
        messages: list[Json] = []
        for turn in turns:
            for block in turn.blocks:
                is_result = isinstance(block, ResultBlock)
                if is_result or not messages or messages[-1]["role"] != turn.role:
                    role = "tool" if is_result else turn.role
                    messages.append({"role": role, "content": [], "reasoning_content": [], "tool_calls": []})
                _add(messages[-1], block)
        return list(map(_with_joined_texts, messages))

    @property
    def callable(self) -> Tools:
        functions = {index: tool for index, tool in enumerate(self.tools or ()) if isinstance(tool, MessageTool)}
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type == "any" and not functions:
            raise ParameterError("tool_choice", "'any' needs tools")
        if choice.type == "tool" and choice.name is None:
            raise ParameterError(("tool_choice", "name"), "is missing")
        named = ResponseToolChoice(type="function", name=choice.name or "")
        mode = MODES.get(choice.type, named)
        tools = tools_of(functions, (), mode, parallel=not choice.disable_parallel_tool_use)
        return replace(tools, schema="input_schema")

    def plan(self, planner: Planner) -> list[Request]:
        if self.thread is not None:
            message = (
                "thread: nothing is kept between requests; send the whole conversation in messages, without thread"
            )
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param="thread", code="thread_unsupported_request")
        if self.messages[-1].role == "assistant":
            message = (
                "is 'assistant': this server does not continue a message that has begun. Instead, end with one of the "
                "user, and ask for a form by output_config.format, or send the text so far to /v1/completions"
            )
            raise ParameterError(("messages", len(self.messages) - 1, "role"), message)
        changed, names = self._as_elsewhere(planner)
        if self.max_tokens is not None:  # a default gets smaller if the prompt leaves less room
            planner = replace(planner, decoding={**planner.decoding, "max_new_tokens": self.max_tokens})
        try:
            return planner.conversation(
                self.model_copy(update={"max_tokens": None, **changed}),
                self.as_template_input(),
                "messages",
                tools=self.callable,
                response_format=self._format(),
                variables={**self._thinks(planner), **(self.chat_template_kwargs or {})},
                effort=self.output_config.effort if self.output_config else None,
            )
        except ParameterError as error:
            raise error.renamed({"max_new_tokens": "max_tokens", **names}) from None

    def _as_elsewhere(self, planner: Planner) -> tuple[Json, Mapping[str, str | FieldPath]]:
        """The fields of other routes that this one's stand for; and by their names, where errors find them."""
        changed: Json = {}
        names: dict[str, str | FieldPath] = {}
        if self.stop_sequences is not None:
            if getattr(self, "stop", None) is not None:
                raise ParameterError("stop", "means the same as stop_sequences: send one of them")
            changed["stop"], names["stop"] = self.stop_sequences, "stop_sequences"
        budget = self.thinking.budget_tokens if self.thinking and self.thinking.type == "enabled" else None
        is_limit = budget is not None and budget < (self.max_tokens or budget + 1)
        if is_limit and planner.prompts.can_think and getattr(self, "max_thinking_tokens", None) is None:
            changed["max_thinking_tokens"] = budget
            names["max_thinking_tokens"] = ("thinking", "budget_tokens")
        return changed, names

    def _thinks(self, planner: Planner) -> Json:
        """enable_thinking, if ``thinking`` asks for it and the chat template reads it."""
        asked = {"enabled": True, "disabled": False}.get(self.thinking.type if self.thinking else "")
        tokenizer = planner.prompts.tokenizer
        if asked is None or tokenizer is None or not tokenizer.template_reads("enable_thinking"):
            return {}
        return {"enable_thinking": asked}

    def _format(self) -> AskedForm | None:
        field: FieldPath
        asked, field = self.output_format, ("output_format", "schema")
        if self.output_config is not None and self.output_config.format is not None:
            if asked is not None:
                raise ParameterError("output_format", "means the same as output_config.format: send one of them")
            asked, field = self.output_config.format, ("output_config", "format", "schema")
        return None if asked is None else AskedForm(field, "json", closed(asked.schema_))

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> MessageWriter:
        (choice,) = choices
        return MessageWriter(model, self, choice, planner.prompts.thinking(choice.prompt))


def _add(message: Json, block: AnyBlock) -> None:
    """A message's texts are lists."""
    match block:
        case TextPart():
            message["content"].append(block.text)
        case ThinkingBlock():
            message["reasoning_content"].append(block.thinking)
        case CallBlock():
            arguments = json.dumps(block.input, ensure_ascii=False)
            message["tool_calls"].append(template_call(block.id, block.name, arguments))
        case ResultBlock():
            message["content"].append(("Error: " if block.is_error else "") + joined(block.content))
            message["tool_call_id"] = block.tool_use_id


def _with_joined_texts(message: Json) -> Json:
    """Joins the texts of a message, and leaves out what it has none of."""
    texts = {name: "\n".join(message[name]) for name in ("content", "reasoning_content") if message.get(name)}
    others = {name: value for name, value in message.items() if value}
    return {**others, "content": "", **texts}


# ---- the answer, as /openapi.json documents it -----------------------------------------------------------------------


class TokenCount(BaseModel):
    input_tokens: int


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThoughtBlock(BaseModel):
    """What a model that can think thought before it answered."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Of no meaning here: clients send a block back only with one.")


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="Of a call that was cut: its text so far, under INVALID_JSON.")


class ThinkingTokens(BaseModel):
    thinking_tokens: int = Field(description="Tokens of what the model thought, with their marks.")


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Input tokens that did not come from the prefix cache.")
    cache_creation_input_tokens: int = Field(description="Always 0: writing to the prefix cache is not counted.")
    cache_read_input_tokens: int = Field(description="Input tokens that came from it. Known at the end of a stream.")
    output_tokens: int = Field(description="Tokens of the answer, with those of a stop sequence that ended it.")
    output_tokens_details: ThinkingTokens | None = Field(None, description="Of a model that can think.")
    service_tier: Literal["standard"]


class MessageObject(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThoughtBlock | ToolUseBlock]
    stop_reason: str | None = Field(
        description="end_turn, max_tokens (also after /abort_request), stop_sequence, tool_use or "
        "model_context_window_exceeded; null in message_start."
    )
    stop_sequence: str | None
    usage: MessageUsage
    lopa: LopaStats | None = Field(None, description="At the end of a stream in message_delta, as seed.")
    seed: int | None = Field(None, description="Seed of the sampling, for repeating it; null without sampling.")


# ---- writing it ------------------------------------------------------------------------------------------------------

PING: Json = {"type": "ping"}


def _framed(event: Json) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + as_line(event) + b"\n\n"


class MessageWriter(Writer):
    """Writes one message. ``thinking`` is None for a model that does not think."""

    end = b""
    comment = _framed(PING)

    def __init__(self, model: str, request: MessagesRequest, choice: Request, thinking: Thinking | None = None):
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._thinking, self._num_prompt = thinking, len(choice.prompt)
        self._calls = Calls(request.callable, thinking)
        asked = request.thinking
        self._shows_blocks = asked is None or asked.type != "disabled"
        """``_shows_thoughts``: also with their text."""
        self._shows_thoughts = asked is None or asked.display != "omitted"
        self._is_cut = request.max_tokens is not None and choice.params.max_new_tokens < request.max_tokens
        """The model's context limits the answer."""
        self._block = ""
        """Type of the block that is being written."""
        self._num_blocks = 0
        self._has_answered = False
        """There is a block besides what the model thought."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        (output,) = outputs
        reasoning, text, _ = self._calls.push(output.text or "", is_final=True)
        calls = self._calls.whole()
        content: list[Json] = []
        if reasoning and self._shows_blocks:
            thinking = reasoning if self._shows_thoughts else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
        if text or not calls:
            content.append({"type": "text", "text": text})
        for call in calls:
            arguments = call["function"]["arguments"]
            values = arguments_of(arguments)
            block = self._call(call)
            content.append({**block, "input": {"INVALID_JSON": arguments} if values is None else values})
        return {**self._head, "content": content, **self._end(output), **self._numbers(output)}

    def opening(self) -> list[Json]:
        end = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(None)}
        return [{"type": "message_start", "message": {**self._head, "content": [], **end}}, PING]

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        events: list[Json] = []
        reasoning, text, calls = self._calls.push(progress.text, is_final=progress.output is not None)
        if reasoning and self._shows_blocks:
            events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            events += [self._delta("thinking_delta", thinking=reasoning)] if self._shows_thoughts else []
        if text:
            events += [*self._begin({"type": "text", "text": ""}), self._delta("text_delta", text=text)]
        for call in calls:
            events += self._begin(self._call(call)) if "id" in call else []
            if arguments := call["function"]["arguments"]:
                events.append(self._delta("input_json_delta", partial_json=arguments))
        if (output := progress.output) is not None:
            events += [] if self._has_answered else self._begin({"type": "text", "text": ""})
            end = self._end(output)
            usage = end.pop("usage")
            events += [*self._close(), {"type": "message_delta", "delta": end, "usage": usage, **self._numbers(output)}]
            events.append({"type": "message_stop"})
        return events

    def failure(self, error: ApiError) -> list[Json]:
        return [error.messages_body()]

    def frame(self, event: Json) -> bytes:
        return _framed(event)

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def _call(self, call: Json) -> Json:
        call_id = f"toolu_{call['id'].removeprefix('call_')}"
        return {"type": "tool_use", "id": call_id, "name": call["function"]["name"], "input": {}}

    def _begin(self, block: Json) -> list[Json]:
        """Begins a block, unless one of its kind is being written; each call has its own."""
        if block["type"] == self._block != "tool_use":
            return []
        events = self._close()
        self._block = block["type"]
        self._num_blocks += 1
        self._has_answered |= self._block != "thinking"
        return [*events, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, kind: str, **values: str) -> Json:
        delta = {"type": kind, **values}
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._block:
            return []
        events = [self._delta("signature_delta", signature=SIGNATURE)] if self._block == "thinking" else []
        self._block = ""
        return [*events, {"type": "content_block_stop", "index": self._num_blocks - 1}]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _end(self, output: GenerationOutput) -> Json:
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = "end_turn" if stop is None else "stop_sequence"
        if self._calls.finish_reason(output) == "tool_calls":
            reason, stop = "tool_use", None
        elif output.finish_reason != "stop":
            is_full = output.finish_reason == "length" and self._is_cut
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stop, "usage": self._usage(output)}

    def _usage(self, output: GenerationOutput | None) -> Json:
        cached = 0 if output is None else output.cached_tokens
        usage: Json = {
            "input_tokens": self._num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if output is None else len(output.tokens),
        }
        if self._thinking is not None and output is not None:
            tokens = num_reasoning_tokens(self._thinking, output)
            usage["output_tokens_details"] = {"thinking_tokens": tokens}
        return {**usage, "service_tier": "standard"}

    def _numbers(self, output: GenerationOutput) -> Json:
        """What Anthropic's API does not have."""
        lopa = {"num_forwards": output.num_forwards, "tokens_per_forward": output.tokens_per_forward}
        return {"lopa": lopa, "seed": output.seed}
