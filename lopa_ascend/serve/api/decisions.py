"""/v1/decisions and /v1/systemone: typed questions about a state, in the form of TypeSafe's System One API.

Each question becomes a prompt that lists the answers under labels. One pass over the prompt and a mask says how
probable each label is, as in ``score``.
"""

from __future__ import annotations

import json
import string
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.core import Request
from lopa_ascend.serve.api.fields import IN_REQUEST, INSTEAD
from lopa_ascend.serve.api.logprobs import scored
from lopa_ascend.serve.api.request import AnsweredRequest, Planner
from lopa_ascend.serve.http.body import Body, unsupported
from lopa_ascend.serve.http.encoding import Json, WholeWriter
from lopa_ascend.types import GenerationOutput

MAX_QUESTIONS = 64
MAX_LEVELS = len(string.digits)
MAX_OPTIONS = len(string.ascii_uppercase)
KINDS = ("noul", "choice", "score")
Content = str | dict[str, Any] | list[Any]
"""What the model is shown: a text, or JSON."""


def _text(content: Content) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


# ---- questions -------------------------------------------------------------------------------------------------------


class AnyQuestion(Body):
    instructions: Content | None = Field(None, description="What is asked.")

    @abstractmethod
    def options(self) -> dict[str, str | None]:
        """By label of each answer, in order, what it stands for; None if the label says it."""

    @abstractmethod
    def answer(self, probs: Sequence[float]) -> Json:
        """From the probability of each label. Confidence is computed as in TypeSafe's system-one-adapter."""

    def prompt(self, state: Content) -> str:
        """What the user says."""
        options = self.options()
        lines = [] if self.instructions is None else [_text(self.instructions)]
        lines += [f"{label}: {text}" for label, text in options.items() if text is not None]
        return "\n".join([_text(state), "", *lines, "", f"Answer with one of {', '.join(options)} and nothing else."])


class NoulCriteria(Body):
    true: Content | None = Field(default=None, description="What counts as yes.")
    false: Content | None = Field(default=None, description="What counts as no.")


class NoulQuestion(AnyQuestion):
    """A question with the answers yes and no, or a statement."""

    type: Literal["noul"]
    criteria: NoulCriteria | None = None

    def options(self) -> dict[str, str | None]:
        criteria = self.criteria or NoulCriteria()
        described = {"yes": criteria.true, "no": criteria.false}
        return {label: None if text is None else _text(text) for label, text in described.items()}

    def answer(self, probs: Sequence[float]) -> Json:
        return {"type": "noul", "noul": probs[0]}


class ChoiceQuestion(AnyQuestion):
    """One of several options."""

    type: Literal["choice"]
    criteria: dict[str, Content | None] = Field(
        min_length=1, max_length=MAX_OPTIONS, description="By name of each option a description, or null."
    )

    def options(self) -> dict[str, str | None]:
        texts = [name if text is None else f"{name}: {_text(text)}" for name, text in self.criteria.items()]
        return dict(zip(string.ascii_uppercase, texts, strict=False))

    def answer(self, probs: Sequence[float]) -> Json:
        named = dict(zip(self.criteria, probs, strict=True))
        best, chance = max(probs), 1 / len(probs)
        confidence = 1.0 if len(probs) == 1 else (best - chance) / (1 - chance)
        choice = max(named, key=named.__getitem__)
        return {"type": "choice", "choice": choice, "probabilities": named, "confidence": max(0.0, confidence)}


class ScoreQuestion(AnyQuestion):
    """A place on a scale."""

    type: Literal["score"]
    criteria: Annotated[list[Content], Field(min_length=1, max_length=MAX_LEVELS, fail_fast=True)] = Field(
        description="What each level means, from the lowest, which is 0."
    )

    def options(self) -> dict[str, str | None]:
        return {str(level): _text(text) for level, text in enumerate(self.criteria)}

    def answer(self, probs: Sequence[float]) -> Json:
        mode, middle = max(range(len(probs)), key=probs.__getitem__), (len(probs) - 1) / 2
        off = sum(prob * abs(level - mode) for level, prob in enumerate(probs))
        chance = sum(abs(level - middle) for level in range(len(probs))) / len(probs)
        return {
            "type": "score",
            "score": sum(level * prob for level, prob in enumerate(probs)),
            "legend": {str(level): text for level, text in enumerate(self.criteria)},
            "probabilities": {str(level): prob for level, prob in enumerate(probs)},
            "confidence": max(0.0, 1 - off / chance) if chance else 1.0,
        }


