"""The decoding parameters for research: they select variants of the decoding."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config.kinds import INT32_MAX, Boolean, Choice, Integer, Number
from lopa_ascend.config.settings import GraphSupport, Group, Parameter, declare

ACCEPTANCES = ("threshold", "factor")
CONFIDENCES = ("max_prob", "margin", "neg_entropy")
ALGS = {"origin": "max_prob", "maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "neg_entropy"}
"""Dream's names for the ways to choose positions, and the confidence of each."""
BASES = ("d2f", "parallel", "fast_dllm")
BLOCK_CACHES = ("prefix", "dual")
BRANCH_ACCEPTANCES = ("published", "verified", "exact")
BRANCH_SCORES = ("mean", "tail", "window")
MAX_STEPS = 8192
"""Most steps of "vanilla". Those of "origin" that fill nothing are drawn all the same, while other requests wait."""
WINDOW_ATTENTIONS = ("block_causal", "full")


@dataclass(frozen=True, kw_only=True)
class ResearchParams:
    """The parameters that select variants of the decoding; see ``DecodingParams``."""

    base: str = declare(
        "d2f",
        Parameter(
            Choice(BASES),
            'the decoding that "lopa" extends: it decodes the anchor branch, and "lopa" adds lookahead branches',
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
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
            'which positions of a block are filled together: "threshold": all above `tau_conf`; "factor": the most '
            "probable ones, as many as `acceptance_factor` allows, whatever `tau_conf` is",
            group=Group.RESEARCH,
            graphs=GraphSupport.DEFAULT,
        ),
    )
    acceptance_factor: float = declare(
        1.0,
        Parameter(
            Number(0, 1000), 'bound of `acceptance` "factor"; higher is faster and less accurate', group=Group.RESEARCH
        ),
    )
    steps: int | None = declare(
        None,
        Parameter(
            Integer(1, MAX_STEPS),
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
            group=None,
        ),
    )
    block_cache: str = declare(
        "prefix",
        Parameter(
            Choice(BLOCK_CACHES),
            'keys and values that `decoding` "fast_dllm" reuses while it fills a block: "prefix": of all positions '
            'before the block; "dual": of those after it too',
            group=Group.RESEARCH,
        ),
    )
    branch_acceptance: str = declare(
        "published",
        Parameter(
            Choice(BRANCH_ACCEPTANCES),
            'which branch wins: "published": the one with the highest score; "verified": the one that fills most '
            'positions, among the anchor and the branches whose lookahead token "d2f" would fill now; "exact": the one '
            'that "d2f" would have after this pass, so that the answer is that of "d2f"',
            group=Group.RESEARCH,
            graphs=GraphSupport.COMPILED,
        ),
    )
    lookahead_depth: int = declare(
        1,
        Parameter(
            Integer(1, 16),
            "most tokens that a lookahead branch has in addition to the anchor's; above 1 one pass may replace several "
            'passes of "d2f"; needs `branch_acceptance` "verified" or "exact"',
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
        Parameter(Number(0, 1), 'fraction of the masked positions that `branch_score` "tail" averages', group=None),
    )
    score_window: int = declare(
        8,
        Parameter(
            Integer(1, INT32_MAX),
            'number of consecutive masked positions that `branch_score` "window" averages',
            group=None,
        ),
    )
    creation_weight: float = declare(
        0.0,
        Parameter(
            Number(0, 1),
            "weight of the confidence of a branch's own lookahead token in the branch's score",
            group=None,
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
    finish_at_eos: bool = declare(
        True,
        Parameter(
            Boolean(),
            "end as soon as the text up to the EOS is final; otherwise fill every open block first, as the published "
            "code does",
            group=None,
        ),
    )
