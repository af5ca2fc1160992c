"""Writes answers of OpenAI's Responses API: a response object, or the events of a stream that build it up.

The output of a response is one message with one part, its text. ``completions`` writes the answers of the other
routes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from lopa_ascend.serve.api.answers import LopaStats
from lopa_ascend.serve.api.encoding import Encoder, as_line
from lopa_ascend.serve.api.errors import ApiError
from lopa_ascend.serve.api.openai_responses_body import Reasoning, ResponseRequest
from lopa_ascend.serve.api.schema import Json
from lopa_ascend.serve.engine.generation import Choice
from lopa_ascend.types import GenerationOutput, Progress, Update

STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
"""The status of a response, by its finish reason."""
ITEM_STATUSES = ("in_progress", "completed")
"""Statuses of a response that its message has too; otherwise the message is incomplete."""

# ---- the answer, as /openapi.json documents it -----------------------------------------------------------------------


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[Any] = Field(description="Always empty.")


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Input tokens that came from the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: writing to the prefix cache is not counted.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = Field(description="Always 0.")


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Tokens of the answer, with those of a stop string that ended it.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: Literal["server_error"]
    message: str


class ResponseObject(BaseModel):
    """A response. Fields of OpenAI's that this server has no value for are null or as OpenAI has them by default."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = Field(description="Set if the status is completed.")
    model: str
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"] = Field(
        description="incomplete: max_output_tokens ended the text; cancelled: /abort_request did."
    )
    incomplete_details: IncompleteDetails | None
    error: ResponseFailure | None = Field(description="Set in response.failed.")
    output: list[OutputMessage] = Field(description="One message; none in response.created.")
    usage: ResponseUsage | None = Field(description="Null while the response is in progress, and if it failed.")
    lopa: LopaStats | None = Field(description="Null where usage is.")
    stop_reason: int | str | None = Field(
        description="The stop string, or the id of stop_token_ids, that ended the text; null at an EOS."
    )
    seed: int | None = Field(description="Seed of the sampling, for repeating it; null without sampling.")
    instructions: str | None
    metadata: dict[str, str]
    user: str | None
    temperature: float = Field(description="In effect, as are top_p and max_output_tokens.")
    top_p: float
    max_output_tokens: int
    store: Literal[False] = Field(description="Nothing is kept.")
    previous_response_id: None
    background: Literal[False]
    tools: list[Any] = Field(description="Always empty.")
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool = Field(description="As in the request, as are reasoning and text; without effect.")
    reasoning: dict[str, str | None]
    text: dict[str, Any]
    top_logprobs: Literal[0]
    truncation: Literal["disabled"]


# ---- writing it ------------------------------------------------------------------------------------------------------


def text_part(text: str) -> Json:
    """The content of the message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseWriter:
    """Writes one response.

    Args:
        model: name of the served model.
        request: what was asked.
        choice: how it is decoded.
    """

    def __init__(self, model: str, request: ResponseRequest, choice: Choice):
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._num_prompt = len(choice.prompt_token_ids)
        params = choice.params
        reasoning = request.reasoning or Reasoning()
        verbosity = request.text.verbosity if request.text else None
        # The same whatever becomes of the response.
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "user": request.user,
            "temperature": params.temperature,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "max_output_tokens": params.max_new_tokens,
            "store": False,
            "previous_response_id": None,
            "background": False,
            "tools": [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "text": {"format": {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})},
            "top_logprobs": 0,
            "truncation": "disabled",
        }

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        """The response, if it is not streamed."""
        (output,) = outputs
        return self.finished(output, output.text or "")

    def encoder(self) -> Encoder:
        """Makes the events of the response, if it is streamed."""
        return ResponseEncoder(self)

    def message(self, status: str, content: Sequence[Json]) -> Json:
        """The message, when the response has this status."""
        head = {"id": self.item_id, "type": "message", "role": "assistant"}
        own_status = status if status in ITEM_STATUSES else "incomplete"
        return {**head, "status": own_status, "content": list(content)}

    def unfinished(self, status: str, output: Sequence[Json] = (), error: Json | None = None) -> Json:
        """The response while it is in progress, or when it has failed."""
        state = {"status": status, "output": list(output), "error": error, "completed_at": None}
        nothing = dict.fromkeys(("incomplete_details", "usage", "lopa", "stop_reason", "seed"))
        return {**self._head, **state, **nothing}

    def finished(self, output: GenerationOutput, text: str) -> Json:
        """The response at its end."""
        status = STATUS[output.finish_reason]
        tokens = len(output.token_ids)
        return {
            **self.unfinished(status, [self.message(status, [text_part(text)])]),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._num_prompt + tokens,
            },
            "lopa": {"num_forwards": output.num_forwards, "tokens_per_forward": output.tokens_per_forward},
            "stop_reason": output.stop_reason,
            "seed": output.seed,
        }


class ResponseEncoder(Encoder):
    """Makes the events of one streamed response. Its last event holds the response as it would be without a stream."""

    end: ClassVar[bytes] = b""

    def __init__(self, writer: ResponseWriter):
        self._writer = writer
        self._text = ""
        """What was sent of the text."""
        self._num_events = 0

    def opening(self) -> list[Json]:
        """The response and its message begin."""
        return [
            self._event("response.created", response=self._writer.unfinished("in_progress")),
            self._event("response.in_progress", response=self._writer.unfinished("in_progress")),
            self._of_item("response.output_item.added", item=self._writer.message("in_progress", [])),
            self._of_part("response.content_part.added", part=text_part("")),
        ]

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        """The text that is new, and what follows the last of it."""
        events, new = [], progress.text[len(self._text) :]
        self._text = progress.text
        if new:
            events.append(self._of_part("response.output_text.delta", delta=new, logprobs=[]))
        if progress.output is not None:
            response = self._writer.finished(progress.output, self._text)
            events += self._closed(response)
        return events

    def closing(self) -> list[Json]:
        """No events after the last update."""
        return []

    def failure(self, error: ApiError) -> list[Json]:
        """An error event with our own code, and the failed response, whose codes are OpenAI's."""
        detail = error.body()["error"]
        names = ("code", "message", "param")
        message = self._writer.message("failed", [text_part(self._text)])
        failed = {"code": "server_error", "message": detail["message"]}
        return [
            self._event("error", **{name: detail[name] for name in names}),
            self._event("response.failed", response=self._writer.unfinished("failed", [message], failed)),
        ]

    def frame(self, event: Json) -> bytes:
        """An event as it is sent: named by its type."""
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + as_line(event) + b"\n\n"

    def _closed(self, response: Json) -> list[Json]:
        """The closing events: the finished text, its content part, its message, and at last the whole response."""
        (message,) = response["output"]
        (part,) = message["content"]
        last = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return [
            self._of_part("response.output_text.done", text=part["text"], logprobs=[]),
            self._of_part("response.content_part.done", part=part),
            self._of_item("response.output_item.done", item=message),
            self._event(last, response=response),
        ]

    def _of_part(self, kind: str, **values: Any) -> Json:
        """An event about the only part of the only message."""
        return self._of_item(kind, item_id=self._writer.item_id, content_index=0, **values)

    def _of_item(self, kind: str, **values: Any) -> Json:
        """An event about the only message."""
        return self._event(kind, output_index=0, **values)

    def _event(self, kind: str, **values: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}
