"""The decoding parameters, each declared once."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config.decodings import DecodingName
from lopa_ascend.config.kinds import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    Boolean,
    Choice,
    Integer,
    IntegerOrAuto,
    Number,
    Strings,
    StructuredOutputs,
    TokenIds,
    TokenNumbers,
    Words,
)
from lopa_ascend.config.settings import DERIVED, GraphSupport, Section, parameter
from lopa_ascend.types import Grammar

AUTO_BRANCHES = 3
"""Lookahead branches that ``num_branches`` "auto" gives a pass, if it gives any."""
AUTO_REQUESTS = 2
"""With more running requests drafts cost more than they save: by the planner's cost of a step of Dream-7B on a 910C
die, three drafts make two requests 1.2 times as fast, and three requests slower."""
MIN_TEMPERATURE = 0.01
"""Lower temperatures count as 0: logits divided by them leave the range of float32."""
ACCEPTANCES = ("threshold", "factor", "entropy", "sequential")
CONFIDENCES = ("max_prob", "margin", "neg_entropy")
ALGS = {"origin": "max_prob", "maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "neg_entropy"}
"""Dream's names for the ways to choose positions, and the confidence of each."""
BASES = ("d2f", "parallel", "fast_dllm", "fast_dllm_v2")
BLOCK_CACHES = ("prefix", "dual")
BRANCH_ACCEPTANCES = ("published", "verified", "exact")
BRANCH_SCORES = ("mean", "tail", "window")
MAX_STEPS = 8192
"""Most steps of "vanilla". Those of "origin" that fill nothing are drawn all the same, while other requests wait."""
WINDOW_ATTENTIONS = ("block_causal", "full")


@dataclass(frozen=True, kw_only=True)
class UsualParams:
    """The parameters that most requests are decoded by; see ``DecodingParams``."""

    decoding: str = parameter(
        "lopa",
        DecodingName(),
        '"lopa": an anchor branch and lookahead branches; "d2f": the anchor branch alone; "parallel": block after '
        'block of a canvas that is computed whole in every forward pass; "vanilla": Dream\'s own, a fixed '
        'number of steps over the whole canvas; "fast_dllm": as "parallel", with keys and values that are computed '
        'once a block; "fast_dllm_v2": block after block, by sub-blocks, for models of that family',
        graphs=GraphSupport.PIPELINED,
    )
    num_branches: int | str = parameter(
        DERIVED,
        IntegerOrAuto(0, 255),
        "the paper's k: lookahead branches beside the anchor branch, each with one more position filled; "
        f'"auto": {AUTO_BRANCHES}, but none where they do not pay: with `branch_acceptance` "verified" and "exact" '
        f'while more than {AUTO_REQUESTS} requests run, with "published" after a pass in which a rule accepted '
        "positions",
        default_text='3 with "lopa", otherwise 0',
        graphs=GraphSupport.BUCKET,
    )
    block_size: int = parameter(32, Integer(1, 4096), "positions in a block", graphs=GraphSupport.BUCKET)
    tau_add: float = parameter(0.1, Number(0, 1), "a new block is added once this fraction of the last block is filled")
    tau_act: float = parameter(
        0.95,
        Number(0, 1),
        "a block must fill at least one position in every step once this fraction of the block before it is filled",
    )
    tau_conf: float = parameter(
        0.9,
        Number(0, 1),
        "a position is filled when the probability of its token is above this; a lower value is faster and "
        "less accurate",
    )
    max_new_tokens: int = parameter(
        256,
        Integer(1),
        "most tokens to generate; together with the prompt they must fit into `max_model_len`",
        aliases=("max_tokens", "max_completion_tokens", "max_output_tokens"),
    )
    min_new_tokens: int = parameter(
        0,
        Integer(0),
        "within this many generated tokens no EOS is produced and no stop string ends the answer",
        aliases=("min_tokens",),
        graphs=GraphSupport.DEFAULT,
    )
    stop: tuple[str, ...] = parameter(
        (), Strings(), "strings that end the answer; they are cut off", default_text="none"
    )
    temperature: float = parameter(
        0.0,
        Number(0, 100),
        f"below {MIN_TEMPERATURE}: take the most probable token; from there on sample, reproducibly by `seed`",
        graphs=GraphSupport.DEFAULT,
    )
    top_p: float | None = parameter(
        None,
        Number(0, 1),
        "sample from the most probable tokens whose probabilities sum up to this; no effect without `temperature`",
        default_text="off",
        off=(1,),
    )
    top_k: int | None = parameter(
        None,
        Integer(1, INT32_MAX),
        "sample from this many most probable tokens; no effect without `temperature`",
        default_text="off",
        off=(0, -1),
    )
    min_p: float = parameter(
        0.0,
        Number(0, 1),
        "sample from the tokens whose probability is at least this share of the largest one; no effect without "
        "`temperature`",
        graphs=GraphSupport.DEFAULT,
    )
    seed: int | None = parameter(
        None,
        Integer(INT64_MIN, INT64_MAX),
        "seed of this request's sampling; the same request with the same seed gets the same answer",
        group=None,  # the flag --seed is the engine's, from which requests draw theirs
        default_text="a new one for each answer, which the answer names",
    )
    presence_penalty: float = parameter(
        0.0,
        Number(-2, 2),
        "subtracted from the logit of every token that the committed part of the answer holds",
        graphs=GraphSupport.DEFAULT,
    )
    frequency_penalty: float = parameter(
        0.0,
        Number(-2, 2),
        "subtracted from a token's logit for each time that the committed part of the answer holds the token",
        graphs=GraphSupport.DEFAULT,
    )
    repetition_penalty: float = parameter(
        1.0,
        Number(0.01, 100),
        "positive logits are divided and negative ones multiplied by this, for tokens of the prompt and of the "
        "committed part of the answer",
        graphs=GraphSupport.DEFAULT,
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (),
        TokenNumbers(Number(-100, 100)),
        "numbers that are added to the logits of tokens, by token id",
        default_text="none",
        graphs=GraphSupport.DEFAULT,
    )
    bad_words: tuple[str | tuple[int, ...], ...] = parameter(
        (),
        Words(max_texts=256, max_characters=64),
        "words that the answer does not contain, as texts or as lists of token ids",
        default_text="none",
        graphs=GraphSupport.DEFAULT,
    )
    structured_outputs: Grammar | None = parameter(
        None,
        StructuredOutputs(max_characters=2**17, max_choices=4096),
        "grammar that the answer keeps to: {json: a JSON schema}, {json_object: true}, {regex: an expression}, "
        "{choice: a list of texts} or {grammar: in the syntax of Lark}",
        group=None,
        default_text="none",
        graphs=GraphSupport.DEFAULT,
    )
    max_thinking_tokens: int | None = parameter(
        None,
        Integer(0, INT32_MAX),
        "most tokens that a model which thinks before its answer thinks in a conversation",
        default_text="no limit",
        aliases=("thinking_token_budget",),
        graphs=GraphSupport.DEFAULT,
    )
    top_logprobs: int = parameter(
        0,
        Integer(0, 20),
        "most probable tokens that are recorded for a position when it is filled",
        group=None,  # each request that shows them asks for them
        graphs=GraphSupport.DEFAULT,
        own_field=True,
    )
    eos_token_id: int | tuple[int, ...] | None = parameter(
        None,
        TokenIds(),
        "token ids that end the answer; the model's are those of generation_config.json or config.json, and the "
        "tokenizer's pad_token unless it is the mask",
        default_text="the model's",
        graphs=GraphSupport.BUCKET,
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (),
        TokenIds(),
        "further token ids that end the answer, even if `ignore_eos` is set; a stop string that is a special token "
        "counts as one",
        default_text="none",
        graphs=GraphSupport.BUCKET,
    )
    ignore_eos: bool = parameter(False, Boolean(), "go on after an EOS")


