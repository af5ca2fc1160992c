"""Answers about the server and its tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from typing import Any

import lopa_ascend
from lopa_ascend.config import DecodingParams, Limits, ParameterError
from lopa_ascend.serve.api.answers import ServerInfo, Text, TokenizerInfo, Tokens
from lopa_ascend.serve.api.protocol import DetokenizeRequest, TokenizeRequest
from lopa_ascend.serve.config import SECRETS, ServeConfig
from lopa_ascend.serve.engine.messages import Ready
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer import Tokenizer

KV_UPDATE = {"block_causal": "single-phase", "full": "two-phase"}
"""How committed keys and values get into all slots, by window attention. Single-phase: every slot gets them in the step
itself. Two-phase: the winner's are copied to the other slots after the step."""
MAX_TOKENS = 2**16
"""Most token ids that are made a text of at once, unless the model takes more."""
PACKAGES = ("torch", "torch_npu", "transformers", "tokenizers", "fastapi", "uvicorn", "pyzmq")
"""Packages whose versions are shown."""


def server_info(config: ServeConfig, ready: Ready, model: str) -> ServerInfo:
    """The effective configuration.

    Args:
        config: how the server was started.
        ready: what the engine reported when its model was loaded.
        model: name of the served model.
    """
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    engine, decoding = settings.pop("engine"), settings.pop("decoding")
    params = DecodingParams(**decoding)
    settings |= {name: settings[name] is not None for name in SECRETS}
    return ServerInfo(
        model=model,
        backend={
            "device": ready.device,
            "dtype": ready.dtype,
            "kv_cache_memory": ready.kv_cache_memory,
            "seed": ready.seed,
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "branch_parallel_size": config.engine.branch_parallel_size,
            "kv_update": KV_UPDATE,
            "ranks": [dataclasses.asdict(rank) for rank in ready.ranks],
        },
        limits=dataclasses.asdict(ready.limits),
        engine=dataclasses.asdict(engine),
        decoding={name: getattr(params, name) for name in DecodingParams.names()},
        server=settings,
        versions={"lopa_ascend": lopa_ascend.__version__, "python": platform.python_version(), **_versions()},
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def tokenize(prompts: Prompts, request: TokenizeRequest, max_model_len: int) -> Tokens:
    """The token ids of a prompt or of a conversation.

    Raises:
        ParameterError: there is no tokenizer, the request has neither or both of prompt and messages, or the template
            refuses the messages.
    """
    tokenizer = _tokenizer(prompts, "prompt" if request.prompt is not None else "messages")
    if (request.prompt is None) == (request.messages is None):
        both = request.prompt is not None
        problem = "cannot be combined with messages" if both else "is missing; give prompt or messages"
        raise ParameterError("prompt", problem)
    if request.prompt is not None:
        ids = prompts.encode_text(request.prompt)
    else:
        ids = prompts.encode_messages([message.as_template_input() for message in request.messages or ()])
    strings = [_text(tokenizer, token) for token in ids] if request.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings)


def detokenize(prompts: Prompts, request: DetokenizeRequest, limits: Limits) -> Text:
    """The text of token ids.

    Raises:
        ParameterError: there is no tokenizer, no such token id, or there are too many.
    """
    tokenizer = _tokenizer(prompts, "tokens")
    if (count := len(request.tokens)) > (most := max(MAX_TOKENS, limits.max_model_len)):
        raise ParameterError("tokens", f"has {count} token ids; this server takes at most {most}")
    for token in request.tokens:
        if not 0 <= token < limits.vocab_size:
            raise ParameterError("tokens", f"token id {token} is not an integer from 0 to {limits.vocab_size - 1}")
    return Text(prompt=tokenizer.decode(request.tokens, skip_special_tokens=False))


def tokenizer_info(tokenizer: Tokenizer, max_model_len: int) -> TokenizerInfo:
    """The tokenizer with its special tokens."""
    named: dict[str, Any] = dict(tokenizer.special)
    return TokenizerInfo(
        tokenizer_class="ByteLevelBPE",
        vocab_size=tokenizer.num_token_ids,
        model_max_length=max_model_len,
        chat_template=tokenizer.chat_template,
        **named,
    )


def _tokenizer(prompts: Prompts, param: str) -> Tokenizer:
    """The tokenizer, which the field ``param`` needs."""
    if prompts.tokenizer is None:
        raise ParameterError(param, "needs a tokenizer, and the model has no tokenizer files")
    return prompts.tokenizer


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.piece(token).decode(errors="replace")
