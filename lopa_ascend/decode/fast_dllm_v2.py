"""Fast-dLLM v2: block after block, each filled by sub-blocks from left to right (arXiv 2509.26328).

Logits predict the next position, so a block's own passes need its first token. The pass that commits the block before
predicts it, and it is filled with any probability. As published that pass computes the committed block alone. It goes
on with the next block if the first token is there already: from the prompt's last tokens, or from a lookahead branch.

With ``sub_block_cache`` a pass computes the current sub-block alone, once its first position is filled. Keys and values
of the block's other positions are then stale by design.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lopa_ascend.config.combinations import Rule
from lopa_ascend.config.kinds import Boolean, Integer
from lopa_ascend.config.settings import research
from lopa_ascend.decode.acceptance import filled_in
from lopa_ascend.decode.block_pipeline import BlockPipeline, PipelineParams
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.strategy import Only
from lopa_ascend.types import Fill, ModelProperties, RowPlan, SequencePlan


@dataclass(frozen=True, kw_only=True)
class FastDllmV2Params(PipelineParams):
    sub_block_size: int = research(
        8,
        Integer(1, 4096),
        'positions that "fast_dllm_v2" and "causal_blocks" fill before they go on to the right',
    )
    sub_block_cache: bool = research(
        False,
        Boolean(),
        'compute the current sub-block of "fast_dllm_v2" alone, beside stale keys and values of its block; this '
        "changes answers",
    )


class FastDllmV2(BlockPipeline):
    description = "block after block, by sub-blocks, for models of that family"
    base = "fast_dllm_v2"
    parameters = FastDllmV2Params
    own: FastDllmV2Params
    only: ClassVar[Only] = {
        "acceptance": ("threshold", "factor", "entropy"),
        "branch_acceptance": (),
        "denoising_steps": (),
        "editing_threshold": (),
        "max_active_blocks": (),
        "max_post_steps": (),
    }
    # A span that a grammar forces would leave out a block's first pass.
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("sub_block_cache", "structured_outputs", (None,)),
        Rule("sub_block_cache", "max_thinking_tokens", (None,)),
    )

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        """Only this family's models are block-causal with logits that predict the next position."""
        return properties.is_block_causal and properties.logit_shift == 1

    def plan(self) -> SequencePlan | None:
        plan = super().plan()
        if plan is None or not self.own.sub_block_cache:
            return plan
        block = self.anchor.blocks[-1]
        begin, end = self._sub_block(self.anchor)
        masked = self.anchor.masked_in(block, self.mask)
        num_known = max(1, len(self.prompt) - block.start)
        if block.filled <= num_known or begin in masked:  # a pass over the whole block comes first
            return plan
        tokens = (*self.prompt, *self.anchor.tokens)[begin:end]
        in_sub_block = tuple(position for position in masked if position < end)
        row = RowPlan(begin, tokens, begin, (end,), in_sub_block, stale_end=block.end)
        return replace(plan, start=begin, rows=(row,))

    def _may_open(self, branch: Branch) -> bool:
        return not branch.blocks[-1].masks and not branch.eos and branch.end < self.limit

    def _row(self, branch: Branch, full: bool) -> RowPlan:
        row = super()._row(branch, full)
        block = branch.blocks[-1]
        if block.start in row.masked:
            ends = tuple(end for end in row.entry_ends if end <= block.start)
            return replace(row, tokens=row.tokens[: block.start - row.start], entry_ends=ends, masked=(block.start,))
        _, end = self._sub_block(branch)
        return replace(row, masked=tuple(position for position in row.masked if position < end))

    def _sub_block(self, branch: Branch) -> tuple[int, int]:
        """[start, end) of the first sub-block with masks, or of the last one."""
        block, size = branch.blocks[-1], self.own.sub_block_size
        first = next(iter(branch.masked_in(block, self.mask)), block.end - 1)
        begin = block.start + (first - block.start) // size * size
        return begin, min(begin + size, block.end)

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """Fills the accepted positions of the sub-block or the most confident one, and a block's first in any case."""
        first = self.grammar.must_fill(branch)
        return filled_in(predicted, self.accept(predicted), min(1, len(predicted)), first)
