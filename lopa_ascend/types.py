"""The nouns that everyone shares; plain data without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class KVShape(NamedTuple):
    """What one rank stores of keys and values for each position."""

    num_layers: int
    num_kv_heads: int
    """KV heads of this rank."""
    head_dim: int


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
    before ``compute_from`` equal the anchor's by construction and need not be computed again where another row of the
    same sequence computes them. ``edges`` are the ends of the attention entries, ascending: the entry that ends at
    ``e`` spans the positions from the previous edge (or ``start``) to ``e`` and sees every key before ``e``.
    ``masked`` are the positions to predict.
    """

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

    ``rows`` are its branches in evaluation order (lookaheads by rank, anchor last), ``num_branches`` at most.
    ``commit`` positions from ``start`` on are final in this forward, and their keys and values stay in the cache.
    ``winner_commits``: the values differ by branch (full attention), so the winner's are copied to all slots once it is
    known. What stands behind ``prefix`` (the committed positions, or the prompt while it is computed) may attend to it
    apart from the rest.
    """

    start: int
    commit: int
    rows: tuple[RowPlan, ...]
    num_branches: int
    winner_commits: bool
    prefix: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one branch-parallel group computes of a sequence's forward pass.

    ``rows`` run in ``slots``, of which the sequence has ``num_slots``. The last row computes all its positions, the
    others take theirs before ``compute_from`` from it. ``branches`` are the rows' indices in ``plan.rows``; a row at
    whose index another group computes the predictions has no ``masked`` positions here.
    """

    plan: SequencePlan
    rows: tuple[RowPlan, ...]
    slots: tuple[int, ...]
    branches: tuple[int, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the host must know of a sequence's next step to plan it; the same on every rank.

    ``num_tokens`` are computed by the group that computes most. Positions before ``committed_end`` are committed after
    it. ``ends[slot]`` is where the longest row of a slot ends, 0 without a row. For ``winner_commits`` see
    SequencePlan.
    """

    num_tokens: int
    committed_end: int
    ends: tuple[int, ...]
    winner_commits: bool


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence in a step: ``tables[slot]`` are the page ids of a slot, of which the first ``num_shared`` are the
    same in all slots."""

    request_id: str
    tables: tuple[tuple[int, ...], ...]
    num_shared: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the host decides of one step: who takes part, and where their keys and values lie.

    Tokens, masks and block states are the step's state, not its plan. ``prefill``: the sequences compute their prompts
    (and their first block); otherwise none does.
    """

    index: int
    prefill: bool
    sequences: tuple[SequenceStep, ...]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step made of one sequence: its record, or why it cannot go on (``error``).

    ``committed`` positions are in its pages now. ``next`` is None when it is done.
    """

    request_id: str
    committed: int
    next: Demand | None
    record: StepRecord | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result for each of the plan's sequences, in their order."""

    sequences: tuple[SequenceResult, ...]


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
    ``head_rows`` count what this rank computed for the request in this pass.
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
class Update:
    """What one step made of one request.

    ``token_ids`` became final in it (never retracted, in order), each filled with the probability in ``max_probs``.
    ``num_forwards``, ``num_positions`` and ``model_tokens`` count from the request's start, as in GenerationOutput.
    ``winner`` is 0 for the anchor and r for the lookahead branch of rank r (from 1); None if no forward pass was made.
    ``cached_tokens`` of the prompt came from the prefix cache. ``finish_reason`` is set on a request's last update:
    "stop" (EOS, in ``stop_token_id``), "length" or "error" (with ``error``). ``record`` is set where a trace was
    asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_probs: tuple[float, ...]
    num_forwards: int
    num_positions: int
    model_tokens: int
    winner: int | None
    cached_tokens: int
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    record: StepRecord | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages between ranks for one ``purpose``: how many collectives a rank took part in, and the bytes that it
    contributed to them (of a broadcast: the bytes of the message)."""

    purpose: str
    calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """Where a rank runs and what it holds in its device's memory, in bytes: weights, a KV pool of ``num_pages`` times
    ``page_bytes``, and what ``num_graphs`` graphs hold as far as is known. ``free`` is what it could still allocate
    after that."""

    host: str
    device: str
    weights: int
    num_pages: int
    page_bytes: int
    num_graphs: int
    graphs: int
    free: int


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Compiled steps. ``num_buckets`` were compiled at start or loaded from a cache, and hold ``memory`` bytes of the
    device with what belongs to them, as far as is known; ``num_late`` were asked for later and refused.

    Since the start ``num_steps`` were launched. They computed ``tokens``, of which no branch needed ``padded_tokens``;
    ``wasted_steps`` were of sequences that had ended. ``eager_steps``: how many steps of sequences ran without a graph,
    by reason: the request's field that no graph can do, or "graph_window_blocks" where a window was too large.
    """

    num_buckets: int
    memory: int
    num_late: int
    num_steps: int
    tokens: int
    padded_tokens: int
    wasted_steps: int
    eager_steps: dict[str, int]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, and its counters since the start. With several ranks these are rank 0's.

    ``pages_in_use`` are held by requests, ``pages_cached`` by the prefix cache alone. ``prefix_queries`` and
    ``prefix_hits`` count prompt tokens. ``copied_positions`` were copied between slots, ``gathered_bytes`` of keys and
    values were read by attention. ``forward_seconds`` is the duration of the last step. ``num_rows`` branches were
    evaluated, on all ranks; ``idle_rows`` more could have been in the same time, had the branches divided evenly, or in
    the rows of a graph. ``graphs`` is None in eager mode.
    """

    num_running: int
    num_waiting: int
    pages_in_use: int
    pages_cached: int
    num_pages: int
    num_steps: int = 0
    num_prefill_steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    copied_positions: int = 0
    gathered_bytes: int = 0
    forward_seconds: float = 0.0
    num_rows: int = 0
    idle_rows: int = 0
    traffic: tuple[Traffic, ...] = ()
    graphs: GraphStats | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A finished request.

    ``token_ids`` is what was generated; with ``finish_at_eos`` it ends before the first EOS. ``max_probs`` are the
    probabilities at which its tokens were filled. ``text`` is None without a tokenizer. ``finish_reason`` is "stop"
    (EOS or stop string), "length", or "abort" (the server was told to end it). ``num_forwards`` counts forward passes,
    however many branches ran in each. ``num_positions`` counts every position that was opened, EOS and what stands
    after it included. ``model_tokens`` counts what this rank computed, all else is the same on every rank.
    ``cached_tokens`` of the prompt came from the prefix cache.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    num_forwards: int
    num_positions: int
    model_tokens: int
    max_probs: tuple[float, ...] = field(default=(), repr=False)
    cached_tokens: int = 0
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
    max_probs: tuple[float, ...] = ()
    output: GenerationOutput | None = None
