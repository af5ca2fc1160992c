"""Bodies of answers, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Of the prompts, taken from the prefix cache.")


class Usage(BaseModel):
    """``prompt_tokens`` count once however large n is; ``completion_tokens`` are the visible ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class LopaStats(BaseModel):
    """Of the whole response: forward passes, and visible tokens by forward passes."""

    num_forwards: int
    tokens_per_forward: float


class CompletionLogprobs(BaseModel):
    """One item a token each. ``text_offset`` is where its text begins in the choice's text, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class _Choice(BaseModel):
    index: int
    finish_reason: str | None = Field(description='"stop", "length" or "abort" (see /abort_request).')
    stop_reason: int | str | None = Field(description="The EOS id or the stop string that ended the text.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids, or without a tokenizer.")


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


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


class Status(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """``bos_token``, ``eos_token`` and the other named special tokens that the model has, besides these."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class Aborted(BaseModel):
    request_id: str
    aborted: Literal[True] = True


class ServerInfo(BaseModel):
    """What the server runs with; no secrets."""

    model: str
    backend: dict[str, Any] = Field(description="The device and number format in effect.")
    limits: dict[str, Any] = Field(description="What a request may ask for.")
    engine: dict[str, Any] = Field(description="The engine's settings, null where it chose itself.")
    decoding: dict[str, Any] = Field(description="Decoding parameters of a request that sets none.")
    server: dict[str, Any] = Field(description="Settings of the HTTP server.")
    versions: dict[str, str | None]
