"""How one request is decoded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lopa_ascend.config.combinations import PIPELINED, check_combinations, filling
from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.kinds import (
    INT32_MAX,
    INT64_MAX,
    Boolean,
    Choice,
    Integer,
    Number,
    Strings,
    TokenIds,
    TokenNumbers,
    Words,
)
from lopa_ascend.config.presets import find_preset
from lopa_ascend.config.settings import GraphSupport, Group, Parameter, check_settings, declare, settings

DECODINGS = ("lopa", "d2f", "parallel", "vanilla", "fast_dllm")
ACCEPTANCES = ("threshold", "factor", "entropy_bound", "frechet")
CONFIDENCES = ("max_prob", "margin", "neg_entropy")
ALGS = {"origin": "max_prob", "maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "neg_entropy"}
"""Dream's names for the ways to choose positions, and the confidence of each."""
BASES = ("d2f", "parallel")
BLOCK_CACHES = ("prefix", "dual")
BRANCH_ACCEPTANCES = ("published", "verified", "exact")
BRANCH_SCORES = ("mean", "tail", "window")
WINDOW_ATTENTIONS = ("block_causal", "full")
MIN_TEMPERATURE = 0.01
"""Lower temperatures count as 0: logits divided by them leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class DecodingParams:
    """How one request is decoded. Defaults: the paper's for GSM8K (Table 5), but with three lookahead branches.

    Raises:
        ParameterError: a value is not allowed, or two values do not go together; ``param`` names the field.
    """

    decoding: str = declare(
        "lopa",
        Parameter(
            Choice(DECODINGS),
            '"lopa": an anchor branch and lookahead branches; "d2f": the anchor branch alone; "parallel": block after '
            'block of a canvas that is computed whole in every forward pass; "vanilla": Dream\'s own, a fixed '
            'number of steps over the whole canvas; "fast_dllm": as "parallel", with keys and values that are computed '
            "once a block",
            graphs=GraphSupport.PIPELINED,
        ),
    )
    base: str = declare(
        "d2f",
        Parameter(
            Choice(BASES),
            'decoding beside whose anchor branch `decoding` "lopa" has lookahead branches',
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
        ),
    )
    num_branches: int | None = declare(
        None,
        Parameter(
            Integer(0, 255),
            "the paper's k: lookahead branches beside the anchor branch, each with one more position filled",
            default_text='3 with "lopa", otherwise 0',
            graphs=GraphSupport.BUCKET,
        ),
    )
    block_size: int = declare(32, Parameter(Integer(1, 4096), "positions in a block", graphs=GraphSupport.BUCKET))
    tau_add: float = declare(
        0.1, Parameter(Number(0, 1), "a new block is added once this fraction of the last block is filled")
    )
    tau_act: float = declare(
        0.95,
        Parameter(
            Number(0, 1),
            "a block must fill at least one position in every step once this fraction of the block before it is filled",
        ),
    )
    tau_conf: float = declare(
        0.9,
        Parameter(
            Number(0, 1),
            "a position is filled when the probability of its token is above this; a lower value is faster and "
            "less accurate",
        ),
    )
    max_new_tokens: int = declare(
        256,
        Parameter(
            Integer(1),
            "most tokens to generate; together with the prompt they must fit into `max_model_len`",
            aliases=("max_tokens", "max_completion_tokens", "max_output_tokens"),
        ),
    )
    whole_last_block: bool = declare(
        False,
        Parameter(
            Boolean(),
            "compute the last block whole and cut the answer at `max_new_tokens`; otherwise the last block is shorter, "
            "and its tokens may be others than in a longer answer",
        ),
    )
    min_new_tokens: int = declare(
        0,
        Parameter(
            Integer(0),
            "within this many generated tokens no EOS is produced and no stop string ends the answer",
            aliases=("min_tokens",),
            graphs=GraphSupport.DEFAULT,
        ),
    )
    stop: tuple[str, ...] = declare(
        (), Parameter(Strings(), "strings that end the answer; they are cut off", default_text="none")
    )
    temperature: float = declare(
        0.0,
        Parameter(
            Number(0, 100),
            f"below {MIN_TEMPERATURE}: take the most probable token; from there on sample, reproducibly by `seed`",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    top_p: float | None = declare(
        None,
        Parameter(
            Number(0, 1, excludes_low=True),
            "sample from the most probable tokens whose probabilities sum up to this; no effect without `temperature`",
            default_text="off",
            off=(1,),
        ),
    )
    top_k: int | None = declare(
        None,
        Parameter(
            Integer(1, INT32_MAX),
            "sample from this many most probable tokens; no effect without `temperature`",
            default_text="off",
            off=(0, -1),
        ),
    )
    min_p: float = declare(
        0.0,
        Parameter(
            Number(0, 1),
            "sample from the tokens whose probability is at least this share of the largest one; no effect without "
            "`temperature`",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    seed: int | None = declare(
        None,
        Parameter(
            Integer(0, INT64_MAX),
            "seed of this request's sampling; the same request with the same seed gets the same answer",
            group=None,  # the flag --seed is the engine's, from which requests draw theirs
            default_text="a new one for each answer, which contains it",
        ),
    )
    presence_penalty: float = declare(
        0.0,
        Parameter(
            Number(-2, 2),
            "subtracted from the logit of every token that the committed part of the answer holds",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    frequency_penalty: float = declare(
        0.0,
        Parameter(
            Number(-2, 2),
            "subtracted from a token's logit for each time that the committed part of the answer holds the token",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    repetition_penalty: float = declare(
        1.0,
        Parameter(
            Number(0, 100, excludes_low=True),
            "positive logits are divided and negative ones multiplied by this, for tokens of the prompt and of the "
            "committed part of the answer",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    logit_bias: tuple[tuple[int, float], ...] = declare(
        (),
        Parameter(
            TokenNumbers(Number(-100, 100)),
            "numbers that are added to the logits of tokens, by token id",
            default_text="none",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    bad_words: tuple[str | tuple[int, ...], ...] = declare(
        (),
        Parameter(
            Words(max_count=256, max_length=64),
            "words that the answer does not contain, as texts or as lists of token ids",
            default_text="none",
            graphs=GraphSupport.DEFAULT,
        ),
    )
    top_logprobs: int = declare(
        0,
        Parameter(
            Integer(0, 20),
            "most probable tokens that are recorded for a position when it is filled",
            group=None,  # each request that shows them asks for them
            graphs=GraphSupport.DEFAULT,
            own_field=True,
        ),
    )
    confidence: str = declare(
        "max_prob",
        Parameter(
            Choice(CONFIDENCES),
            "what positions are ranked and branches are scored by: the probability of the predicted token, its margin "
            "over the second most probable token, or the negative entropy of the prediction",
            group=Group.RESEARCH,
            graphs=GraphSupport.COMPILED,
        ),
    )
    acceptance: str = declare(
        "threshold",
        Parameter(
            Choice(ACCEPTANCES),
            'which positions of a block are filled together: "threshold": all above `tau_conf`; the other rules fill '
            "the most probable positions, as many as a bound of their own allows, and do not use `tau_conf`",
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
        ),
    )
    acceptance_factor: float = declare(
        1.0, Parameter(Number(0, 1000), 'bound of `acceptance` "factor"; higher is faster', group=Group.RESEARCH)
    )
    acceptance_gamma: float = declare(
        0.1,
        Parameter(
            Number(0, 1000),
            'bound of `acceptance` "entropy_bound", in nats; higher is faster; needs `confidence` "neg_entropy"',
            group=Group.RESEARCH,
        ),
    )
    acceptance_delta: float = declare(
        0.25, Parameter(Number(0, 1), 'bound of `acceptance` "frechet"; lower is faster', group=Group.RESEARCH)
    )
    steps: int | None = declare(
        None,
        Parameter(
            Integer(1, INT32_MAX),
            'steps of `decoding` "vanilla", each of which fills its share of the canvas',
            group=Group.RESEARCH,
            default_text="as many as the canvas has positions",
        ),
    )
    alg: str = declare(
        "entropy",
        Parameter(
            Choice(tuple(ALGS)),
            'which positions a step of `decoding` "vanilla" fills: "origin": random ones; the others: the best by the '
            "probability of the predicted token, by its margin over the second, or by the negative entropy",
            group=Group.RESEARCH,
        ),
    )
    alg_temp: float = declare(
        0.0,
        Parameter(
            Number(0, 1000),
            "above 0: `alg` draws positions in proportion to exp(confidence / alg_temp)",
            group=Group.RESEARCH,
        ),
    )
    block_cache: str = declare(
        "prefix",
        Parameter(
            Choice(BLOCK_CACHES),
            'keys and values that `decoding` "fast_dllm" reuses while it fills a block: "prefix": of all positions '
            'before the block; "dual": of those behind it too',
            group=Group.RESEARCH,
        ),
    )
    branch_acceptance: str = declare(
        "published",
        Parameter(
            Choice(BRANCH_ACCEPTANCES),
            'which branch wins: "published": that with the highest score; "verified": that which fills most, of those '
            'whose lookahead token "d2f" would fill now; "exact": that which "d2f" would have next, so that the answer '
            'is that of "d2f"',
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
        ),
    )
    branch_score: str = declare(
        "mean",
        Parameter(
            Choice(BRANCH_SCORES),
            'score of a branch from the confidences of its masked positions: "mean" of all; "tail": mean of the '
            'lowest; "window": lowest mean over consecutive positions',
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
        ),
    )
    tail_fraction: float = declare(
        0.5,
        Parameter(
            Number(0, 1), 'fraction of the masked positions that `branch_score` "tail" averages', group=Group.RESEARCH
        ),
    )
    score_window: int = declare(
        8,
        Parameter(
            Integer(1, INT32_MAX),
            'number of consecutive masked positions that `branch_score` "window" averages',
            group=Group.RESEARCH,
        ),
    )
    creation_weight: float = declare(
        0.0,
        Parameter(
            Number(0, 1),
            "weight of the confidence of a branch's own lookahead token in the branch's score",
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
        ),
    )
    window_attention: str | None = declare(
        None,
        Parameter(
            Choice(WINDOW_ATTENTIONS),
            'what a block of the window attends to: "block_causal": all positions up to its own end; "full": all '
            "positions up to the end of the window",
            group=Group.RESEARCH,
            default_text='"block_causal" with "lopa" and "d2f", otherwise "full"',
            graphs=GraphSupport.COMPILED,
        ),
    )
    max_active_blocks: int | None = declare(
        None,
        Parameter(
            Integer(1, INT32_MAX),
            "most blocks in the window, from the first unfinished block on",
            group=Group.RESEARCH,
            default_text="no limit",
        ),
    )
    eos_token_id: int | tuple[int, ...] | None = declare(
        None,
        Parameter(TokenIds(), "token ids that end the answer", default_text="the model's", graphs=GraphSupport.BUCKET),
    )
    stop_token_ids: tuple[int, ...] = declare(
        (),
        Parameter(TokenIds(), "more token ids that end the answer, with `ignore_eos` too", default_text="none"),
    )
    ignore_eos: bool = declare(False, Parameter(Boolean(), "go on after an EOS"))
    finish_at_eos: bool = declare(
        True,
        Parameter(
            Boolean(),
            "end as soon as the visible text is final; otherwise fill every open block first, as the published "
            "code does",
            group=Group.RESEARCH,
        ),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.num_branches is None:
            object.__setattr__(self, "num_branches", 3 if self.decoding == "lopa" else 0)
        if self.window_attention is None:
            object.__setattr__(self, "window_attention", "block_causal" if self.is_pipelined else "full")
        if self.temperature < MIN_TEMPERATURE:
            # Nothing is sampled. Equal parameters let equal requests be scored together.
            for name, value in (("temperature", 0.0), ("top_p", None), ("top_k", None), ("min_p", 0.0)):
                object.__setattr__(self, name, value)
        check_combinations(self)

    @property
    def lookaheads(self) -> int:
        """Number of lookahead branches: ``num_branches``, which is never None after construction."""
        assert self.num_branches is not None
        return self.num_branches

    @property
    def is_pipelined(self) -> bool:
        """Whether a window of blocks moves over the canvas and commits keys and values behind it. If not, the whole
        canvas is there from the beginning, and keys and values are computed again."""
        return filling(self.decoding, self.base) in PIPELINED

    @property
    def ranking(self) -> str:
        """What positions are ranked by: ``confidence``, or with "vanilla" what ``alg`` stands for."""
        return ALGS[self.alg] if self.decoding == "vanilla" else self.confidence

    @property
    def is_random(self) -> bool:
        """Whether the answer depends on the seed."""
        draws_positions = self.decoding == "vanilla" and (self.alg == "origin" or self.alg_temp > 0)
        return self.temperature > 0 or draws_positions

    @property
    def max_canvas(self) -> int:
        """Most generated positions: ``max_new_tokens``, with ``whole_last_block`` rounded up to whole blocks."""
        if not self.whole_last_block:
            return self.max_new_tokens
        return -(-self.max_new_tokens // self.block_size) * self.block_size

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """``eos_token_id``, which is never a single id after construction; None: the model's own ids."""
        assert not isinstance(self.eos_token_id, int)
        return self.eos_token_id

    @classmethod
    def preset(cls, name: str, **options: Any) -> DecodingParams:
        """The parameters of a published evaluation, such as "S13" of the LoPA paper; see docs/decoding.md.

        Args:
            name: of the preset.
            options: parameters in place of the preset's.

        Raises:
            ParameterError: there is no such preset, or an option is not allowed.
        """
        found = find_preset(name)
        for option in options:
            if option not in cls.names():
                raise ParameterError(option, f"unknown option; choose from {', '.join(cls.names())}")
        return cls(**found.merged(options))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def parameters(cls) -> dict[str, Parameter]:
        """The declarations by name, in order."""
        return {name: setting for name, setting in settings(cls).items() if isinstance(setting, Parameter)}

    @classmethod
    def graph_support(cls) -> dict[str, GraphSupport]:
        """By name, in order: with which values a request can run in compiled steps."""
        return {name: parameter.graphs for name, parameter in cls.parameters().items()}
