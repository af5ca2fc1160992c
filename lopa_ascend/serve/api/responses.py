"""/v1/responses, OpenAI's Responses API: a response object, or the events of a stream that build it up.

Nothing is kept between requests; text and calls of functions go in and out, and fields that ask for more are refused.
The output is what the model thought, one message with one part, its text, and an item for each call.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag

from lopa_ascend.config.files import shown
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import LopaStats
from lopa_ascend.serve.api.chat import Content, Message, joined
from lopa_ascend.serve.api.fields import HARMLESS, INSIDE
from lopa_ascend.serve.api.request import (
    EFFORT,
    MAX_MESSAGES,
    VARIABLES,
    GenerationRequest,
    Planner,
    tidy_tools,
)
from lopa_ascend.serve.api.structured import TextFormat, text_form
from lopa_ascend.serve.api.tools import (
    MAX_TOOLS,
    PARALLEL,
    TOOL_CHOICE,
    AnyResponseChoice,
    AnyResponseTool,
    CallItem,
    Calls,
    LeftOut,
    OtherTool,
    ResponseTool,
    Tools,
    response_tools,
    template_call,
    warn_once,
)
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import WITHOUT_EFFECT, Body, unsupported
from lopa_ascend.serve.http.encoding import Json, Writer, as_line
from lopa_ascend.text.reasoning import num_reasoning_tokens
from lopa_ascend.types import GenerationOutput, Progress, Thinking, Update

EVENTS = (
    "With stream: true. Each event is named by its type and holds JSON with a sequence_number: response.created, "
    "response.in_progress, response.output_item.added, response.content_part.added, a response.output_text.delta for "
    "every piece of text, response.output_text.done, response.content_part.done, response.output_item.done, and last "
    "response.completed or response.incomplete with the whole response. A call has "
    "response.function_call_arguments.delta and response.function_call_arguments.done in place of those of text, and "
    "what the model thought has response.reasoning_text.delta and response.reasoning_text.done. "
    "If the request fails, an error event and response.failed come instead of what is left."
)
STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
"""By finish reason."""
ITEM_STATUSES = ("in_progress", "completed")
"""A message has these too; otherwise it is incomplete."""

# ---- input -----------------------------------------------------------------------------------------------------------

ITEM_INSTEAD = {
    "item_reference": "send the message itself: this server keeps no responses (Vercel's AI SDK sends messages with "
    "store: false)",
}


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What a model thought before an earlier answer, for chat templates that read ``reasoning_content``."""

    ignored = INSIDE
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None


class OtherCallItem(Body):
    """A call of no function, in an earlier response of another server."""

    ignored = INSIDE
    type: Literal["custom_tool_call", "local_shell_call"]
    call_id: str
    name: str = "local_shell"
    input: str | None = None
    action: dict[str, Any] | None = None

    def as_template_input(self) -> Json:
        return template_call(self.call_id, self.name, json.dumps(self.action or {"input": self.input}))


class OtherItem(LeftOut):
    """What Codex and other servers add to a conversation, and this model can make nothing of."""

    type: Literal["additional_tools", "web_search_call"] = Field(description="Left out, with a warning in the log.")


class CallOutputItem(Body):
    """The result of a call."""

    ignored = INSIDE
    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str
    output: Content
    name: str | None = Field(None, description=WITHOUT_EFFECT)

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        if values.get("output") in (None, []):
            values["output"] = ""  # of a function that returns nothing

    def as_template_input(self) -> Json:
        """The message that tells the model the result."""
        return {"role": "tool", "content": joined(self.output), "tool_call_id": self.call_id}


ITEMS = {
    "message": Message,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": OtherCallItem,
    "custom_tool_call_output": CallOutputItem,
    "local_shell_call": OtherCallItem,
    "local_shell_call_output": CallOutputItem,
    "additional_tools": OtherItem,
    "web_search_call": OtherItem,
    "reasoning": ReasoningItem,
}


def _kind_of(item: Any) -> str:
    """The tag of an item's type, in the form that locations of errors leave out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"[{ITEMS[kind or 'message'].__name__}]"


def _check_item(item: object) -> object:
    """Refuses unknown types, before their fields would be called unknown."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind is not None and (not isinstance(kind, str) or kind not in ITEMS):
        instead = ITEM_INSTEAD.get(str(kind), "send calls of functions" if "call" in str(kind)[:100] else None)
        raise unsupported("type", f"must be {' or '.join(map(repr, ITEMS))}, got {shown(kind)}", instead)
    if kind == "function_call" and isinstance(item, dict) and item.get("arguments", "") is None:
        return {**item, "arguments": ""}
    return item


def _check_input(value: object) -> object:
    if not isinstance(value, str) and not (isinstance(value, list) and value):
        raise ValueError(f"must be a string or a list of items, got {shown(value)}")
    return value


