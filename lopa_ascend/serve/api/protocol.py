"""Bodies of requests. Names and meanings are OpenAI's; decoding parameters are extra fields by their own names.

A field that is null counts as absent, as OpenAI has it. Values of decoding parameters are checked by ``DecodingParams``
and the engine's limits, so that there is one place that knows; the schemas state their ranges for readers and tools.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator

from lopa_ascend.config import BRANCH_SCORES, CONFIDENCES, DECODINGS, WINDOW_ATTENTIONS
from lopa_ascend.serve.api.schema import (
    PROMPT_OR_MESSAGES,
    documenting,
    one_of,
    ranged,
    temperature,
)

MAX_CHOICES = 1024
"""Of one request: prompts times n."""
MAX_N = 128
"""OpenAI's limit."""

# Fields of OpenAI's and vLLM's APIs that this server does not act on: taken with these values, under which they would
# change nothing, and refused with any other.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "prompt_logprobs": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {**UNSUPPORTED, "suffix": ("",), "best_of": (1,)}
UNSUPPORTED_TEMPLATE: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **UNSUPPORTED_TEMPLATE,
    "echo": (False,),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
# The events of a diffusion stream carry all of this by themselves.
UNSUPPORTED_DIFFUSION: dict[str, tuple[Any, ...]] = {
    "stream": (True,),
    "n": (1,),
    "best_of": (1,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
}
# A client sends the messages it got back to the server, with the fields it does not use set to null.
UNSUPPORTED_MESSAGE = ("name", "refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id")


class Body(BaseModel):
    # Not coerced: "5" is no number.
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk carries the usage so far.")


LOGPROB = "the logarithm of the probability that the model gave the token in the forward pass that filled its position"


class GenerationRequest(Body):
    """The fields that both endpoints share."""

    model: str | None = Field(None, description="The served model's name; may be absent.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Answers to each prompt; default 1.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Needs stream: true.")
    user: str | None = Field(None, description="Taken, without any effect.")
    return_token_ids: bool | None = Field(None, description="Adds token_ids to every choice.")
    max_tokens: int | None = ranged(1, None, "The same as max_new_tokens.")
    max_completion_tokens: int | None = ranged(1, None, "The same as max_new_tokens.")
    min_tokens: int | None = ranged(0, None, "The same as min_new_tokens.")
    top_p: float | None = Field(
        None,
        json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
        description="1 is off; other values need a temperature above 0.",
    )
    top_k: int | None = ranged(-1, 2**31 - 1, "0 and -1 are off; other values need a temperature above 0.")

    decoding: str | None = one_of(DECODINGS)
    num_branches: int | None = ranged(0, 255, 'Lookahead branches; 0 with decoding "d2f".')
    block_size: int | None = ranged(1, 4096)
    tau_add: float | None = ranged(0, 1)
    tau_act: float | None = ranged(0, 1)
    tau_conf: float | None = ranged(0, 1)
    max_new_tokens: int | None = ranged(1, None, "Prompt and answer together must fit max_model_len.")
    min_new_tokens: int | None = ranged(0, None, "At most max_new_tokens.")
    stop: str | list[str] | None = Field(
        None,
        description="Any number of strings; empty ones are refused.",
        json_schema_extra={"minLength": 1, "items": {"type": "string", "minLength": 1}},
    )
    temperature: float | None = temperature("0, or from 0.01 to 100. Default 0, not OpenAI's 1.")
    seed: int | None = ranged(0, 2**63 - 1)
    confidence: str | None = one_of(CONFIDENCES)
    branch_score: str | None = one_of(BRANCH_SCORES)
    tail_fraction: float | None = ranged(0, 1)
    score_window: int | None = ranged(1, 2**31 - 1)
    creation_weight: float | None = ranged(0, 1)
    window_attention: str | None = one_of(WINDOW_ATTENTIONS)
    max_active_blocks: int | None = ranged(1, 2**31 - 1)
    eos_token_id: int | list[int] | None = Field(
        None, description="One id or several.", json_schema_extra={"minimum": 0, "items": {"minimum": 0}}
    )
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


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}


def _prompt_schema(most: int) -> dict[str, Any]:
    several = [{"type": "array", "items": one, "minItems": 1, "maxItems": most} for one in (_TEXT, _TOKENS)]
    return {"anyOf": [_TEXT, _TOKENS, *several]}


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_COMPLETION))

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_prompt_schema(MAX_CHOICES))]
    echo: bool | None = Field(None, description="The text begins with the prompt. Not together with logprobs.")
    logprobs: int | None = Field(
        None,
        json_schema_extra={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 1}, {"enum": [None, False]}]},
        description=f"0 or 1: the log probability of each token, {LOGPROB}. With 1 top_logprobs lists it again: there "
        "are no alternatives. A prompt has none.",
    )


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


def _nullable_fields(schema: dict[str, Any]) -> None:
    for name in UNSUPPORTED_MESSAGE:
        schema["properties"][name] = {"enum": [None], "description": "Not supported: taken only as null."}


class Message(Body):
    model_config = ConfigDict(json_schema_extra=_nullable_fields)

    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer is the same as system.")
    content: Annotated[str, PlainValidator(_text_of), WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        description="Parts are joined by line breaks."
    )

    def as_template_input(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_CHAT))

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = Field(None, description=f"Adds the log probability of each token: {LOGPROB}.")
    top_logprobs: int | None = Field(
        None,
        json_schema_extra={"minimum": 0, "maximum": 1},
        description="0 or 1; 1 lists the token again: there are no alternatives. Needs logprobs: true.",
    )


class DiffusionCompletionRequest(CompletionRequest):
    """The stream is implied; there is one answer."""

    model_config = ConfigDict(
        json_schema_extra=documenting({**UNSUPPORTED_COMPLETION, **UNSUPPORTED_DIFFUSION}, prompt=_prompt_schema(1))
    )

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompts: list[str | list[int]]) -> list[str | list[int]]:
        if len(prompts) != 1:
            raise ValueError(f"must be one prompt, not {len(prompts)}")
        return prompts


class DiffusionChatRequest(ChatRequest):
    """The stream is implied; there is one answer."""

    model_config = ConfigDict(json_schema_extra=documenting({**UNSUPPORTED_CHAT, **UNSUPPORTED_DIFFUSION}))


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages``."""

    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_TEMPLATE, PROMPT_OR_MESSAGES))

    model: str | None = Field(None, description="The served model's name; may be absent.")
    prompt: str | None = Field(None, description="A text. Special tokens in it are recognised.", min_length=1)
    messages: list[Message] | None = Field(
        None, min_length=1, description="A conversation, through the chat template, up to where the answer begins."
    )
    add_special_tokens: bool | None = Field(None, description="Either way: byte-level BPE adds none to a text.")
    return_token_strs: bool | None = Field(None, description="Adds token_strs.")


class DetokenizeRequest(Body):
    model: str | None = Field(None, description="The served model's name; may be absent.")
    tokens: list[int] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})


class AbortRequest(Body):
    request_id: str = Field(description="A response's id, or the X-Request-Id that its request was sent with.")
