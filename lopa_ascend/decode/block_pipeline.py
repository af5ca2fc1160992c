"""D2F: confidence-driven filling of a pipeline of blocks; the anchor branch alone (SPEC sections 1 to 3 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lopa_ascend.config.combinations import Rule
from lopa_ascend.config.kinds import Choice, Integer, Number
from lopa_ascend.config.settings import GraphSupport, research
from lopa_ascend.decode.acceptance import COMBINATIONS, BlockParams, filled_in
from lopa_ascend.decode.blocks import Block, BlockState, Branch, threshold_count
from lopa_ascend.decode.editing import Editing
from lopa_ascend.decode.schedule import wanted
from lopa_ascend.decode.strategy import Only, SequenceStart, Strategy
from lopa_ascend.types import Fill, ModelProperties, RowPlan, SequencePlan

WINDOW_ATTENTIONS = ("block_causal", "full", "causal")


@dataclass(frozen=True, kw_only=True)
class PipelineParams(BlockParams):
    window_attention: str = research(
        "block_causal",
        Choice(WINDOW_ATTENTIONS),
        'what a block of the window attends to: "block_causal": all positions up to its own end; "full": all '
        'positions up to the end of the window; "causal", of "s2d2" alone: before the first mask each position, those '
        "of the prompt too, attends to those up to its own, and the others to the whole block",
        default_text='"block_causal"; "full" on a whole canvas',
        graphs=GraphSupport.COMPILED,
    )
    editing_threshold: float | None = research(
        None,
        Number(0, 1),
        "a filled position of the open block takes the predicted token in place of its own when the probability is "
        "above this; the block is final once a pass without masks has changed nothing, and only then it is shown",
        default_text="filled positions stay as they are",
        graphs=GraphSupport.DEFAULT,
    )
    max_post_steps: int = research(
        16,
        Integer(1, 4096),
        "passes without masks after which a block is final even if `editing_threshold` still changes tokens",
    )


class BlockPipeline(Strategy):
    """One sequence under D2F, which has the anchor branch alone. SDAR, LLaDA2 and DreamReasoner are decoded so, too."""

    description = "the anchor branch alone"
    base = "d2f"
    commits = True
    scored_by = "d2f"
    has_graphs = True
    parameters = PipelineParams
    own: PipelineParams
    only: ClassVar[Only] = {
        "branch_acceptance": ("published", "verified", "exact"),  # of one branch
        "window_attention": ("block_causal", "full"),
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        *COMBINATIONS,
        Rule("editing_threshold", "tau_add", (1,)),  # the next block would open beside one that is not final
        # What a grammar has passed may not change.
        Rule("editing_threshold", "structured_outputs", (None,)),
        Rule("editing_threshold", "max_thinking_tokens", (None,)),
    )

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        """Final keys and values are those of the pass that fills a block's last mask, or of a later one."""
        return not properties.is_causal

    def __init__(self, start: SequenceStart) -> None:
        params = start.params
        if params.editing_threshold is not None:
            self.editing = Editing(params.editing_threshold, params.max_post_steps, start.mask)
        super().__init__(start)

    # ---- before a forward pass -------------------------------------------------------------------------------------

    def plan(self) -> SequencePlan | None:
        anchor = self.anchor
        is_final = self.known_winner is not None or (self.params.finish_at_eos and self.visible_is_final())
        if is_final or (not anchor.masks and not anchor.active_blocks()):
            return None
        committing = [block for block in anchor.blocks if block.state is BlockState.TO_CACHE]
        num_new = committing[-1].end - self.num_committed if committing else 0
        full = self.own.window_attention == "full"
        rows = tuple(self._row(branch, full) for branch in self.branches)
        return SequencePlan(
            start=self.num_committed,
            num_new=num_new,
            rows=rows,
            max_rows=self.max_rows,
            winner_commits=full,
            prefix_length=max(self.num_committed, self.origin),
        )

    def finish_pass(self, branch: Branch) -> Branch:
        return branch.finish_blocks()

    def open(self, branch: Branch) -> Branch:
        """Opens another block, if it may (SPEC section 2, step a), and activates blocks (step b)."""
        return self.extend(branch).activate(self.params.tau_act)

    def extend(self, branch: Branch) -> Branch:
        if not self._may_open(branch):
            return branch
        return branch.open_block(min(self.params.block_size, self.limit - branch.end), self.mask, self.editing.checks)

    def _may_open(self, branch: Branch) -> bool:
        last = branch.blocks[-1]
        if branch.eos or branch.end >= self.limit or last.checks_left:
            return False
        if last.filled < threshold_count(self.params.tau_add, last.length):
            return False
        if self.own.max_active_blocks is None:
            return True
        first_masked = next((i for i, block in enumerate(branch.blocks) if block.masks), len(branch.blocks))
        return len(branch.blocks) - first_masked < self.own.max_active_blocks

    def _row(self, branch: Branch, full: bool) -> RowPlan:
        """``full``: the window is one attention entry."""
        tokens = (*self.prompt, *branch.tokens)[self.num_committed :]
        window = [block for block in branch.blocks if block.end > self.num_committed]
        compute_from = self.num_committed
        entry_ends: tuple[int, ...] = (branch.end,)
        if not full:
            if branch.lookahead is not None:
                position = min(fill.position for fill in branch.own_fills)
                compute_from = next(block.start for block in window if position < block.end)
            entry_ends = self._entry_ends(window)
        predicted = self.editing.predicted_positions(branch, branch.masked_positions(self.mask))
        return RowPlan(self.num_committed, tokens, compute_from, entry_ends, tuple(predicted))

    def _entry_ends(self, window: Sequence[Block]) -> tuple[int, ...]:
        """The ends of the blocks whose positions see one another; on a grid those of the prompt too."""
        if not self.properties.is_block_causal:
            return tuple(block.end for block in window)
        size, end = self.params.block_size, window[-1].end
        # From the prompt's end the grid goes on in both directions.
        phase = len(self.prompt) % size if self.properties.grid == "prompt" else 0
        first = self.num_committed + size - (self.num_committed - phase) % size
        return (*range(first, end, size), end)

    # ---- after a forward pass --------------------------------------------------------------------------------------

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """Fill rule (SPEC section 3): each block fills what the acceptance rule accepts. A fully activated block that
        would fill too few positions fills its most confident ones instead, the earliest among equals; with
        ``acceptance`` "sequential" its first ones. Fills that no rule accepted are fallbacks."""
        chosen: list[Fill] = []
        fallbacks = 0
        predicted = self.editing.of_masks(branch, predicted)
        first = self.grammar.must_fill(branch)
        for block in branch.active_blocks():
            in_block = [fill for fill in predicted if block.start <= fill.position < block.end]
            least = min(self._num_wanted_in(block), len(in_block)) if block.activated else 0
            filled, num_fallbacks = filled_in(in_block, self.accept(in_block), least, first)
            if self.own.acceptance == "sequential":  # which accepts none
                filled, num_fallbacks = in_block[:least], least
            chosen += filled
            fallbacks += num_fallbacks
        return chosen, fallbacks

    def _num_wanted_in(self, block: Block) -> int:
        """How many positions a fully activated block must fill in its next pass."""
        if (steps := self.own.denoising_steps) is None:
            return 1
        masks = block.end - max(block.start, len(self.prompt))
        return wanted(self.properties, block.passes, steps, self.params.block_size, masks)
