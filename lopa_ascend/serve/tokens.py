"""Routes about the tokenizer: /tokenize, /detokenize, /tokenizer_info and Anthropic's count of tokens."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from lopa_ascend.admission import Limits
from lopa_ascend.config import ParameterError
from lopa_ascend.serve.api.chat import Message
from lopa_ascend.serve.api.fields import HARMLESS_TEMPLATE, INSTEAD
from lopa_ascend.serve.api.messages import MessagesRequest, TokenCount
from lopa_ascend.serve.api.request import MAX_MESSAGES, VARIABLES
from lopa_ascend.serve.api.tools import MAX_TOOLS, AnyChatTool, chat_tools
from lopa_ascend.serve.endpoint import Endpoint
from lopa_ascend.serve.http.api_error import MESSAGES, ApiError
from lopa_ascend.serve.http.body import Body, Intake, read_body
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.serve.http.openapi import READING, body_of, errors
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer import Tokenizer

MAX_TOKENS = 2**16
"""Most token ids that become a text at once, unless the model takes more."""
STATUSES = (*READING, 404)
COUNT = f"{MESSAGES}/count_tokens"


class TokenizeRequest(Body):
    """Either a prompt or a conversation."""

    harmless = HARMLESS_TEMPLATE
    instead = INSTEAD

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    prompt: str | None = Field(None, description="A text. Special tokens in it are recognised.")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        description="A conversation: the chat template makes a prompt of it.",
    )
    tools: Annotated[list[AnyChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the chat template shows to the model. With messages."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=f"{VARIABLES} With messages.")
    add_special_tokens: bool | None = Field(
        None, description="Taken, and without effect: byte-level BPE adds no special tokens to a text."
    )
    return_token_strs: bool | None = Field(None, description="Adds token_strs. Default: false.")

    @classmethod
    def complete_schema(cls, schema: Json) -> None:
        super().complete_schema(schema)
        null = {"type": "null"}
        prompt = {"properties": {"prompt": {"type": "string"}, "messages": null}, "required": ["prompt"]}
        messages = {"properties": {"messages": {"type": "array"}, "prompt": null}, "required": ["messages"]}
        schema["allOf"] = [{"anyOf": [prompt, messages]}]


class DetokenizeRequest(Body):
    model: str | None = Field(None, description="Name of the served model; may be left out.")
    tokens: Annotated[list[int], Field(fail_fast=True)] = Field(
        description="Token ids.", json_schema_extra={"items": {"type": "integer", "minimum": 0}}
    )


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


def add_tokenizer(app: FastAPI, endpoint: Endpoint, intake: Intake) -> None:
    def tokens(raw: bytes) -> Response:
        asked = read_body(TokenizeRequest, raw)
        model = endpoint.find(asked.model)
        return _json(_tokenized(model.client.prompts, asked, model.limits.max_model_len))

    def text(raw: bytes) -> Response:
        asked = read_body(DetokenizeRequest, raw)
        model = endpoint.find(asked.model)
        return _json(_detokenized(model.client.prompts, asked, model.limits))

    def count(raw: bytes) -> Response:
        asked = read_body(MessagesRequest, raw)
        (choice,) = asked.plan(endpoint.find(asked.model).planner)
        return _json(TokenCount(input_tokens=len(choice.prompt)))

    @app.post("/tokenize", response_model=Tokens, responses=errors(*STATUSES), openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        return await intake.take(request, tokens)

    @app.post("/detokenize", response_model=Text, responses=errors(*STATUSES), openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        return await intake.take(request, text)

    @app.post(
        COUNT,
        response_model=TokenCount,
        responses=errors(*STATUSES, route=COUNT),
        openapi_extra=body_of(MessagesRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """Number of tokens of a conversation's prompt, in Anthropic's Messages API."""
        return await intake.take(request, count)

    @app.get("/tokenizer_info", responses=errors(404))
    async def tokenizer_info() -> TokenizerInfo:
        """The tokenizer, its special tokens and its chat template."""
        tokenizer = endpoint.default.client.prompts.tokenizer
        if tokenizer is None:
            raise ApiError(HTTPStatus.NOT_FOUND, "the model has no tokenizer files", code="no_tokenizer")
        named: dict[str, Any] = dict(tokenizer.special)
        return TokenizerInfo(
            tokenizer_class="ByteLevelBPE",
            vocab_size=tokenizer.num_token_ids,
            model_max_length=endpoint.default.limits.max_model_len,
            chat_template=tokenizer.chat_template,
            **named,
        )


def _tokenized(prompts: Prompts, request: TokenizeRequest, max_model_len: int) -> Tokens:
    tokenizer = _tokenizer(prompts, "prompt" if request.prompt is not None else "messages")
    if (request.prompt is None) == (request.messages is None):
        both = request.prompt is not None
        problem = "cannot be combined with messages" if both else "is missing; give prompt or messages"
        raise ParameterError("prompt", problem)
    if request.prompt is not None:
        ids = prompts.encode_text(request.prompt)
    else:
        tools = chat_tools(request.tools, None, parallel=None).as_template_input()
        messages = [message.as_template_input() for message in request.messages or ()]
        ids = prompts.encode_chat(messages, tools, request.chat_template_kwargs, checked=False)
    strings = [tokenizer.piece(token).decode(errors="replace") for token in ids] if request.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings)


def _detokenized(prompts: Prompts, request: DetokenizeRequest, limits: Limits) -> Text:
    tokenizer = _tokenizer(prompts, "tokens")
    if (count := len(request.tokens)) > (most := max(MAX_TOKENS, limits.max_model_len)):
        raise ParameterError("tokens", f"has {count} token ids; this server takes at most {most}")
    for token in request.tokens:
        if not 0 <= token < limits.vocab_size:
            raise ParameterError("tokens", f"token id {token} is not an integer from 0 to {limits.vocab_size - 1}")
    return Text(prompt=tokenizer.decode(request.tokens, skip_special_tokens=False))


def _tokenizer(prompts: Prompts, param: str) -> Tokenizer:
    if prompts.tokenizer is None:
        raise ParameterError(param, "needs a tokenizer, and the model has no tokenizer files")
    return prompts.tokenizer


def _json(answer: BaseModel) -> Response:
    """Called in worker threads: a long answer takes long to encode."""
    return Response(answer.model_dump_json(), media_type="application/json")
