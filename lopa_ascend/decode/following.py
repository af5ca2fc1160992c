"""Following a grammar along the branches of a decoding: the token that is chosen first, what is masked again because it
does not fit, and what is filled without a prediction because nothing else fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.types import Fill, GrammarError, RowPlan

Changes = tuple[list[Fill], list[Fill], list[int]]
"""(fills of a pass that stay, ``forced`` and ``remasked`` of its ``StepRecord``)."""


class NoGrammar:
    """In place of a ``GrammarFollower`` for a free answer. The methods of that may raise GrammarError."""

    binds = False
    """Whether there is a grammar. If so, it says where the answer ends."""

    def allowed(self, anchor: Branch, row: RowPlan) -> int:
        """The set of tokens (see ``decode.constraint``) that may be chosen at a row's first masked position; 0: any."""
        return 0

    def allowed_along(self, anchor: Branch, row: RowPlan) -> list[int]:
        """The same at the first masked position and, if the row is causal, at those behind it."""
        return [self.allowed(anchor, row)]

    def must_fill(self, branch: Branch) -> int | None:
        """The position that a pass fills in any case, if there is one."""
        return None

    def admitted(self, branch: Branch, fills: list[Fill]) -> list[Fill]:
        """The fills of masked positions that fit, as far as what is before them is known."""
        return fills

    def num_admitted(self, branch: Branch, drafts: Sequence[int]) -> int:
        """How many drafts (token ids), from the first on, fit behind the branch's filled beginning."""
        return len(drafts)

    def follow(self, branch: Branch, extend: Callable[[Branch], Branch], before: Branch | None = None) -> Branch:
        """The branch after fills, as its grammar has it. ``extend`` adds a block that is not activated yet, if there
        may be another; ``before`` is the branch before the fills, if these fill its first mask."""
        return branch

    def changes(self, anchor: Branch, own_fills: Sequence[Fill], fills: list[Fill], after: Branch) -> Changes:
        """What a pass has done beside the winner's ``own_fills``. ``anchor``: before the pass; ``after``: after it."""
        return fills, [], []


FREE = NoGrammar()


