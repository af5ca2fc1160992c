"""Decoding parameters that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lopa_ascend.config.decodings import DECODINGS, built_in_like, find_decoding, is_known, needed_confidence
from lopa_ascend.config.parameters import MIN_TEMPERATURE
from lopa_ascend.config.settings import ParameterError

if TYPE_CHECKING:
    from lopa_ascend.config.decoding import DecodingParams


PIPELINED = ("lopa", "d2f")
"""Decodings whose window of blocks moves over the canvas and commits keys and values behind it. The others have the
whole canvas from the beginning, and every position of it attends to all others."""
BY_BLOCKS = (*PIPELINED, "parallel", "fast_dllm")
"""Decodings that fill blocks by an acceptance rule."""
DECODINGS_OF = {
    "acceptance": BY_BLOCKS,
    "confidence": BY_BLOCKS,
    "max_active_blocks": PIPELINED,
    "steps": ("vanilla",),
    "alg": ("vanilla",),
    "alg_temp": ("vanilla",),
    "block_cache": ("fast_dllm",),
    "branch_acceptance": PIPELINED,
    "lookahead_depth": PIPELINED,
}
"""By parameter, the decodings with which it may have another value than its default."""


def decoding_that_fills(decoding: str, base: str) -> str:
    """The name of the built-in decoding whose rules fill the positions.

    This is "lopa" itself over the base "d2f", and the base over any other one. A decoding that is not built in counts
    as the built-in decoding that it is like.
    """
    if decoding == "lopa" and base != "d2f":
        return base
    return built_in_like(decoding)


def fitting_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that can be used together with what a request asks for. The others are left out.

    A decoding that does not exist gets all of them: ``DecodingParams`` refuses its name. Defaults that do not go with
    sampling are changed or left out for a request that samples, and ``min_new_tokens`` becomes at most the request's
    ``max_new_tokens``.

    Args:
        defaults: decoding parameters by name.
        asked: the parameters that the request sets itself, in place of defaults.

    Raises:
        ParameterError: the decoding is that of another package, which cannot be loaded.
    """
    merged = {"decoding": "lopa", "base": "d2f", **defaults, **asked}
    try:
        if not is_known(merged["decoding"]):
            return dict(defaults)
    except ValueError as error:
        raise ParameterError("decoding", str(error)) from error
    usable = _defaults_for_sampling(defaults) if _is_sampling(asked.get("temperature")) else dict(defaults)
    unusable = _unusable_defaults(merged, defaults)
    usable = {name: value for name, value in usable.items() if name not in unusable}
    _leave_out_conflicts(usable, asked)
    longest = asked.get("max_new_tokens")
    if "min_new_tokens" in usable and isinstance(longest, int):
        usable["min_new_tokens"] = max(0, min(usable["min_new_tokens"], longest))
    return usable


