"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.serve.http.body import Body, unsupported
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.serve.link.generation import AskedChoice
from lopa_ascend.serve.openai.answer import AnyChoice, AnyCompletion, CompletionWriter, Details, Form
from lopa_ascend.serve.openai.fields import HARMLESS, HARMLESS_TEMPLATE, INSTEAD, MESSAGE, PART, ignoring
from lopa_ascend.serve.openai.logprobs import TokenProb
from lopa_ascend.serve.openai.request import (
    LOGPROB,
    MAX_MESSAGES,
    GenerationRequest,
    Planner,
    drop_tools_without_choice,
)

# ---- messages --------------------------------------------------------------------------------------------------------

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message."""
ROLES = ("system", "developer", "user", "assistant")


@ignoring(PART)
class TextPart(Body):
    """A part of a message. Both APIs take the types of both."""

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
        raise ValueError("must be a string or a list of text parts")
    return content


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


@ignoring(MESSAGE)
class Message(Body):
    """A message of a conversation, as a client writes it or sends an earlier answer back."""

    harmless = {"refusal": (), "audio": (), "function_call": (), "tool_calls": (), "tool_call_id": ()}
    instead = INSTEAD

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer means the same as system.")
    content: Annotated[str | Parts, BeforeValidator(_check_content)] = Field(
        description="Parts are joined by line breaks."
    )
    name: str | None = Field(default=None, description="Who speaks: given to the chat template, which may ignore it.")

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        if values.get("role") in ("tool", "function"):
            message = f"must be {' or '.join(map(repr, ROLES))}, got {shown(values['role'])}"
            raise unsupported("role", message, "put the result of a tool into a message of the user")
        if values.get("role") == "assistant" and values.get("content") in (None, []):
            values["content"] = ""  # clients keep an empty answer so

    @classmethod
    def complete_schema(cls, schema: Json) -> None:
        super().complete_schema(schema)
        schema["required"].remove("content")
        schema["else"] = {"required": ["content"]}
        schema["if"] = {"properties": {"role": {"const": "assistant"}}}

    def as_template_input(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        parts = self.content
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


# ---- the request -----------------------------------------------------------------------------------------------------


class ChatRequest(GenerationRequest):
    harmless = {
        **HARMLESS,
        **HARMLESS_TEMPLATE,
        "echo": (False,),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),
        "functions": (),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "moderation": (),
    }
    writer_type: ClassVar[type[CompletionWriter]] = CompletionWriter

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = Field(
        None, description=f"Adds the log probability of each token, which is {LOGPROB}. Default: false."
    )
    top_logprobs: int | None = Field(
        None,
        json_schema_extra={"minimum": 0, "maximum": 20},
        description="0 to 20: lists so many most probable tokens of each position. Needs logprobs: true.",
    )

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        drop_tools_without_choice(values)

    def plan(self, planner: Planner) -> list[AskedChoice]:
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        messages = [message.as_template_input() for message in self.messages]
        return planner.conversation(self, messages, "messages", with_logprobs=bool(self.logprobs))

    def writer(self, planner: Planner, model: str, choices: list[AskedChoice]) -> CompletionWriter:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        details = Details.of(self, with_ids=bool(self.return_token_ids), logprobs=logprobs)
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


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(AnyChoice):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(AnyCompletion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatForm(Form):
    """How chat completions are written."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    opening = {"delta": {"role": "assistant", "content": ""}}
    end = {"delta": {}}

    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def logprobs(self, tokens: Sequence[TokenProb], with_top: bool) -> Json:
        content = []
        for item in tokens:
            top = [other.chat() for other in item.top] if with_top else []
            content.append({**item.chat(), "top_logprobs": top})
        return {"content": content, "refusal": None}


CHAT = ChatForm()