class GrammarFollower(NoGrammar):
    """Keeps the branches of one request to its grammar. ``forces_first`` and ``gives_ahead``: see ``Strategy``."""

    binds = True

    def __init__(
        self,
        constraint: Constraint,
        mask: int,
        ends: frozenset[int],
        *,
        forces_first: bool = True,
        gives_ahead: bool = False,
    ) -> None:
        self._constraint, self._mask, self._ends = constraint, mask, ends
        self._forces_first, self._gives_ahead = forces_first, gives_ahead

    def allowed(self, anchor: Branch, row: RowPlan) -> int:
        known = max(0, row.start - anchor.first)
        before = row.tokens[max(0, anchor.first - row.start) : row.masked[0] - row.start]
        return self._constraint.allowed((*anchor.tokens[:known], *before))

    def allowed_along(self, anchor: Branch, row: RowPlan) -> list[int]:
        if not row.is_causal:
            known = anchor.first + len(self._beginning(anchor))
            drafts = row.tokens[known - row.start : row.masked[0] - row.start] if row.drafts else ()
            return [self.allowed(anchor, row)] if self.num_admitted(anchor, drafts) == len(drafts) else []
        found = []
        for position in row.masked:
            try:
                found.append(self.allowed(anchor, replace(row, masked=(position,))))
            except GrammarError:  # behind the first position, drafts before it may be wrong: then it means nothing
                if not found:
                    raise
                break
        return found

    def must_fill(self, branch: Branch) -> int | None:
        """None also if any token may follow: then the decoding alone decides."""
        beginning = self._beginning(branch)
        if not branch.masks or self._constraint.takes_any(beginning):
            return None
        return branch.first + len(beginning)

    def admitted(self, branch: Branch, fills: list[Fill]) -> list[Fill]:
        first, beginning = self.must_fill(branch), self._beginning(branch)
        return [
            fill
            for fill in fills
            if fill.position != first or self._constraint.admitted((*beginning, fill.token)) > len(beginning)
        ]

    def num_admitted(self, branch: Branch, drafts: Sequence[int]) -> int:
        beginning = self._beginning(branch)
        return self._constraint.admitted((*beginning, *drafts)) - len(beginning)

    def follow(self, branch: Branch, extend: Callable[[Branch], Branch], before: Branch | None = None) -> Branch:
        """Follows the filled beginning to the first mask. A token that does not fit is masked again, with what is
        behind it in its block. Then tokens are filled as long as only one can follow.

        Passes end: where not any token fits, a pass fills the first mask (``must_fill``) with one that does, which
        stays. Elsewhere the beginning grows before anything is masked again. Every round lets it grow, too.
        """
        binds = before is not None and self.must_fill(before) is not None
        num_before = len(self._beginning(before)) if before is not None and binds else -1
        while True:
            beginning = self._beginning(branch)
            num_fitting = self._constraint.admitted(beginning)
            if num_fitting <= num_before:
                raise GrammarError("the grammar does not go on with the token that it allowed")
            num_before = num_fitting
            if num_fitting < len(beginning):
                branch = branch.mask_again(num_fitting, self._mask, self._ends)
                beginning = beginning[:num_fitting]
            forced = self._constraint.forced(beginning) if self._ends.isdisjoint(beginning) else []
            if forced and len(beginning) == len(branch.tokens):
                branch = extend(branch)
            fills = self._fills_of(forced, branch, len(beginning))
            if not fills:
                return branch.fill(self._given(branch, beginning), self._ends)
            branch = branch.fill(fills, self._ends)

    def _fills_of(self, forced: Sequence[int], branch: Branch, index: int) -> list[Fill]:
        """Puts forced tokens into the masks from a generated position on, as far as these reach."""
        firsts = () if self._forces_first else {block.start for block in branch.blocks}
        fills = []
        for number, token in enumerate(forced, index):
            position = branch.first + number
            if number == len(branch.tokens) or branch.tokens[number] != self._mask or position in firsts:
                break
            fills.append(Fill(position, token, 1.0, 1.0))
        return fills

    def _given(self, branch: Branch, beginning: Sequence[int]) -> list[Fill]:
        """Puts tokens behind masks of the last block, if its first position is filled."""
        if not self._gives_ahead or not branch.masks:
            return []
        first = branch.first + len(beginning)
        ahead = ((first + distance, token) for distance, token in self._constraint.ahead(beginning))
        begin, end = branch.blocks[-1].start, branch.end
        return [
            Fill(position, token, 1.0, 1.0)
            for position, token in ahead
            if begin < first and position < end and branch.token_at(position) == self._mask
        ]

    def _beginning(self, branch: Branch) -> tuple[int, ...]:
        return branch.tokens[: branch.tokens.index(self._mask)] if branch.masks else branch.tokens

    def changes(self, anchor: Branch, own_fills: Sequence[Fill], fills: list[Fill], after: Branch) -> Changes:
        first, tokens = after.first, after.tokens
        stay = [fill for fill in fills if tokens[fill.position - first] == fill.token]
        # The winner may have opened another number of blocks than the anchor; these hold masks alone.
        known = [*anchor.tokens, *[self._mask] * len(tokens)][: len(tokens)]
        for fill in own_fills:
            known[fill.position - first] = fill.token
        filled = {fill.position for fill in stay}
        forced, remasked = [], []
        for position, (old, new) in enumerate(zip(known, tokens, strict=True), first):
            is_filled = position in filled
            if old != self._mask and (old != new or is_filled):
                remasked.append(position)
            if new not in (self._mask, old) and not is_filled:
                forced.append(Fill(position, new, 1.0, 1.0))
        return stay, forced, remasked
