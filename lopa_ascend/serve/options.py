"""A request's fields -> what the engine is asked to do: token ids and decoding parameters of each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.engine import LLM
from lopa_ascend.serve.cli import ServeConfig
from lopa_ascend.serve.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest
from lopa_ascend.serve.worker import Choice

ALIASES = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
}
OFF: dict[str, tuple[float, ...]] = {"top_p": (1,), "top_k": (0, -1)}
"""How OpenAI's and vLLM's clients switch these off."""


def completion_choices(llm: LLM, config: ServeConfig, request: CompletionRequest) -> list[Choice]:
    """One for each prompt and each of its ``n`` answers, prompt-major.

    Raises:
        ParameterError: a field is wrong, or does not fit the model.
    """
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ParameterError("best_of", f"must equal n, got {request.best_of}")
    if len(request.prompt) * (request.n or 1) > MAX_CHOICES:
        raise ParameterError("prompt", f"prompts times n must be at most {MAX_CHOICES}")
    prompts = [llm.tokenize(prompt) for prompt in request.prompt]
    return _choices(llm, config, request, prompts, "prompt")


def chat_choices(llm: LLM, config: ServeConfig, request: ChatRequest) -> list[Choice]:
    """One for each of the ``n`` answers.

    Raises:
        ParameterError: a field is wrong, or does not fit the model.
    """
    try:
        prompt = llm.tokenize_chat([message.as_template_input() for message in request.messages])
    except ParameterError as error:
        raise _renamed(error, {"prompt": "messages"}) from None
    return _choices(llm, config, request, [prompt], "messages")


def _renamed(error: ParameterError, names: Mapping[str, str]) -> ParameterError:
    """The error under the name by which the request sent the field."""
    return ParameterError(names.get(error.param, error.param), str(error).removeprefix(f"{error.param}: "))


def _choices(
    llm: LLM, config: ServeConfig, request: GenerationRequest, prompts: list[list[int]], source: str
) -> list[Choice]:
    if request.stream_options is not None and not request.stream:
        raise ParameterError("stream_options", "needs stream: true")
    asked, sent_as = _asked(request)
    choices = []
    try:
        for prompt in prompts:
            params = _params(llm, config, asked, len(prompt))
            llm.check(prompt, params)
            choices += [Choice(prompt, _vary_seed(params, config.seed, index)) for index in range(request.n or 1)]
    except ParameterError as error:
        raise _renamed(error, {"prompt": source, **sent_as}) from None
    return choices


def _asked(request: GenerationRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """The decoding parameters that the request sets, and under which name it sent those that have several."""
    asked = {name: value for name in DecodingParams.names() if (value := getattr(request, name)) is not None}
    sent_as: dict[str, str] = {}
    for name, aliases in ALIASES.items():
        for alias in aliases:
            value = getattr(request, alias)
            if value is None:
                continue
            if asked.setdefault(name, value) != value:
                other = f"{sent_as.get(name, name)}, which means the same, is {asked[name]}"
                raise ParameterError(alias, f"is {value}, but {other}")
            if getattr(request, name) is None:
                sent_as.setdefault(name, alias)
    for name, values in OFF.items():
        if asked.get(name) in values:
            asked[name] = None
    for name in ("stop", "eos_token_id"):
        if isinstance(asked.get(name), list):
            asked[name] = tuple(asked[name])
    return asked, sent_as


def _params(llm: LLM, config: ServeConfig, asked: Mapping[str, Any], prompt_tokens: int) -> DecodingParams:
    """What the request asks for, else the server's default where it goes with that."""
    defaults = {"max_new_tokens": DecodingParams.max_new_tokens, **config.decoding}
    if "decoding" in asked:
        defaults.pop("num_branches", None)
    if asked.get("temperature") == 0:
        defaults.pop("top_p", None)
        defaults.pop("top_k", None)
    # A prompt that leaves no room at all is for LLM.check to refuse.
    defaults["max_new_tokens"] = max(1, min(defaults["max_new_tokens"], llm.max_model_len - prompt_tokens))
    if "min_new_tokens" in defaults:
        longest = asked.get("max_new_tokens", defaults["max_new_tokens"])
        defaults["min_new_tokens"] = max(0, min(defaults["min_new_tokens"], longest))
    return DecodingParams(**{**defaults, **asked})


def _vary_seed(params: DecodingParams, default: int, index: int) -> DecodingParams:
    if params.temperature == 0 or index == 0:
        return params
    return replace(params, seed=(default if params.seed is None else params.seed) + index)
