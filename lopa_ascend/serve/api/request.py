"""What all requests for text have in common: their fields, and the way to the choices that the engine gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar
from unicodedata import normalize

from pydantic import Field

from lopa_ascend.admission import Limits
from lopa_ascend.config import (
    ContextLengthError,
    DecodingParams,
    ParameterError,
    context_length,
    fitting_defaults,
)
from lopa_ascend.config.combinations import IN_JSON
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.config.files import shown
from lopa_ascend.config.kinds import INT64_MIN, MAX_TOKEN_IDS
from lopa_ascend.core import Request
from lopa_ascend.serve.api.decoding_fields import with_decoding_parameters
from lopa_ascend.serve.api.fields import HARMLESS, IN_REQUEST, INSIDE, INSTEAD
from lopa_ascend.serve.api.structured import AskedForm, asked_form, calling_form, placed
from lopa_ascend.serve.api.tools import Tools, note_others
from lopa_ascend.serve.http.body import Body
from lopa_ascend.serve.http.encoding import Json, Writer
from lopa_ascend.text.gaps import Gap, Piece, gapped_text
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.types import GappedText, Thinking

MAX_MESSAGES = 2**14
MAX_N = 128
"""OpenAI's limit."""
MAX_SCORED = 2**14
"""Most tokens of the texts that one pass scores."""
MAX_LOGPROBS = 2**20
"""Each takes some 200 bytes while the answer is made."""
OLD_NAME = "An older name for one of the fields of structured_outputs."
ID_PARAMETERS = ("eos_token_id", "stop_token_ids", "logit_bias")
"""They name token ids one by one. Those of ``bad_words`` make words."""
VARIABLES = (
    'Variables for the chat template, such as {"enable_thinking": false}. One that it does not read is refused. '
    "Default: --default-chat-template-kwargs."
)
EFFORT = "A hint for chat templates that read it. none also means enable_thinking: false, for those that read that."
LOGPROB = (
    "the logarithm of the probability that the model gave the token in the forward pass that filled its position, or, "
    "with top_k, top_p or min_p, of the probability with which the token was drawn"
)


# ---- fields ----------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    ignored = INSIDE
    include_usage: bool | None = Field(None, description="The stream ends with a chunk without choices that has usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk has the usage up to it.")


class AnsweredRequest(Body):
    """A request that the engine answers. Each route has a subclass."""

    instead = INSTEAD
    always_streams: ClassVar[bool] = False
    """The answer is a stream of forward passes."""

    model: str | None = Field(None, description="Name of the served model; may be left out.")

    @property
    def streams(self) -> bool:
        return self.always_streams

    @abstractmethod
    def plan(self, planner: Planner) -> list[Request]:
        """The choices, ``n`` for each prompt. Raises ParameterError if a field is wrong, or does not fit the model."""

    @abstractmethod
    def writer(self, planner: Planner, model: str, choices: list[Request]) -> Writer:
        """``model`` is the name of the served model."""


@with_decoding_parameters
class GenerationRequest(AnsweredRequest):
    """A request for text."""

    ignored = IN_REQUEST
    harmless = HARMLESS
    is_conversation: ClassVar[bool] = False
    """The chat template makes the prompt, after which the model may think."""

    n: int | None = Field(None, ge=1, le=MAX_N, description="Number of answers to each prompt. Default: 1.")
    stream: bool | None = Field(None, description="Answer with server-sent events. Default: false.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream: true.")
    return_token_ids: bool | None = Field(None, description="Adds token_ids to every choice. Default: false.")
    guided_json: dict[str, Any] | str | None = Field(None, description=OLD_NAME)
    guided_regex: str | None = Field(None, description=OLD_NAME)
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description=OLD_NAME)
    guided_grammar: str | None = Field(None, description=OLD_NAME)

    @property
    def streams(self) -> bool:
        return self.always_streams or bool(self.stream)