AnyItem = (
    Annotated[Message, Tag("[Message]")]
    | Annotated[CallItem, Tag("[CallItem]")]
    | Annotated[CallOutputItem, Tag("[CallOutputItem]")]
    | Annotated[OtherCallItem, Tag("[OtherCallItem]")]
    | Annotated[OtherItem, Tag("[OtherItem]")]
    | Annotated[ReasoningItem, Tag("[ReasoningItem]")]
)
Item = Annotated[Annotated[AnyItem, Discriminator(_kind_of)], BeforeValidator(_check_item)]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

# ---- fields that allow little ----------------------------------------------------------------------------------------


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description=WITHOUT_EFFECT)


class Reasoning(Body):
    effort: str | None = Field(default=None, description=EFFORT)
    summary: str | None = Field(default=None, description=f"{WITHOUT_EFFECT} Reasoning is shown whole.")
    generate_summary: str | None = Field(default=None, description=WITHOUT_EFFECT)
    context: str | None = Field(default=None, description=WITHOUT_EFFECT)


# ---- the request -----------------------------------------------------------------------------------------------------

Include = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
"""Most pairs in ``metadata``, most characters of names and values; OpenAI's limits."""


def _check_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Bounds what the server keeps and repeats."""
    pairs = (metadata or {}).items()
    if len(pairs) > MAX_PAIRS or any(len(name) > MAX_NAME or len(value) > MAX_VALUE for name, value in pairs):
        sizes = f"names of at most {MAX_NAME} and values of at most {MAX_VALUE} characters"
        raise ValueError(f"must have at most {MAX_PAIRS} pairs, {sizes}, got {shown(metadata)}")
    return metadata


class ResponseRequest(GenerationRequest):
    """A conversation, whose next message is the answer."""

    harmless = {
        **HARMLESS,
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "context_management": (),
        "n": (1,),
        "stream_options": ({"include_obfuscation": False}, {"include_obfuscation": True}),
        "return_token_ids": (False,),
        "moderation": (),
        "background_options": (),
    }
    is_conversation = True

    input: Annotated[str | Items, BeforeValidator(_check_input)] = Field(
        description="What the user says, or the messages of a conversation."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    include: Annotated[list[Include], Field(fail_fast=True)] | None = Field(
        None, description="Without effect: there are no hosted tools, and reasoning is shown as text."
    )
    metadata: Annotated[dict[str, str] | None, AfterValidator(_check_metadata)] = Field(
        None, description="The answer repeats it."
    )
    user: str | None = Field(None, max_length=MAX_VALUE, description="The answer repeats it.")
    store: bool | None = Field(
        None, description="Taken, and without effect: nothing is kept, and the answer says store: false."
    )
    tools: Annotated[list[AnyResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: AnyResponseChoice | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL)
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)

    def as_template_input(self) -> list[Json]:
        """Calls belong to the assistant's message before them, reasoning to the one after it."""
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        reasoning: Json = {}
        for item in self.input:
            if isinstance(item, ReasoningItem):
                if item.content:
                    reasoning = {"reasoning_content": "\n".join(part.text for part in item.content)}
                continue
            if isinstance(item, OtherItem):
                warn_once(item.type)
                continue
            if isinstance(item, CallItem | OtherCallItem):
                if not messages or messages[-1]["role"] != "assistant" or reasoning:
                    messages.append({"role": "assistant", "content": "", **reasoning})
                messages[-1].setdefault("tool_calls", []).append(item.as_template_input())
            else:
                message = item.as_template_input()
                messages.append({**message, **(reasoning if message["role"] == "assistant" else {})})
            reasoning = {}
        return messages

    @property
    def callable(self) -> Tools:
        return response_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        tidy_tools(values)

    def plan(self, planner: Planner) -> list[Request]:
        response_format = text_form(self.text.format if self.text else None)
        messages = self.as_template_input()
        return planner.conversation(
            self,
            messages,
            "input",
            tools=self.callable,
            response_format=response_format,
            variables=self.chat_template_kwargs,
            effort=self.reasoning.effort if self.reasoning else None,
        )

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> ResponseWriter:
        (choice,) = choices
        return ResponseWriter(model, self, choice, planner.prompts.thinking(choice.prompt))


# ---- the answer, as /openapi.json documents it -----------------------------------------------------------------------


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[Any] = Field(description="Always empty.")


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What a model that can think thought before it answered."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any] = Field(description="Always empty.")
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Input tokens that came from the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: writing to the prefix cache is not counted.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = Field(description="Tokens of what the model thought, with their marks.")


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Tokens of the answer, with those of a stop string that ended it.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: Literal["server_error"]
    message: str


