"""What every decoding strategy has: the state of one sequence, its verbs, and which tokens are final.

``plan`` describes the next forward pass. ``absorb`` takes its predictions and replaces the branches by the next ones.
It is made of ``select`` (the winner), ``choose`` (what it fills), ``advance`` (the state that follows) and ``spawn``
(the next branches). It alone changes the strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.acceptance import acceptance_rule, most_confident
from lopa_ascend.decode.blocks import Block, BlockState, Branch
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.types import (
    DREAM,
    Alternatives,
    BranchRecord,
    Edit,
    Fill,
    GappedText,
    GrammarError,
    ModelProperties,
    RowPlan,
    RowResult,
    SequencePlan,
    StepRecord,
)


@dataclass(frozen=True)
class Start:
    """What the decoding of a sequence begins with."""

    prompt: Sequence[int]
    """Token ids."""
    params: DecodingParams
    mask: int
    """Token id of the mask."""
    eos: frozenset[int]
    """EOS ids, which end the answer unless ``params.ignore_eos``."""
    num_committed: int = 0
    """Positions of the prompt whose keys and values are in the cache already."""
    properties: ModelProperties = DREAM
    """The model's."""
    constraint: Constraint | None = None
    """What the answer keeps to; None: it is free."""
    gapped: GappedText | None = None
    """For a decoding that ``fills_gaps``: the canvas; None: masks alone."""


