"""Decoding parameters that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lopa_ascend.config.errors import ParameterError

if TYPE_CHECKING:
    from lopa_ascend.config.decoding import DecodingParams


PIPELINED = ("lopa", "d2f")
"""Decodings whose window of blocks moves over the canvas and commits keys and values behind it. The others have the
whole canvas from the beginning, and every position of it attends to all others."""


def fitting_defaults(defaults: Mapping[str, Any], decoding: str) -> dict[str, Any]:
    """Default values without those that do not go with the decoding that stands in place of the default one.

    Args:
        defaults: decoding parameters by name.
        decoding: what is asked for.
    """
    foreign = {"num_branches"}  # the default number is meant for the default decoding
    if decoding not in PIPELINED:
        foreign |= {"window_attention", "max_active_blocks"}
    return {name: value for name, value in defaults.items() if name not in foreign}


def check_combinations(params: DecodingParams) -> None:
    """Checks parameters, each of which is allowed by itself.

    Raises:
        ParameterError: two of them contradict each other; the message names both.
    """
    if params.decoding != "lopa" and params.num_branches:
        message = f'must be 0 with decoding "{params.decoding}", got {params.num_branches}; use "lopa"'
        raise ParameterError("num_branches", message)
    if params.decoding not in PIPELINED:
        _check_whole_canvas(params)
    if params.min_new_tokens > params.max_new_tokens:
        message = f"{params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
        raise ParameterError("min_new_tokens", message)
    if params.acceptance == "entropy_bound" and params.confidence != "neg_entropy":
        message = f'"entropy_bound" needs confidence "neg_entropy", got "{params.confidence}"'
        raise ParameterError("acceptance", message)
    if params.branch_acceptance == "exact" and params.temperature:
        # A draw depends on the number of its forward pass, which is another one than d2f's.
        raise ParameterError("branch_acceptance", f'"exact" needs temperature 0, got {params.temperature}')


def _check_whole_canvas(params: DecodingParams) -> None:
    """Checks the parameters of a decoding that has the whole canvas from the beginning."""
    if params.window_attention != "full":
        message = (
            f'"{params.window_attention}" does not go with decoding "{params.decoding}", where every position attends '
            'to the whole canvas; use "full", or decoding "d2f"'
        )
        raise ParameterError("window_attention", message)
    if params.max_active_blocks is not None:
        message = f'{params.max_active_blocks} does not go with decoding "{params.decoding}", which opens no blocks'
        raise ParameterError("max_active_blocks", message)
