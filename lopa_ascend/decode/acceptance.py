"""Acceptance rules: which predictions of a block are filled in together after one forward pass.

A rule ranks the predictions for a block's masks and accepts the first n, for the largest n that it allows, perhaps 0.
The strategy decides what happens then (SPEC section 3: a fully activated block fills its most confident position all
the same, any other block nothing).

With c_1 >= c_2 >= ... the probabilities of the ranked predictions:

- "threshold" (D2F, arXiv 2508.09192; Fast-dLLM, arXiv 2505.22618): c_n > tau_conf.
- "factor" (Fast-dLLM): (n + 1) (1 - c_n) < acceptance_factor. The more positions are filled together, the surer each
  must be.
- "entropy" (d3LLM, arXiv 2601.07568): the entropy of each is at most max_entropy.
- "sequential" (SDAR, arXiv 2510.06303): none, so that a block fills its first masks, as many as it must.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.combinations import Rule as Combination
from lopa_ascend.config.kinds import INT32_MAX, Choice, Integer, Number
from lopa_ascend.config.settings import GraphSupport, research
from lopa_ascend.types import Fill

Rule = Callable[[Sequence[Fill]], list[Fill]]
"""``rule(predictions)`` returns the accepted predictions of one block. Both are in the order of positions."""


CONFIDENCES = ("max_prob", "margin", "neg_entropy")
ACCEPTANCES = ("threshold", "factor", "entropy", "sequential")


@dataclass(frozen=True, kw_only=True)
class BlockParams:
    confidence: str = research(
        "max_prob",
        Choice(CONFIDENCES),
        "what positions are ranked and branches are scored by: the probability of the predicted token, its margin "
        "over the second most probable token, or the negative entropy of the prediction",
        graphs=GraphSupport.COMPILED,
    )
    acceptance: str = research(
        "threshold",
        Choice(ACCEPTANCES),
        'which positions of a block are filled together: "threshold": all above `tau_conf`; "factor": the most '
        'probable ones, as many as `acceptance_factor` allows, whatever `tau_conf` is; "entropy": all whose entropy is '
        'at most `max_entropy`; "sequential": the first ones, as many as a pass must fill',
        graphs=GraphSupport.DEFAULT,
    )
    acceptance_factor: float = research(
        1.0, Number(0, 1000), 'bound of `acceptance` "factor"; higher is faster and less accurate', is_inert=True
    )
    max_entropy: float = research(
        0.5,
        Number(0, 100),
        'bound of `acceptance` "entropy", in nats; higher is faster and less accurate',
        is_inert=True,
    )
    denoising_steps: int | None = research(
        None,
        Integer(1, 4096),
        "passes in which a block is filled at the latest: each fills at least its share of the block",
        default_text="as many as the block has positions",
        graphs=GraphSupport.DEFAULT,
    )
    max_active_blocks: int | None = research(
        None,
        Integer(1, INT32_MAX),
        "most blocks that are open at once, from the first unfinished block on",
        default_text='no limit; 1 with "parallel"',
    )


COMBINATIONS = (Combination("acceptance", "confidence", ("neg_entropy",), free=("factor", "sequential")),)


def float32(value: float) -> float:
    """The float32 nearest to ``value``: thresholds are compared in the precision of the confidences."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def threshold(params: DecodingParams) -> Rule:
    tau_conf = float32(params.tau_conf)
    return lambda predictions: [fill for fill in predictions if fill.max_prob > tau_conf]


def factor(params: DecodingParams) -> Rule:
    """(n + 1) (1 - c_n) grows with n, so the first n that fails ends the search."""

    def accept(predictions: Sequence[Fill]) -> list[Fill]:
        ranked = by_probability(predictions)
        products = ((n + 1) * (1 - fill.max_prob) for n, fill in enumerate(ranked, 1))
        return before_refused(ranked, [product < params.acceptance_factor for product in products])

    return accept


def to_the_last(rule: Rule) -> Rule:
    """Fast-dLLM's "factor" for LLaDA: the first prediction counts as accepted, and the last is once all others are."""

    def accept(predictions: Sequence[Fill]) -> list[Fill]:
        accepted = rule(predictions)
        return list(predictions) if max(1, len(accepted)) == len(predictions) - 1 else accepted

    return accept


def entropy(params: DecodingParams) -> Rule:
    least = float32(-params.max_entropy)
    return lambda predictions: [fill for fill in predictions if fill.confidence >= least]


RULES: dict[str, Callable[[DecodingParams], Rule]] = {
    "threshold": threshold,
    "factor": factor,
    "entropy": entropy,
    "sequential": lambda params: lambda predictions: [],
}


def acceptance_rule(params: DecodingParams) -> Rule:
    return RULES[params.acceptance](params)


def filled_in(
    predictions: Sequence[Fill], accepted: list[Fill], least: int = 0, first: int | None = None
) -> tuple[list[Fill], int]:
    """What a pass fills in a block, and how much of it no rule accepted. If fewer than ``least`` are ``accepted``, the
    most confident predictions are filled; ``first`` is filled in any case if it is the block's first mask."""
    if first is not None and predictions and predictions[0].position == first:
        forced, *others = predictions
        rest = [fill for fill in accepted if fill is not forced]
        if len(rest) + 1 < least:
            rest = most_confident(others, least - 1)
        return [forced, *rest], sum(fill not in accepted for fill in (forced, *rest))
    if len(accepted) >= least:
        return accepted, 0
    return most_confident(predictions, least), least - len(accepted)


def most_confident(predictions: Sequence[Fill], count: int = 1) -> list[Fill]:
    """The ``count`` highest confidences, the earliest among equals, in the order of positions."""
    ranked = sorted(predictions, key=lambda fill: (-fill.confidence, fill.position))
    return sorted(ranked[:count], key=lambda fill: fill.position)


def by_probability(predictions: Sequence[Fill]) -> list[Fill]:
    """The most probable first, the earliest among equals."""
    return sorted(predictions, key=lambda fill: (-fill.max_prob, fill.position))


def before_refused(ranked: Sequence[Fill], allowed: Sequence[bool]) -> list[Fill]:
    """The predictions before the first that is not allowed, in the order of positions."""
    count = next((n for n, is_allowed in enumerate(allowed) if not is_allowed), len(ranked))
    return sorted(ranked[:count], key=lambda fill: fill.position)
