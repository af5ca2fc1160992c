"""Streams of forward passes: /v1/diffusion/completions and /v1/diffusion/chat/completions.

From the events a client can rebuild the canvas after every forward pass. docs/serving.md describes the protocol. The
canvas holds the answer: position 0 is the one after the prompt.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from lopa_ascend.serve.http.body import HarmlessValues
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.serve.openai.answer import CompletionWriter, LopaStats, Usage
from lopa_ascend.serve.openai.chat import ChatRequest
from lopa_ascend.serve.openai.completions import CompletionRequest, prompt_schema
from lopa_ascend.types import BranchRecord, Fill, GenerationOutput, Progress, StepRecord, Update, winner_rank

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
    id: str
    created: int
    model: str
    prompt_tokens: int
    max_new_tokens: int = Field(description="Most tokens of the answer.")
    block_size: int = Field(description="Positions by which the canvas grows.")


class DiffusionStep(BaseModel):
    """One forward pass."""

    object: Literal["diffusion.step"]
    id: str
    index: int = Field(description="Number of the pass, from 0.")
    canvas_length: int = Field(description="Positions of the canvas, filled or masked.")
    fills: list[FilledPosition] = Field(
        description="All positions that the pass filled; the winner's own tokens are first."
    )
    edits: list[EditedPosition] = Field(
        description="Positions that the pass changed although they were filled, where editing_threshold is set."
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
    """Writes the answer to a request with one choice as a stream that shows every forward pass."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._sent: set[int] = set()
        """Positions of the canvas whose tokens were sent."""

    def opening(self) -> list[Json]:
        params = self.choices[0].params
        start = {"prompt_tokens": self.prompt_tokens, "max_new_tokens": params.max_new_tokens}
        return [{"object": "diffusion.start", **self.head, **start, "block_size": params.block_size}]

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        events = []
        if update.record is not None:
            events.append({**self._step(update.record), "text": progress.text})
        if progress.output is not None:
            events.append(self._done(progress.output, progress.text))
        return events

    def _step(self, record: StepRecord) -> Json:
        winner = record.branches[record.winner]
        fills = [*winner.own_fills, *record.fills]
        self._sent.update(fill.position - self.prompt_tokens for fill in fills)
        *lookaheads, anchor = record.branches
        return {
            "object": "diffusion.step",
            "id": self.id,
            "index": record.index,
            "canvas_length": winner.end - self.prompt_tokens,
            "fills": [self._fill(fill) for fill in fills],
            "edits": [{**self._fill(edit), "replaced": edit.replaced} for edit in record.edits],
            "committed": max(0, record.cache_length + record.committed - self.prompt_tokens),
            "winner": winner_rank(record),
            "branches": [self._branch(rank, branch) for rank, branch in enumerate((anchor, *lookaheads))],
        }

    def _done(self, output: GenerationOutput, text: str) -> Json:
        # A lookahead branch without masks wins without another pass, so its last token was in no diffusion.step.
        fills = [
            self._filled(position, token, prob)
            for position, (token, prob) in enumerate(zip(output.token_ids, output.max_probs, strict=True))
            if position not in self._sent
        ]
        return {
            "object": "diffusion.done",
            **self.head,
            "fills": fills,
            "token_ids": list(output.token_ids),
            "text": text,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
            **self.totals([output]),
        }

    def _branch(self, rank: int, branch: BranchRecord) -> Json:
        lookahead = None if branch.lookahead is None else self._fill(branch.lookahead)
        further = [self._fill(fill) for fill in branch.own_fills[1:]]
        state = {"rank": rank, "score": branch.score, "masks": branch.masks}
        return {**state, "lookahead": lookahead, "further": further}

    def _fill(self, fill: Fill) -> Json:
        return self._filled(fill.position - self.prompt_tokens, fill.token, fill.max_prob, fill.confidence)

    def _filled(self, position: int, token_id: int, prob: float, confidence: float | None = None) -> Json:
        token = None if self.tokenizer is None else self.tokenizer.piece(token_id).decode(errors="replace")
        return {
            "position": position,
            "token_id": token_id,
            "token": token,
            "prob": prob,
            "confidence": confidence,
        }


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


class DiffusionCompletionRequest(CompletionRequest):
    """One prompt, whose answer is always streamed."""

    harmless = {**CompletionRequest.harmless, **HARMLESS_DIFFUSION}
    always_streams = True
    writer_type = StepWriter

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

    harmless = {**ChatRequest.harmless, **HARMLESS_DIFFUSION}
    always_streams = True
    writer_type = StepWriter
