"""Streams of forward passes: /v1/diffusion/completions and /v1/diffusion/chat/completions.

From the events a client can rebuild the canvas after every forward pass. docs/serving.md describes the protocol. The
canvas holds the answer: position 0 is the one after the prompt.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import CompletionWriter, LopaStats, Usage
from lopa_ascend.serve.api.chat import ChatRequest
from lopa_ascend.serve.api.completions import CompletionRequest, prompt_schema
from lopa_ascend.serve.api.request import Planner
from lopa_ascend.serve.http.body import HarmlessValues
from lopa_ascend.serve.http.encoding import Json, as_line
from lopa_ascend.text.pass_events import PassEvents
from lopa_ascend.types import Progress, Update

LINES = "application/jsonl"
"""The media type of a trace file: JSON lines."""

EVENTS = (
    "JSON: a diffusion.start (schema DiffusionStart), a diffusion.step for each forward pass (DiffusionStep), then "
    "diffusion.done (DiffusionDone); the last event is [DONE]. If the request fails, an event with an error comes "
    "instead of diffusion.done."
)

# ---- events, as /openapi.json documents them -------------------------------------------------------------------------


class FilledPosition(BaseModel):
    """A token in a position that was masked before."""

    position: int = Field(description="Place in the answer, from 0.")
    token_id: int
    token: str | None = Field(description="Text of the token alone; null without a tokenizer.")
    prob: float = Field(description="Probability of the token when the position was filled.")
    confidence: float | None = Field(description="What the position was ranked by; null in diffusion.done.")


class EditedPosition(FilledPosition):
    """A token in a position that had another one."""

    replaced: int = Field(description="Id of the other token.")


class BranchState(BaseModel):
    rank: int = Field(description="0: the anchor branch; r: the lookahead branch of rank r.")
    score: float = Field(description="What the winner is chosen by.")
    masks: int = Field(description="Masked positions before the pass.")
    lookahead: FilledPosition | None = Field(description="The token that the branch has beside the anchor's.")
    further: list[FilledPosition] = Field(
        description="More tokens that the branch has beside the anchor's, where lookahead_depth is above 1."
    )


class DiffusionStart(BaseModel):
    """The first event."""

    object: Literal["diffusion.start"]
    format: Literal["lopa-trace"]
    version: Literal[1]
    id: str
    created: int
    model: str
    prompt: str | None = Field(description="Text of the prompt, in a trace file; null without a tokenizer.")
    prompt_tokens: int
    max_new_tokens: int = Field(description="Most tokens of the answer.")
    block_size: int = Field(description="Positions by which the canvas grows.")
    first_block: int = Field(
        description="Where the first block begins: 0, or before it if blocks lie on a grid from the prompt's beginning."
    )
    decoding: dict[str, Any] = Field(description="The decoding parameters in effect, but for the less usual.")


class DiffusionStep(BaseModel):
    """One forward pass."""

    object: Literal["diffusion.step"]
    id: str
    index: int = Field(description="Number of the pass, from 0.")
    seconds: float = Field(description="From the beginning of the request to the end of the pass.")
    canvas_length: int = Field(description="Positions of the canvas, filled or masked.")
    fills: list[FilledPosition] = Field(
        description="All positions that the pass filled; the winner's own tokens are first."
    )
    remasked: list[int] = Field(
        description="With structured_outputs: positions of earlier fills that did not fit. They are masked again "
        "before these fills."
    )
    edits: list[EditedPosition] = Field(
        description="Positions that the pass changed although they were filled, where editing_threshold is set."
    )
    drafted: list[FilledPosition] = Field(
        description="Tokens that a later pass is to check or, if accepted is a number, that this pass has checked."
    )
    accepted: int | None = Field(
        description="How many of drafted, from the first on, the pass has accepted; null if it has checked none."
    )
    committed: int = Field(description="Positions from 0 on that no later pass computes.")
    winner: int = Field(description="Index of the winner in branches, which is its rank.")
    branches: list[BranchState] = Field(description="By rank.")
    text: str = Field(description="The final beginning of the text.")


class DiffusionDone(BaseModel):
    """The last event."""

    object: Literal["diffusion.done"]
    id: str
    created: int
    model: str
    fills: list[FilledPosition] = Field(description="Visible positions that were filled without a further pass.")
    token_ids: list[int] = Field(description="The visible tokens: the canvas from 0 on.")
    text: str
    finish_reason: str
    stop_reason: int | str | None
    seed: int | None
    usage: Usage
    lopa: LopaStats


# ---- making them -----------------------------------------------------------------------------------------------------


class StepWriter(CompletionWriter):
    """Writes a stream that shows every forward pass of a request's only choice."""

    _passes: PassEvents
    _is_file = False

    def watch(self, planner: Planner, is_file: bool) -> StepWriter:
        """Must come before anything is written. ``is_file``: the stream is a trace file."""
        (choice,) = self.choices
        arguments = choice.prompt, choice.params, planner.limits.properties, planner.prompts.tokenizer
        self._passes, self._is_file, self._began = PassEvents(self.head, *arguments), is_file, time.monotonic()
        if is_file:
            self.media_type, self.comment, self.end = LINES, b"\n", b""
        return self

    def opening(self) -> list[Json]:
        return [self._passes.start(with_prompt=self._is_file)]

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        events = []
        if update.record is not None:
            events.append(self._passes.step(update.record, time.monotonic() - self._began, progress.text))
        if progress.output is not None:
            events.append(self._passes.done(progress.output, progress.text))
        return events

    def frame(self, event: Json) -> bytes:
        return as_line(event) + b"\n" if self._is_file else super().frame(event)


# ---- requests --------------------------------------------------------------------------------------------------------

HARMLESS_DIFFUSION: HarmlessValues = {
    "stream": (True,),
    "n": (1,),
    "best_of": (1,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
}
"""A diffusion stream is always one streamed answer, and its events carry everything that these fields ask for."""
TRACE: bool | None = Field(
    None,
    description="Answer with a trace file, which the page at / opens: the events as JSON lines, without [DONE]. "
    "Default: false.",
)

WITHOUT_TOOLS: HarmlessValues = {"tools": (), "tool_choice": ("none",), "parallel_tool_calls": (True, False)}
"""Events show what the model writes, calls as well, so there is nothing to read from them."""


class DiffusionCompletionRequest(CompletionRequest):
    """One prompt, whose answer is always streamed."""

    harmless = {**CompletionRequest.harmless, **HARMLESS_DIFFUSION}
    always_streams = True
    writer_type = StepWriter

    trace: bool | None = TRACE

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> StepWriter:
        writer = super().writer(planner, model, choices)
        assert isinstance(writer, StepWriter)
        return writer.watch(planner, bool(self.trace))

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompts: list[str | list[int]]) -> list[str | list[int]]:
        if len(prompts) != 1:
            raise ValueError(f"must be one prompt, not {len(prompts)}")
        return prompts

    @classmethod
    def complete_schema(cls, schema: Json) -> None:
        super(CompletionRequest, cls).complete_schema(schema)
        schema["properties"]["prompt"] = prompt_schema(1)


class DiffusionChatRequest(ChatRequest):
    """One conversation, whose answer is always streamed."""

    harmless = {**ChatRequest.harmless, **HARMLESS_DIFFUSION, **WITHOUT_TOOLS}
    always_streams = True
    writer_type = StepWriter

    trace: bool | None = TRACE

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> StepWriter:
        writer = super().writer(planner, model, choices)
        assert isinstance(writer, StepWriter)
        return writer.watch(planner, bool(self.trace))
