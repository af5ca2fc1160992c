"""/score: how probable given texts are after a prompt, in the form of vLLM's scores of pairs of texts."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from lopa_ascend.config import ParameterError
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import ScoredText
from lopa_ascend.serve.api.chat import Message
from lopa_ascend.serve.api.fields import IN_REQUEST
from lopa_ascend.serve.api.logprobs import scored
from lopa_ascend.serve.api.request import MAX_MESSAGES, AnsweredRequest, Planner
from lopa_ascend.serve.http.encoding import Json, WholeWriter
from lopa_ascend.types import GenerationOutput

MAX_TEXTS = 1024
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class ScoreRequest(AnsweredRequest):
    """A prompt and texts that may follow it, or pairs of a prompt and a text."""

    ignored = IN_REQUEST
    text_1: Texts | None = Field(None, description="The prompt; or as many as text_2 has, which belong together.")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None,
        min_length=1,
        max_length=MAX_MESSAGES,
        description="In place of text_1: a conversation, of which the chat template makes the prompt.",
    )
    text_2: Texts = Field(
        description="The texts to score, each with the space that it begins with, if any. One prompt is one forward "
        "pass, with as many masks after the prompt as the longest text has tokens."
    )

    @property
    def texts(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2

    def plan(self, planner: Planner) -> list[Request]:
        if (self.text_1 is None) == (self.messages is None):
            problem = "is missing; give text_1 or messages" if self.messages is None else "cannot be with messages"
            raise ParameterError("text_1", problem)
        if self.messages is not None:
            messages = [message.as_template_input() for message in self.messages]
            return [planner.scored(planner.prompts.encode_chat(messages), self.texts, ("text_2",))]
        if not isinstance(self.text_1, list):
            assert self.text_1 is not None
            return [planner.scored(planner.encode(self.text_1, "text_1"), self.texts, ("text_2",))]
        if len(self.text_1) != len(self.texts):
            raise ParameterError("text_2", f"has {len(self.texts)} texts, and text_1 {len(self.text_1)}")
        prompts = [planner.encode(text, ("text_1", index)) for index, text in enumerate(self.text_1)]
        pairs = zip(prompts, self.texts, strict=True)
        return [planner.scored(prompt, [text], ("text_2", index)) for index, (prompt, text) in enumerate(pairs)]

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> ScoreWriter:
        return ScoreWriter(model, self.texts, choices)


class Score(ScoredText):
    """How probable one text is."""

    index: int
    object: Literal["score"]
    score: float = Field(description="Its probability, from 0 to 1.")


class ScoreUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = Field(description="Always 0.")
    total_tokens: int


class Scores(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score] = Field(description="In the order of text_2.")
    usage: ScoreUsage


class ScoreWriter(WholeWriter):
    """Writes the scores of one request, from one choice for all texts or one for each."""

    def __init__(self, model: str, texts: Sequence[str], choices: Sequence[Request]):
        self.id = f"score-{uuid.uuid4().hex}"
        self._texts, self._model, self._created = texts, model, int(time.time())
        self._num_prompt = sum(len(choice.prompt) for choice in choices)

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        if len(outputs) == 1:
            found = scored(self._texts, outputs[0])
        else:
            pairs = zip(self._texts, outputs, strict=True)
            found = [score for text, output in pairs for score in scored([text], output)]
        usage = {"prompt_tokens": self._num_prompt, "completion_tokens": 0, "total_tokens": self._num_prompt}
        return {
            "id": self.id,
            "object": "list",
            "created": self._created,
            "model": self._model,
            "data": [_score(index, score) for index, score in enumerate(found)],
            "usage": usage,
        }


def _score(index: int, score: dict[str, Any]) -> Json:
    return {"index": index, "object": "score", "score": math.exp(score["logprob"]), **score}
