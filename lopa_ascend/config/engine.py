"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lopa_ascend.config.checks import ParameterError, choice, flag, integer, number
from lopa_ascend.config.decoding import CONFIDENCES, WINDOW_ATTENTIONS

GRAPH_MODES = {"cpu": ("eager", "inductor"), "npu": ("npugraph_ex", "ge", "eager")}
"""By device; the first one is the default."""
ATTENTION_LAYOUTS = ("TND", "BSH")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is started with.

    Raises:
        ParameterError: a value is out of range; ``param`` names the field.
    """

    model: str | None = None
    """Hugging Face directory of a Dream checkpoint; None for the bundled model."""
    lora: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    """Positions of prompt and answer together; default: the model's max_position_embeddings."""
    kv_cache_memory: int | None = None
    """Bytes of the KV pool; default: what the limits below can use, at most 4 GiB and half of the free memory, or on an
    NPU four fifths of what is free once the weights are loaded."""
    max_num_seqs: int = 32
    """Requests that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step; default: max_model_len, but at least 4096."""
    max_num_branches: int = 15
    """Lookahead branches that a request may ask for."""
    enable_prefix_caching: bool = True
    """Keep the KV pages of whole prompts for requests with an equal prompt; changes no token."""
    approximate_prefix_caching: bool = False
    """Reuse pages of an equal beginning as well, although its prompt went on differently: changes tokens."""
    seed: int = 0
    """Of the sampling where a request has none."""
    threads: int | None = None
    tensor_parallel_size: int = 1
    """Ranks that split each branch's forward pass."""
    branch_parallel_size: int = 1
    """Groups of such ranks that take different branches."""
    distributed_timeout_seconds: float = 60.0
    """For which a rank may hang before the others end."""
    agreement_interval: int = 64
    """Steps between two comparisons of what the ranks have decided; 0 for none."""
    graph_mode: str | None = None
    """How a decode step runs: "eager", or compiled to one graph; default: see GRAPH_MODES."""
    graph_num_branches: int = 3
    """Lookahead branches that graphs have room for."""
    graph_block_size: int = 32
    """Positions that a block has in graphs, at most."""
    graph_window_blocks: int = 8
    """Blocks of the largest window that there is a graph for."""
    graph_window_attention: str = "block_causal"
    """What the blocks of a window see in graphs; with "full" there is no asynchronous scheduling."""
    graph_confidence: str = "max_prob"
    """The confidence in graphs."""
    graph_cache: str | None = None
    """Directory in which compiled graphs outlive the process; default: none do."""
    async_scheduling: bool = True
    """Launch a compiled step before the one before it was read; changes no token."""
    attention_layout: str = "TND"
    """How attention is asked on an NPU: "TND" or "BSH"; changes no token."""
    debug_kv: bool = False
    """Check page ids and cache positions before every write; in eager mode on an NPU."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_memory", "max_num_batched_tokens", "threads"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1, 2**63 - 1)
        integer("max_num_seqs", self.max_num_seqs, 1)
        for name in ("tensor_parallel_size", "branch_parallel_size"):
            integer(name, getattr(self, name), 1, 4096)
        number("distributed_timeout_seconds", self.distributed_timeout_seconds, 2.0, 86400.0)
        # As it travels between ranks, which compare their configurations.
        object.__setattr__(self, "distributed_timeout_seconds", float(self.distributed_timeout_seconds))
        integer("agreement_interval", self.agreement_interval, 0)
        integer("max_num_branches", self.max_num_branches, 0, 255)
        integer("seed", self.seed, 0, 2**63 - 1)
        for name in ("enable_prefix_caching", "approximate_prefix_caching", "async_scheduling", "debug_kv"):
            flag(name, getattr(self, name))
        choice("device", self.device, tuple(GRAPH_MODES))
        if self.graph_mode is None:
            object.__setattr__(self, "graph_mode", GRAPH_MODES[self.device][0])
        choice("graph_mode", self.graph_mode, GRAPH_MODES[self.device])
        integer("graph_num_branches", self.graph_num_branches, 0, 255)
        integer("graph_block_size", self.graph_block_size, 1, 4096)
        integer("graph_window_blocks", self.graph_window_blocks, 2, 4096)
        choice("graph_window_attention", self.graph_window_attention, WINDOW_ATTENTIONS)
        choice("graph_confidence", self.graph_confidence, CONFIDENCES)
        choice("attention_layout", self.attention_layout, ATTENTION_LAYOUTS)
        if self.debug_kv and self.graph_mode != "eager":
            raise ParameterError("debug_kv", f'reads every step back; it needs graph_mode "eager", not {self.mode!r}')
        if self.approximate_prefix_caching and not self.enable_prefix_caching:
            raise ParameterError("approximate_prefix_caching", "needs enable_prefix_caching")

    @property
    def mode(self) -> str:
        """``graph_mode`` with its default filled in."""
        assert self.graph_mode is not None
        return self.graph_mode

    @property
    def world_size(self) -> int:
        """Ranks of this engine."""
        return self.tensor_parallel_size * self.branch_parallel_size

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))
