"""The settings of a benchmark: decoding parameters with a name, and the grids of a sweep."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.decodings import built_in_like

FIGURES = "figures"
"""What --sweep takes in place of parameters: the settings that all figures need."""
BRANCHES = (1, 2, 3, 5, 7, 10, 14)
"""Lookahead branches of the figures; "d2f" stands for none."""
TAUS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Thresholds of S1 to S6, for ``tau_act`` and ``tau_conf`` alike."""
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"decoding": "vanilla"},
    {"decoding": "parallel"},
    {"decoding": "fast_dllm"},
    {"decoding": "lopa", "base": "parallel"},
    {"decoding": "d2f"},
    {"decoding": "lopa", "branch_acceptance": "exact"},
    {"decoding": "lopa", "branch_acceptance": "verified"},
    {"decoding": "lopa", "branch_acceptance": "exact", "num_branches": 15, "lookahead_depth": 8},
    {"decoding": "lopa", "branch_acceptance": "verified", "num_branches": 15, "lookahead_depth": 8},
    {"decoding": "lopa"},
)
"""The ways to decode that one figure compares, in its order."""


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    params: DecodingParams
    label: str
    """What differs from the parameters that all settings have in common, for people."""

    @property
    def key(self) -> str:
        """Names the parameters' values in files."""
        text = json.dumps(asdict(self.params), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def one_setting(given: Mapping[str, Any]) -> Setting:
    """The setting that has these parameters."""
    return Setting(DecodingParams(**given), _label(given) or "defaults")


def swept(axes: Sequence[str], given: Mapping[str, Any]) -> list[Setting]:
    """All settings of a sweep, without repetitions.

    Combinations that the decoding has no use for are left out, such as branches of "d2f".

    Args:
        axes: "NAME=VALUE,VALUE..." for decoding parameters, whose product is taken; or "figures".
        given: the parameters that all settings have in common.

    Raises:
        ParameterError: an axis is malformed, its parameter is unknown, a value is not allowed, or nothing is left.
    """
    if FIGURES in axes:
        if len(axes) > 1:
            raise ParameterError("sweep", f'"{FIGURES}" stands alone, got {" ".join(axes)}')
        changes = _for_figures()
    else:
        names = [axis.partition("=")[0] for axis in axes]
        if repeated := {name for name in names if names.count(name) > 1}:
            message = f"has {min(repeated)} twice; give all its values in one --sweep {min(repeated)}=VALUE,VALUE"
            raise ParameterError("sweep", message)
        changes = [dict(pairs) for pairs in itertools.product(*map(_axis, axes))]
    settings: dict[str, Setting] = {}
    for change in changes:
        # A common parameter that the decoding of a change cannot have gives way; an explicit one of the axes does not.
        values = {**fitting_defaults(given, change), **change}
        if change.get("num_branches") and built_in_like(values.get("decoding", "lopa")) != "lopa":
            continue
        setting = Setting(DecodingParams(**values), _label(change))
        settings.setdefault(setting.key, setting)
    if not settings:
        raise ParameterError("sweep", f"leaves no setting: only lopa has branches, got {' '.join(axes)}")
    return list(settings.values())


def _for_figures() -> list[dict[str, Any]]:
    grid = [{"decoding": "lopa", "num_branches": k, "tau_act": tau, "tau_conf": tau} for k in (3, 7) for tau in TAUS]
    plain = [{"decoding": "d2f", "tau_act": tau, "tau_conf": tau} for tau in TAUS]
    branches = [{"decoding": "lopa", "num_branches": k} for k in BRANCHES]
    windows = [{"decoding": "lopa", "num_branches": k, "window_attention": "full"} for k in (3, 7)]
    return [*STRATEGIES, *branches, *windows, {"decoding": "d2f", "window_attention": "full"}, *plain, *grid]


def _axis(text: str) -> list[tuple[str, Any]]:
    name, separator, values = text.partition("=")
    parameters = DecodingParams.parameters()
    if not separator or not values:
        raise ParameterError("sweep", f'must be "NAME=VALUE,VALUE..." or "{FIGURES}", got {text!r}')
    if name not in parameters:
        raise ParameterError("sweep", f"unknown parameter {name!r}; choose one of {', '.join(parameters)}")
    try:
        return [(name, parameters[name].kind.parse(value)) for value in values.split(",")]
    except ValueError as error:
        raise ParameterError("sweep", f"{name}: {error}") from error


def _label(changes: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in changes.items())