class Strategy(ABC):
    """One sequence and how it is decoded.

    Attributes:
        like: for a decoding that is not built in: the name of the built-in decoding whose parameters it accepts.
        parameters: for a decoding that is not built in: a frozen dataclass of further parameters, each of which is
            declared as those of ``DecodingParams`` are. Requests set them by their names.
        confidence: for a decoding that is not built in: the confidence that its passes report, whatever the parameter
            ``confidence`` is, such as "neg_entropy"; None: the one that the request asks for.
        params: how the request is decoded.
        own: the values of ``parameters``.
        branches: of the next pass, in evaluation order: lookahead branches by rank, the anchor last.
        num_committed: positions whose keys and values are final.
        num_forwards: forward passes so far.
        origin, limit: where the first block to decode begins, and the most positions that the sequence can have; see
            ``ModelProperties``.
        ends: token ids that end the answer.
        is_stuck: the last pass filled nothing that a rule had accepted.
        is_crowded: so many requests run that drafts do not pay; the engine sets it before each pass.
        constraint: see ``Start``.
        alternatives: by position: the most probable tokens with their probabilities, as the pass predicted them that
            the token of the position comes from. Empty unless the request asks for ``top_logprobs``.
    """

    like: ClassVar[str]
    parameters: ClassVar[type[Any] | None] = None
    confidence: ClassVar[str | None] = None
    fills_gaps: ClassVar[bool] = False
    """Whether the decoding fills texts with gaps."""
    own: Any

    def __init__(self, start: Start) -> None:
        self.params = params = start.params
        self.constraint = start.constraint
        self.properties = properties = start.properties
        self.prompt = prompt = tuple(start.prompt)
        self.mask = mask = start.mask
        self.ends = params.ends(start.eos)
        self._cuts = self.ends | {mask} if params.finish_at_eos else frozenset({mask})
        """The final tokens end before the first of these token ids."""
        self.origin = properties.origin(len(prompt), params.block_size)
        self.limit = properties.limit(len(prompt), params.max_new_tokens, params.block_size)
        self._rule = acceptance_rule(params)
        self.own = None if self.parameters is None else self.parameters(**dict(params.own))
        self.num_committed = start.num_committed
        self.num_forwards = 0
        self.is_stuck = False
        self.is_crowded = False
        self.alternatives: dict[int, Alternatives] = {}
        state = BlockState.IN_CACHE if self.num_committed == self.origin else BlockState.TO_CACHE
        first = Branch((), (Block(0, self.origin, 0, state, activated=True),), len(prompt))
        self.branches: Sequence[Branch] = (self.open(first),)

    @classmethod  # noqa: B027  most decodings have nothing to refuse
    def check(cls, params: DecodingParams) -> None:
        """Refuses parameters that do not go together in this decoding. Each is allowed by itself.

        Raises:
            ParameterError: two of them contradict each other.
        """

    @property
    def max_rows(self) -> int:
        """The most rows that a forward pass of this sequence may have. The engine reserves pages for so many."""
        return 1 + self.params.lookaheads

    @property
    def in_prefill(self) -> bool:
        """Whether the next pass computes the prompt, or its whole blocks."""
        return self.num_committed < self.origin

    @property
    def anchor(self) -> Branch:
        """The branch without tokens of its own: the winner of the last pass, with its fills."""
        return self.branches[-1]

    @property
    def answer(self) -> Branch:
        """The branch whose tokens are the answer so far."""
        return self.known_winner or self.anchor

    @property
    def num_opened(self) -> int:
        """See ``Update.num_positions``."""
        return len(self.answer.tokens)

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
        self.branches = (*lookaheads[:num_lookaheads], anchor)
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
        winner, branch, scores = self.select(plan, results)
        row = plan.rows[winner]
        evaluated = [*self.branches[:winner], branch, *self.branches[winner + 1 :]]
        records = tuple(
            BranchRecord(branch.own_fills, branch.end, branch.masks, score, branch.confirmed_by)
            for branch, score in zip(evaluated, scores, strict=True)
        )
        predicted = self.predicted(row, results[winner])
        fills, fallbacks = self.choose(branch, predicted)
        edits = self.edits(branch, predicted)
        self.is_stuck = len(fills) == fallbacks
        after = self.after(branch, fills, edits)
        fills, forced, remasked = self._changes(after, branch.own_fills, fills)
        open_positions = [fill for fill in self.of_masks(branch, predicted) if self._is_open(fill, after)]
        self.branches = [self.open(branch) for branch in self.spawn(after, open_positions)]
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
            forced=tuple(forced),
            remasked=tuple(remasked),
            edits=tuple(edits),
        )
        self.num_committed += plan.num_new
        self.num_forwards += 1
        return record

    def advance(self, branch: Branch, fills: Sequence[Fill], edits: Sequence[Edit] = ()) -> Branch:
        """The anchor of the pass after one that this branch wins, and that fills and edits these positions."""
        return self.open(self.after(branch, fills, edits))

    def after(self, branch: Branch, fills: Sequence[Fill], edits: Sequence[Edit]) -> Branch:
        """The branch after a pass that it wins, before it opens blocks."""
        checked = branch.edit(edits, self.ends).check(changed=bool(edits))
        num_before = len(self._beginning(branch)) if branch.masks else -1
        return self.settle(self.follow(checked.fill(fills, self.ends).as_anchor(), num_before))

    # ---- what a grammar adds ---------------------------------------------------------------------------------------

    def follow(self, branch: Branch, num_before: int = -1) -> Branch:
        """The branch after fills, as its grammar has it.

        The filled beginning is followed up to the first mask. A token that does not fit is masked again, with what
        follows it in its block. Then tokens are filled as long as only one can follow.

        Every pass lets the beginning grow, so there are at most ``max_new_tokens`` of them: each fills the first mask
        (``accept_in``) with one of the tokens that fit, which therefore stays. Every round here lets it grow, too.

        Args:
            num_before: tokens of the beginning before the fills, if these fill the first mask.

        Raises:
            GrammarError: nothing fits, the grammar is too hard to follow, or what it allowed does not fit.
        """
        if self.constraint is None:
            return branch
        while True:
            beginning = self._beginning(branch)
            num_fitting = self.constraint.admitted(beginning)
            if num_fitting <= num_before:
                raise GrammarError("the grammar does not go on with the token that it allowed")
            num_before = num_fitting
            if num_fitting < len(beginning):
                branch = branch.mask_again(num_fitting, self.mask, self.ends)
                beginning = beginning[:num_fitting]
            forced = self.constraint.forced(beginning) if self.ends.isdisjoint(beginning) else []
            if forced and len(beginning) == len(branch.tokens):
                branch = self.extend(branch)
            fills = self._fills_of(forced, branch, len(beginning))
            if not fills:
                return branch
            branch = branch.fill(fills, self.ends)

    def _fills_of(self, forced: Sequence[int], branch: Branch, index: int) -> list[Fill]:
        """The fills that put forced tokens into the masks from a generated position on, as far as these reach."""
        fills = []
        for number, token in enumerate(forced, index):
            position = branch.first + number
            if number == len(branch.tokens) or branch.tokens[number] != self.mask or not self.may_force(position):
                break
            fills.append(Fill(position, token, 1.0, 1.0))
        return fills

    def _beginning(self, branch: Branch) -> tuple[int, ...]:
        """The generated tokens up to the first mask."""
        return branch.tokens[: branch.tokens.index(self.mask)] if branch.masks else branch.tokens

    def allowed(self, row: RowPlan) -> int:
        """The tokens that may be chosen at the first masked position of a row, as a set; see ``decode.constraint``."""
        assert self.constraint is not None
        first = len(self.prompt)
        known = max(0, row.start - first)
        before = row.tokens[max(0, first - row.start) : row.masked[0] - row.start]
        return self.constraint.allowed((*self.anchor.tokens[:known], *before))

    def _is_open(self, fill: Fill, after: Branch) -> bool:
        """Whether a lookahead branch may fill a position: it is masked, and what is first fits."""
        index = fill.position - after.first
        if after.tokens[index] != self.mask:
            return False
        if self.constraint is None or self.mask in after.tokens[:index]:
            return True
        return self.constraint.admitted((*after.tokens[:index], fill.token)) > index

    def _changes(
        self, after: Branch, own_fills: Sequence[Fill], fills: list[Fill]
    ) -> tuple[list[Fill], list[Fill], list[int]]:
        """What a pass has done beside the winner's own tokens: the fills that stay, what was forced, and what was
        masked again; see ``StepRecord``."""
        if self.constraint is None:
            return fills, [], []
        first, tokens = after.first, after.tokens
        stay = [fill for fill in fills if tokens[fill.position - first] == fill.token]
        # The winner may have opened another number of blocks than the anchor; these hold masks alone.
        known = [*self.anchor.tokens, *[self.mask] * len(tokens)][: len(tokens)]
        for fill in own_fills:
            known[fill.position - first] = fill.token
        filled = {fill.position for fill in stay}
        forced, remasked = [], []
        for position, (old, new) in enumerate(zip(known, tokens, strict=True), first):
            is_filled = position in filled
            if old != self.mask and (old != new or is_filled):
                remasked.append(position)
            if new not in (self.mask, old) and not is_filled:
                forced.append(Fill(position, new, 1.0, 1.0))
        return stay, forced, remasked

    def extend(self, branch: Branch) -> Branch:
        """The branch with another block if it may have one, which is not activated yet."""
        return branch

    def may_force(self, position: int) -> bool:
        """Whether a position may be filled without a pass."""
        return True

    def accept_in(self, branch: Branch, predicted: Sequence[Fill], least: int = 0) -> tuple[list[Fill], int]:
        """Which predictions for a block's masked positions are filled, and how many of these no rule has accepted.

        Where the rule accepts fewer than ``least``, the most confident ones are filled instead. Under a grammar the
        first masked position of the branch is filled in any case.
        """
        accepted = self.accept(predicted)
        if self.constraint is not None and predicted and predicted[0].position == self._first_mask(branch):
            first, *others = predicted
            rest = [fill for fill in accepted if fill is not first]
            if len(rest) + 1 < least:
                rest = most_confident(others, least - 1)
            return [first, *rest], sum(fill not in accepted for fill in (first, *rest))
        if len(accepted) >= least:
            return accepted, 0
        return most_confident(predicted, least), least - len(accepted)

    def _first_mask(self, branch: Branch) -> int:
        return branch.first + len(self._beginning(branch))

    # ---- how a branch goes on: whole canvases have all blocks from the beginning, and commit none --------------------

    def settle(self, branch: Branch) -> Branch:
        """The branch after a pass has been made: which of its blocks are committed, or will be."""
        return branch

    def open(self, branch: Branch) -> Branch:
        """The branch as the next pass computes it: with the blocks that it opens and activates."""
        return branch

    def take_alternatives(self, found: Mapping[int, Alternatives]) -> None:
        """Adds to ``alternatives`` what the last pass predicted."""
        self.alternatives.update(found)

    # ---- what a decoding decides: the built-in ones and those of other packages override these ----------------------

    def predicted(self, row: RowPlan, result: RowResult) -> list[Fill]:
        """What one row would put into its masked positions."""
        columns = zip(row.masked, result.tokens, result.max_probs, result.confidences, strict=True)
        return [Fill(*column) for column in columns]

    def accept(self, predicted: Sequence[Fill]) -> list[Fill]:
        """Those of the predictions for a block's masked positions that the acceptance rule lets through, in the order
        of positions."""
        return self._rule(predicted)

    @abstractmethod
    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """What is filled, and how many of these fills no rule has accepted.

        Args:
            branch: the winner, or one that may win with "verified", which asks for several. It must not be changed.
            predicted: the predictions for the masked positions of its row.
        """

    def edits(self, branch: Branch, predicted: list[Fill]) -> list[Edit]:
        """What is changed of the positions that are filled already; the arguments are those of ``choose``."""
        return []

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        """(index of the winner; the winner; the branch scores). Here there is one branch.

        The arguments are those of ``absorb``.
        """
        confidences = self.scored(self.anchor, plan.rows[0], results[0])
        return 0, self.anchor, [sum(confidences) / len(confidences) if confidences else 1.0]

    def of_masks(self, branch: Branch, predicted: list[Fill]) -> list[Fill]:
        """Those of the predictions that are for masked positions of a branch: here all."""
        return predicted

    def scored(self, branch: Branch, row: RowPlan, result: RowResult) -> Sequence[float]:
        """The confidences of a branch's masked positions, in the order of the positions."""
        return result.confidences

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """The branches of the next pass, before they open blocks: here the anchor alone.

        Args:
            anchor: the winner, with its fills.
            open_positions: the predictions for positions that are still masked.
        """
        return [anchor]

    @property
    def known_winner(self) -> Branch | None:
        """The branch that would win the next pass unchanged, if that is known without the pass: then it is the answer.
        Otherwise None."""
        return None

    def recorded_positions(self) -> set[int]:
        """The positions that the last pass has not filled and whose ``alternatives`` are recorded: those of the tokens
        that lookahead branches hold."""
        return {fill.position for branch in self.branches for fill in branch.own_fills}

    # ---- what is final ---------------------------------------------------------------------------------------------

    @property
    def firm_tokens(self) -> tuple[int, ...]:
        """The tokens of the visible positions, masks included, up to the first one whose token may be replaced."""
        return self.answer.tokens[: self.params.max_new_tokens]

    def final_tokens(self) -> list[int]:
        """The answer's token ids up to the first mask; with ``finish_at_eos`` up to the first that ends the answer.

        They never change.
        """
        tokens = self.firm_tokens
        end = next((i for i, token in enumerate(tokens) if token in self._cuts), len(tokens))
        return list(tokens[:end])

    def final_places(self) -> Sequence[int]:
        """The places of ``final_tokens`` among the generated positions."""
        return range(len(self.final_tokens()))

    @property
    def gap_ends(self) -> tuple[tuple[int, int | None], ...]:
        """See ``Update``."""
        return ()

    def end_reached(self) -> int | None:
        """The token id that ends the answer, if no position before it is masked."""
        for token in self.firm_tokens:
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
        tokens = self.firm_tokens
        return len(tokens) == self.params.max_new_tokens and self.mask not in tokens
