"""Decoding on a whole canvas: all generated positions are there from the beginning, and attend to one another. Every
later fill changes what the others see, so no keys and values are final before the last token is filled: these
strategies commit nothing, and a pass computes prompt and canvas again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import ClassVar

from lopa_ascend.config.kinds import Boolean
from lopa_ascend.config.settings import research
from lopa_ascend.decode.acceptance import COMBINATIONS, BlockParams, filled_in, most_confident, to_the_last
from lopa_ascend.decode.blocks import Block, Branch, threshold_count
from lopa_ascend.decode.schedule import wanted
from lopa_ascend.decode.strategy import Final, Only, SequenceStart, Strategy
from lopa_ascend.types import Fill, ModelProperties, RowPlan, SequencePlan


class Canvas(Strategy):
    """One sequence on a whole canvas of blocks of masks. It may be a text with gaps (``gaps``: their places among the
    generated positions). A gap has blocks of its own, and given text is a block without masks. A token that ends the
    answer ends its gap, and is repeated to the gap's end."""

    fills_gaps = True
    only: ClassVar[Only] = {"window_attention": ("full",)}

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        return not properties.has_blocks

    def __init__(self, start: SequenceStart) -> None:
        assert not start.num_committed, "the keys and values of the prompt depend on the canvas"
        super().__init__(start)
        params, self._has_gaps = start.params, start.gapped is not None
        self._ends_early = params.finish_at_eos and not self.grammar.binds
        self._ends_early &= self._has_gaps or (params.max_active_blocks or 1) > 1
        canvas = (self.mask,) * params.max_new_tokens if start.gapped is None else start.gapped.tokens
        branch, gaps = self.anchor, list[range]()
        for tokens in runs(canvas, self.mask):
            place = len(branch.tokens)
            if tokens[0] != self.mask:
                branch = branch.open_given(tokens)
                continue
            gaps.append(range(place, place + len(tokens)))
            for offset in range(0, len(tokens), params.block_size):
                branch = branch.open_block(min(params.block_size, len(tokens) - offset), self.mask)
        self.gaps, self.branches = tuple(gaps), (branch,)

    @property
    def gap_length(self) -> int:
        return sum(map(len, self.gaps))

    @property
    def num_opened(self) -> int:
        return self.gap_length - self.answer.masks

    def plan(self) -> SequencePlan | None:
        is_final = self.known_winner is not None or (self.params.finish_at_eos and self.visible_is_final())
        if is_final or not self.anchor.masks:
            return None
        rows = tuple(self._row(branch) for branch in self.branches)
        return SequencePlan(
            start=rows[-1].start,
            num_new=0,
            rows=rows,
            max_rows=self.max_rows,
            winner_commits=False,
            prefix_length=rows[-1].start,
        )

    @abstractmethod
    def _row(self, branch: Branch) -> RowPlan:
        """What the next pass computes of a branch."""

    def _whole_row(self, branch: Branch, masked: Sequence[int]) -> RowPlan:
        return RowPlan(0, (*self.prompt, *branch.tokens), 0, (branch.end,), tuple(masked))

    def finish_pass(self, branch: Branch) -> Branch:
        return self._ended(branch) if self._ends_early and branch.eos else branch

    def _ended(self, branch: Branch) -> Branch:
        """Repeats each gap's first token that ends the answer to the gap's end."""
        tokens = list(branch.tokens)
        for gap in self.gaps:
            if (end := self._end_in(tokens, gap)) is not None:
                tokens[end : gap.stop] = [tokens[end]] * (gap.stop - end)
        prompt, *blocks = branch.blocks
        places = (slice(block.start - branch.first, block.end - branch.first) for block in blocks)
        masks = [tokens[place].count(self.mask) for place in places]
        ended = (replace(block, masks=count) for block, count in zip(blocks, masks, strict=True))
        return replace(branch, tokens=tuple(tokens), blocks=(prompt, *ended))

    def _end_in(self, tokens: Sequence[int], gap: range) -> int | None:
        return next((place for place in gap if tokens[place] in self.ends), None)

    # ---- what is final: of a text with gaps what is in them ----------------------------------------------------------

    def final(self) -> Final:
        if not self._has_gaps:
            return super().final()
        found, is_whole = self._final_gaps(), not self.answer.masks
        complete = found if is_whole else found[:-1]
        ends = zip(accumulate(len(places) for places, _ in complete), (end for _, end in complete), strict=True)
        return [place for places, _ in found for place in places], found[-1][1] if is_whole else None, tuple(ends)

    def _final_gaps(self) -> list[tuple[range, int | None]]:
        """For each gap up to the first with a mask, that one included: its final places, and the token that ends it."""
        tokens, found = self.answer.tokens, list[tuple[range, int | None]]()
        for gap in self.gaps:
            end = self._end_in(tokens, gap) if self.params.finish_at_eos else None
            stop = gap.stop if end is None else end
            mask = next((place for place in range(gap.start, stop) if tokens[place] == self.mask), None)
            found.append((range(gap.start, stop if mask is None else mask), None if end is None else tokens[end]))
            if mask is not None:
                break
        return found

    def visible_is_final(self) -> bool:
        return not self.answer.masks if self._has_gaps else super().visible_is_final()


