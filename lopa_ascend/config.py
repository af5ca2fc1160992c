"""Frozen, validated configuration: the model's and a request's. Values are checked once, here, on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

DECODINGS = ("lopa", "d2f")
CONFIDENCES = ("max_prob", "margin", "neg_entropy")
BRANCH_SCORES = ("mean", "tail", "window")
WINDOW_ATTENTIONS = ("block_causal", "full")
GRAPH_MODES = {"cpu": ("eager", "inductor"), "npu": ("npugraph_ex", "ge", "eager")}
"""By device; the first one is the default."""
ATTENTION_LAYOUTS = ("TND", "BSH")
MIN_TEMPERATURE = 0.01
"""Below it logits divided by the temperature leave the range of float32."""


class ParameterError(ValueError):
    """A wrong value; ``param`` names the field."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in choices):
        raise ParameterError(name, f"unknown value {value!r}; choose one of {', '.join(choices)}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ParameterError(name, f"must be a number from {low:g} to {high:g}, got {value!r}")


def _integer(name: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limit = f"an integer of at least {low}" if high == 2**31 - 1 else f"an integer from {low} to {high}"
        raise ParameterError(name, f"must be {limit}, got {value!r}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(name, f"must be true or false, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class DecodingParams:
    """How one request is decoded. Defaults are the paper's GSM8K row (Table 5) with three lookahead branches.

    Raises:
        ParameterError: a value is out of range, or two values do not go together; ``param`` names the field.
    """

    decoding: str = "lopa"
    """"lopa", or "d2f": the anchor branch alone."""
    num_branches: int | None = None
    """k, lookahead branches beside the anchor; default 3 with "lopa", 0 with "d2f"."""
    block_size: int = 32
    tau_add: float = 0.1
    """A block is added once this fraction of the last one is filled."""
    tau_act: float = 0.95
    """A block must fill at least one position a step once this fraction of the block before it is filled."""
    tau_conf: float = 0.9
    """A position is filled when the probability of its token is above this."""
    max_new_tokens: int = 256
    """Exact; the last block may be shorter."""
    min_new_tokens: int = 0
    """EOS is not produced in the first so many positions, and stop strings there do not count."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut off."""
    temperature: float = 0.0
    """0, or from 0.01 to 100."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Seed of this request's sampling; default: the engine's seed."""
    confidence: str = "max_prob"
    branch_score: str = "mean"
    """"mean" of the confidences still masked; "tail": of the least confident ``tail_fraction``; "window": the
    lowest mean over ``score_window`` consecutive masked positions."""
    tail_fraction: float = 0.5
    score_window: int = 8
    creation_weight: float = 0.0
    """Weight of a lookahead token's own confidence in its branch's score."""
    window_attention: str = "block_causal"
    max_active_blocks: int | None = None
    """At most so many blocks from the first unfinished one on; default: as published, no limit."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Default: all of the model's generation config."""
    ignore_eos: bool = False
    finish_at_eos: bool = True
    """Stop as soon as the visible text is final; False runs on until every open block is filled, as published."""

    def __post_init__(self) -> None:
        _choice("decoding", self.decoding, DECODINGS)
        if self.num_branches is None:
            object.__setattr__(self, "num_branches", 3 if self.decoding == "lopa" else 0)
        _integer("num_branches", self.num_branches, 0, 255)
        if self.decoding == "d2f" and self.num_branches:
            raise ParameterError("num_branches", f'must be 0 with decoding "d2f", got {self.num_branches}; use "lopa"')
        _integer("block_size", self.block_size, 1, 4096)
        for name in ("tau_add", "tau_act", "tau_conf", "creation_weight"):
            _number(name, getattr(self, name), 0.0, 1.0)
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ParameterError(
                "min_new_tokens", f"{self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise ParameterError("stop", f"must be non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        self._check_sampling()
        _choice("confidence", self.confidence, CONFIDENCES)
        _choice("branch_score", self.branch_score, BRANCH_SCORES)
        _number("tail_fraction", self.tail_fraction, 0.0, 1.0)
        _integer("score_window", self.score_window, 1)
        _choice("window_attention", self.window_attention, WINDOW_ATTENTIONS)
        if self.max_active_blocks is not None:
            _integer("max_active_blocks", self.max_active_blocks, 1)
        eos = (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id
        if eos is not None:
            for token in eos:
                _integer("eos_token_id", token, 0)
            object.__setattr__(self, "eos_token_id", tuple(eos))
        _flag("ignore_eos", self.ignore_eos)
        _flag("finish_at_eos", self.finish_at_eos)

    def _check_sampling(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ParameterError("temperature", f"must be 0 or at least {MIN_TEMPERATURE}, got {self.temperature!r}")
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, 1)
        for name in ("top_p", "top_k"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ParameterError(name, "has no effect at temperature 0; raise temperature or leave it out")
        if self.top_p == 0:
            raise ParameterError("top_p", "must be above 0")
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)

    @property
    def lookaheads(self) -> int:
        """``num_branches`` with its default filled in."""
        assert self.num_branches is not None
        return self.num_branches

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """``eos_token_id`` as several; None for the model's own."""
        assert not isinstance(self.eos_token_id, int)
        return self.eos_token_id

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


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
    """Bytes of the KV pool; default: what the limits below can use, at most 4 GiB and half of the free memory."""
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
                _integer(name, getattr(self, name), 1, 2**63 - 1)
        _integer("max_num_seqs", self.max_num_seqs, 1)
        for name in ("tensor_parallel_size", "branch_parallel_size"):
            _integer(name, getattr(self, name), 1, 4096)
        _number("distributed_timeout_seconds", self.distributed_timeout_seconds, 2.0, 86400.0)
        # As it travels between ranks, which compare their configurations.
        object.__setattr__(self, "distributed_timeout_seconds", float(self.distributed_timeout_seconds))
        _integer("agreement_interval", self.agreement_interval, 0)
        _integer("max_num_branches", self.max_num_branches, 0, 255)
        _integer("seed", self.seed, 0, 2**63 - 1)
        for name in ("enable_prefix_caching", "approximate_prefix_caching", "async_scheduling", "debug_kv"):
            _flag(name, getattr(self, name))
        _choice("device", self.device, tuple(GRAPH_MODES))
        if self.graph_mode is None:
            object.__setattr__(self, "graph_mode", GRAPH_MODES[self.device][0])
        _choice("graph_mode", self.graph_mode, GRAPH_MODES[self.device])
        _integer("graph_num_branches", self.graph_num_branches, 0, 255)
        _integer("graph_block_size", self.graph_block_size, 1, 4096)
        _integer("graph_window_blocks", self.graph_window_blocks, 2, 4096)
        _choice("graph_window_attention", self.graph_window_attention, WINDOW_ATTENTIONS)
        _choice("graph_confidence", self.graph_confidence, CONFIDENCES)
        _choice("attention_layout", self.attention_layout, ATTENTION_LAYOUTS)
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


class ConfigError(ValueError):
    """A model configuration that this engine cannot run; the message names the field and what was expected."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry and special ids of a Dream model, every value from ``config.json`` and ``generation_config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    # ---- shares of a tensor-parallel rank --------------------------------------------------------------------------

    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """The sizes that split this model: query heads and the MLP evenly, KV heads evenly or one for several ranks,
        and the vocabulary so that no rank is left without a token."""
        return tuple(size for size in range(1, self.num_heads + 1) if self._splits(size))

    def _splits(self, size: int) -> bool:
        even = not self.num_heads % size and not self.intermediate_size % size
        kv_heads = not self.num_kv_heads % size or not size % self.num_kv_heads
        return even and kv_heads and (size - 1) * self.vocab_shard(size) < self.vocab_size

    def local_heads(self, size: int) -> int:
        """Query heads of one of ``size`` ranks."""
        return self.num_heads // size

    def local_kv_heads(self, size: int) -> int:
        """KV heads of one of ``size`` ranks: where there are more ranks, several hold the same one."""
        return max(1, self.num_kv_heads // size)

    def vocab_shard(self, size: int) -> int:
        """Token ids of one of ``size`` ranks; the last ones may have fewer."""
        return -(-self.vocab_size // size)

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], source: str = "config.json"
    ) -> ModelConfig:
        """Reads the fields of a Hugging Face Dream directory.

        Raises:
            ConfigError: a field is missing, malformed, or asks for something this engine does not do.
        """
        config = {name: value for name, value in config.items() if value is not None}  # null: the default
        read = _Reader(config, source)
        read.expect("model_type", ("Dream",))
        read.expect("hidden_act", ("silu",), default="silu")
        read.expect("rope_scaling", (None,), default=None)
        read.expect("use_sliding_window", (False,), default=False)
        rope = config.get("rope_parameters", {})
        if not isinstance(rope, dict):
            raise ConfigError(f"{source}: rope_parameters is {rope!r}, expected an object")
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"{source}: rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if "head_dim" not in config and hidden % heads:
            raise ConfigError(f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = read.integer("head_dim", default=hidden // heads)
        if head_dim % 2:
            raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one")
        vocab = read.integer("vocab_size")
        mask = read.token("mask_token_id", vocab)
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=read.integer("max_position_embeddings"),
            rope_theta=read.positive("rope_theta", rope.get("rope_theta", 10000.0)),
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            attention_bias=read.flag("attention_bias", True),
            mask_token_id=mask,
            eos_token_ids=_eos_ids(config, generation, vocab, source),
            dtype=str(config.get("torch_dtype", config.get("dtype", "float32"))),
        )


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab: int, source: str) -> tuple[int, ...]:
    """All EOS ids of generation_config.json, or else of config.json."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id", [])
    else:
        source = source.replace("config.json", "generation_config.json")
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(f"{source}: eos_token_id {token!r} is not an id below vocab_size {vocab}")
    return tuple(ids)


class _Reader:
    """Typed access to a JSON object whose errors name the file, the field and what was expected."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def expect(self, name: str, allowed: tuple[object, ...], **default: object) -> None:
        value = self.values.get(name, default.get("default"))
        if value not in allowed:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected {' or '.join(map(repr, allowed))}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected a positive integer")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected true or false")
        return value

    def token(self, name: str, vocab: int) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected a token id below vocab_size {vocab}")
        return value