def _unusable_defaults(merged: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """The names of parameters whose defaults have no place in the decoding of a request.

    Args:
        merged: the defaults, with what the request asks for in their place; and the decoding and its base in any case.
        defaults: decoding parameters by name.
    """
    decoding = merged["decoding"]
    filled_by = decoding_that_fills(decoding, merged["base"])
    unusable = {name for name, decodings in DECODINGS_OF.items() if filled_by not in decodings}
    if filled_by not in PIPELINED:
        unusable.add("window_attention")
    if decoding != "lopa":
        unusable.add("base")
    if decoding not in DECODINGS:
        unusable.add("branch_acceptance")
    if needed_confidence(decoding) is not None:
        unusable.add("confidence")
    if "branch_acceptance" in unusable or merged.get("branch_acceptance", "published") == "published":
        unusable.add("lookahead_depth")
    if decoding != defaults.get("decoding", "lopa"):
        unusable.add("num_branches")  # the default number is meant for the default decoding
    return unusable


def _leave_out_conflicts(usable: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Takes out of ``usable``, defaults by name, what contradicts ``asked``."""
    for pair in _conflicts({**usable, **asked}):
        by_default = [name for name in pair if name not in asked]
        if by_default:
            usable.pop(by_default[0], None)


def _conflicts(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of parameters whose values contradict each other.

    Args:
        params: parameters by name, whose values were not checked yet. The default of each parameter that is missing
            contradicts nothing.
    """
    is_exact = params.get("branch_acceptance") == "exact"
    is_sampled = _is_sampling(params.get("temperature"))
    pairs = {
        ("alg", "alg_temp"): params.get("alg") == "origin" and _is_above(params.get("alg_temp"), 0),
        ("branch_acceptance", "temperature"): is_exact and is_sampled,
    }
    return [pair for pair, is_conflict in pairs.items() if is_conflict]


def _is_above(value: Any, bound: float) -> bool:
    return isinstance(value, int | float) and value > bound


def _is_sampling(temperature: Any) -> bool:
    return isinstance(temperature, int | float) and temperature >= MIN_TEMPERATURE


def _defaults_for_sampling(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a request that samples: "exact" drafts become "verified" ones."""
    usable = dict(defaults)
    if usable.get("branch_acceptance") == "exact":
        usable["branch_acceptance"] = "verified"
    return usable


def check_combinations(params: DecodingParams) -> None:
    """Checks parameters, each of which is allowed by itself.

    Raises:
        ParameterError: two of them contradict each other; the message names both.
    """
    if built_in_like(params.decoding) != "lopa" and params.num_branches:
        message = f'must be 0 with decoding "{params.decoding}", got {params.num_branches}; use "lopa"'
        raise ParameterError("num_branches", message)
    _check_decoding(params)
    if params.min_new_tokens > params.max_new_tokens:
        message = f"{params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
        raise ParameterError("min_new_tokens", message)
    if params.lookahead_depth > 1 and params.branch_acceptance == "published":
        message = f'{params.lookahead_depth} does not go with branch_acceptance "published"; use "verified" or "exact"'
        raise ParameterError("lookahead_depth", message)
    if params.branch_acceptance == "exact" and params.temperature:
        # A draw depends on the number of its forward pass, which is another one than d2f's.
        raise ParameterError("branch_acceptance", f'"exact" needs temperature 0, got {params.temperature}')
    if params.decoding not in DECODINGS and (strategy := find_decoding(params.decoding)) is not None:
        strategy.check(params)


def _check_decoding(params: DecodingParams) -> None:
    """Checks the parameters that do not go with every decoding."""
    filled_by = decoding_that_fills(params.decoding, params.base)
    is_over_other = params.decoding == "lopa" and filled_by != "lopa"
    named = f'base "{filled_by}"' if is_over_other else f'decoding "{params.decoding}"'
    if params.decoding not in DECODINGS and params.branch_acceptance != "published":
        raise ParameterError("branch_acceptance", f'"{params.branch_acceptance}" does not go with {named}')
    if params.decoding != "lopa" and params.base != "d2f":
        raise ParameterError("base", f'"{params.base}" does not go with {named}; it is for "lopa"')
    for name, decodings in DECODINGS_OF.items():
        value, default = getattr(params, name), getattr(type(params), name)
        if filled_by not in decodings and value != default:
            choices = ", ".join(f'"{decoding}"' for decoding in decodings)
            shown = f'"{value}"' if isinstance(value, str) else value
            raise ParameterError(name, f"{shown} does not go with {named}; it is for {choices}")
    if filled_by not in PIPELINED and params.window_attention != "full":
        message = (
            f'"{params.window_attention}" does not go with {named}, where every position attends to the whole canvas; '
            'use "full", or decoding "d2f"'
        )
        raise ParameterError("window_attention", message)
    needed = needed_confidence(params.decoding)
    if needed is not None and params.confidence not in (needed, type(params).confidence):
        raise ParameterError("confidence", f'"{params.confidence}" does not go with {named}, which uses "{needed}"')
    if params.alg_temp and params.alg == "origin":
        raise ParameterError("alg_temp", f'{params.alg_temp} does not go with alg "origin", which ranks nothing')
