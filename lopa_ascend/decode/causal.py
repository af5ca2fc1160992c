"""Decodings of causal models: a pass that commits reads its tokens causally, and predicts the token behind them.

"ar" fills one position a pass. In "causal_blocks" (Nemotron-Labs-Diffusion, openPangu-R-7B-Diffusion) that prediction
begins a block. Further passes fill its other positions, which see one another, and then the block is committed. A
prompt may be computed in pieces, because nothing behind a position changes its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2
from lopa_ascend.decode.strategy import Only
from lopa_ascend.types import BranchRecord, ModelProperties, RowPlan, RowResult, SequencePlan, StepRecord


class CausalBlocks(FastDllmV2):
    description = "block after block, each committed by a causal pass, for causal models"
    base = "causal_blocks"
    gives_ahead = True  # as Nemotron's code gives the end of its thoughts
    decides_on_host = True
    scored_by = "ar"
    forces_first = False  # the pass that commits a block predicts the first position of the next one
    only: ClassVar[Only] = {"sub_block_cache": (), "window_attention": ("block_causal",)}

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        return properties.is_causal and properties.fills_blocks

    @property
    def num_counted(self) -> int:
        """Positions before the one that a causal pass predicts are final, even if it is only about to commit them."""
        return max(0, self.anchor.blocks[-1].start - len(self.prompt))

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        """A piece of a prompt predicts nothing, and is not counted as a forward pass."""
        row, anchor = plan.rows[-1], self.anchor
        if row.masked:
            return super().absorb(plan, results, model_tokens, head_rows)
        record = StepRecord(
            index=self.num_forwards,
            span=(row.start, row.end),
            cache_length=self.num_committed,
            committed=plan.num_new,
            branches=(BranchRecord((), row.end, anchor.masks, 1.0),),
            winner=0,
            fills=(),
            fallbacks=0,
            model_tokens=model_tokens,
            head_rows=head_rows,
        )
        self.num_committed += plan.num_new
        return record

    def _row(self, branch: Branch, full: bool) -> RowPlan:
        row = super()._row(branch, full)
        # While the first position of the last block is masked, the row ends before it.
        if row.end > branch.blocks[-1].start:
            return row
        return replace(row, causal_end=row.end, entry_ends=(), logit_shift=1)


class Autoregressive(CausalBlocks):
    description = "one token a pass, as an autoregressive model, for causal models"
    base = "ar"
    fills_one = True
    draws_once = True
    only: ClassVar[Only] = {"sub_block_size": (), "tau_conf": None}

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        return properties.is_causal

    def extend(self, branch: Branch) -> Branch:
        return branch.open_block(1, self.mask) if self._may_open(branch) else branch
