"""Known answers of a model: an engine must repeat what a CPU answered to some prompts before it serves. The command
``python -m scripts.eval answers`` writes such a file.

On another device rounding may decide a near-tie differently, so only the first ``exact`` tokens of an answer are
compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lopa_ascend.config import DecodingParams, EngineConfig, ModelConfig, ParameterError
from lopa_ascend.config.files import ADAPTER_CONFIG, read_json_object, shown
from lopa_ascend.core import Request
from lopa_ascend.types import TokenRun

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_TOKENS = 256
"""Largest ``max_new_tokens`` of an answer."""
MAX_ANSWERS = 64
TIME_LIMIT = 600.0
"""Seconds to repeat the answers."""
INCIDENTAL = ("_name_or_path", "base_model_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Fields of a model's or an adapter's configuration that do not tell models apart."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt and what a CPU answered."""

    prompt: str | None = None
    """As text, for messages."""
    prompt_token_ids: Annotated[tuple[int, ...], Meta(min_length=1)]
    params: dict[str, Any] = {}
    """Decoding parameters that differ from their usual defaults."""
    token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_TOKENS)]
    margins: tuple[float, ...] = ()
    """For each token, log(its probability / the second's)."""
    exact: Annotated[int, Meta(ge=0)]
    """Number of first tokens that every device gives."""

    @property
    def decoding(self) -> DecodingParams:
        """``params`` with the defaults; ParameterError if one is unknown or not allowed."""
        unknown = self.params.keys() - set(DecodingParams.all_parameters())
        if unknown:
            raise ParameterError(min(unknown), "is no decoding parameter")
        return DecodingParams(**self.params)


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that gave the answers. Equal ones give equal answers but for rounding."""

    config: str
    lora: str | None = None
    quantization: str | None = None
    quantization_exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig, model: Path) -> Identity:
        adapter = None if config.lora is None else _digest(Path(config.lora) / ADAPTER_CONFIG)
        return cls(
            config=_digest(model / "config.json"),
            lora=adapter,
            quantization=config.quantization,
            quantization_exclude=tuple(sorted(config.quantization_exclude)),
        )


class AnswersFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1] = 1
    model: Identity
    name: str
    answers: Annotated[tuple[Answer, ...], Meta(min_length=1, max_length=MAX_ANSWERS)]


def _digest(file: Path) -> str:
    values = {name: value for name, value in _object(file).items() if name not in INCIDENTAL}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _object(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file, ValueError)
    except ValueError as error:
        raise ParameterError("check_answers", str(error)) from error


def read_answers(config: EngineConfig, path: Path, model: ModelConfig) -> tuple[Answer, ...]:
    """The answers in the configured file, for the model in directory ``path``; none if no file is configured.
    ParameterError names the field if the file cannot be used, or belongs to another model."""
    if config.check_answers is None:
        return ()
    try:
        found = msgspec.convert(_object(Path(config.check_answers)), AnswersFile)
        _check_identity(found, Identity.of(config, path))
        for index, answer in enumerate(found.answers):
            _check_answer(f"answers[{index}]", answer, model)
        if not any(answer.exact for answer in found.answers):
            raise ValueError("answers: exact is 0 in all of them, so nothing would be compared")
    except ValueError as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError("check_answers", f"{config.check_answers}: {error}") from error
    return found.answers


def _check_identity(found: AnswersFile, own: Identity) -> None:
    for name in Identity.__struct_fields__:
        expected, value = getattr(own, name), getattr(found.model, name)
        if value != expected:
            message = f"is {shown(value)} in the file, which is of {found.name!r}, and {shown(expected)} of this model"
            raise ValueError(f"model.{name}: {message}; write a file for it with python -m scripts.eval answers")


def _check_answer(where: str, answer: Answer, model: ModelConfig) -> None:
    for name in ("prompt_token_ids", "token_ids"):
        for index, token in enumerate(getattr(answer, name)):
            if not 0 <= token < model.vocab_size or (token == model.mask_token_id and name == "prompt_token_ids"):
                raise ValueError(f"{where}.{name}[{index}]: {token} is no token of this model")
    if answer.exact > len(answer.token_ids):
        raise ValueError(f"{where}.exact: is {answer.exact}, and there are {len(answer.token_ids)} token_ids")
    try:
        params = answer.decoding
    except ParameterError as error:
        raise ValueError(f"{where}.params.{error}") from error
    if params.is_random:
        raise ValueError(f"{where}.params: the answer depends on a seed; choose temperature 0 and a greedy decoding")
    if params.max_new_tokens > MAX_TOKENS:
        raise ValueError(f"{where}.params.max_new_tokens: is {params.max_new_tokens}, expected at most {MAX_TOKENS}")


def repeat(engine: Engine, answers: Sequence[Answer], deadline: float = float("inf")) -> list[TokenRun]:
    """An engine's answers now, to all prompts together. ParameterError if it cannot decode one of them, or not before
    ``deadline`` on the monotonic clock."""
    runs: dict[str, list[TokenRun]] = {f"answer-{index}": [] for index in range(len(answers))}
    for name, answer in zip(runs, answers, strict=True):
        try:
            engine.add(Request(name, answer.prompt_token_ids, answer.decoding))
        except ParameterError as error:
            raise ParameterError("check_answers", f"{_shown(answer)} cannot run on this engine: {error}") from error
    while engine.has_work():
        if time.monotonic() > deadline:
            raise ParameterError("check_answers", f"the answers took more than {TIME_LIMIT:g} seconds")
        for update in engine.step():
            if update.error is not None:
                answer = answers[list(runs).index(update.request_id)]
                raise ParameterError("check_answers", f"{_shown(answer)} failed: {update.error}")
            runs[update.request_id].append(update.tokens)
    return [TokenRun.joined(parts) for parts in runs.values()]


def check_answers(engine: Engine) -> None:
    """Has an engine repeat the answers of its file before it serves: one by one, and all together. ParameterError names
    prompt, position and both tokens if a token differs; or see ``repeat``."""
    answers = engine.answers
    deadline = time.monotonic() + TIME_LIMIT
    for answer in answers:
        _compare(answer, repeat(engine, [answer], deadline)[0].ids, "alone")
    if len(answers) > 1:
        for answer, run in zip(answers, repeat(engine, answers, deadline), strict=True):
            _compare(answer, run.ids, "together with the others")
    if answers:
        compared = sum(answer.exact for answer in answers)
        logger.info("%d answers (%d tokens) are those of %s", len(answers), compared, engine.config.check_answers)


def _compare(answer: Answer, found: Sequence[int], how: str) -> None:
    place = first_difference(answer.token_ids[: answer.exact], found)
    if place == answer.exact:
        return
    token = found[place] if place < len(found) else "the end"
    raise ParameterError(
        "check_answers",
        f"{_shown(answer)}, decoded {how}: token {place} of the answer is {token}, and on a CPU it was "
        f"{answer.token_ids[place]}. This device does not compute the model rightly, or its weights are not those of "
        "the file",
    )


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The first index at which the tokens differ; the shorter length if there is none."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def _shown(answer: Answer) -> str:
    return f"prompt {shown(answer.prompt if answer.prompt is not None else list(answer.prompt_token_ids))}"


def encode(identity: Identity, name: str, answers: Sequence[Answer]) -> Mapping[str, Any]:
    content: Mapping[str, Any] = msgspec.to_builtins(AnswersFile(model=identity, name=name, answers=tuple(answers)))
    return content
