"""Fast-dLLM: block after block, with keys and values that are computed once a block and then reused (arXiv 2505.22618).

A block's first pass computes prompt and canvas. The later ones compute less, and reuse its other keys and values:

- "prefix" cache: they compute from the block to the end of the canvas.
- "dual" cache: they compute the block alone, and reuse the masks after it too.

Reused keys and values are stale: they do not know what was filled since. If the output at a position predicts the next
one, no later pass could predict the block's first position, so the first pass fills it, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lopa_ascend.config.kinds import Choice
from lopa_ascend.config.settings import research
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import Parallel, ParallelParams, first_masked
from lopa_ascend.decode.strategy import Only
from lopa_ascend.types import RowPlan

BLOCK_CACHES = ("prefix", "dual")


@dataclass(frozen=True, kw_only=True)
class FastDllmParams(ParallelParams):
    block_cache: str = research(
        "prefix",
        Choice(BLOCK_CACHES),
        'keys and values that `decoding` "fast_dllm" reuses while it fills a block: "prefix": of all positions '
        'before the block; "dual": of those after it too',
    )


class FastDllm(Parallel):
    """One sequence under Fast-dLLM. What a pass fills is decided as without a cache."""

    description = 'as "parallel", with keys and values that are computed once a block'
    base = "fast_dllm"
    parameters = FastDllmParams
    own: FastDllmParams
    only: ClassVar[Only] = {"max_active_blocks": ()}
    forces_first = False  # the block's first pass is made for it

    def _row(self, branch: Branch) -> RowPlan:
        block, first = first_masked(branch), branch.first
        if not block.filled:
            end = block.start + 1 if self.properties.logit_shift else block.end
            return self._whole_row(branch, range(block.start, end))
        end = block.end if self.own.block_cache == "dual" else branch.end
        return RowPlan(
            start=block.start,
            tokens=tuple(branch.tokens[block.start - first : end - first]),
            compute_from=block.start,
            entry_ends=(end,),
            masked=tuple(branch.masked_in(block, self.mask)),
            stale_end=branch.end,
        )
