"""LoPA with lookahead branches as drafts, which win only if predictions of the same pass confirm them.

As published, the branch with the best score wins, and its lookahead token is committed although it has passed no test.
Here a lookahead branch may win only if the base's fill rule (D2F's, say), applied to the anchor's predictions of the
same pass, fills its token now. The branch's own predictions are then worth a second pass. With ``lookahead_depth``
above 1 a branch may hold several tokens. A confirmed branch can itself confirm another that holds its tokens and more,
and saves another pass.

Related: Spiffy (arXiv 2509.18085), FreeDave (arXiv 2510.00294), SSD (arXiv 2510.04147).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from lopa_ascend.decode.blocks import BlockState, Branch
from lopa_ascend.decode.lopa import Lookaheads, Lopa, LopaCausalBlocks
from lopa_ascend.types import Fill, RowResult, SequencePlan

Place = tuple[int, int]
"""(position, token id)."""
Confirmed = Mapping[Place, tuple[int, Fill]]
"""By place of a branch's own token: (index of the branch that confirms it, that branch's prediction)."""


class Drafts(Lookaheads):
    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """With ``lookahead_depth`` above 1, one branch for each set of ``draft_ranks``, then the anchor. What the base
        fills in every pass has the first ranks: fully activated blocks, under a grammar the first mask."""
        first = self.grammar.must_fill(anchor)
        if self.params.lookahead_depth == 1 and first is None:
            return super().spawn(anchor, open_positions)
        activated = [range(block.start, block.end) for block in self.open(anchor).blocks if block.activated]

        def place_in_ranking(fill: Fill) -> tuple[bool, bool, float, int]:
            is_in_activated = any(fill.position in block for block in activated)
            return fill.position != first, not is_in_activated, -fill.confidence, fill.position

        ranked = sorted(open_positions, key=place_in_ranking)
        shapes = draft_ranks(min(len(ranked), self.num_wanted), self.params.lookahead_depth, self.num_wanted)
        return self.branches_with(anchor, [[ranked[rank] for rank in shape] for shape in shapes])

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        scores = self.score(plan, results)
        predicted = [self.predicted(row, result) for row, result in zip(plan.rows, results, strict=True)]
        winner, confirmed = self._confirmed_winner(predicted, scores)
        branch = self.branches[winner]
        if branch.own_fills:
            # What no prediction confirms, a grammar forces once the others are confirmed.
            anchor = len(self.branches) - 1
            own = [confirmed.get(_place(fill), (anchor, replace(fill, max_prob=1.0))) for fill in branch.own_fills]
            branch = branch.confirm(own)
        return winner, branch, [float(score) for score in scores]

    @abstractmethod
    def _confirmed_winner(self, predicted: Sequence[list[Fill]], scores: Sequence[Fraction]) -> tuple[int, Confirmed]:
        """The index of the winner, and what confirms its own tokens."""

    @property
    def known_winner(self) -> Branch | None:
        """None: a lookahead branch without masks is a draft until the next pass has confirmed it."""
        return None


class Verified(Drafts):
    """The winner has the most filled positions, its own tokens included, among the anchor and the confirmed branches.
    Ties go to the higher branch score, then to the better rank.

    The anchor counts as confirmed. Another branch is confirmed if a confirmed one holds a part of its own tokens, and
    the base's rule, applied to the predictions for that one, fills the others. So the rule has accepted every token, on
    predictions from accepted tokens alone. Positions may be filled in another order than by the base, so the answer may
    differ.
    """

    branch_acceptance = "verified"

    def _confirmed_winner(self, predicted: Sequence[list[Fill]], scores: Sequence[Fraction]) -> tuple[int, Confirmed]:
        own = [{_place(fill) for fill in branch.own_fills} for branch in self.branches]
        anchor = len(self.branches) - 1
        confirmed: dict[int, dict[Place, tuple[int, Fill]]] = {anchor: {}}
        num_filled: dict[int, int] = {}
        to_visit = deque([anchor])
        while to_visit:
            index = to_visit.popleft()
            fills, _ = self.choose(self.branches[index], predicted[index])
            num_filled[index] = len(own[index]) + len(fills)
            filled_now = {_place(fill): (index, fill) for fill in fills}
            for other in range(anchor):
                if other in confirmed:
                    continue
                holds_part = own[index] < own[other]  # a proper subset
                missing = own[other] - own[index]
                if holds_part and missing <= filled_now.keys():
                    confirmed[other] = confirmed[index] | {place: filled_now[place] for place in missing}
                    to_visit.append(other)
        winner = min(num_filled, key=lambda index: (-num_filled[index], -scores[index], index))
        return winner, confirmed[winner]


class Exact(Drafts):
    """A branch wins if the base's next pass would start from exactly its tokens. With ``lookahead_depth`` above 1
    branches chain. So the answer is the base's, token for token, and these passes are saved.

    A pass with a commit is not saved: keys and values would be read from other places, and differ with full attention
    or a causal commit. Without one, the base's next pass is the same computation on the same cached keys and values, to
    the last bit, also with penalties and banned words.
    """

    branch_acceptance = "exact"

    def _confirmed_winner(self, predicted: Sequence[list[Fill]], scores: Sequence[Fraction]) -> tuple[int, Confirmed]:
        winner = len(self.branches) - 1
        by_tokens = {branch.tokens: index for index, branch in enumerate(self.branches[:-1])}
        confirmed: dict[Place, tuple[int, Fill]] = {}
        while True:
            branch = self.branches[winner]
            fills, _ = self.choose(branch, predicted[winner])
            following = self.open(self.advance(branch, fills, self.editing.edits(branch, predicted[winner])))
            commits = any(block.state is BlockState.TO_CACHE for block in (*branch.blocks, *following.blocks))
            if commits or following.tokens not in by_tokens:
                return winner, confirmed
            confirmed |= {_place(fill): (winner, fill) for fill in fills}
            winner = by_tokens[following.tokens]


class VerifiedLopa(Verified, Lopa):
    has_graphs = True


class ExactLopa(Exact, Lopa):
    has_graphs = True


class VerifiedCausalBlocks(Verified, LopaCausalBlocks):
    """Over causal blocks."""


class ExactCausalBlocks(Exact, LopaCausalBlocks):
    """Over causal blocks."""


@lru_cache(maxsize=1024)
def draft_ranks(num_ranks: int, depth: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks that drafts fill, the most promising set first; the ranks of each set ascend.

    Rank r_i of r_0 < r_1 < ... costs r_i - i + 1: 1, plus 1 for each better rank that is not in the set. The costs
    ascend, so the sets of cost n are the partitions of n. Cheaper sets come first, equal ones in lexicographic order.
    ``depth``: most ranks in a set; ``count``: most sets.

    >>> draft_ranks(3, 3, 10)
    ((0,), (0, 1), (1,), (0, 1, 2), (0, 2), (2,), (1, 2))
    """
    found: list[tuple[int, ...]] = []
    sizes = range(1, min(depth, num_ranks) + 1)
    # The most expensive set of a size holds the worst ranks, each of which costs num_ranks - size + 1.
    max_cost = max((size * (num_ranks - size + 1) for size in sizes), default=0)
    for cost in range(1, max_cost + 1):
        for parts in _partitions(cost, 1, depth):
            ranks = tuple(part + i - 1 for i, part in enumerate(parts))
            if ranks[-1] < num_ranks:
                found.append(ranks)
        if len(found) >= count:
            break
    return tuple(found[:count])


def _partitions(total: int, least: int, depth: int) -> Iterator[tuple[int, ...]]:
    """The sums of ``total`` from at most ``depth`` ascending parts, ``least`` or more each."""
    if not total:
        yield ()
    elif depth:
        for part in range(least, total + 1):
            for rest in _partitions(total - part, part, depth - 1):
                yield (part, *rest)


def _place(fill: Fill) -> Place:
    return fill.position, fill.token
