"""What every decoding strategy has: the state of one sequence, its verbs, and which tokens are final.

``plan`` describes the next forward pass. ``absorb`` takes its predictions and replaces the branches: ``select`` picks
the winner, ``choose`` its fills, ``advance`` makes the state that follows, ``spawn`` the next branches. It alone
changes the strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.combinations import Rule
from lopa_ascend.config.settings import settings
from lopa_ascend.decode.acceptance import acceptance_rule
from lopa_ascend.decode.blocks import Block, BlockState, Branch
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.decode.editing import NO_EDITING, NoEditing
from lopa_ascend.decode.following import FREE, GrammarFollower
from lopa_ascend.types import (
    DREAM,
    Alternatives,
    BranchRecord,
    Edit,
    Fill,
    GappedText,
    ModelProperties,
    RowPlan,
    RowResult,
    SequencePlan,
    StepRecord,
)

Final = tuple[Sequence[int], int | None, tuple[tuple[int, int | None], ...]]
"""(places of final tokens, which never change, among the generated positions; the token id that ends the answer, if no
position before it is masked; ``Update.gap_ends``)."""


@dataclass(frozen=True)
class SequenceStart:
    prompt: Sequence[int]
    params: DecodingParams
    mask: int
    eos: frozenset[int]
    """Ids that end the answer unless ``params.ignore_eos``."""
    num_committed: int = 0
    """Positions of the prompt that are in the cache already."""
    properties: ModelProperties = DREAM
    vocab_size: int = 2
    constraint: Constraint | None = None
    """None: the answer is free."""
    gapped: GappedText | None = None
    """The canvas, for a decoding that ``fills_gaps``; None: masks alone."""


Only = Mapping[str, tuple[object, ...] | None]
"""By parameter: values that a decoding takes beside the default; None: all."""


@dataclass(frozen=True, kw_only=True)
class NoParams:
    """No parameters of its own."""


class Strategy(ABC):
    """One sequence and how it is decoded.

    Attributes:
        own: the values of ``parameters``.
        branches: of the next pass, in evaluation order: lookahead branches by rank, the anchor last.
        max_rows: the most rows of a forward pass of this sequence; the engine reserves pages for them.
        num_committed: positions whose keys and values are final.
        origin, limit: see ``ModelProperties``.
        ends: token ids that end the answer.
        is_stuck: the last pass filled nothing that a rule had accepted.
        is_crowded: so many requests run that drafts do not pay; the engine sets it before each pass.
        successor: decodes the sequence from now on; None: this strategy does.
        alternatives: by position, the most probable tokens with their probabilities, from the pass that predicted the
            position's token; empty without ``top_logprobs``.
    """

    # What a decoding says about itself. A class inherits all of it.
    description: ClassVar[str] = ""
    """One clause for the help of ``decoding``."""
    base: ClassVar[str] = ""
    """The built-in decoding whose rules fill positions, as ``base`` of "lopa" names it."""
    parameters: ClassVar[type[Any]] = NoParams
    """A frozen dataclass of its own parameters, which requests set by name. It inherits from the parent class's."""
    only: ClassVar[Only] = {"num_branches": (0,)}
    """The parameters that it takes with some values only. A class replaces what its parents say."""
    rules: ClassVar[tuple[Rule, ...]] = tuple(
        Rule(name, grammar, (None,))  # a grammar says where the answer ends
        for grammar in ("structured_outputs", "max_thinking_tokens")
        for name in ("ignore_eos", "finish_at_eos")
    )
    """Which parameters go together, beside what the parent classes say."""
    told_apart_by: ClassVar[tuple[str, ...]] = ()
    """Parameters that choose among the classes of a decoding. Each class has its value as an attribute."""
    confidence: ClassVar[str | None] = None
    """The confidence that its passes report; None: the request's."""
    default_branches: ClassVar[int] = 0
    commits: ClassVar[bool] = False
    """Whether a window of blocks moves over the canvas and commits keys and values behind it."""
    has_one_open_block: ClassVar[bool] = False
    """Whether passes with several rows compute one block alone, and commit nothing."""
    scored_by: ClassVar[str] = "parallel"
    """The decoding whose attention and blocks score given texts."""
    computes_whole_branches: ClassVar[bool] = False
    """Whether each lookahead branch computes prompt and canvas."""
    fills_gaps: ClassVar[bool] = False
    forces_first: ClassVar[bool] = True
    """Whether a block's first position may be filled without a pass, if a grammar forces its token."""
    gives_ahead: ClassVar[bool] = False
    """Whether a block's passes see from the beginning what a grammar puts later into it."""
    has_graphs: ClassVar[bool] = False
    """Whether compiled steps decode it. Not inherited."""
    has_row_of_each_position: ClassVar[bool] = False
    """Whether a pass may have a row for each position of a block, not only for each branch."""
    fills_one: ClassVar[bool] = False
    """Whether a block is one position, whatever ``block_size`` is."""
    draws_once: ClassVar[bool] = False
    """Whether draws depend on seed and position alone. Otherwise each pass draws anew."""
    decides_on_host: ClassVar[bool] = False
    """Whether only its forward passes are compiled, so that they support all that a request asks."""
    drafts: ClassVar[bool] = False
    """See ``RowPlan.drafts``."""
    own: Any
    editing: NoEditing = NO_EDITING
    successor: Strategy | None = None

    def __init__(self, start: SequenceStart) -> None:
        self.params = params = start.params
        self.properties = properties = start.properties
        self.prompt = prompt = tuple(start.prompt)
        self.mask = mask = start.mask
        self.ends = params.ends(start.eos)
        self.grammar = FREE
        if start.constraint is not None:
            rules = {"forces_first": self.forces_first, "gives_ahead": self.gives_ahead}
            self.grammar = GrammarFollower(start.constraint, mask, self.ends, **rules)
        self.origin = properties.origin(len(prompt), params.block_size)
        self.limit = properties.limit(len(prompt), params.max_new_tokens, params.block_size)
        self._rule = acceptance_rule(params)
        self.own = self.parameters(**{name: getattr(params, name) for name in settings(self.parameters)})
        self.max_rows = params.most_rows
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
        """Refuses values that contradict each other in this decoding (ParameterError). Each is allowed by itself."""

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        """Whether it decodes models of these properties."""
        return True

    @classmethod
    def ranked_by(cls, params: DecodingParams) -> str:
        """The confidence that a pass reports beside the probability."""
        ranking: str = cls.confidence or params.confidence
        return ranking

    @classmethod
    def draws(cls, params: DecodingParams) -> bool:
        """Whether the seed draws positions."""
        return False

    @property
    def anchor(self) -> Branch:
        """The branch without own tokens: the winner of the last pass, with its fills."""
        return self.branches[-1]

    @property
    def answer(self) -> Branch:
        return self.known_winner or self.anchor

    @property
    def num_opened(self) -> int:
        """See ``Update.num_positions``."""
        return len(self.answer.tokens)

    @property
    def num_counted(self) -> int:
        """Generated positions, from the first on, that penalties count."""
        return max(0, self.num_committed - len(self.prompt))

    @abstractmethod
    def plan(self) -> SequencePlan | None:
        """What the next forward pass computes; None when the sequence is done."""

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        """Takes the predictions of a pass: picks the winner, fills it, and grows the next branches from it. ``plan``
        may have fewer rows than were planned (``SequencePlan.keep``)."""
        if len(plan.rows) < len(self.branches):
            self.branches = (*self.branches[: len(plan.rows) - 1], self.anchor)
        winner, branch, scores = self.select(plan, results)
        row = plan.rows[winner]
        evaluated = [*self.branches[:winner], branch, *self.branches[winner + 1 :]]
        records = tuple(
            BranchRecord(branch.own_fills, branch.end, branch.masks, score, branch.confirmed_by)
            for branch, score in zip(evaluated, scores, strict=True)
        )
        predicted = self.predicted(row, results[winner])
        fills, fallbacks = self.choose(branch, predicted)
        edits = self.editing.edits(branch, predicted)
        self.is_stuck = len(fills) == fallbacks
        after = self.advance(branch, fills, edits)
        fills, forced, remasked = self.grammar.changes(self.anchor, branch.own_fills, fills, after)
        tokens, first = after.tokens, after.first
        masked = [fill for fill in predicted if tokens[fill.position - first] == self.mask]
        open_positions = self.grammar.admitted(after, masked)
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
        """The branch after a pass that it wins with these fills and edits, before it opens blocks."""
        filled = branch.edit(edits, self.ends).check(changed=bool(edits)).fill(fills, self.ends).as_anchor()
        return self.finish_pass(self.grammar.follow(filled, self.extend, branch))

    # ---- how a branch goes on: whole canvases have all blocks from the beginning, and commit none --------------------

    def extend(self, branch: Branch) -> Branch:
        """With another block, not activated yet, if it may have one."""
        return branch

    def finish_pass(self, branch: Branch) -> Branch:
        """After a pass: which blocks are committed, or will be."""
        return branch

    def open(self, branch: Branch) -> Branch:
        """As the next pass computes it: with the blocks that it opens and activates."""
        return branch

    def take_alternatives(self, found: Mapping[int, Alternatives]) -> None:
        self.alternatives.update(found)

    # ---- what a decoding decides: the built-in ones and those of other packages override these ----------------------

    def predicted(self, row: RowPlan, result: RowResult) -> list[Fill]:
        """What one row would put into its masked positions."""
        columns = zip(row.masked, result.tokens, result.max_probs, result.confidences, strict=True)
        return [Fill(*column) for column in columns]

    def accept(self, predicted: Sequence[Fill]) -> list[Fill]:
        """The predictions for a block's masks that the acceptance rule accepts, in the order of positions."""
        return self._rule(predicted)

    @abstractmethod
    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """Picks the fills of a branch. Returns them, and how many are fallbacks, which no rule accepted. "verified"
        asks for several branches of a pass, so nothing may be changed."""

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        """(index of the winner, the winner, branch scores); here of one branch."""
        confidences = self.editing.scored(self.anchor, plan.rows[0], results[0])
        return 0, self.anchor, [sum(confidences) / len(confidences) if confidences else 1.0]

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """The branches of the next pass, before they open blocks: here the anchor alone. ``open_positions`` are the
        predictions for positions that are still masked."""
        return [anchor]

    @property
    def known_winner(self) -> Branch | None:
        """The branch that would win the next pass unchanged, if known without the pass: then it is the answer."""
        return None

    def recorded_positions(self) -> set[int]:
        """Positions that the last pass did not fill but records ``alternatives`` of: those of lookahead tokens."""
        return {fill.position for branch in self.branches for fill in branch.own_fills}

    # ---- what is final ---------------------------------------------------------------------------------------------

    def final(self) -> Final:
        """The tokens up to the first mask, with ``finish_at_eos`` up to the first that ends the answer."""
        tokens = self.editing.firm(self.answer)[: self.params.max_new_tokens]
        known = tokens.index(self.mask) if self.mask in tokens else len(tokens)
        end = next((place for place in range(known) if tokens[place] in self.ends), None)
        if end is None:
            return range(known), None, ()
        return range(end if self.params.finish_at_eos else known), tokens[end], ()

    def visible_is_final(self) -> bool:
        """Whether no later step can change the visible text: all up to an EOS, or all of the answer, is filled."""
        places, end, _ = self.final()
        return end is not None or len(places) == self.params.max_new_tokens
