"""How one request is decoded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lopa_ascend.config.checks import ParameterError, choice, flag, integer, number

DECODINGS = ("lopa", "d2f")
CONFIDENCES = ("max_prob", "margin", "neg_entropy")
BRANCH_SCORES = ("mean", "tail", "window")
WINDOW_ATTENTIONS = ("block_causal", "full")
MIN_TEMPERATURE = 0.01
"""Below it logits divided by the temperature leave the range of float32."""


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
        choice("decoding", self.decoding, DECODINGS)
        if self.num_branches is None:
            object.__setattr__(self, "num_branches", 3 if self.decoding == "lopa" else 0)
        integer("num_branches", self.num_branches, 0, 255)
        if self.decoding == "d2f" and self.num_branches:
            raise ParameterError("num_branches", f'must be 0 with decoding "d2f", got {self.num_branches}; use "lopa"')
        integer("block_size", self.block_size, 1, 4096)
        for name in ("tau_add", "tau_act", "tau_conf", "creation_weight"):
            number(name, getattr(self, name), 0.0, 1.0)
        integer("max_new_tokens", self.max_new_tokens, 1)
        integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ParameterError(
                "min_new_tokens", f"{self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise ParameterError("stop", f"must be non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        self._check_sampling()
        choice("confidence", self.confidence, CONFIDENCES)
        choice("branch_score", self.branch_score, BRANCH_SCORES)
        number("tail_fraction", self.tail_fraction, 0.0, 1.0)
        integer("score_window", self.score_window, 1)
        choice("window_attention", self.window_attention, WINDOW_ATTENTIONS)
        if self.max_active_blocks is not None:
            integer("max_active_blocks", self.max_active_blocks, 1)
        eos = (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id
        if eos is not None:
            for token in eos:
                integer("eos_token_id", token, 0)
            object.__setattr__(self, "eos_token_id", tuple(eos))
        flag("ignore_eos", self.ignore_eos)
        flag("finish_at_eos", self.finish_at_eos)

    def _check_sampling(self) -> None:
        number("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ParameterError("temperature", f"must be 0 or at least {MIN_TEMPERATURE}, got {self.temperature!r}")
        if self.top_p is not None:
            number("top_p", self.top_p, 0.0, 1.0)
        if self.top_k is not None:
            integer("top_k", self.top_k, 1)
        for name in ("top_p", "top_k"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ParameterError(name, "has no effect at temperature 0; raise temperature or leave it out")
        if self.top_p == 0:
            raise ParameterError("top_p", "must be above 0")
        if self.seed is not None:
            integer("seed", self.seed, 0, 2**63 - 1)

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
