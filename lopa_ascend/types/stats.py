"""Counters and sizes that the engine reports. With several ranks they are rank 0's unless stated otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages between ranks for one purpose."""

    purpose: str
    calls: int
    """Collectives of this rank."""
    num_bytes: int
    """Contributed by this rank; of a broadcast, the message's."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Where a rank runs and what it holds in its device's memory. Sizes are in bytes."""

    host: str
    device: str
    weights: int
    num_pages: int
    page_bytes: int
    """The KV pool takes ``num_pages`` * ``page_bytes``."""
    num_graphs: int
    graphs: int
    """As far as it is known."""
    free: int
    """What could still be allocated."""
    linear: str
    """Whether rows of linear layers are independent of one another on this rank, in words."""
    versions: Mapping[str, str | None]
    """See ``Device.versions``."""


@dataclass(frozen=True, slots=True)
class GraphStats:
    num_buckets: int
    """Compiled at start or loaded from the graph cache."""
    memory: int
    """Bytes of device memory of the graphs and what belongs to them, as far as it is known."""
    num_late: int
    """Compilations asked for after the start, and refused."""
    num_steps: int
    """Launches."""
    tokens: int
    padded_tokens: int
    """Of ``tokens``, those that no branch needed."""
    wasted_steps: int
    """Steps computed for sequences that had ended."""
    eager_steps: dict[str, int]
    """Steps without a graph, by reason: the request's field that no graph supports, or "graph_window_blocks"."""
    replay_milliseconds: dict[str, float] = field(default_factory=dict)
    """Of each bucket at start, with the most keys; empty if steps are not replayed graphs."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, and its counters since the start."""

    num_running: int
    num_waiting: int
    pages_in_use: int
    """Held by requests."""
    pages_cached: int
    """Held by the prefix cache alone."""
    num_pages: int
    num_steps: int = 0
    num_prefill_steps: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache, ``prefix_hits`` of them found."""
    prefix_hits: int = 0
    copied_positions: int = 0
    """Positions with keys and values copied between slots."""
    gathered_bytes: int = 0
    """Of keys and values that attention copied out of the pages."""
    step_seconds: float = 0.0
    """Of the last step."""
    num_rows: int = 0
    """Branches evaluated, on all ranks."""
    idle_rows: int = 0
    """Places for branches, on all ranks, that stayed empty: branches did not divide evenly among the groups, or the
    graph has room for more."""
    traffic: tuple[Traffic, ...] = ()
    graphs: GraphStats | None = None
    """None in eager mode."""

    @property
    def kv_usage(self) -> float:
        return self.pages_in_use / self.num_pages if self.num_pages else 0.0

    @property
    def num_preempted(self) -> int:
        """A running request is never preempted: it was admitted with the most pages that it can need."""
        return 0
