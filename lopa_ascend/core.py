"""The way of a request through the engine: a ``Request`` waits, a ``Sequence`` runs, a ``Step`` computes several.

A sequence has everything that the engine knows about a running request. All rooms read it and update it in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.filters import Filter
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.kv.pages import PAGE_SIZE, PageTables, worst_case
from lopa_ascend.types import DREAM, GappedText, ModelProperties, PageCopy, Scoring, SequencePlan, StepRecord

if TYPE_CHECKING:
    from torch import Tensor


class Request(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """A prompt and how to decode it. It travels whole to the engine, and from there to the other ranks."""

    request_id: str
    """Unique among unfinished requests; empty until an engine is asked."""
    prompt: tuple[int, ...]
    """Token ids."""
    params: DecodingParams
    trace: bool = False
    """Updates carry a record of each forward pass."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """Texts to score after the prompt instead of generating one. ``max_new_tokens`` is the length of the longest."""
    gapped: GappedText | None = None
    """The canvas; None: masks alone."""
    properties: ModelProperties = DREAM
    """Set by the engine."""

    @property
    def prompt_tokens(self) -> int:
        """Given tokens: the prompt, and those of a text with gaps."""
        return len(self.prompt) + (0 if self.gapped is None else self.gapped.num_given)

    @property
    def origin(self) -> int:
        """See ``ModelProperties.origin``."""
        return self.properties.origin(len(self.prompt), self.params.block_size)

    @property
    def limit(self) -> int:
        """Most positions of the sequence: prompt and canvas."""
        return self.properties.limit(len(self.prompt), self.params.max_new_tokens, self.params.block_size)

    @property
    def num_shared_positions(self) -> int:
        """Positions of the prompt that one row computes and commits for all slots. On a whole canvas each branch has
        its own keys and values for the prompt too."""
        return self.origin if self.params.is_pipelined else 0

    @property
    def num_reusable(self) -> int:
        """Positions of the prompt that may come from the prefix cache. What predicts the first position to decode must
        be computed: a causal model's last position, or the prompt's last block if the answer begins a block."""
        if self.properties.is_causal:
            return len(self.prompt) - 1
        in_last_block = (
            self.properties.is_block_causal and self.properties.logit_shift and self.origin == len(self.prompt)
        )
        return self.origin - self.params.block_size if in_last_block else self.origin


@dataclass(eq=False)
class Sequence:
    request: Request
    strategy: Strategy
    """The decoding state: tokens, blocks, branches, and the number of committed positions."""
    scoring: Scoring
    page_tables: PageTables
    num_cached: int = 0
    """Positions of the prompt that came from the prefix cache."""
    last_hidden: Tensor | None = None
    """Normed hidden state [hidden] of the last committed position, which predicts the first position of the window."""
    filters: tuple[Filter, ...] = ()
    plan: SequencePlan | None = None
    """The next forward pass; None when the sequence is done or has failed."""
    error: str | None = None
    """Why the sequence has failed."""
    num_computed: int = 0
    """Tokens of the busiest branch-parallel group in the next step; with padding in a compiled step."""
    slot_ends: tuple[int, ...] = ()
    """By slot: positions to have room for in the next step; 0 if the slot has no row."""
    last_step: int = -1
    continuation_logprobs: tuple[tuple[float, ...], ...] = ()
    num_reported: int = 0
    """Final tokens that updates have reported."""
    model_tokens: int = 0
    """Tokens that this rank computed."""
    canvas_positions: int = 0
    """Positions of the answer in the rows of all branches and forward passes, on all ranks."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_committed(self) -> int:
        return self.strategy.num_committed

    @property
    def in_prefill(self) -> bool:
        return not self.strategy.num_forwards and self.num_committed < self.request.origin

    @property
    def num_reserved(self) -> int:
        """Pages that the sequence may still take."""
        pages = self.page_tables
        # Pages that all slots share are shared for good, also those of positions that later passes compute again.
        committed = max(self.num_committed, self.request.num_shared_positions, pages.num_shared_pages * PAGE_SIZE)
        window = self.request.params.max_window
        return worst_case(self.request.limit, len(pages.by_slot), committed, window) - pages.num_pages

    @property
    def committed_end(self) -> int:
        """Positions before this one are committed after the next step."""
        return self.next_pass.start + self.next_pass.num_new

    @property
    def next_pass(self) -> SequencePlan:
        assert self.plan is not None
        return self.plan

    def fail(self, error: str) -> None:
        self.plan, self.error = None, error

    def make_room(self) -> None:
        """Allocates the pages that the next step writes."""
        self.page_tables.make_room(self.committed_end, self.slot_ends, winner_commits=self.next_pass.winner_commits)


@dataclass(frozen=True, slots=True)
class Step:
    """The scheduler's decision about one step. The plans and page tables of its sequences have the rest."""

    index: int
    prefill: bool
    """All sequences compute their prompt for the first time, with a first block or the whole canvas; else none does."""
    sequences: tuple[Sequence, ...]
    copies: tuple[PageCopy, ...] = ()
    """To make before the step, in this order: a page may be the source of one and the target of a later one."""


Result = tuple[Sequence, StepRecord | None]
"""A sequence and its forward pass in a step; None if that failed. A step that is launched ahead of the host reports in
the step after it."""
