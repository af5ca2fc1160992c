"""LoPA with lookahead branches as drafts, which win only if the anchor's own predictions confirm them.

The branches of a pass are those of LoPA: the anchor, and the anchor with one more position filled. As published, the
branch with the best score wins, and its lookahead token is committed although it has passed no test. Here a lookahead
branch may win only if D2F's fill rule, applied to the anchor's predictions of the same pass, fills its token now. The
branch's own predictions are then worth a second pass.

Related: Spiffy (arXiv 2509.18085), FreeDave (arXiv 2510.00294), SSD (arXiv 2510.04147).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction

from lopa_ascend.decode.blocks import BlockState, Branch
from lopa_ascend.decode.lopa import Lopa
from lopa_ascend.types import Fill, RowResult, SequencePlan


class DraftingLopa(Lopa):
    """What both kinds of confirmation have in common."""

    def _select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, list[float]]:
        scores = self._scores(results)
        predicted = [self._predicted(row, result) for row, result in zip(plan.rows, results, strict=True)]
        fills, _ = self._choose(self.branches[-1], predicted[-1])
        winner = self._confirmed_winner(predicted, fills, scores)
        branch = self.branches[winner]
        if branch.lookahead is not None:
            branch.confirm(next(fill for fill in fills if _is_same(fill, branch.lookahead)))
        return winner, [float(score) for score in scores]

    @abstractmethod
    def _confirmed_winner(
        self, predicted: Sequence[list[Fill]], fills: Sequence[Fill], scores: Sequence[Fraction]
    ) -> int:
        """The index of the winner. A lookahead branch that wins has a token that is among ``fills``.

        Args:
            predicted: the predictions for each branch.
            fills: what D2F would fill into the anchor now.
            scores: the branch scores.
        """

    def _finish_without_forward(self) -> bool:
        """A lookahead branch without masks is a draft until the next pass has confirmed it."""
        return False


class VerifiedLopa(DraftingLopa):
    """The branch wins that fills most positions, its lookahead token included, among the anchor and the branches whose
    token the anchor's predictions confirm. Among equals the branch score decides, then the rank.

    So D2F's fill rule has accepted every token, on predictions from accepted tokens alone. The order in which
    positions are filled, and with it the answer, may be another one than D2F's.
    """

    def _confirmed_winner(
        self, predicted: Sequence[list[Fill]], fills: Sequence[Fill], scores: Sequence[Fraction]
    ) -> int:
        num_filled = {len(self.branches) - 1: len(fills)}
        for index, branch in enumerate(self.branches):
            lookahead = branch.lookahead
            if lookahead is not None and any(_is_same(fill, lookahead) for fill in fills):
                chosen, _ = self._choose(branch, predicted[index])
                num_filled[index] = 1 + len(chosen)
        return min(num_filled, key=lambda index: (-num_filled[index], -scores[index], index))


class ExactLopa(DraftingLopa):
    """A lookahead branch wins if it is what D2F would compute in its next pass. That pass is then made already, so the
    answer is D2F's, token for token, and some passes are saved.

    Without commits in this pass and in the one that is saved, D2F's next pass would compute the same tokens on the same
    cached keys and values: it is the same computation, to the last bit, with block-causal windows and with full
    attention, with penalties and banned words. With a commit, keys and values would be read from other places, and
    with full attention they would be others. So nothing is saved then.
    """

    def _confirmed_winner(
        self, predicted: Sequence[list[Fill]], fills: Sequence[Fill], scores: Sequence[Fraction]
    ) -> int:
        *drafts, anchor = self.branches
        tokens = self._next_tokens(anchor, fills)
        return next((index for index, draft in enumerate(drafts) if draft.tokens == tokens), len(drafts))

    def _next_tokens(self, anchor: Branch, fills: Sequence[Fill]) -> list[int] | None:
        """The token ids, masks included, that D2F's next pass would begin with; None if there is a commit in this pass
        or in that one.

        Args:
            fills: what D2F would fill into the anchor now.
        """
        after = anchor.copy()
        for fill in fills:
            after.fill(fill, self.ends)
        after.settle({block.start for block in after.active_blocks() if not block.masks})
        if any(block.state is BlockState.TO_CACHE for block in (*anchor.blocks, *after.blocks)):
            return None
        self._extend(after)
        return after.tokens


def _is_same(fill: Fill, lookahead: Fill) -> bool:
    """Whether both put the same token into the same position."""
    return (fill.position, fill.token) == (lookahead.position, lookahead.token)
