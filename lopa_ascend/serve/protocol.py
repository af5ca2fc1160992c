"""What goes over the wire. Names and meanings are OpenAI's; decoding parameters are extra fields by their own names.

A field that is null counts as absent, as OpenAI has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

MAX_CHOICES = 1024
"""Of one request: prompts times n."""

# Fields of OpenAI's and vLLM's APIs that this server does not act on: taken with these values, under which they would
# change nothing, and refused with any other.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "prompt_logprobs": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {**UNSUPPORTED, "echo": (False,), "suffix": ("",)}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# A client sends the messages it got back to the server, with the fields it does not use set to null.
UNSUPPORTED_MESSAGE = ("name", "refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id")


def _documenting(fields: dict[str, tuple[Any, ...]]) -> Callable[[dict[str, Any]], None]:
    def extend(schema: dict[str, Any]) -> None:
        text = "Not supported: taken only with a value that changes nothing."
        for name, values in fields.items():
            schema["properties"][name] = {"enum": [None, *values], "description": text}

    return extend


class _Body(BaseModel):
    # Not coerced: "5" is no number, and 5.0 no number of tokens.
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool | None = Field(None, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk carries the usage so far.")


class GenerationRequest(_Body):
    """The fields that both endpoints share."""

    model: str | None = Field(None, description="The served model's name; may be absent.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers to each prompt; default 1.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Taken, without any effect.")
    return_token_ids: bool | None = Field(None, description="Adds token_ids to every choice.")
    max_tokens: int | None = Field(None, description="The same as max_new_tokens.")
    max_completion_tokens: int | None = Field(None, description="The same as max_new_tokens.")
    min_tokens: int | None = Field(None, description="The same as min_new_tokens.")
    top_p: float | None = Field(None, description="1 is off.")
    top_k: int | None = Field(None, description="0 and -1 are off.")

    decoding: str | None = None
    num_branches: int | None = None
    block_size: int | None = None
    tau_add: float | None = None
    tau_act: float | None = None
    tau_conf: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, description="Default 0, not OpenAI's 1.")
    seed: int | None = None
    confidence: str | None = None
    branch_score: str | None = None
    tail_fraction: float | None = None
    score_window: int | None = None
    creation_weight: float | None = None
    window_attention: str | None = None
    max_active_blocks: int | None = None
    eos_token_id: int | list[int] | None = None
    ignore_eos: bool | None = None
    finish_at_eos: bool | None = None


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
    ]
}


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra=_documenting(UNSUPPORTED_COMPLETION))

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    best_of: int | None = Field(None, description="Must equal n.")


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("must be a string or a list of text parts")
    for part in content:
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
            raise ValueError('every part must be {"type": "text", "text": ...}; nothing else is supported')
        if not isinstance(part["text"], str):
            raise ValueError("the text of a part must be a string")
    return "\n".join(part["text"] for part in content)


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer is the same as system.")
    content: Annotated[str, PlainValidator(_text_of), WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        description="Parts are joined by line breaks."
    )

    def as_template_input(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra=_documenting(UNSUPPORTED_CHAT))

    messages: list[Message] = Field(min_length=1)


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class LopaStats(BaseModel):
    """Of the whole response: forward passes, and visible tokens by forward passes."""

    num_forwards: int
    tokens_per_forward: float


class _Choice(BaseModel):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: None = None
    token_ids: list[int] | None = Field(None, description="With return_token_ids, or without a tokenizer.")


class CompletionChoice(_Choice):
    text: str


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    message: ChatMessage


class _Response(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    lopa: LopaStats


class Completion(_Response):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_Response):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lopa-ascend"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
