"""Decoding in several settings: which parameters take several values, and what a combination of them is."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.config import DecodingParams, fitting_defaults
from lopa_ascend.config.presets import Preset
from lopa_ascend.families import recommended_decoding
from lopa_ascend.serve.flags import DECODING_FLAGS, argument_type, field_values, option
from scripts.eval.command import with_defaults

SWEPT = ("block_size", "num_branches", "tau_conf")
"""Decoding parameters that take several values."""
ONE_TOKEN = {"num_branches": 0, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}
"""Parameters by which a pass fills one position: no block begins before the last one is filled, and no probability is
above the threshold."""


@dataclass(frozen=True)
class Way:
    """One setting."""

    label: str
    decoding: Mapping[str, Any]
    """The parameters that are not left to their defaults."""
    params: DecodingParams
    """All parameters."""
    is_first: bool = False
    """It is one token a pass, with which the curves of its block size begin."""

    @property
    def curve(self) -> str:
        """Names what it has in common with other thresholds."""
        return f"{self.params.decoding}, blocks of {self.params.block_size}, k = {self.params.num_branches}"


def add_swept_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the parameters of SWEPT, each with any number of values."""
    flags = with_defaults(DECODING_FLAGS, dict.fromkeys(SWEPT, "the preset's, or as recommended for the model"))
    for flag in (flags[name] for name in SWEPT):
        text = f"one or several: {flag.help_text()}"
        parser.add_argument(option(flag.name), nargs="+", type=argument_type(flag), metavar="N", help=text)


def sweep(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each combination of the values of SWEPT that were given, by name.

    Args:
        given: the arguments that were given, by name.
    """
    names = [name for name in SWEPT if name in given]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(given[name] for name in names))]


def ways_to_decode(
    given: Mapping[str, Any], preset: Preset | None, model: str | Path, *, with_first: bool
) -> list[Way]:
    """The settings of a sweep. Before those of a block size comes one token a pass.

    Args:
        given: the arguments that were given, by name.
        preset: the one that was chosen, if any.
        model: whose recommendation holds without a preset.
        with_first: one setting alone is a sweep, too.
    """
    fixed = field_values({name: value for name, value in given.items() if name not in SWEPT}, DECODING_FLAGS)

    def way(values: Mapping[str, Any], label: str = "", *, is_first: bool = False) -> Way:
        asked = {**fixed, **values}
        decoding = preset.merged(asked) if preset else {**fitting_defaults(recommended_decoding(model), asked), **asked}
        label = label or ", ".join(f"{name} {value}" for name, value in values.items())
        return Way(label, decoding, DecodingParams(**decoding), is_first)

    combined = sweep(given)
    found = [way(values) for values in combined]
    if len(found) == 1 and not with_first:
        return found
    firsts = [way({**values, **ONE_TOKEN}, "one token a pass", is_first=True) for values in combined]
    return [*{first.params.block_size: first for first in firsts}.values(), *found]
