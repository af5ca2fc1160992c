"""What the scheduler, the runner and the executors say to one another about one step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lopa_ascend.types.decode import RowPlan, SequencePlan, StepRecord


class KVShape(NamedTuple):
    """What one rank stores of keys and values for each position."""

    num_layers: int
    num_kv_heads: int
    """KV heads of this rank."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the logits of one request become tokens, probabilities and confidences (SPEC section 3)."""

    confidence: str
    """See ``DecodingParams.confidence``."""
    mask: int
    """Token id of the mask, which is never chosen."""
    num_token_ids: int
    """Token ids from this one on do not exist in the tokenizer, and are never chosen."""
    eos: tuple[int, ...] = ()
    """EOS ids that are not chosen at positions before ``min_position``."""
    min_position: int = 0
    temperature: float = 0.0
    """0: the most probable token. Above: a token is drawn."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    """Seed of the draws."""
    eos_columns: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The columns of ``eos`` in a shard, by the shard's first token id and size; ``score.shards`` fills it once."""

    @property
    def truncated(self) -> bool:
        """Whether top_p, top_k or min_p limit the choice."""
        return self.top_p is not None or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one branch-parallel group computes of a sequence's forward pass."""

    plan: SequencePlan
    rows: tuple[RowPlan, ...]
    """The group's rows. The last one computes all its positions; the others reuse its results before their
    ``compute_from``. Rows that another group predicts have no ``masked`` positions here."""
    slots: tuple[int, ...]
    """The slot of each row."""
    branches: tuple[int, ...]
    """Index of each row in ``plan.rows``."""
    num_slots: int
    """Slots that the sequence has in this group, with or without a row in this pass."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the next step of a sequence may need at most, so that the scheduler can plan it; the same on every rank."""

    num_computed: int
    """Tokens that the busiest branch-parallel group computes; with padding in a compiled step."""
    committed_end: int
    """Positions before this one are committed after the step."""
    slot_ends: tuple[int, ...]
    """For each slot how many positions it must have room for; 0 if no row can be there."""
    winner_commits: bool
    """See ``SequencePlan.winner_commits``."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence in a step, and where its keys and values lie."""

    request_id: str
    page_tables: tuple[tuple[int, ...], ...]
    """For each slot the ids of its pages, in the order of positions."""
    num_shared_pages: int
    """The first ``num_shared_pages`` pages are the same in all slots."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Keys and values to copy from one page to another, from the page's first position on."""

    source: int
    """Page id."""
    target: int
    """Page id."""
    num_positions: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler decides about one step. Tokens, masks and block states are kept by the sequences."""

    index: int
    """Number of the step, from 0."""
    prefill: bool
    """Every sequence of the step computes its prompt for the first time, with its first block or its whole canvas;
    otherwise none does."""
    sequences: tuple[SequenceStep, ...]
    copies: tuple[PageCopy, ...] = ()
    """Copies to make before the step, in this order: a page may be the source of one and the target of a later one."""


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step did to one sequence."""

    request_id: str
    record: StepRecord | None
    """The forward pass; None if it failed."""
    error: str | None = None
    """Why the sequence cannot go on."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step. A step that is launched ahead of the host reports its sequences in the step after it."""

    sequences: tuple[SequenceResult, ...]
