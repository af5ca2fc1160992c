"""The nouns that everyone shares; plain data without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fill:
    """One position that was filled: absolute ``position``, ``token`` id, its probability and confidence (float32)."""

    position: int
    token: int
    max_prob: float
    confidence: float


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One branch of one sequence in one forward pass.

    ``tokens`` are the ids (masks included) of the absolute positions ``[start, start + len(tokens))``. Positions
    before ``compute_from`` equal the anchor's by construction and are computed once, in the anchor's row.
    ``edges`` are the ends of the attention entries, ascending: the entry that ends at ``e`` spans the positions from
    the previous edge (or ``start``) to ``e`` and sees every key before ``e``. ``masked`` are the positions to predict.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    compute_from: int
    edges: tuple[int, ...]
    masked: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence asks of one forward pass.

    ``rows`` are its branches in evaluation order (lookaheads by rank, anchor last). ``commit`` positions from
    ``start`` on are final in this forward, and their keys and values stay in the cache. ``num_slots`` slots take every
    committing write, those without a row too. ``winner_commits``: the values differ by branch (full attention), so the
    winner's are copied to all slots once it is known.
    """

    start: int
    commit: int
    rows: tuple[RowPlan, ...]
    num_slots: int
    winner_commits: bool


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a forward pass says of one row: per position of ``RowPlan.masked`` the chosen token id, its probability and
    its confidence (both float32 values)."""

    tokens: tuple[int, ...]
    max_probs: tuple[float, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """One branch of one forward, for traces: its lookahead fill (None for the anchor), the end of its window, its mask
    count going in, and its branch score (the published confidence of the branch)."""

    lookahead: Fill | None
    end: int
    masks: int
    score: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass of one request, for traces. Positions are absolute, counted from the start of the prompt.

    ``span`` is the input span [start, end) of the winner's row, ``cache_length`` the positions in the KV cache before
    the pass, ``committed`` how many it adds. ``branches`` come in evaluation order (lookaheads by rank, anchor last),
    ``winner`` indexes them. ``fills`` are the positions that the winner filled after the pass; a winning lookahead's
    own token is in ``branches[winner].lookahead``. ``fallbacks`` of the fills were forced. ``model_tokens`` and
    ``head_rows`` count what was computed for the request in this pass.
    """

    index: int
    span: tuple[int, int]
    cache_length: int
    committed: int
    branches: tuple[BranchRecord, ...]
    winner: int
    fills: tuple[Fill, ...]
    fallbacks: int
    model_tokens: int
    head_rows: int


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A finished request.

    ``token_ids`` is what was generated; with ``finish_at_eos`` it ends before the first EOS. ``text`` is None without a
    tokenizer. ``finish_reason`` is "stop" (EOS or stop string) or "length". ``num_forwards`` counts forward passes,
    however many branches ran in each. ``num_positions`` counts every position that was opened, EOS and what
    stands after it included.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    num_forwards: int
    num_positions: int
    model_tokens: int
    trace: tuple[StepRecord, ...] | None = field(default=None, repr=False)

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens by forward passes."""
        return len(self.token_ids) / self.num_forwards if self.num_forwards else 0.0

    @property
    def published_tokens_per_step(self) -> float:
        """TPF as the published Dream code counts it (SPEC section 9): every opened position, what follows the EOS
        included, by forward passes plus one closing round."""
        return self.num_positions / (self.num_forwards + 1)


@dataclass(frozen=True, slots=True)
class Progress:
    """What of a running request is final: ``token_ids`` and ``text`` only ever grow, and are never retracted.

    ``text`` holds back an incomplete UTF-8 sequence and any ending that could begin a stop string. ``output`` is set
    on the last one only.
    """

    token_ids: tuple[int, ...]
    text: str
    output: GenerationOutput | None = None
