"""The way of a request through the engine: a ``Request`` waits, a ``Sequence`` runs, a ``Step`` computes several.

Everything that the engine knows about a running request is in its sequence, which all rooms read and update in place.
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
    """A prompt and how to decode it. It travels whole: to the engine, and from there to the other ranks."""

    request_id: str
    """Any text that no unfinished request has as its id; empty until an engine is asked."""
    prompt: tuple[int, ...]
    """Token ids."""
    params: DecodingParams
    trace: bool = False
    """Updates carry a record of each forward pass."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """If there are any, nothing is generated: how probable is each of them after the prompt? ``max_new_tokens`` is the
    length of the longest."""
    gapped: GappedText | None = None
    """The canvas, which ``max_new_tokens`` is the length of; None: masks alone."""
    properties: ModelProperties = DREAM
    """The model's, which the engine sets."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are given: the prompt, and those of a text with gaps."""
        return len(self.prompt) + (0 if self.gapped is None else self.gapped.num_given)

    @property
    def origin(self) -> int:
        """See ``ModelProperties.origin``."""
        return self.properties.origin(len(self.prompt), self.params.block_size)

    @property
    def limit(self) -> int:
        """The most positions that the sequence can have: prompt and canvas."""
        return self.properties.limit(len(self.prompt), self.params.max_new_tokens, self.params.block_size)

    @property
    def num_shared_positions(self) -> int:
        """Positions of the prompt that all slots share: one row computes and commits them. On a whole canvas each
        branch has keys and values of its own for the prompt too."""
        return self.origin if self.params.is_pipelined else 0

    @property
    def num_reusable(self) -> int:
        """Positions of the prompt whose keys and values may come from the prefix cache. If the first block to decode
        begins behind the prompt, the prompt's last block predicts its first position, so that block is computed. In a
        causal model the prompt's last position does."""
        if self.properties.is_causal:
            return len(self.prompt) - 1
        in_last_block = (
            self.properties.is_block_causal and self.properties.logit_shift and self.origin == len(self.prompt)
        )
        return self.origin - self.params.block_size if in_last_block else self.origin


@dataclass(eq=False)
class Sequence:
    """A request that runs."""

    request: Request
    strategy: Strategy
    """The decoding state: tokens, blocks, branches, and the number of committed positions."""
    scoring: Scoring
    page_tables: PageTables
    num_cached: int = 0
    """Positions of the prompt whose keys and values came from the prefix cache."""
    last_hidden: Tensor | None = None
    """Normed hidden state [hidden] of the last committed position, which predicts the first position of the window."""
    filters: tuple[Filter, ...] = ()
    """What the request keeps out of its answer."""
    plan: SequencePlan | None = None
    """The next forward pass; None when the sequence is done or has failed."""
    error: str | None = None
    """Why the sequence has failed."""
    num_computed: int = 0
    """Tokens that the busiest branch-parallel group computes in the next step; with padding in a compiled step."""
    slot_ends: tuple[int, ...] = ()
    """For each slot how many positions it must have room for in the next step; 0 if no row can be there."""
    last_step: int = -1
    """Index of the last step that the sequence took part in."""
    continuation_logprobs: tuple[tuple[float, ...], ...] = ()
    """See ``Update``."""
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
        """Positions whose keys and values are final."""
        return self.strategy.num_committed

    @property
    def in_prefill(self) -> bool:
        """Whether the next step computes the prompt for the first time."""
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
        """``plan`` of a sequence that is not done."""
        assert self.plan is not None
        return self.plan

    def fail(self, error: str) -> None:
        """Notes that the sequence cannot go on."""
        self.plan, self.error = None, error

    def make_room(self) -> None:
        """Allocates the pages that the next step writes."""
        self.page_tables.make_room(self.committed_end, self.slot_ends, winner_commits=self.next_pass.winner_commits)


@dataclass(frozen=True, slots=True)
class Step:
    """What the scheduler decides about one step: its sequences, whose plans and page tables say the rest."""

    index: int
    """Number of the step, from 0."""
    prefill: bool
    """Every sequence of the step computes its prompt for the first time, with its first block or its whole canvas;
    otherwise none does."""
    sequences: tuple[Sequence, ...]
    copies: tuple[PageCopy, ...] = ()
    """Copies to make before the step, in this order: a page may be the source of one and the target of a later one."""


Result = tuple[Sequence, StepRecord | None]
"""What a step did to one sequence: its forward pass; None if that failed. A step that is launched ahead of the host
reports its sequences in the step after it."""
