"""What every decoding strategy has: the state of one sequence, its two verbs, and which tokens are final."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.acceptance import acceptance_rule
from lopa_ascend.decode.blocks import Block, BlockState, Branch
from lopa_ascend.types import BranchRecord, Fill, RowPlan, RowResult, SequencePlan, StepRecord


class Strategy(ABC):
    """One sequence and how it is decoded.

    Attributes:
        like: for a decoding that is not built in: the name of the built-in decoding whose parameters it accepts.
        branches: in evaluation order: lookahead branches by rank, the anchor last.
        winner: the branch that won the last forward pass, with its fills.
        num_committed: positions whose keys and values are final.
        num_forwards: forward passes so far.
        limit: the most positions that the sequence can have.
        ends: token ids that end the answer.
        is_stuck: the last pass filled nothing that a rule had accepted.
        wins_of_dropped: for each lookahead branch that ``keep`` dropped from the last pass, by rank: the probability
            that it would have won. Empty if the pass does not show this.
        saved_by_a_win: forward passes that a lookahead branch saves when it wins.
        accept: the acceptance rule.

    Args:
        prompt: token ids.
        mask: token id of the mask.
        eos: EOS ids, which end the answer unless ``params.ignore_eos``.
        num_committed: positions of the prompt whose keys and values are in the cache already.
    """

    like: ClassVar[str]
    saved_by_a_win: ClassVar[float] = 1.0

    def __init__(
        self,
        prompt: Sequence[int],
        params: DecodingParams,
        mask: int,
        eos: frozenset[int],
        num_committed: int = 0,
    ) -> None:
        self.params = params
        self.prompt = tuple(prompt)
        self.mask = mask
        self.ends = params.ends(eos)
        self._cuts = self.ends | {mask} if params.finish_at_eos else frozenset({mask})
        """The final tokens end before the first of these token ids."""
        self.limit = len(prompt) + params.max_canvas
        self.accept = acceptance_rule(params)
        self.num_committed = num_committed
        self.num_forwards = 0
        self.is_stuck = False
        self.wins_of_dropped: tuple[float, ...] = ()
        self._won: tuple[RowPlan, RowResult]
        """The winner's row of the last forward pass, and its predictions."""
        state = BlockState.IN_CACHE if num_committed == len(prompt) else BlockState.TO_CACHE
        blocks = [Block(0, len(prompt), 0, state, activated=True)]
        self.branches = [Branch([], blocks)]
        self.winner = self.branches[0]

    @property
    def max_rows(self) -> int:
        """The most rows that a forward pass of this sequence may have. The engine reserves pages for so many."""
        return 1 + self.params.lookaheads

    @property
    def in_prefill(self) -> bool:
        """Whether the next pass computes the prompt."""
        return self.num_committed < len(self.prompt)

    @property
    def num_opened(self) -> int:
        """See ``Update.num_positions``."""
        return len(self.winner.tokens)

    @property
    def num_counted(self) -> int:
        """Generated positions, from the first one on, whose tokens penalties count."""
        return max(0, self.num_committed - len(self.prompt))

    @abstractmethod
    def plan(self) -> SequencePlan | None:
        """What the next forward pass computes; None when the sequence is done."""

    def keep(self, plan: SequencePlan, num_lookaheads: int) -> SequencePlan:
        """Drops all lookahead branches of the next pass but the first ``num_lookaheads``. The anchor always stays.

        Args:
            plan: what ``plan`` returned.

        Returns:
            The plan with the rows of the remaining branches.
        """
        *lookaheads, anchor = self.branches
        self.branches = [*lookaheads[:num_lookaheads], anchor]
        *lookahead_rows, anchor_row = plan.rows
        return replace(plan, rows=(*lookahead_rows[:num_lookaheads], anchor_row))

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        """Takes the predictions of a pass: picks the winner, fills it, and grows the next branches from it.

        Args:
            plan: what ``plan`` gave.
            results: the predictions for each of ``plan.rows``.
            model_tokens: see ``StepRecord``.
            head_rows: see ``StepRecord``.
        """
        winner, scores = self._select(plan, results)
        row = plan.rows[winner]
        records = tuple(
            BranchRecord(branch.lookahead, branch.end, branch.masks, score, branch.further, branch.confirmed_by)
            for branch, score in zip(self.branches, scores, strict=True)
        )
        branch = self.branches[winner]
        predicted = self._predicted(row, results[winner])
        fills, fallbacks = self._choose(branch, predicted)
        for fill in fills:
            branch.fill(fill, self.ends)
        self.is_stuck = len(fills) == fallbacks
        self._won = row, results[winner]
        filled = {fill.position for fill in fills}
        self._grow(branch, [fill for fill in predicted if fill.position not in filled])
        record = StepRecord(
            index=self.num_forwards,
            span=(row.start, row.end),
            cache_length=self.num_committed,
            committed=plan.num_new,
            branches=records,
            winner=winner,
            fills=tuple(fills),
            fallbacks=fallbacks,
            model_tokens=model_tokens,
            head_rows=head_rows,
        )
        self.num_committed += plan.num_new
        self.num_forwards += 1
        return record

    def _predicted(self, row: RowPlan, result: RowResult) -> list[Fill]:
        """What one row would put into its masked positions."""
        columns = zip(row.masked, result.tokens, result.max_probs, result.confidences, strict=True)
        return [Fill(*column) for column in columns]

    @abstractmethod
    def _choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """What is filled, and how many of these fills no rule has accepted.

        Args:
            branch: the winner, or one that may win with "verified", which asks for several. It must not be changed.
            predicted: the predictions for the masked positions of its row.
        """

    def _grow(self, winner: Branch, open_positions: list[Fill]) -> None:
        """Makes the branches of the next pass.

        Args:
            winner: with its fills.
            open_positions: the predictions for positions that are still masked.
        """
        self.branches = self._spawn(winner, open_positions)
        self.winner = self.branches[-1]

    # ---- lookahead branches: here none, only the anchor -------------------------------------------------------------

    def _finish_without_forward(self) -> bool:
        """Ends the sequence if the winner of its next pass, and with it the output, is known without that pass.

        Returns:
            Whether the sequence has ended.
        """
        return False

    def _select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, list[float]]:
        """(index of the winner, the branch scores). The arguments are those of ``absorb``."""
        confidences = results[0].confidences
        return 0, [sum(confidences) / len(confidences) if confidences else 1.0]

    def _spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """The branches of the next pass.

        Args:
            anchor: the winner, with its fills.
            open_positions: the predictions for positions that are still masked.
        """
        anchor.become_anchor()
        return [anchor]

    # ---- what is final ---------------------------------------------------------------------------------------------

    def _visible(self) -> list[int]:
        """Token ids of the positions that the answer may have, masks included."""
        return self.winner.tokens[: self.params.max_new_tokens]

    def final_tokens(self) -> list[int]:
        """The answer's token ids up to the first mask; with ``finish_at_eos`` up to the first that ends the answer.

        They never change.
        """
        tokens = self._visible()
        end = next((i for i, token in enumerate(tokens) if token in self._cuts), len(tokens))
        return tokens[:end]

    def end_reached(self) -> int | None:
        """The token id that ends the answer, if no position before it is masked."""
        for token in self._visible():
            if token in self.ends:
                return token
            if token == self.mask:
                return None
        return None

    def visible_is_final(self) -> bool:
        """Whether no later step can change the visible text: all positions up to an EOS, or all that the answer can
        have, are filled."""
        if self.end_reached() is not None:
            return True
        visible = self._visible()
        return len(visible) == self.params.max_new_tokens and self.mask not in visible
