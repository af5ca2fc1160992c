"""The events of a diffusion stream, which shows every forward pass of one request.

Positions are counted from the start of the prompt. Branch 0 is the anchor, branch r the lookahead branch of rank r;
branches are listed in the order in which they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.serve.api.responses import Json, Response
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import BranchRecord, Fill, Progress, StepRecord, Update


class StepEncoder:
    """Makes the events of one diffusion stream, which has a single choice.

    Args:
        response: makes the parts of the response.
        tokenizer: for the text of filled tokens; None: events have token ids only.
    """

    def __init__(self, response: Response, tokenizer: Tokenizer | None):
        self._response, self._tokenizer = response, tokenizer

    def opening(self) -> list[Json]:
        """No events before the first update."""
        return []

    def progress(self, index: int, update: Update, progress: Progress) -> list[Json]:
        """A diffusion.step for a forward pass, and diffusion.done at the end."""
        events = []
        if update.record is not None:
            events.append({"object": "diffusion.step", **self._step(update.record), "text": progress.text})
        if progress.output is not None:
            end = {"finish_reason": progress.output.finish_reason, "stop_reason": progress.output.stop_reason}
            totals = self._response.totals([progress.output])
            ids = list(progress.output.token_ids)
            done = {"object": "diffusion.done", **self._response.head, "text": progress.text, "token_ids": ids}
            events.append({**done, **end, **totals})
        return events

    def closing(self) -> list[Json]:
        """No events after the last update."""
        return []

    def _step(self, record: StepRecord) -> Json:
        ranks = _ranks(record.branches)
        branches = [self._branch(rank, branch) for rank, branch in zip(ranks, record.branches, strict=True)]
        return {
            "id": self._response.id,
            "index": record.index,
            "winner": ranks[record.winner],
            "committed": record.committed,
            "span": list(record.span),
            "branches": branches,
            "fills": [self._fill(fill) | {"prob": fill.max_prob} for fill in record.fills],
        }

    def _branch(self, rank: int, branch: BranchRecord) -> Json:
        lookahead = None if branch.lookahead is None else self._fill(branch.lookahead)
        return {"rank": rank, "score": branch.score, "masks": branch.masks, "lookahead": lookahead}

    def _fill(self, fill: Fill) -> Json:
        token = None if self._tokenizer is None else self._tokenizer.piece(fill.token).decode(errors="replace")
        return {"position": fill.position, "token_id": fill.token, "token": token, "confidence": fill.confidence}


def _ranks(branches: Sequence[BranchRecord]) -> list[int]:
    """The rank of each branch: 0 for the anchor, which comes last; lookahead branches count from 1."""
    return [0 if branch.lookahead is None else rank for rank, branch in enumerate(branches, 1)]