@dataclass(frozen=True, kw_only=True)
class ParallelParams(BlockParams):
    eos_last: bool = research(
        False,
        Boolean(),
        'with "parallel" and "fast_dllm": a token that ends the answer is filled only where no other position is '
        "left to fill",
        group=None,
    )


class Parallel(Canvas):
    """Block after block, from left to right (semi-autoregressive parallel decoding, arXiv 2505.22618).

    A pass fills what the acceptance rule accepts in the first block with masks, or else its most confident position;
    with ``denoising_steps`` at least as many as LLaDA's schedule wants (arXiv 2502.09992). One block as long as the
    canvas is decoded in any order. With ``max_active_blocks`` above 1 a pass also fills what the rule accepts in the
    blocks behind, as far as ``tau_add`` opens them; with ``finish_at_eos`` a token that ends the answer is then
    repeated to the canvas's end (d3LLM, arXiv 2601.07568).
    """

    description = "block after block of a canvas that is computed whole in every forward pass"
    base = "parallel"
    parameters = ParallelParams
    own: ParallelParams
    only: ClassVar[Only] = {"acceptance": ("threshold", "factor", "entropy")}
    rules = COMBINATIONS

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self._eos_last = self.own.eos_last and not self.grammar.binds
        if self.properties.fills_as_llada and self.own.acceptance == "factor":
            self._rule = to_the_last(self._rule)

    @property
    def num_counted(self) -> int:
        return first_masked(self.anchor).start - len(self.prompt)

    def _row(self, branch: Branch) -> RowPlan:
        return self._whole_row(
            branch, [q for block in self._window(branch) for q in branch.masked_in(block, self.mask)]
        )

    def _window(self, branch: Branch) -> list[Block]:
        """The first block that has masks, and the open ones behind it; none if there are no masks."""
        first = next((i for i, block in enumerate(branch.blocks) if block.masks), len(branch.blocks))
        window = list(branch.blocks[first : first + 1])
        for block in branch.blocks[first + 1 : first + (self.own.max_active_blocks or 1)]:
            if window[-1].filled < threshold_count(self.params.tau_add, window[-1].length):
                break
            window.append(block)
        return window

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        chosen: list[Fill] = []
        fallbacks, window = 0, self._window(branch)
        for number, block in enumerate(window):
            in_block = [fill for fill in predicted if block.start <= fill.position < block.end]
            least = 0 if number else min(self._num_wanted(block), len(in_block))
            filled, num_fallbacks = self._chosen_in_block(branch, in_block, least)
            chosen += filled
            fallbacks += num_fallbacks
        if self.properties.fills_as_llada and len(window) > 1 and len(chosen) == fallbacks:
            others = [fill for fill in most_confident(predicted) if fill not in chosen]
            return chosen + others, fallbacks + len(others)
        return chosen, fallbacks

    def _chosen_in_block(self, branch: Branch, predicted: list[Fill], least: int) -> tuple[list[Fill], int]:
        """As ``choose``, in one block, at least ``least``. With ``eos_last`` tokens that end the answer come last."""
        late = [fill for fill in predicted if fill.token in self.ends] if self._eos_last else []
        early = [fill for fill in predicted if fill not in late] if late else predicted
        num_late = max(0, least - len(early))
        first = self.grammar.must_fill(branch)
        filled, fallbacks = filled_in(early, self.accept(early), least - num_late, first)
        if num_late:
            filled = sorted([*filled, *late[:num_late]], key=lambda fill: fill.position)
        return filled, fallbacks + num_late

    def _num_wanted(self, block: Block) -> int:
        steps = self.own.denoising_steps
        if steps is None:
            return 1
        length = block.length
        planned = sum(wanted(self.properties, number, steps, length, length) for number in range(block.passes + 1))
        return max(1, planned - block.filled)

    def finish_pass(self, branch: Branch) -> Branch:
        """Counts the pass in begun blocks, and ends gaps."""
        if self.own.denoising_steps is not None:
            blocks = (
                replace(block, passes=block.passes + 1) if block.masks and block.filled else block
                for block in branch.blocks
            )
            branch = replace(branch, blocks=tuple(blocks))
        return super().finish_pass(branch)


def runs(tokens: Sequence[int], mask: int) -> list[tuple[int, ...]]:
    """The runs of masks, and of other tokens, in order."""
    return [tuple(run) for _, run in groupby(tokens, lambda token: token == mask)]


def first_masked(branch: Branch) -> Block:
    return next(block for block in branch.blocks if block.masks)