def _check_kind(question: Any) -> Any:
    if not isinstance(question, dict):
        raise ValueError(f"must be an object, got {shown(question)}")
    if question.get("type") not in KINDS:
        raise unsupported("type", f"must be {' or '.join(map(repr, KINDS))}, got {shown(question.get('type'))}")
    return question


def _kind_of(question: Any) -> str:
    """The tag of a type, in the form that locations of errors leave out."""
    kind = question.get("type") if isinstance(question, dict) else getattr(question, "type", None)
    return f"[{kind}]"


AnyKind = (
    Annotated[NoulQuestion, Tag("[noul]")]
    | Annotated[ChoiceQuestion, Tag("[choice]")]
    | Annotated[ScoreQuestion, Tag("[score]")]
)
Question = Annotated[Annotated[AnyKind, Discriminator(_kind_of)], BeforeValidator(_check_kind)]

# ---- the request -----------------------------------------------------------------------------------------------------


class DecisionRequest(AnsweredRequest):
    """A state, and questions about it that do not see one another."""

    ignored = IN_REQUEST
    named_by_client = frozenset({"questions"})
    instead = {**INSTEAD, "input": "send state, and questions by name"}

    state: Content = Field(description="What the questions are about, as text or JSON.")
    questions: dict[str, Question] = Field(
        min_length=1, max_length=MAX_QUESTIONS, description="By name, which the model is not shown. A pass for each."
    )

    def plan(self, planner: Planner) -> list[Request]:
        return [self._planned(planner, name, question) for name, question in self.questions.items()]

    def _planned(self, planner: Planner, name: str, question: AnyQuestion) -> Request:
        field, options = ("questions", name), question.options()
        if question.instructions is None and not any(options.values()):
            raise ParameterError((*field, "instructions"), "is missing")
        tokens = {label: planner.encode(label, field)[0] for label in options}
        if len({*tokens.values()}) < len(tokens):
            raise ParameterError(field, f"cannot be asked: the tokenizer begins two of {', '.join(tokens)} alike")
        try:
            messages = [{"role": "user", "content": question.prompt(self.state)}]
            prompt = planner.prompts.encode_chat(messages, variables={"enable_thinking": False})
            thinking = planner.prompts.thinking(prompt)
            if thinking is not None and thinking.is_open:
                prompt += thinking.close
            return planner.scored(prompt, [[token] for token in tokens.values()], field)
        except ParameterError as error:
            raise error.renamed(dict.fromkeys(("messages", "prompt"), "state")) from None

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> DecisionWriter:
        return DecisionWriter(model, self.questions, choices)


# ---- the answer ------------------------------------------------------------------------------------------------------


class NoulAnswer(BaseModel):
    type: Literal["noul"]
    noul: float = Field(description="Probability of yes, from 0 to 1.")


class ChoiceAnswer(BaseModel):
    type: Literal["choice"]
    choice: str = Field(description="The most probable option.")
    probabilities: dict[str, float] = Field(description="Of the options, among them.")
    confidence: float = Field(description="That of the choice, from 0 for all alike to 1.")


class ScoreAnswer(BaseModel):
    type: Literal["score"]
    score: float = Field(description="Mean of the levels, weighted by their probabilities.")
    legend: dict[str, Content] = Field(description="The levels as they were sent.")
    probabilities: dict[str, float] = Field(description="Of the levels, among them.")
    confidence: float = Field(description="How near the levels lie to the most probable one, from 0 for chance to 1.")


class DecisionUsage(BaseModel):
    input_tokens: int = Field(description="Of all prompts: the state counts for each question.")
    output_tokens: int = Field(description="Always 0.")


class Decisions(BaseModel):
    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class DecisionWriter(WholeWriter):
    """Writes the answers to one request, which has a choice for each question."""

    def __init__(self, model: str, questions: Mapping[str, AnyQuestion], choices: Sequence[Request]):
        self.id = f"decision-{uuid.uuid4().hex}"
        self._model, self._questions = model, questions
        self._num_prompt = sum(len(choice.prompt) for choice in choices)

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        answers = {}
        for (name, question), output in zip(self._questions.items(), outputs, strict=True):
            found = scored([*question.options()], output)
            answers[name] = question.answer([label["share"] for label in found])
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        return {"model": self._model, "answers": answers, "usage": usage}