class ResponseObject(BaseModel):
    """A response. Fields of OpenAI's that this server has no value for are null or as OpenAI has them by default."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = Field(description="Set if the status is completed.")
    model: str
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"] = Field(
        description="incomplete: max_output_tokens ended the text; cancelled: /abort_request did."
    )
    incomplete_details: IncompleteDetails | None
    error: ResponseFailure | None = Field(description="Set in response.failed.")
    output: list[OutputReasoning | OutputMessage | OutputCall] = Field(
        description="What the model thought, if it did; then one message, unless there are only calls. None in "
        "response.created."
    )
    usage: ResponseUsage | None = Field(description="Null while the response is in progress, and if it failed.")
    lopa: LopaStats | None = Field(description="Null where usage is.")
    stop_reason: int | str | None = Field(
        description="The stop string, or the id of stop_token_ids, that ended the text; null at an EOS."
    )
    seed: int | None = Field(description="Seed of the sampling, for repeating it; null without sampling.")
    instructions: str | None
    metadata: dict[str, str]
    user: str | None
    temperature: float = Field(description="In effect, as are top_p and max_output_tokens.")
    top_p: float
    max_output_tokens: int
    store: Literal[False] = Field(description="Nothing is kept.")
    previous_response_id: None
    background: Literal[False]
    tools: list[Any] = Field(description="As in the request, as are tool_choice, reasoning and text.")
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    text: dict[str, Any]
    top_logprobs: Literal[0]
    truncation: Literal["disabled"]


# ---- writing it ------------------------------------------------------------------------------------------------------


def _reasoning_item(item: Json, status: str) -> Json:
    content = [{"type": "reasoning_text", "text": "".join(item["pieces"])}]
    return {"id": item["id"], "type": "reasoning", "summary": [], "content": content, "status": status}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseWriter(Writer):
    """Writes one response, which also is the stream's last event. ``thinking`` is None for a model that cannot
    think."""

    end = b""

    def __init__(self, model: str, request: ResponseRequest, choice: Request, thinking: Thinking | None = None):
        self._num_events = 0
        self.id = f"resp_{uuid.uuid4().hex}"
        self._thinking = thinking
        self._calls = Calls(request.callable, thinking)
        self._items: list[Json] = []
        """The output so far: what the model thought, the message once there is text in pieces, and each call."""
        self._answers = False
        """Events have closed what the model thought."""
        self._message: int | None = None
        """Its index in the output."""
        self._last_call = 0
        """The last call's index in the output."""
        self._num_prompt = len(choice.prompt)
        params = choice.params
        reasoning = request.reasoning or Reasoning()
        verbosity = request.text.verbosity if request.text else None
        # The same whatever becomes of the response.
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "user": request.user,
            "temperature": params.temperature,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "max_output_tokens": params.max_new_tokens,
            "store": False,
            "previous_response_id": None,
            "background": False,
            "tools": [_as_sent(tool) for tool in request.tools or ()],
            "tool_choice": _dumped(request.tool_choice) or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "text": {
                "format": _dumped(request.text and request.text.format) or {"type": "text"},
                **({"verbosity": verbosity} if verbosity else {}),
            },
            "top_logprobs": 0,
            "truncation": "disabled",
        }

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        (output,) = outputs
        self._advance(output.text or "", is_final=True)
        return self._finished(output)

    def opening(self) -> list[Json]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._unfinished("in_progress")) for kind in kinds]

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        events = self._advance(progress.text, is_final=progress.output is not None)
        if progress.output is not None:
            events += self._closed(self._finished(progress.output))
        return events

    def failure(self, error: ApiError) -> list[Json]:
        """An error event with our own code, and the failed response with one of OpenAI's."""
        detail = error.body()["error"]
        names = ("code", "message", "param")
        failed = {"code": "server_error", "message": detail["message"]}
        return [
            self._event("error", **{name: detail[name] for name in names}),
            self._event("response.failed", response=self._unfinished("failed", self._output("failed"), failed)),
        ]

    def frame(self, event: Json) -> bytes:
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + as_line(event) + b"\n\n"

    # ---- the output ------------------------------------------------------------------------------------------------

    def _advance(self, text: str, *, is_final: bool) -> list[Json]:
        """Takes the text so far into the output, and returns the events about what is new."""
        reasoning, new, pieces = self._calls.push(text, is_final=is_final)
        events = self._think(reasoning) if reasoning else []
        if self._items and self._calls.has_thought and not self._answers:
            self._answers = True
            events += self._close_item(0, _reasoning_item(self._items[0], "completed"))
        is_empty = is_final and not pieces and not self._items
        events += self._say(new) if new or is_empty else []
        for piece in pieces:
            events += self._call(piece)
        return events

    def _think(self, new: str) -> list[Json]:
        events = []
        if not self._items:
            self._items.append({"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "pieces": []})
            added = {**_reasoning_item(self._items[0], "in_progress"), "content": []}
            events.append(self._of_item("response.output_item.added", 0, item=added))
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._of_part("response.content_part.added", 0, part=part))
        self._items[0]["pieces"].append(new)
        return [*events, self._of_part("response.reasoning_text.delta", 0, delta=new)]

    def _say(self, new: str) -> list[Json]:
        """The message begins with its first text."""
        events = []
        index = len(self._items) if self._message is None else self._message
        if self._message is None:
            self._message = index
            head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
            self._items.append({**head, "pieces": []})
            added = {**head, "status": "in_progress", "content": []}
            events.append(self._of_item("response.output_item.added", index, item=added))
            events.append(self._of_part("response.content_part.added", index, part=_text_part("")))
        self._items[index]["pieces"].append(new)
        if new:
            events.append(self._of_part("response.output_text.delta", index, delta=new, logprobs=[]))
        return events

    def _call(self, piece: Json) -> list[Json]:
        """A call's first piece has its name."""
        function, events = piece["function"], []
        if "name" in function:
            head = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": piece["id"]}
            self._last_call = len(self._items)
            self._items.append({**head, "name": function["name"], "pieces": [], "number": piece["index"]})
            added = {**head, "name": function["name"], "arguments": "", "status": "in_progress"}
            events.append(self._of_item("response.output_item.added", self._last_call, item=added))
        index = self._last_call
        self._items[index]["pieces"].append(function["arguments"])
        if function["arguments"]:
            values = {"item_id": self._items[index]["id"], "delta": function["arguments"]}
            events.append(self._of_item("response.function_call_arguments.delta", index, **values))
        return events

    def _output(self, status: str) -> list[Json]:
        """The output, when the response has this status."""
        own_status = status if status in ITEM_STATUSES else "incomplete"
        output = []
        for item in self._items:
            text = "".join(item["pieces"])
            if item["type"] == "reasoning":
                output.append(_reasoning_item(item, "completed" if self._answers else own_status))
            elif item["type"] == "message":
                message = {name: item[name] for name in ("id", "type", "role")}
                output.append({**message, "status": own_status, "content": [_text_part(text)]})
            else:
                call = {name: item[name] for name in ("id", "type", "call_id", "name")} | {"arguments": text}
                is_complete = self._calls.is_complete(item["number"])
                output.append({**call, "status": "completed" if is_complete else "incomplete"})
        return output

    def _closed(self, response: Json) -> list[Json]:
        """The closing events: of each item what it holds, and the item; at last the whole response."""
        events = []
        for index, item in enumerate(response["output"]):
            if item["type"] != "reasoning" or not self._answers:
                events += self._close_item(index, item)
        last = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return [*events, self._event(last, response=response)]

    def _close_item(self, index: int, item: Json) -> list[Json]:
        if item["type"] == "function_call":
            values = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", index, **values)]
        else:
            (part,) = item["content"]
            with_logprobs: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            events = [self._of_part(f"response.{part['type']}.done", index, text=part["text"], **with_logprobs)]
            events.append(self._of_part("response.content_part.done", index, part=part))
        return [*events, self._of_item("response.output_item.done", index, item=item)]

    def _of_part(self, kind: str, index: int, **values: Any) -> Json:
        return self._of_item(kind, index, item_id=self._items[index]["id"], content_index=0, **values)

    def _of_item(self, kind: str, index: int, **values: Any) -> Json:
        return self._event(kind, output_index=index, **values)

    def _event(self, kind: str, **values: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}

    def _unfinished(self, status: str, output: Sequence[Json] = (), error: Json | None = None) -> Json:
        """While it is in progress, or when it has failed."""
        state = {"status": status, "output": list(output), "error": error, "completed_at": None}
        nothing = dict.fromkeys(("incomplete_details", "usage", "lopa", "stop_reason", "seed"))
        return {**self._head, **state, **nothing}

    def _finished(self, output: GenerationOutput) -> Json:
        status = STATUS[output.finish_reason]
        tokens = len(output.tokens)
        reasoning = 0 if self._thinking is None else num_reasoning_tokens(self._thinking, output)
        return {
            **self._unfinished(status, self._output(status)),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": self._num_prompt + tokens,
            },
            "lopa": {"num_forwards": output.num_forwards, "tokens_per_forward": output.tokens_per_forward},
            "stop_reason": output.stop_reason,
            "seed": output.seed,
        }


def _as_sent(tool: ResponseTool | OtherTool) -> Json:
    """With what OpenAI's functions always have."""
    always = dict.fromkeys(("parameters", "strict")) if isinstance(tool, ResponseTool) else {}
    return always | tool.model_dump(exclude_none=True)


def _dumped(value: Body | str | None) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, Body) else value
