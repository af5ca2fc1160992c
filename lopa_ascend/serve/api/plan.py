"""From a request to its choices: the token ids and the decoding parameters that the engine gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unicodedata import normalize

from lopa_ascend.config import (
    ContextLengthError,
    DecodingParams,
    Limits,
    ParameterError,
    context_length,
    fitting_defaults,
)
from lopa_ascend.config.files import shown
from lopa_ascend.config.kinds import MAX_TOKEN_IDS
from lopa_ascend.serve.api.openai_responses_body import ResponseRequest
from lopa_ascend.serve.api.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest
from lopa_ascend.serve.engine.generation import Choice
from lopa_ascend.text.prompt import Prompts

MAX_LOGPROBS = 2**20
"""Most log probabilities in an answer: each takes some 200 bytes while the answer is made."""
ID_PARAMETERS = ("eos_token_id", "stop_token_ids", "logit_bias")
"""Parameters that name token ids one by one. Those of ``bad_words`` make words."""


def check_defaults(decoding: Mapping[str, Any], prompts: Prompts, limits: Limits) -> None:
    """Checks a server's default decoding parameters against its model: with a wrong one every request would fail.

    Raises:
        ValueError: a default names token ids that the model does not have, or needs a tokenizer.
    """
    params = DecodingParams(**decoding)
    try:
        limits.check_token_ids(prompts.for_engine(params))
    except ParameterError as error:
        raise ValueError(f"the default of {error}") from error


class AskedParameters(NamedTuple):
    """The decoding parameters that a request sets itself."""

    values: dict[str, Any]
    """By name; None for a parameter that the request switches off."""
    sent_as: dict[str, str]
    """By name: the name or the alias under which the request sent the parameter."""


@dataclass(frozen=True)
class Planner:
    """Plans a request: what its choices are, and whether the engine can run them."""

    prompts: Prompts
    limits: Limits
    decoding: Mapping[str, Any]
    """The server's defaults, by name of the decoding parameter."""

    def completion(self, request: CompletionRequest) -> list[Choice]:
        """``n`` choices for each prompt, one prompt after the other.

        Raises:
            ParameterError: a field is wrong, or does not fit the model.
        """
        if len(request.prompt) * (request.n or 1) > MAX_CHOICES:
            raise ParameterError("prompt", f"prompts times n must be at most {MAX_CHOICES}")
        if request.echo and request.logprobs is not None:
            raise ParameterError("echo", "cannot be combined with logprobs: prompts have no log probabilities")
        if request.echo and self.prompts.tokenizer is None:
            raise ParameterError("echo", "needs a tokenizer, and the model has no tokenizer files")
        return self._choices(request, [self._encode(prompt) for prompt in request.prompt], "prompt")

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """The token ids of a prompt, which is refused at once if it is too long: there may be a thousand of them."""
        ids = prompt
        if isinstance(prompt, str) or len(prompt) < self.limits.max_model_len:
            ids = self.prompts.encode(prompt)
        if len(ids) >= self.limits.max_model_len:
            message = f"has {len(ids)} tokens; {context_length(self.limits.max_model_len)}"
            raise ContextLengthError("prompt", message)
        assert isinstance(ids, list)
        return ids

    def chat(self, request: ChatRequest) -> list[Choice]:
        """``n`` choices for the conversation.

        Raises:
            ParameterError: a field is wrong, or does not fit the model.
        """
        if request.top_logprobs and not request.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        messages = [message.as_template_input() for message in request.messages]
        return self._conversation(request, messages, "messages")

    def response(self, request: ResponseRequest) -> list[Choice]:
        """The one choice for the conversation.

        Raises:
            ParameterError: a field is wrong, or does not fit the model.
        """
        return self._conversation(request, request.as_template_input(), "input")

    def echoed(self, request: CompletionRequest) -> list[str]:
        """The text of each prompt if the request asks for an echo, else nothing."""
        tokenizer = self.prompts.tokenizer
        if not request.echo or tokenizer is None:
            return []
        return [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in request.prompt
        ]

    def _conversation(self, request: GenerationRequest, messages: list[dict[str, str]], field: str) -> list[Choice]:
        """The choices for a conversation, which came in the field ``field``."""
        try:
            prompt = self.prompts.encode_chat(messages)
        except ParameterError as error:
            raise _renamed(error, {"prompt": field, "messages": field}) from None
        return self._choices(request, [prompt], field)

    def _choices(self, request: GenerationRequest, prompts: list[list[int]], prompt_field: str) -> list[Choice]:
        """The choices for several prompts, which came in the field ``prompt_field``."""
        if request.stream_options is not None and not request.stream:
            raise ParameterError("stream_options", "needs stream: true")
        asked = asked_parameters(request)
        if isinstance(request, CompletionRequest) and request.logprobs is not None:
            asked.values["top_logprobs"], asked.sent_as["top_logprobs"] = request.logprobs, "logprobs"
        choices, params_by_length = [], dict[int, DecodingParams]()
        try:
            self._check_sizes(asked.values, len(prompts) * (request.n or 1))
            for prompt in prompts:
                params = params_by_length.get(len(prompt))
                if params is None:
                    params = self.prompts.for_engine(self._params(asked.values, len(prompt)))
                    self.limits.check(len(prompt), params)
                    params_by_length[len(prompt)] = params
                choices += [Choice(prompt, _with_own_seed(params, index)) for index in range(request.n or 1)]
            logprobs = getattr(request, "logprobs", None)  # responses have no such field
            if logprobs is not None and logprobs is not False:  # 0 asks for those of the tokens
                _check_logprobs(choices)
        except ParameterError as error:
            raise _renamed(error, {"prompt": prompt_field, **asked.sent_as}) from None
        return choices

    def _check_sizes(self, asked: Mapping[str, Any], num_choices: int) -> None:
        """Refuses lists that are too long for all choices together, as every choice has its own copy in the engine.

        Args:
            asked: the parameters that the request sets, with each token id once.

        Raises:
            ParameterError: there are too many token ids.
        """
        counts = {"bad_words": _num_ids(asked.get("bad_words") or ())}
        for name in ID_PARAMETERS:
            counts[name] = len(asked.get(name) or ())
        for name, count in counts.items():
            if count * num_choices > MAX_TOKEN_IDS:
                most = MAX_TOKEN_IDS // num_choices
                message = f"has {count} token ids; a request with {num_choices} choices may have {most}"
                raise ParameterError(name, message)

    def _params(self, asked: Mapping[str, Any], prompt_tokens: int) -> DecodingParams:
        """The request's own parameters, and the defaults for all others unless a default contradicts the request."""
        defaults = fitting_defaults({"max_new_tokens": DecodingParams.max_new_tokens, **self.decoding}, asked)
        # Where a prompt leaves no room at all, Limits.check refuses the request.
        room = self.limits.max_model_len - prompt_tokens
        defaults["max_new_tokens"] = max(1, min(defaults["max_new_tokens"], room))
        if "min_new_tokens" in defaults:
            longest = asked.get("max_new_tokens", defaults["max_new_tokens"])
            defaults["min_new_tokens"] = max(0, min(defaults["min_new_tokens"], longest))
        return DecodingParams.of(**{**defaults, **asked})


