"""The forward passes of a request as events: what a diffusion stream sends, and a trace file holds one a line.

docs/serving.md describes the events. The canvas holds the answer: position 0 is the one after the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lopa_ascend.config import DecodingParams
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import BranchRecord, Fill, GenerationOutput, ModelProperties, StepRecord, winner_rank

Json = dict[str, Any]

FORMAT, VERSION = "lopa-trace", 1
"""Named in the first event. The version rises when readers of the older one would misread the events."""
NAMED = (
    "decoding", "base", "branch_acceptance", "num_branches", "block_size", "tau_add", "tau_act", "tau_conf",
    "temperature",
)  # fmt: skip
"""Decoding parameters in the first event: they explain the states of blocks, and make runs comparable."""


class PassEvents:
    """Makes the events of one request. ``head`` has ``id``, ``created`` and ``model``; without a tokenizer there is no
    text."""

    def __init__(
        self,
        head: Mapping[str, Any],
        prompt: Sequence[int],
        params: DecodingParams,
        properties: ModelProperties,
        tokenizer: Tokenizer | None,
    ):
        self._head, self._prompt, self._params = dict(head), prompt, params
        self._first_block = properties.origin(len(prompt), params.block_size) - len(prompt)
        self._tokenizer = tokenizer
        self._sent: set[int] = set()
        """Positions of the canvas whose tokens were in an event."""

    def start(self, *, with_prompt: bool) -> Json:
        prompt = None
        if with_prompt and self._tokenizer is not None:
            prompt = self._tokenizer.decode(self._prompt, skip_special_tokens=False)
        return {
            "object": "diffusion.start",
            "format": FORMAT,
            "version": VERSION,
            **self._head,
            "prompt": prompt,
            "prompt_tokens": len(self._prompt),
            "max_new_tokens": self._params.max_new_tokens,
            "block_size": self._params.block_size,
            "first_block": self._first_block,
            "decoding": {name: getattr(self._params, name) for name in NAMED},
        }

    def step(self, record: StepRecord, seconds: float, text: str) -> Json:
        """The event of a forward pass that ended ``seconds`` after the request began; ``text`` is final then."""
        winner = record.branches[record.winner]
        own = [fill for fill in winner.own_fills if fill.position not in record.remasked]
        fills = [*own, *record.fills, *record.forced]
        remasked = [position - len(self._prompt) for position in record.remasked]
        self._sent.difference_update(remasked)
        self._sent.update(fill.position - len(self._prompt) for fill in fills)
        *lookaheads, anchor = record.branches
        return {
            "object": "diffusion.step",
            "id": self._head["id"],
            "index": record.index,
            "seconds": round(seconds, 6),
            "canvas_length": max([winner.end, *(fill.position + 1 for fill in record.forced)]) - len(self._prompt),
            "fills": [self._fill(fill) for fill in fills],
            "remasked": remasked,
            "edits": [{**self._fill(edit), "replaced": edit.replaced} for edit in record.edits],
            "drafted": [self._fill(fill) for fill in record.drafted],
            "accepted": record.accepted,
            "committed": max(0, record.cache_length + record.committed - len(self._prompt)),
            "winner": winner_rank(record),
            "branches": [self._branch(rank, branch) for rank, branch in enumerate((anchor, *lookaheads))],
            "text": text,
        }

    def done(self, output: GenerationOutput, text: str) -> Json:
        # A lookahead branch without masks wins without another pass, so its last token was in no diffusion.step.
        fills = [
            self._filled(position, token, prob)
            for position, (token, prob) in enumerate(zip(output.token_ids, output.max_probs, strict=True))
            if position not in self._sent
        ]
        prompt, answer = len(self._prompt), len(output.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return {
            "object": "diffusion.done",
            **self._head,
            "fills": fills,
            "token_ids": list(output.token_ids),
            "text": text,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": output.cached_tokens}},
            "lopa": {"num_forwards": output.num_forwards, "tokens_per_forward": output.tokens_per_forward},
        }

    def _branch(self, rank: int, branch: BranchRecord) -> Json:
        lookahead = None if branch.lookahead is None else self._fill(branch.lookahead)
        further = [self._fill(fill) for fill in branch.own_fills[1:]]
        state = {"rank": rank, "score": branch.score, "masks": branch.masks}
        return {**state, "lookahead": lookahead, "further": further}

    def _fill(self, fill: Fill) -> Json:
        return self._filled(fill.position - len(self._prompt), fill.token, fill.max_prob, fill.confidence)

    def _filled(self, position: int, token_id: int, prob: float, confidence: float | None = None) -> Json:
        token = None if self._tokenizer is None else self._tokenizer.piece(token_id).decode(errors="replace")
        return {
            "position": position,
            "token_id": token_id,
            "token": token,
            "prob": prob,
            "confidence": confidence,
        }
