"""The bodies of answers, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens that came from the prefix cache.")


class Usage(BaseModel):
    """Token counts of all choices together."""

    prompt_tokens: int = Field(description="Each prompt counts once, whatever n is.")
    completion_tokens: int = Field(description="Tokens of the answer, with those of a stop string that ended it.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class LopaStats(BaseModel):
    """How the choices were decoded."""

    num_forwards: int = Field(description="Forward passes of all choices.")
    tokens_per_forward: float = Field(description="Visible tokens of all choices divided by their forward passes.")


class CompletionLogprobs(BaseModel):
    """Lists with one item for each token."""

    tokens: list[str] = Field(description="Text of the token alone.")
    token_logprobs: list[float] = Field(description="Log probability of the token.")
    top_logprobs: list[dict[str, float]] | None = Field(
        description="By position the most probable tokens, and the token itself."
    )
    text_offset: list[int] = Field(description="Where the token begins in the choice's text, in characters.")


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
    stop_reason: int | str | None = Field(
        description="The stop string, or the id of stop_token_ids, that ended the text; null at an EOS."
    )
    seed: int | None = Field(None, description="Seed of the sampling, for repeating it; null without sampling.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids, or if the model has no tokenizer.")


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


class ModelInfo(BaseModel):
    model_path: str = Field(description="Name of the served model; directories of the server are not shown.")
    tokenizer_path: str
    is_generation: Literal[True] = True


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
    """The tokenizer. The model's named special tokens, such as bos_token and eos_token, are further fields."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class Aborted(BaseModel):
    request_id: str
    aborted: Literal[True] = True


class ServerInfo(BaseModel):
    """The effective configuration, without secrets."""

    model: str
    backend: dict[str, Any] = Field(description="Device, number format, memory, seed and ranks in effect.")
    limits: dict[str, Any] = Field(description="What a request may ask for.")
    engine: dict[str, Any] = Field(description="Settings of the engine; null: the engine's own choice.")
    decoding: dict[str, Any] = Field(description="Decoding parameters of a request that sets none.")
    server: dict[str, Any] = Field(description="Settings of the HTTP server. Of secrets: whether they are set.")
    versions: dict[str, str | None] = Field(description="Versions of packages; null: not installed.")