def asked_parameters(request: GenerationRequest) -> AskedParameters:
    """The decoding parameters that a request sets, under their own names or by aliases.

    Raises:
        ParameterError: the request sets a parameter to two different values.
    """
    values: dict[str, Any] = {}
    sent_as: dict[str, str] = {}
    for name, parameter in DecodingParams.all_parameters().items():
        for field in (name, *parameter.aliases):
            value = getattr(request, field, None)  # not every route has a field for every parameter
            if value is None:
                continue
            if name not in values:
                values[name] = value
                sent_as[name] = field
            elif values[name] != value:
                message = f"is {shown(value)}, but {sent_as[name]}, which means the same, is {shown(values[name])}"
                raise ParameterError(field, message)
        if values.get(name) in parameter.off:
            values[name] = None
    return AskedParameters(values, sent_as)


def _num_ids(words: Sequence[str | Sequence[int]]) -> int:
    """Most token ids that ``bad_words`` can become: a text has one for each byte in NFC at most, alone and after a
    space."""
    total = 0
    for word in words:
        total += 2 * (len(normalize("NFC", word).encode()) + 1) if isinstance(word, str) else len(word)
    return total


def _check_logprobs(choices: Sequence[Choice]) -> None:
    """Raises ParameterError if the choices of a request can have too many log probabilities together."""
    total = sum(choice.params.max_new_tokens * (1 + choice.params.top_logprobs) for choice in choices)
    if total > MAX_LOGPROBS:
        message = (
            f"makes up to {total} log probabilities: number of choices times max_tokens times (1 + top_logprobs); "
            f"this server gives at most {MAX_LOGPROBS} in one answer"
        )
        raise ParameterError("top_logprobs", message)


def _with_own_seed(params: DecodingParams, index: int) -> DecodingParams:
    """The parameters of the answer number ``index`` to a prompt, which has the seed ``seed + index``."""
    return params if params.seed is None else params.with_valid(seed=(params.seed + index) % 2**63)


def _renamed(error: ParameterError, names: Mapping[str, str]) -> ParameterError:
    """The same error, with the name under which the request sent the field."""
    return type(error)(names.get(error.param, error.param), str(error).removeprefix(f"{error.param}: "))
