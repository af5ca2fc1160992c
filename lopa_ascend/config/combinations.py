"""Decoding parameters that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lopa_ascend.config.errors import ParameterError

if TYPE_CHECKING:
    from lopa_ascend.config.decoding import DecodingParams


def check_combinations(params: DecodingParams) -> None:
    """Checks parameters, each of which is allowed by itself.

    Raises:
        ParameterError: two of them contradict each other; the message names both.
    """
    if params.decoding == "d2f" and params.num_branches:
        raise ParameterError("num_branches", f'must be 0 with decoding "d2f", got {params.num_branches}; use "lopa"')
    if params.min_new_tokens > params.max_new_tokens:
        message = f"{params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
        raise ParameterError("min_new_tokens", message)
    if params.acceptance == "entropy_bound" and params.confidence != "neg_entropy":
        message = f'"entropy_bound" needs confidence "neg_entropy", got "{params.confidence}"'
        raise ParameterError("acceptance", message)
    if params.branch_acceptance == "exact" and params.temperature:
        # A draw depends on the number of its forward pass, which is another one than d2f's.
        raise ParameterError("branch_acceptance", f'"exact" needs temperature 0, got {params.temperature}')
