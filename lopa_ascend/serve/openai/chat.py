"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from lopa_ascend.config import ParameterError
from lopa_ascend.serve.http.body import Body, HarmlessValues
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.serve.link.generation import AskedChoice
from lopa_ascend.serve.openai.answer import AnyChoice, AnyCompletion, CompletionWriter, Details, Form
from lopa_ascend.serve.openai.logprobs import TokenProb
from lopa_ascend.serve.openai.request import (
    HARMLESS,
    LOGPROB,
    MAX_MESSAGES,
    GenerationRequest,
    Planner,
    drop_tools_without_choice,
)

# ---- messages --------------------------------------------------------------------------------------------------------

CHAT_PART_FIELDS = frozenset(("type", "text", "cache_control", "prompt_cache_breakpoint"))
"""Fields of a text part. The last two are about caches of other servers, and without effect."""


def _chat_text(content: object) -> str:
    """The text of a message, which may be given in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("must be a string or a list of text parts")
    for part in content:
        if not _is_text_part(part):
            raise ValueError('every part must be {"type": "text", "text": ...}; other parts are not supported')
        if not isinstance(part["text"], str):
            raise ValueError("the text of a part must be a string")
    return "\n".join(part["text"] for part in content)


def _is_text_part(part: object) -> bool:
    """Whether a part of a message's content is a text, with no other fields than a text may have."""
    if not isinstance(part, dict) or not {"type", "text"} <= part.keys() <= CHAT_PART_FIELDS:
        return False
    return bool(part["type"] == "text")


_TEXT_PART = {
    "type": "object",
    "properties": {name: {} for name in sorted(CHAT_PART_FIELDS)}
    | {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}


class Message(Body):
    # Clients send answers back as messages of the next request, with these fields set to null or empty.
    harmless = {
        "refusal": (),
        "reasoning": ("",),
        "reasoning_content": ("",),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
    }

    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer means the same as system.")
    content: Annotated[str, PlainValidator(_chat_text), WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        description="Parts are joined by line breaks."
    )
    name: str | None = Field(default=None, description="Who speaks: given to the chat template, which may ignore it.")

    def as_template_input(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


# ---- the request -----------------------------------------------------------------------------------------------------

HARMLESS_TEMPLATE: HarmlessValues = {
    "tools": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
}
"""Fields about the chat template."""


class ChatRequest(GenerationRequest):
    harmless = {
        **HARMLESS,
        **HARMLESS_TEMPLATE,
        "echo": (False,),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
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
    token: str
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