def tidy_tools(values: dict[str, Any]) -> None:
    """Without a tool that may be called, the list changes nothing, and goes."""
    if isinstance(tools := values.get("tools"), list):
        if values.get("tool_choice") == "none":
            del values["tools"]
        else:
            note_others(tools)


# ---- planning --------------------------------------------------------------------------------------------------------


def check_defaults(decoding: Mapping[str, Any], prompts: Prompts, limits: Limits) -> None:
    """Refuses default decoding parameters with which every request would fail, by ValueError: token ids that the model
    does not have, a need of a tokenizer, or limits of thinking for a model that does not think."""
    params = DecodingParams(**decoding)
    try:
        prompts.check_thinking(decoding, is_conversation=True)
        limits.check_token_ids(prompts.for_engine(params))
    except ParameterError as error:
        raise ValueError(f"the default of {error}") from error


@dataclass(frozen=True)
class Planner:
    """Makes the choices of a request, as far as the engine can run them."""

    prompts: Prompts
    limits: Limits
    decoding: Mapping[str, Any]
    """The server's defaults, by name."""

    def conversation(
        self,
        request: GenerationRequest,
        messages: list[Json],
        field: str,
        *,
        tools: Tools,
        response_format: AskedForm | None,
        variables: Json | None = None,
        effort: str | None = None,
        with_logprobs: bool = False,
    ) -> list[Request]:
        """The choices for a conversation from ``field``. ``variables`` are the request's own for the chat template;
        ``effort`` is a hint for templates that read it."""
        form = asked_form(request, response_format, tools)
        shown = tools.as_template_input()
        if tools.is_forced and not self.prompts.knows_tools:
            shown = []  # the grammar has the functions
        try:
            prompt = self.prompts.encode_chat(messages, shown, {**self._hints(effort), **(variables or {})})
        except ParameterError as error:
            raise error.renamed({"prompt": field, "messages": field}) from None
        if tools.is_forced or (form is not None and tools.functions):
            self._check_schemas(tools, form)
            form = calling_form(tools, form)
        return self.choices(request, [prompt], field, form=form, with_logprobs=with_logprobs)

    def _hints(self, effort: str | None) -> Json:
        """Variables for ``reasoning_effort``, as far as the chat template reads them."""
        hints: Json = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            hints |= {"enable_thinking": False}
        tokenizer = self.prompts.tokenizer
        read = frozenset[str]() if tokenizer is None else tokenizer.template_variables
        return {name: value for name, value in hints.items() if name in read}

    def _check_schemas(self, tools: Tools, answer: AskedForm | None) -> None:
        """Refuses functions, and an answer in their place, by the field of the schema: their common grammar has
        none."""
        schemas: dict[FieldPath, Any] = dict(tools.callable().values())
        if answer is not None and answer.kind == "json":
            schemas[answer.field] = answer.value
        for field, schema in schemas.items():
            try:
                self.prompts.for_engine(DecodingParams(structured_outputs={"json": schema}))
            except ParameterError as error:
                raise placed(error, field) from None

    def choices(
        self,
        request: GenerationRequest,
        prompts: list[list[int]],
        prompt_field: str | FieldPath,
        *,
        form: AskedForm | None,
        top_logprobs: int | None = None,
        with_logprobs: bool = False,
        rest: Sequence[Piece] = (),
        rest_field: str = "",
    ) -> list[Request]:
        """The choices for several prompts.

        Args:
            form: required of the answers. A choice of texts with log probabilities adds a scoring choice per prompt.
            top_logprobs: the parameter, if the request sets it by its field ``logprobs``.
            rest: follows the prompt in a text with gaps; from the field ``rest_field``.
        """
        if request.stream_options is not None and not request.stream:
            raise ParameterError("stream_options", "needs stream: true")
        asked, sent_as = asked_parameters(request)
        if top_logprobs is not None:
            asked["top_logprobs"], sent_as["top_logprobs"] = top_logprobs, "logprobs"
        if form is not None:
            asked["structured_outputs"], sent_as["structured_outputs"] = form.parameter, form.field
        texts = [tuple(prompt) for prompt in prompts]  # one object in all choices of a prompt
        try:
            _check_sizes(asked, len(prompts) * (request.n or 1))
            self.prompts.check_thinking(asked, is_conversation=request.is_conversation)
            choices = self._answers(request, asked, texts, rest, rest_field)
            if with_logprobs:
                _check_logprobs(choices)
                if form is not None and form.kind == "choice":
                    choices += [self.scored(prompt, form.value, form.field) for prompt in texts]
        except ParameterError as error:
            if error.path[0] == "structured_outputs" and form is not None:
                raise placed(error, form.field) from None
            raise error.renamed({"prompt": prompt_field, **sent_as, **IN_JSON}) from None
        return choices

    def _answers(
        self,
        request: GenerationRequest,
        asked: Mapping[str, Any],
        prompts: Sequence[tuple[int, ...]],
        rest: Sequence[Piece],
        rest_field: str,
    ) -> list[Request]:
        """``n`` for each prompt. Prompts of one length share their parameters."""
        fitting = dict[int, tuple[DecodingParams, GappedText | None]]()
        choices = []
        for prompt in prompts:
            if len(prompt) not in fitting:
                thinking = self.prompts.thinking(prompt) if request.is_conversation else None
                fitting[len(prompt)] = self._fit(asked, len(prompt), rest, rest_field, thinking)
            params, gapped = fitting[len(prompt)]
            for index in range(request.n or 1):
                choices.append(Request("", prompt, _with_own_seed(params, index), gapped=gapped))
        return choices

    def _fit(
        self,
        asked: Mapping[str, Any],
        prompt_tokens: int,
        rest: Sequence[Piece],
        rest_field: str,
        thinking: Thinking | None,
    ) -> tuple[DecodingParams, GappedText | None]:
        """The parameters for prompts of one length, and the text with gaps that follows them."""
        num_open = sum(isinstance(piece, Gap) and not piece.size(0) for piece in rest)
        num_known = sum(piece.size(0) if isinstance(piece, Gap) else len(piece) for piece in rest)
        params = self.prompts.for_engine(self._params(asked, prompt_tokens + num_known, max(1, num_open)), thinking)
        if not rest:
            self.limits.check(prompt_tokens, params)
            return params, None
        total = prompt_tokens + num_known + num_open * params.max_new_tokens
        if total > (longest := self.limits.max_model_len):
            message = f"has {total} tokens with its gaps and the text before it; {context_length(longest)}"
            raise ContextLengthError(rest_field, message)
        gapped = gapped_text(rest, params.max_new_tokens, self.limits.mask_token_id)
        params = params.with_valid(max_new_tokens=len(gapped.tokens))
        try:
            self.limits.check_gaps(params, gapped)
            self.limits.check(prompt_tokens, params)
        except ParameterError as error:
            raise error.renamed(dict.fromkeys(("gaps", "max_new_tokens"), rest_field)) from None
        return params, gapped

    def scored(self, prompt: Sequence[int], texts: Sequence[str | Sequence[int]], field: FieldPath) -> Request:
        """Asks how probable texts of ``field`` are after a prompt."""
        continuations = [tuple(self.encode(text, (*field, index))) for index, text in enumerate(texts)]
        if (total := sum(map(len, continuations))) > MAX_SCORED:
            raise ParameterError(field, f"has {total} tokens; at most {MAX_SCORED} can be scored at once")
        longest = max(map(len, continuations))
        params = DecodingParams(**fitting_defaults(self.decoding, {})).for_continuations(longest)
        try:
            self.limits.check(len(prompt), params)
            self.limits.check_continuations(len(prompt), params, continuations)
        except ParameterError as error:
            raise error.renamed(dict.fromkeys(("continuations", "max_new_tokens"), field)) from None
        return Request("", tuple(prompt), params, continuations=tuple(continuations))

    def _params(self, asked: Mapping[str, Any], prompt_tokens: int, num_gaps: int = 1) -> DecodingParams:
        """The request's parameters, and all defaults that do not contradict them. ``num_gaps`` share the room left."""
        defaults = fitting_defaults({"max_new_tokens": DecodingParams.max_new_tokens, **self.decoding}, asked)
        # If a prompt leaves no room at all, Limits.check refuses the request.
        block_size = asked.get("block_size", defaults.get("block_size", DecodingParams.block_size))
        is_size = type(block_size) is int and block_size > 0  # DecodingParams refuses others
        room = self.limits.room(prompt_tokens, block_size if is_size else 1)
        defaults["max_new_tokens"] = max(1, min(defaults["max_new_tokens"], room // num_gaps))
        if "min_new_tokens" in defaults:
            longest = asked.get("max_new_tokens", defaults["max_new_tokens"])
            defaults["min_new_tokens"] = max(0, min(defaults["min_new_tokens"], longest))
        return DecodingParams(**{**defaults, **asked})

    def encode(self, prompt: str | Sequence[int], field: str | FieldPath) -> list[int]:
        """Token ids of a field. One that is too long is refused at once: there may be a thousand prompts."""
        longest = self.limits.max_model_len
        try:
            ids = self.prompts.encode(prompt) if isinstance(prompt, str) or len(prompt) < longest else list(prompt)
        except ParameterError as error:
            raise error.at(field) from None
        if len(ids) >= longest:
            raise ContextLengthError(field, f"has {len(ids)} tokens; {context_length(longest)}")
        return ids


def asked_parameters(request: GenerationRequest) -> tuple[dict[str, Any], dict[str, str | FieldPath]]:
    """The decoding parameters of a request by name, None if it switches one off; and the fields in which they came."""
    values: dict[str, Any] = {}
    sent_as: dict[str, str | FieldPath] = {}
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
    return values, sent_as


def _check_sizes(asked: Mapping[str, Any], num_choices: int) -> None:
    """Refuses lists that are too long for all choices together: each has a copy. ``asked`` has each token id once."""
    counts = {name: len(asked.get(name) or ()) for name in ID_PARAMETERS}
    counts["bad_words"] = _num_ids(asked.get("bad_words") or ())
    for name, count in counts.items():
        if count * num_choices > MAX_TOKEN_IDS:
            most = MAX_TOKEN_IDS // num_choices
            message = f"has {count} token ids; a request with {num_choices} choices may have {most}"
            raise ParameterError(name, message)


def _num_ids(words: Sequence[str | Sequence[int]]) -> int:
    """Most token ids that ``bad_words`` can become: one for each byte in NFC, alone and after a space."""
    total = 0
    for word in words:
        total += 2 * (len(normalize("NFC", word).encode()) + 1) if isinstance(word, str) else len(word)
    return total


def _check_logprobs(choices: Sequence[Request]) -> None:
    """Raises ParameterError if a request's choices can have too many log probabilities together."""
    total = sum(choice.params.max_new_tokens * (1 + choice.params.top_logprobs) for choice in choices)
    if total > MAX_LOGPROBS:
        message = (
            f"makes up to {total} log probabilities: number of choices times max_tokens times (1 + top_logprobs); "
            f"this server gives at most {MAX_LOGPROBS} in one answer"
        )
        raise ParameterError("top_logprobs", message)


def _with_own_seed(params: DecodingParams, index: int) -> DecodingParams:
    """The seed of answer ``index`` to a prompt is ``seed + index`` in 64 bits."""
    if params.seed is None:
        return params
    return params.with_valid(seed=(params.seed + index - INT64_MIN) % 2**64 + INT64_MIN)
