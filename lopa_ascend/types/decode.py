"""What a decoding strategy asks of one forward pass, what it gets back, and what it records. Positions are absolute: 0
is the first position of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Fill:
    """A token put into one masked position."""

    position: int
    token: int
    max_prob: float
    """Probability of ``token``, float32."""
    confidence: float
    """What the position is ranked by, float32; see ``DecodingParams.confidence``."""


@dataclass(frozen=True, slots=True)
class Edit(Fill):
    """A token put in the place of ``replaced``."""

    replaced: int


@dataclass(frozen=True, slots=True)
class GappedText:
    """A text with gaps that follows a prompt."""

    tokens: tuple[int, ...]
    """Token ids; runs of the mask are gaps."""
    flexible: tuple[int, ...] = ()
    """Numbers of the gaps that may become shorter: the first passes find their lengths."""
    num_gaps: int = 0
    num_given: int = 0
    """Tokens outside of gaps."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One branch of one sequence in one forward pass."""

    start: int
    tokens: tuple[int, ...]
    """Of the positions from ``start`` on, masks included."""
    compute_from: int
    """First position that this row computes. Everything before it equals the anchor, sees nothing behind it, and is
    reused from the last row of the group's share, which computes all."""
    entry_ends: tuple[int, ...]
    """Ends of the attention entries, ascending. An entry covers the positions from the end before it (or ``start``) to
    its own, and its queries see every key before its end."""
    masked: tuple[int, ...]
    """Positions to predict, ascending: masked ones, with ``editing_threshold`` all generated ones of the open block."""
    causal_end: int = 0
    """Positions before this one see those up to their own; ``entry_ends`` says what the others see."""
    logit_shift: int | None = None
    """Logits at q - logit_shift predict the token at q; with 1 ``masked`` may be ``end`` too. None: the model's."""
    drafts: bool = False
    """A later pass verifies what it predicts. Weights for drafts, if there are any, compute what is not causal."""
    stale_end: int = 0
    """If above ``end``: queries also see positions from there to this one, by an earlier pass's keys and values."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_causal(self) -> bool:
        """Whether no position sees one behind it."""
        return self.causal_end >= self.end


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence computes in one forward pass."""

    start: int
    """First computed position. Keys and values before it are in the cache, committed or from an earlier pass."""
    num_new: int
    """Positions from ``start`` on whose keys and values stay in the cache. A pass that verifies drafts commits what it
    accepts of them instead (``StepRecord.committed``)."""
    rows: tuple[RowPlan, ...]
    """In evaluation order: lookahead branches by rank, the anchor last."""
    max_rows: int
    """The most rows that this sequence ever has in one pass."""
    winner_commits: bool
    """Full attention: keys and values differ by branch, so the winner's are copied to all slots after the pass."""
    prefix_length: int
    """Length of the shared prefix: what is cached, or the prompt in the pass that commits it. Queries behind it attend
    to prefix and rest separately; the results are merged."""
    fills_all_slots: bool = False
    """Every group computes the anchor or a branch, and the anchor's keys and values go to every slot without a row:
    later rows of any slot read them."""

    def piece(self, num_tokens: int) -> SequencePlan:
        """The first positions of a causal pass that commits all that it computes. A piece predicts nothing."""
        (row,) = self.rows
        if num_tokens >= len(row.tokens):
            return self
        return replace(self, num_new=num_tokens, rows=(replace(row, tokens=row.tokens[:num_tokens], masked=()),))

    def keep(self, num_lookaheads: int) -> SequencePlan:
        """Without the lookahead branches behind the first ``num_lookaheads``."""
        *lookaheads, anchor = self.rows
        return replace(self, rows=(*lookaheads[:num_lookaheads], anchor))


@dataclass(frozen=True, slots=True)
class RowResult:
    """The predictions for one row: one value for each position of ``RowPlan.masked``, in order; floats are float32."""

    tokens: tuple[int, ...]
    max_probs: tuple[float, ...]
    confidences: tuple[float, ...]
    seconds: tuple[tuple[int, float], ...] = ()
    """If the row drafts: the tokens that would be chosen without these, with their probabilities."""


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """One branch of one forward pass, for traces."""

    own_fills: tuple[Fill, ...]
    """What it holds beside the anchor's tokens. Probabilities and confidences are those of the proposal or, in a draft
    that has won, of the predictions that confirm it."""
    end: int
    masks: int
    """Masked positions before the pass."""
    score: float
    confirmed_by: tuple[int, ...] = ()
    """In a draft that has won: for each of ``own_fills`` the index of the branch that confirms it."""

    @property
    def lookahead(self) -> Fill | None:
        return self.own_fills[0] if self.own_fills else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass of one request, for traces."""

    index: int
    """Number of the pass, from 0."""
    span: tuple[int, int]
    """[start, end) of the winner's row."""
    cache_length: int
    """Committed positions before the pass."""
    committed: int
    branches: tuple[BranchRecord, ...]
    """As ``SequencePlan.rows``."""
    winner: int
    """Index in ``branches``."""
    fills: tuple[Fill, ...]
    """What was filled and stays. A winning branch's own tokens are in ``branches[winner].own_fills``."""
    fallbacks: int
    """Fills that no rule accepted: a fully activated block has to fill one position."""
    model_tokens: int
    """Tokens that this rank computed for the request; ``head_rows``: rows of logits."""
    head_rows: int
    forced: tuple[Fill, ...] = ()
    """Filled after that without a prediction: under a grammar because nothing else fits; in a text with gaps what is
    given, once their lengths are found."""
    remasked: tuple[int, ...] = ()
    """Under a grammar: positions with tokens, from before the pass or the winner's own, that do not fit. They were
    masked again, and are masked still or among ``fills`` and ``forced``."""
    edits: tuple[Edit, ...] = ()
    """Changes of positions that were filled before the pass."""
    drafted: tuple[Fill, ...] = ()
    """In the order of positions: tokens that a later pass is to check, with this pass's probabilities; if ``accepted``
    is a number, tokens that this pass has checked, with the drafting pass's."""
    accepted: int | None = None
    """How many of ``drafted``, from the first on, the pass would have written itself: ``fills`` has them, and as a rule
    one token more. None: it has checked none."""
    second_was_right: bool = False
    """In place of the first of ``drafted`` that it refused the pass has written the draft's second choice."""

    def canvas_positions(self, prompt_length: int) -> int:
        """Positions of the answer in all branches of this pass. Each branch counts as many as the winner has."""
        start, end = self.span
        return len(self.branches) * (end - max(start, prompt_length))


def winner_rank(record: StepRecord) -> int:
    """0 if the anchor won the pass, r if the lookahead branch of rank r (from 1) did."""
    is_anchor = record.winner == len(record.branches) - 1
    return 0 if is_anchor else record.winner + 1
