"""A request's fields -> what the engine is asked to do: token ids and decoding parameters of each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lopa_ascend.config import DecodingParams, Limits, ParameterError
from lopa_ascend.serve.api.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest
from lopa_ascend.serve.engine.client import Choice
from lopa_ascend.text.prompt import Prompts

ALIASES = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
}
OFF: dict[str, tuple[float, ...]] = {"top_p": (1,), "top_k": (0, -1)}
"""How OpenAI's and vLLM's clients switch these off."""


@dataclass(frozen=True)
class Planner:
    """Makes choices of requests. ``decoding`` is what a request does not set itself, ``seed`` what its sampling starts
    from."""

    prompts: Prompts
    limits: Limits
    decoding: Mapping[str, Any]
    seed: int

    def completion(self, request: CompletionRequest) -> list[Choice]:
        """One for each prompt and each of its ``n`` answers, prompt-major.

        Raises:
            ParameterError: a field is wrong, or does not fit the model.
        """
        if len(request.prompt) * (request.n or 1) > MAX_CHOICES:
            raise ParameterError("prompt", f"prompts times n must be at most {MAX_CHOICES}")
        if request.logprobs is not None and not 0 <= request.logprobs <= 1:
            raise ParameterError("logprobs", f"must be 0 or 1: there are no alternatives, got {request.logprobs}")
        if request.echo and request.logprobs is not None:
            raise ParameterError("echo", "does not go with logprobs: a prompt has no probabilities")
        if request.echo and self.prompts.tokenizer is None:
            raise ParameterError("echo", "needs a tokenizer, and the model has no tokenizer files")
        prompts = [self.prompts.encode(prompt) for prompt in request.prompt]
        return self._choices(request, prompts, "prompt")

    def chat(self, request: ChatRequest) -> list[Choice]:
        """One for each of the ``n`` answers.

        Raises:
            ParameterError: a field is wrong, or does not fit the model.
        """
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= 1:
            raise ParameterError("top_logprobs", f"must be 0 or 1: there are no others, got {request.top_logprobs}")
        if request.top_logprobs and not request.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        try:
            prompt = self.prompts.encode_chat([message.as_template_input() for message in request.messages])
        except ParameterError as error:
            raise _renamed(error, {"prompt": "messages"}) from None
        return self._choices(request, [prompt], "messages")

    def echoed(self, request: CompletionRequest) -> list[str]:
        """The text of each prompt, where it was asked for."""
        tokenizer = self.prompts.tokenizer
        if not request.echo or tokenizer is None:
            return []
        return [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in request.prompt
        ]

    def _choices(self, request: GenerationRequest, prompts: list[list[int]], source: str) -> list[Choice]:
        if request.stream_options is not None and not request.stream:
            raise ParameterError("stream_options", "needs stream: true")
        asked, sent_as = _asked(request)
        choices = []
        try:
            for prompt in prompts:
                params = self._params(asked, len(prompt))
                self.limits.check(len(prompt), params)
                self.prompts.check_stop(params.stop)
                choices += [Choice(prompt, self._vary_seed(params, index)) for index in range(request.n or 1)]
        except ParameterError as error:
            raise _renamed(error, {"prompt": source, **sent_as}) from None
        return choices

    def _params(self, asked: Mapping[str, Any], prompt_tokens: int) -> DecodingParams:
        """What the request asks for, else the server's default where it goes with that."""
        defaults = {"max_new_tokens": DecodingParams.max_new_tokens, **self.decoding}
        if "decoding" in asked:
            defaults.pop("num_branches", None)
        if asked.get("temperature") == 0:
            defaults.pop("top_p", None)
            defaults.pop("top_k", None)
        # A prompt that leaves no room at all is for Limits.check to refuse.
        room = self.limits.max_model_len - prompt_tokens
        defaults["max_new_tokens"] = max(1, min(defaults["max_new_tokens"], room))
        if "min_new_tokens" in defaults:
            longest = asked.get("max_new_tokens", defaults["max_new_tokens"])
            defaults["min_new_tokens"] = max(0, min(defaults["min_new_tokens"], longest))
        return DecodingParams(**{**defaults, **asked})

    def _vary_seed(self, params: DecodingParams, index: int) -> DecodingParams:
        if params.temperature == 0 or index == 0:
            return params
        first = self.seed if params.seed is None else params.seed
        return replace(params, seed=(first + index) % 2**63)


def _renamed(error: ParameterError, names: Mapping[str, str]) -> ParameterError:
    """The error under the name by which the request sent the field."""
    return ParameterError(names.get(error.param, error.param), str(error).removeprefix(f"{error.param}: "))


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
