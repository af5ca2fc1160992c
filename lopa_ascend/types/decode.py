"""What a decoding strategy asks of one forward pass, what it gets back, and what it records.

Positions are absolute: 0 is the first position of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Fill:
    """A token put into one masked position."""

    position: int
    token: int
    """Token id."""
    max_prob: float
    """Probability of the token, float32."""
    confidence: float
    """What the position is ranked by, float32; see ``DecodingParams.confidence``."""


@dataclass(frozen=True, slots=True)
class Edit(Fill):
    """A token put in the place of another one."""

    replaced: int
    """Token id of the other one."""


@dataclass(frozen=True, slots=True)
class GappedText:
    """A text with gaps that follows a prompt."""

    tokens: tuple[int, ...]
    """Token ids; runs of the mask are gaps."""
    flexible: tuple[int, ...] = ()
    """The gaps, by number, that may become shorter: the first passes find their lengths."""
    num_gaps: int = 0
    num_given: int = 0
    """Tokens outside of gaps."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One branch of one sequence in one forward pass."""

    start: int
    """First position of the row."""
    tokens: tuple[int, ...]
    """Token ids, masks included, of the positions [start, start + len(tokens))."""
    compute_from: int
    """Before this position the row has the anchor's tokens, and sees no others. Where the same branch-parallel group
    also computes the anchor, or another row with the anchor's tokens, this row takes over the keys, values and
    predictions of that one, and computes only from here on."""
    entry_ends: tuple[int, ...]
    """End positions of the attention entries, ascending. An entry covers the positions from the end of the entry before
    it (or ``start``) to its own end, and its queries see every key before its end."""
    masked: tuple[int, ...]
    """Positions to predict, ascending: those that are masked, and with ``editing_threshold`` the others of the open
    block that are generated."""
    causal_end: int = 0
    """Positions before this one see those up to their own; ``entry_ends`` says what the others see."""
    logit_shift: int | None = None
    """The logits at position q - logit_shift predict the token at q; with 1 ``masked`` may be ``end`` too. None: as
    ``ModelProperties`` says."""
    drafts: bool = False
    """What it predicts is verified by a later pass. Weights that a model has for drafts alone compute it, but for what
    is causal."""
    stale_end: int = 0
    """If it is larger than ``end``, the queries also see the positions from ``end`` up to this one, by the keys and
    values that an earlier pass has left in the cache."""

    @property
    def end(self) -> int:
        """The position after the last one of the row."""
        return self.start + len(self.tokens)

    @property
    def is_causal(self) -> bool:
        """Whether no position sees one behind it."""
        return self.causal_end >= self.end


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence computes in one forward pass."""

    start: int
    """First position that is computed. The keys and values of the positions before it are in the cache: committed, or
    for a strategy that commits nothing those of an earlier pass."""
    num_new: int
    """Positions from ``start`` on that this pass commits: their keys and values stay in the cache. A pass that verifies
    drafts commits what it accepts of them instead (``StepRecord.committed``)."""
    rows: tuple[RowPlan, ...]
    """The branches in evaluation order: lookahead branches by rank, the anchor last."""
    max_rows: int
    """The most rows that this sequence ever has in one pass."""
    winner_commits: bool
    """Full attention: keys and values differ by branch, so the winner's are copied to all slots after the pass."""
    prefix_length: int
    """Queries from position ``prefix_length`` on attend in two parts, which are merged: to the positions before it, and
    to the rest. The first part is what is cached; while the prompt is computed and committed, it is the prompt."""
    fills_all_slots: bool = False
    """Every group computes the anchor, or a branch, and the anchor's keys and values go to every slot without a row:
    later rows of any slot read them."""

    def piece(self, num_tokens: int) -> SequencePlan:
        """The first ``num_tokens`` positions of a causal pass that commits all that it computes. It predicts nothing,
        unless these are all."""
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
    """The predictions for one row: one value for each position of ``RowPlan.masked``, in the same order."""

    tokens: tuple[int, ...]
    """Token ids."""
    max_probs: tuple[float, ...]
    """Probabilities of those tokens, float32."""
    confidences: tuple[float, ...]
    """Confidences, float32."""
    seconds: tuple[tuple[int, float], ...] = ()
    """Only in a row that ``drafts``: the tokens that would be chosen without these, with their probabilities."""


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """One branch of one forward pass, for traces."""

    own_fills: tuple[Fill, ...]
    """The tokens that the branch holds in addition to the anchor; empty for the anchor. Their probabilities and
    confidences are those with which they were proposed or, in a draft that has won, those of the predictions that
    confirm them."""
    end: int
    """End of the branch's window."""
    masks: int
    """Masked positions before the pass."""
    score: float
    """The branch score. The branch with the highest one wins, if ``branch_acceptance`` is "published"."""
    confirmed_by: tuple[int, ...] = ()
    """Only in a draft that has won: for each of ``own_fills`` the index in ``StepRecord.branches`` of the branch whose
    prediction confirms it."""

    @property
    def lookahead(self) -> Fill | None:
        """The first of ``own_fills``; None for the anchor."""
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
    """Positions that the pass adds to the committed ones."""
    branches: tuple[BranchRecord, ...]
    """The branches in evaluation order: lookahead branches by rank, the anchor last."""
    winner: int
    """Index of the winner in ``branches``."""
    fills: tuple[Fill, ...]
    """What was filled after the pass and stays. A winning branch's own tokens are in ``branches[winner].own_fills``."""
    fallbacks: int
    """How many of the fills were not accepted: the one position that a fully activated block has to fill."""
    model_tokens: int
    """Tokens that this rank computed for the request."""
    head_rows: int
    """Rows of logits that this rank computed for the request."""
    forced: tuple[Fill, ...] = ()
    """What was filled after that without a prediction: under a grammar because nothing else fits; in a text with gaps
    what is given, once their lengths are found."""
    remasked: tuple[int, ...] = ()
    """Under a grammar: positions that were filled before the pass, or are among the winner's own, and whose tokens do
    not fit. They were masked again, and are masked still or among ``fills`` and ``forced``."""
    edits: tuple[Edit, ...] = ()
    """What the pass changed of positions that were filled before it."""
    drafted: tuple[Fill, ...] = ()
    """Tokens that a later pass is to check, with the probabilities of this pass; if ``accepted`` is a number, the
    tokens that this pass has checked, with those of the pass that drafted them. In the order of positions."""
    accepted: int | None = None
    """How many of ``drafted``, from the first one on, the pass would have written itself: ``fills`` has them, and as a
    rule its own token behind them. None: it has checked none."""
    second_was_right: bool = False
    """The pass has written in the place of the first of ``drafted`` that it refused what was the draft's second
    choice there."""

    def canvas_positions(self, prompt_length: int) -> int:
        """Positions of the answer that all branches have in this pass. Each branch counts as many as the winner has.

        Args:
            prompt_length: tokens of the prompt, which are no part of the answer.
        """
        start, end = self.span
        return len(self.branches) * (end - max(start, prompt_length))


def winner_rank(record: StepRecord) -> int:
    """0 if the anchor won the pass, r if the lookahead branch of rank r (from 1) did."""
    is_anchor = record.winner == len(record.branches) - 1
    return 0 if is_anchor else record.winner + 1
