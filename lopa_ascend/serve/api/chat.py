"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import (
    SCORED,
    AnswerForm,
    AnyChoice,
    AnyCompletion,
    CompletionWriter,
    Details,
    ScoredText,
)
from lopa_ascend.serve.api.fields import HARMLESS, HARMLESS_TEMPLATE, INSIDE, INSTEAD
from lopa_ascend.serve.api.logprobs import TokenProb
from lopa_ascend.serve.api.request import (
    EFFORT,
    LOGPROB,
    MAX_MESSAGES,
    VARIABLES,
    GenerationRequest,
    Planner,
    tidy_tools,
)
from lopa_ascend.serve.api.structured import ResponseFormat, response_form, texts_of
from lopa_ascend.serve.api.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    PARALLEL,
    TOOL_CHOICE,
    AnyChatChoice,
    AnyChatTool,
    MessageCall,
    Tools,
    chat_tools,
)
from lopa_ascend.serve.http.body import EMPTY, Body, unsupported
from lopa_ascend.serve.http.encoding import Json

# ---- messages --------------------------------------------------------------------------------------------------------

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(Body):
    """A part of a message. Both APIs take the types of both."""

    ignored = INSIDE
    type: Literal["text", "input_text", "output_text"]
    text: str

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        kind = values.get("type")
        if kind is not None and kind not in TEXT_PARTS:
            raise unsupported(
                "type", f"must be {' or '.join(map(repr, TEXT_PARTS))}, got {shown(kind)}", "send text alone"
            )


def _check_content(content: object) -> object:
    if not isinstance(content, str) and not (isinstance(content, list) and content):
        raise ValueError(f"must be a string or a list of text parts, got {shown(content)}")
    return content


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Content = Annotated[str | Parts, BeforeValidator(_check_content)]


def joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Message(Body):
    """A message of a conversation, as a client writes it or sends an earlier answer back."""

    ignored = INSIDE
    harmless = {"refusal": (), "audio": (), "function_call": ()}
    instead = INSTEAD

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer means the same as system."
    )
    content: Content = Field(description="Parts are joined by line breaks.")
    name: str | None = Field(default=None, description="Who speaks: given to the chat template, which may ignore it.")
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        None, description="Calls of an earlier answer."
    )
    tool_call_id: str | None = Field(None, description="In a message with the role tool: whose result it is.")
    reasoning_content: str | None = Field(
        None, description="What the model thought before an earlier answer, for chat templates that read it."
    )
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        role = values.get("role")
        if role == "function":
            message = f"must be {' or '.join(map(repr, ROLES))}, got {shown(role)}"
            raise unsupported("role", message, "send the role tool")
        for field, own_role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if values.get(field) in EMPTY:
                del values[field]
            elif field in values and role in ROLES and role != own_role:
                raise unsupported(field, f"belongs to the role {own_role!r}, and this message has {shown(role)}")
        if values.get("role") in ("assistant", "tool") and values.get("content") in (None, []):
            values["content"] = ""  # clients keep an empty answer, or result, so

    @classmethod
    def complete_schema(cls, schema: Json) -> None:
        super().complete_schema(schema)
        schema["required"].remove("content")
        schema["else"] = {"required": ["content"]}
        schema["if"] = {"properties": {"role": {"enum": ["assistant", "tool"]}}}

    def as_template_input(self) -> Json:
        message: Json = {"role": "system" if self.role == "developer" else self.role, "content": joined(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        return message | {name: value for name, value in others.items() if value is not None}


# ---- the request -----------------------------------------------------------------------------------------------------


class ChatRequest(GenerationRequest):
    harmless = {
        **HARMLESS,
        **HARMLESS_TEMPLATE,
        "echo": (False,),
        "functions": (),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "moderation": (),
    }
    writer_type: ClassVar[type[CompletionWriter]] = CompletionWriter
    is_conversation = True

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = Field(
        None, description=f"Adds the log probability of each token, which is {LOGPROB}. Default: false."
    )
    top_logprobs: int | None = Field(
        None,
        json_schema_extra={"minimum": 0, "maximum": 20},
        description="0 to 20: lists so many most probable tokens of each position. Needs logprobs: true.",
    )

    response_format: ResponseFormat | None = None
    tools: Annotated[list[AnyChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: AnyChatChoice | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL)

    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    reasoning_effort: str | None = Field(None, description=EFFORT)
    include_reasoning: bool | None = Field(
        None, description="Whether the answer has reasoning_content, if the model thinks. Default: true."
    )
    separate_reasoning: bool | None = Field(
        None, description="false: what the model thinks stays in the content, with its marks. Default: true."
    )

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        tidy_tools(values)

    @property
    def callable(self) -> Tools:
        return chat_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def plan(self, planner: Planner) -> list[Request]:
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        messages = [message.as_template_input() for message in self.messages]
        return planner.conversation(
            self,
            messages,
            "messages",
            tools=self.callable,
            response_format=response_form(self.response_format),
            variables=self.chat_template_kwargs,
            effort=self.reasoning_effort,
            with_logprobs=bool(self.logprobs),
        )

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> CompletionWriter:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        with_ids, texts = bool(self.return_token_ids), texts_of(self, with_logprobs=bool(self.logprobs))
        thinking = planner.prompts.thinking(choices[0].prompt)
        details = Details.of(
            self,
            with_ids=with_ids,
            logprobs=logprobs,
            tools=self.callable,
            texts=texts,
            thinking=None if self.separate_reasoning is False else thinking,
            shows_reasoning=self.include_reasoning is not False,
        )
        return self.writer_type(CHAT, model, choices, details, planner.prompts.tokenizer)


# ---- the answer ------------------------------------------------------------------------------------------------------


class TopLogprob(BaseModel):
    token: str = Field(description=r"Its text, or of a part of a character its bytes, such as \xf0\x9f.")
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None
    choices: list[ScoredText] | None = Field(None, description=SCORED)


class NameAndArguments(BaseModel):
    name: str
    arguments: str = Field(description="JSON text.")


class ChatCall(BaseModel):
    id: str
    type: Literal["function"]
    function: NameAndArguments


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="Null if there are only calls.")
    refusal: None = None
    reasoning_content: str | None = Field(None, description="What a model that can think thought before it answered.")
    tool_calls: list[ChatCall] | None = None


class ChatChoice(AnyChoice):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(AnyCompletion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatForm(AnswerForm):
    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    opening = {"delta": {"role": "assistant", "content": ""}}
    end = {"delta": {}}

    def message(self, text: str, calls: Sequence[Json] = (), reasoning: str = "") -> Json:
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        others = {"reasoning_content": reasoning, "tool_calls": calls}
        return {"message": message | {name: value for name, value in others.items() if value}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def reasoning_delta(self, text: str) -> Json:
        return {"delta": {"reasoning_content": text}}

    def call_delta(self, call: Json) -> Json:
        return {"delta": {"tool_calls": [call]}}

    def logprobs(self, tokens: Sequence[TokenProb], with_top: bool) -> Json:
        content = []
        for item in tokens:
            top = [other.chat() for other in item.top] if with_top else []
            content.append({**item.chat(), "top_logprobs": top})
        return {"content": content, "refusal": None}


CHAT = ChatForm()