@dataclass(frozen=True, kw_only=True)
class ResearchParams:
    """The parameters that select variants of the decoding; see ``DecodingParams``."""

    base: str = parameter(
        "d2f",
        Choice(BASES),
        'the decoding that "lopa" extends: it decodes the anchor branch, and "lopa" adds lookahead branches',
        group=Section.RESEARCH,
        graphs=GraphSupport.DEFAULT,
    )
    confidence: str = parameter(
        "max_prob",
        Choice(CONFIDENCES),
        "what positions are ranked and branches are scored by: the probability of the predicted token, its margin "
        "over the second most probable token, or the negative entropy of the prediction",
        group=Section.RESEARCH,
        graphs=GraphSupport.COMPILED,
    )
    acceptance: str = parameter(
        "threshold",
        Choice(ACCEPTANCES),
        'which positions of a block are filled together: "threshold": all above `tau_conf`; "factor": the most '
        'probable ones, as many as `acceptance_factor` allows, whatever `tau_conf` is; "entropy": all whose entropy is '
        'at most `max_entropy`; "sequential": the first ones, as many as a pass must fill',
        group=Section.RESEARCH,
        graphs=GraphSupport.DEFAULT,
    )
    acceptance_factor: float = parameter(
        1.0,
        Number(0, 1000),
        'bound of `acceptance` "factor"; higher is faster and less accurate',
        group=Section.RESEARCH,
    )
    max_entropy: float = parameter(
        0.5,
        Number(0, 100),
        'bound of `acceptance` "entropy", in nats; higher is faster and less accurate',
        group=Section.RESEARCH,
    )
    denoising_steps: int | None = parameter(
        None,
        Integer(1, 4096),
        "passes in which a block is filled at the latest: each fills at least its share of the block",
        group=Section.RESEARCH,
        default_text="as many as the block has positions",
        graphs=GraphSupport.DEFAULT,
    )
    editing_threshold: float | None = parameter(
        None,
        Number(0, 1),
        "a filled position of the open block takes the predicted token in place of its own when the probability is "
        "above this; the block is final once a pass without masks has changed nothing, and only then it is shown",
        group=Section.RESEARCH,
        default_text="filled positions stay as they are",
        graphs=GraphSupport.DEFAULT,
    )
    max_post_steps: int = parameter(
        16,
        Integer(1, 4096),
        "passes without masks after which a block is final even if `editing_threshold` still changes tokens",
        group=Section.RESEARCH,
    )
    sub_block_size: int = parameter(
        8,
        Integer(1, 4096),
        'positions that "fast_dllm_v2" fills before it goes on to the right',
        group=Section.RESEARCH,
    )
    sub_block_cache: bool = parameter(
        False,
        Boolean(),
        'compute the current sub-block of "fast_dllm_v2" alone, beside stale keys and values of its block; this '
        "changes answers",
        group=Section.RESEARCH,
    )
    steps: int | None = parameter(
        None,
        Integer(1, MAX_STEPS),
        'steps of `decoding` "vanilla", each of which fills its share of the canvas',
        group=Section.RESEARCH,
        default_text="as many as the canvas has positions",
    )
    alg: str = parameter(
        "entropy",
        Choice(tuple(ALGS)),
        'which positions a step of `decoding` "vanilla" fills: "origin": random ones; the others: the best by the '
        "probability of the predicted token, by its margin over the second, or by the negative entropy",
        group=Section.RESEARCH,
    )
    alg_temp: float = parameter(
        0.0, Number(0, 1000), "above 0: `alg` draws positions in proportion to exp(confidence / alg_temp)", group=None
    )
    block_cache: str = parameter(
        "prefix",
        Choice(BLOCK_CACHES),
        'keys and values that `decoding` "fast_dllm" reuses while it fills a block: "prefix": of all positions '
        'before the block; "dual": of those after it too',
        group=Section.RESEARCH,
    )
    branch_acceptance: str = parameter(
        "published",
        Choice(BRANCH_ACCEPTANCES),
        'which branch wins: "published": the one with the highest score; "verified": the one that fills most '
        'positions, among the anchor and the branches whose lookahead token "d2f" would fill now; "exact": the one '
        'that "d2f" would have after this pass, so that the answer is that of "d2f"',
        group=Section.RESEARCH,
        graphs=GraphSupport.COMPILED,
    )
    lookahead_depth: int = parameter(
        1,
        Integer(1, 16),
        "most tokens that a lookahead branch has in addition to the anchor's; above 1 one pass may replace several "
        'passes of "d2f"; needs `branch_acceptance` "verified" or "exact"',
        group=Section.RESEARCH,
        graphs=GraphSupport.DEFAULT,
    )
    branch_score: str = parameter(
        "mean",
        Choice(BRANCH_SCORES),
        'score of a branch from the confidences of its masked positions: "mean" of all; "tail": mean of the '
        'lowest; "window": lowest mean over consecutive positions',
        group=Section.RESEARCH,
        graphs=GraphSupport.DEFAULT,
    )
    tail_fraction: float = parameter(
        0.5, Number(0, 1), 'fraction of the masked positions that `branch_score` "tail" averages', group=None
    )
    score_window: int = parameter(
        8,
        Integer(1, INT32_MAX),
        'number of consecutive masked positions that `branch_score` "window" averages',
        group=None,
    )
    creation_weight: float = parameter(
        0.0,
        Number(0, 1),
        "weight of the confidence of a branch's own lookahead token in the branch's score",
        group=None,
        graphs=GraphSupport.DEFAULT,
    )
    window_attention: str = parameter(
        DERIVED,
        Choice(WINDOW_ATTENTIONS),
        'what a block of the window attends to: "block_causal": all positions up to its own end; "full": all '
        "positions up to the end of the window",
        group=Section.RESEARCH,
        default_text='"block_causal" with "lopa" and "d2f", otherwise "full"',
        graphs=GraphSupport.COMPILED,
    )
    max_active_blocks: int | None = parameter(
        None,
        Integer(1, INT32_MAX),
        "most blocks that are open at once, from the first unfinished block on",
        group=Section.RESEARCH,
        default_text='no limit; 1 with "parallel"',
    )
    eos_last: bool = parameter(
        False,
        Boolean(),
        'with "parallel" and "fast_dllm": a token that ends the answer is filled only where no other position is '
        "left to fill",
        group=None,
    )
    finish_at_eos: bool = parameter(
        True,
        Boolean(),
        "end as soon as the text up to the EOS is final; otherwise fill every open block first, as the published "
        "code does",
        group=None,
    )
