"""The bodies of requests, with OpenAI's names and meanings. Decoding parameters are further fields.

A field that is null counts as absent, as in OpenAI's API. The models check the types of decoding parameters, and
``DecodingParams`` and the engine's limits check their values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator

from lopa_ascend.serve.api.schema import (
    NOT_SUPPORTED,
    PROMPT_OR_MESSAGES,
    Json,
    NeutralValues,
    documenting,
    with_decoding_parameters,
)

MAX_CHOICES = 1024
"""Most choices of one request, which has prompts times n of them."""
MAX_MESSAGES = 2**14
"""Most messages of a conversation."""
MAX_N = 128
"""Most answers to one prompt; OpenAI's limit."""

# Fields of OpenAI's and vLLM's APIs that this server does not act on, each with the values besides null that change
# nothing. With these values they are taken, with any other they are refused.
UNSUPPORTED: NeutralValues = {
    "length_penalty": (1,),
    "prompt_logprobs": (0,),
    "use_beam_search": (False,),
    "priority": (0,),
    "include_stop_str_in_output": (False,),
    "include_reasoning": (True, False),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
    "add_special_tokens": (True, False),  # byte-level BPE adds none
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}
UNSUPPORTED_COMPLETION: NeutralValues = {**UNSUPPORTED, "suffix": ("",), "best_of": (1,)}
# Fields about the chat template.
UNSUPPORTED_TEMPLATE: NeutralValues = {
    "tools": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
}
UNSUPPORTED_CHAT: NeutralValues = {
    **UNSUPPORTED,
    **UNSUPPORTED_TEMPLATE,
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
# A diffusion stream is always one streamed answer, and its events carry everything that these fields ask for.
UNSUPPORTED_DIFFUSION: NeutralValues = {
    "stream": (True,),
    "n": (1,),
    "best_of": (1,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
}
# Clients send answers back as messages of the next request, with these fields set to null or empty.
UNSUPPORTED_MESSAGE: NeutralValues = {
    "refusal": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
}


class Body(BaseModel):
    """The body of a request, or a part of it. Unknown fields are refused."""

    # Values are not converted: "5" is not a number.
    model_config = ConfigDict(extra="forbid", strict=True)


LOGPROB = (
    "the logarithm of the probability that the model gave the token in the forward pass that filled its position, or, "
    "with top_k, top_p or min_p, of the probability with which the token was drawn"
)

WITHOUT_EFFECT = "Taken, and without effect."


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="The stream ends with a chunk without choices that has usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk has the usage up to it.")
    include_obfuscation: bool | None = Field(None, description=WITHOUT_EFFECT)


class IgnoredFields(Body):
    """Fields that clients of other servers send, and that change nothing here."""

    user: str | None = Field(None, description=WITHOUT_EFFECT)
    metadata: dict[str, Any] | None = Field(None, description=WITHOUT_EFFECT)
    store: bool | None = Field(None, description=WITHOUT_EFFECT)
    service_tier: str | None = Field(None, description=WITHOUT_EFFECT)
    reasoning_effort: str | None = Field(None, description=WITHOUT_EFFECT)
    verbosity: str | None = Field(None, description=WITHOUT_EFFECT)
    cache_salt: str | None = Field(None, description=f"{WITHOUT_EFFECT} All requests share one prefix cache.")
    request_id: str | None = Field(None, description=f"{WITHOUT_EFFECT} Send the header X-Request-Id.")
    safety_identifier: str | None = Field(None, description=WITHOUT_EFFECT)
    prompt_cache_key: str | None = Field(None, description=WITHOUT_EFFECT)
    prompt_cache_retention: str | None = Field(None, description=WITHOUT_EFFECT)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=WITHOUT_EFFECT)


@with_decoding_parameters
class GenerationRequest(IgnoredFields):
    """What all requests for text have in common."""

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Number of answers to each prompt. Default: 1.")
    stream: bool | None = Field(None, description="Answer with server-sent events. Default: false.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream: true.")
    return_token_ids: bool | None = Field(None, description="Adds token_ids to every choice. Default: false.")


# ---- completions -----------------------------------------------------------------------------------------------------


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """The prompts of a request, which may be one prompt or several, as text or as token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if len(value) > MAX_CHOICES:
            raise ValueError(f"must be at most {MAX_CHOICES} prompts, got {len(value)}")
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}


def _prompt_schema(max_prompts: int) -> Json:
    kinds = (_TEXT, _TOKEN_IDS)
    several = [{"type": "array", "items": kind, "minItems": 1, "maxItems": max_prompts} for kind in kinds]
    return {"anyOf": [*kinds, *several]}


_BEST_OF: Json = {
    "type": ["integer", "null"],
    "minimum": 1,
    "description": "Not supported: taken only as 1, or with the value of n, where every answer is returned.",
}


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_COMPLETION, best_of=_BEST_OF))

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_prompt_schema(MAX_CHOICES))]
    echo: bool | None = Field(
        None, description="The text begins with the prompt. Not together with logprobs. Default: false."
    )
    logprobs: int | None = Field(
        None,
        json_schema_extra={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"enum": [None, False]}]},
        description=f"0 to 20: adds the log probability of each token, which is {LOGPROB}, and lists of so many most "
        "probable tokens. Prompts have no log probabilities.",
    )


# ---- chat ------------------------------------------------------------------------------------------------------------


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


def _document_null_fields(schema: Json) -> None:
    for name, values in UNSUPPORTED_MESSAGE.items():
        schema["properties"][name] = {"enum": [None, *values], "description": NOT_SUPPORTED}


class Message(Body):
    model_config = ConfigDict(json_schema_extra=_document_null_fields)

    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer means the same as system.")
    content: Annotated[str, PlainValidator(_chat_text), WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        description="Parts are joined by line breaks."
    )
    name: str | None = Field(default=None, description="Who speaks: given to the chat template, which may ignore it.")

    def as_template_input(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_CHAT))

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = Field(
        None, description=f"Adds the log probability of each token, which is {LOGPROB}. Default: false."
    )
    top_logprobs: int | None = Field(
        None,
        json_schema_extra={"minimum": 0, "maximum": 20},
        description="0 to 20: lists so many most probable tokens of each position. Needs logprobs: true.",
    )


# ---- diffusion streams -----------------------------------------------------------------------------------------------


class DiffusionCompletionRequest(CompletionRequest):
    """One prompt, whose answer is always streamed."""

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
    """One conversation, whose answer is always streamed."""

    model_config = ConfigDict(json_schema_extra=documenting({**UNSUPPORTED_CHAT, **UNSUPPORTED_DIFFUSION}))


# ---- other routes ----------------------------------------------------------------------------------------------------


class TokenizeRequest(Body):
    """Either a prompt or a conversation."""

    model_config = ConfigDict(json_schema_extra=documenting(UNSUPPORTED_TEMPLATE, PROMPT_OR_MESSAGES))

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    prompt: str | None = Field(None, description="A text. Special tokens in it are recognised.")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        description="A conversation: the chat template makes a prompt of it.",
    )
    add_special_tokens: bool | None = Field(
        None, description="Taken, and without effect: byte-level BPE adds no special tokens to a text."
    )
    return_token_strs: bool | None = Field(None, description="Adds token_strs. Default: false.")


class DetokenizeRequest(Body):
    model: str | None = Field(None, description="Name of the served model; may be left out.")
    tokens: Annotated[list[int], Field(fail_fast=True)] = Field(
        description="Token ids.", json_schema_extra={"items": {"type": "integer", "minimum": 0}}
    )


class AbortRequest(Body):
    request_id: str = Field(description="The id of a response, as every event of a stream has it.")
