"""Acceptance rules: which predictions of a block are filled in together after one forward pass.

Every rule ranks the predictions of a block's masked positions and accepts the first n of them, for the largest n that
it allows. It may accept none. What happens then is decided by the strategy (SPEC section 3: a block that is fully
activated fills its most confident position all the same, and any other block fills nothing).

With c_1 >= c_2 >= ... the probabilities of the ranked predictions:

- "threshold", of D2F (arXiv 2508.09192) and Fast-dLLM (arXiv 2505.22618): c_n > tau_conf.
- "factor", of Fast-dLLM: (n + 1) (1 - c_n) < acceptance_factor. The more positions are filled together, the surer
  each must be.
- "entropy", of d3LLM (arXiv 2601.07568): the entropy of each is at most max_entropy.
- "sequential", of SDAR (arXiv 2510.06303): none, so that a block fills its first masks, as many as it must.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.types import Fill

Rule = Callable[[Sequence[Fill]], list[Fill]]
"""``rule(predictions)`` returns the accepted ones of the predictions for a block's masked positions. Arguments and
results are in the order of positions."""


def float32(value: float) -> float:
    """The float32 nearest to ``value``: thresholds are compared in the precision of the confidences."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def threshold(params: DecodingParams) -> Rule:
    """The rule "threshold": accepts each prediction whose probability is above tau_conf, whatever the others are."""
    tau_conf = float32(params.tau_conf)
    return lambda predictions: [fill for fill in predictions if fill.max_prob > tau_conf]


def factor(params: DecodingParams) -> Rule:
    """The rule "factor". (n + 1) (1 - c_n) grows with n, so the first n that fails ends the search."""

    def accept(predictions: Sequence[Fill]) -> list[Fill]:
        ranked = by_probability(predictions)
        products = ((n + 1) * (1 - fill.max_prob) for n, fill in enumerate(ranked, 1))
        return before_refused(ranked, [product < params.acceptance_factor for product in products])

    return accept


def to_the_last(rule: Rule) -> Rule:
    """Fast-dLLM's "factor" for LLaDA: the first prediction counts as accepted, and the last one is accepted as soon as
    all others are."""

    def accept(predictions: Sequence[Fill]) -> list[Fill]:
        accepted = rule(predictions)
        return list(predictions) if max(1, len(accepted)) == len(predictions) - 1 else accepted

    return accept


def entropy(params: DecodingParams) -> Rule:
    """The rule "entropy", whose confidences are negative entropies."""
    least = float32(-params.max_entropy)
    return lambda predictions: [fill for fill in predictions if fill.confidence >= least]


RULES: dict[str, Callable[[DecodingParams], Rule]] = {
    "threshold": threshold,
    "factor": factor,
    "entropy": entropy,
    "sequential": lambda params: lambda predictions: [],
}


def acceptance_rule(params: DecodingParams) -> Rule:
    """The rule that ``params.acceptance`` names."""
    return RULES[params.acceptance](params)


def filled_in(
    predictions: Sequence[Fill], accepted: list[Fill], least: int = 0, first: int | None = None
) -> tuple[list[Fill], int]:
    """What a pass fills in a block, and how much of it no rule has accepted.

    Args:
        predictions: for the block's masked positions.
        accepted: those that the rule accepts.
        least: if the rule accepts fewer, the most confident predictions are filled instead.
        first: the position that is filled in any case if it is the block's first masked one.
    """
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
    """The ``count`` predictions with the highest confidence, the earliest among equals, in the order of positions: what
    is filled if a rule accepts too few."""
    ranked = sorted(predictions, key=lambda fill: (-fill.confidence, fill.position))
    return sorted(ranked[:count], key=lambda fill: fill.position)


def by_probability(predictions: Sequence[Fill]) -> list[Fill]:
    """The predictions, the most probable one first, the earliest among equals."""
    return sorted(predictions, key=lambda fill: (-fill.max_prob, fill.position))


def before_refused(ranked: Sequence[Fill], allowed: Sequence[bool]) -> list[Fill]:
    """The predictions before the first one that is not allowed, in the order of positions."""
    count = next((n for n, is_allowed in enumerate(allowed) if not is_allowed), len(ranked))
    return sorted(ranked[:count], key=lambda fill: fill.position)
