"""Which decoding parameters go together: one table, which refuses what contradicts itself and drops such defaults.

``python -m ci.decoding_table`` writes it into docs/decoding.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lopa_ascend.config.decodings import DECODINGS, PIPELINED, built_in_like, find_decoding, is_known, needed_confidence
from lopa_ascend.config.parameters import (
    ALGS,
    BASES,
    BRANCH_ACCEPTANCES,
    MIN_TEMPERATURE,
    ResearchParams,
    UsualParams,
)
from lopa_ascend.config.settings import ParameterError, settings
from lopa_ascend.types import Grammar

if TYPE_CHECKING:
    from lopa_ascend.config.decoding import DecodingParams

DEFAULTS = {
    name: setting.default for owner in (UsualParams, ResearchParams) for name, setting in settings(owner).items()
}
"""The default of each parameter by name."""
LIKE = "like"
"""In ``Rule.needs``: the decoding, or for one that is not built in the decoding that it is like."""
FILLER = "filler"
"""In ``Rule.needs``: the decoding whose rules fill positions, see ``filled_by``."""
IN_JSON = {"True": "true", "False": "false", "None": "null"}
"""How requests spell what messages of rules hold."""
MAX_SHOWN = 100
"""Most characters of a value in a message."""


@dataclass(frozen=True)
class Rule:
    """A parameter that goes with some values of another one only."""

    param: str
    needs: str
    """The other parameter, ``LIKE`` or ``FILLER``."""
    choices: tuple[object, ...]
    """The values of the other one."""
    free: tuple[object, ...] = ()
    """Values of ``param`` that go with everything, beside its default."""

    @property
    def free_values(self) -> tuple[object, ...]:
        """All values of ``param`` that go with everything, but for None."""
        default = DEFAULTS[self.param]
        return (() if default is None else (default,)) + self.free

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether parameters keep this rule. One whose value has a wrong type is left to the check of its own.

        Args:
            values: all parameters by name, not necessarily checked.
        """
        value = values[self.param]
        value = tuple(value) if isinstance(value, list) else value
        kinds = (str, int, float, tuple, Mapping, Grammar)
        if value is None or not isinstance(value, kinds) or value in self.free_values:
            return True
        return self._needed(values) in self.choices

    def _needed(self, values: Mapping[str, Any]) -> Any:
        if self.needs == LIKE:
            return built_in_like(values["decoding"])
        if self.needs == FILLER:
            return filled_by(values["decoding"], values["base"])
        if self.needs == "temperature" and not _is_sampling(values["temperature"]):
            return 0
        return values[self.needs]

    def refusal(self, values: Mapping[str, Any]) -> ParameterError:
        """The error of parameters that do not keep this rule: both values, and what can be used instead."""
        other, choices = self.needs, self.choices
        if other == FILLER and values["decoding"] == "lopa" and values["base"] != "d2f":
            other, choices = "base", tuple(base for base in BASES if base in self.choices)
        elif other in (LIKE, FILLER):
            other, choices = "decoding", self.decodings()
        remedies = [f"use {other} {listed(choices)}"] if choices else []
        if choices == (None,):
            remedies = [f"leave out {other}"]
        if self.free_values:
            remedies.append(f"use {self.param} {listed(self.free_values)}")
        advice = f"; {', or '.join(remedies)}" if remedies else ""
        found = f"{_shown(values[self.param])} does not go with {other} {_shown(values[other])}"
        return ParameterError(self.param, found.strip() + advice, names=(self.param, other, *IN_JSON))

    def decodings(self) -> tuple[str, ...]:
        """The built-in decodings that keep the rule, if it is about decodings."""
        return tuple(name for name in DECODINGS if self._needed({"decoding": name, "base": "d2f"}) in self.choices)


BY_BLOCKS = ("d2f", "parallel", "fast_dllm", "fast_dllm_v2")
"""Decodings that fill blocks by an acceptance rule."""
COMMITTING = ("d2f", "fast_dllm_v2")
"""Decodings that commit keys and values behind a window of blocks."""
RULES = (
    Rule("num_branches", LIKE, ("lopa",), free=(0,)),
    Rule("base", "decoding", ("lopa",)),
    Rule("branch_acceptance", "decoding", PIPELINED),
    Rule("branch_acceptance", FILLER, ("d2f",)),
    Rule("branch_acceptance", "temperature", (0,), free=("verified",)),  # a draw depends on the number of its pass
    Rule("lookahead_depth", "branch_acceptance", tuple(name for name in BRANCH_ACCEPTANCES if name != "published")),
    Rule("max_active_blocks", FILLER, ("d2f", "parallel")),
    Rule("window_attention", FILLER, COMMITTING, free=("full",)),  # all others see the whole canvas
    Rule("denoising_steps", FILLER, ("d2f", "parallel", "fast_dllm")),
    Rule("denoising_steps", "branch_acceptance", ("published",)),  # a pass that a branch saves would be counted
    Rule("editing_threshold", FILLER, ("d2f",)),
    Rule("editing_threshold", "tau_add", (1,)),  # the next block would open beside one that is not final
    Rule("max_post_steps", FILLER, ("d2f",)),
    Rule("sub_block_size", FILLER, ("fast_dllm_v2",)),
    Rule("sub_block_cache", "decoding", ("fast_dllm_v2",)),
    Rule("acceptance", FILLER, BY_BLOCKS),
    Rule("confidence", FILLER, BY_BLOCKS),
    Rule("acceptance", FILLER, ("d2f",), free=("factor", "entropy")),  # "sequential" fills as many as a pass must
    Rule("acceptance", "confidence", ("neg_entropy",), free=("factor", "sequential")),
    Rule("eos_last", "decoding", ("parallel", "fast_dllm")),
    Rule("block_cache", FILLER, ("fast_dllm",)),
    Rule("steps", FILLER, ("vanilla",)),
    Rule("alg", FILLER, ("vanilla",)),
    Rule("alg_temp", FILLER, ("vanilla",)),
    Rule("structured_outputs", FILLER, BY_BLOCKS),  # any order of positions would leave no prefix to follow
    Rule("max_thinking_tokens", FILLER, BY_BLOCKS),
    # A grammar says where the answer ends. What it has passed may not change, and a span that it forces would leave out
    # a block's first pass.
    *(
        Rule(name, grammar, (None,))
        for grammar in ("structured_outputs", "max_thinking_tokens")
        for name in ("ignore_eos", "finish_at_eos", "editing_threshold", "sub_block_cache")
    ),
    Rule("alg_temp", "alg", tuple(alg for alg in ALGS if alg != "origin")),  # it ranks nothing
)


def filled_by(decoding: str, base: str) -> str:
    """The built-in decoding whose rules fill the positions. "lopa" has those of its base; a decoding that is not built
    in has those of the one that it is like."""
    if decoding == "lopa":
        return base
    like = built_in_like(decoding)
    return "d2f" if like == "lopa" else like


def check_combinations(params: DecodingParams) -> None:
    """Checks parameters, each of which is allowed by itself.

    Raises:
        ParameterError: two of them contradict each other; the message names both.
    """
    values = vars(params)
    for rule in RULES:
        if not rule.holds(values):
            raise rule.refusal(values)
    if params.min_new_tokens > params.max_new_tokens:
        message = f"{params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}"
        raise ParameterError("min_new_tokens", message, names=("max_new_tokens",))
    needed = needed_confidence(params.decoding)
    if needed is not None and params.confidence not in (needed, DEFAULTS["confidence"]):
        message = f'"{params.confidence}" does not go with decoding "{params.decoding}", which uses "{needed}"'
        raise ParameterError("confidence", message)
    if params.decoding not in DECODINGS and (strategy := find_decoding(params.decoding)) is not None:
        strategy.check(params)


def fitting_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that can be used together with what a request asks for. The others are left out.

    A default ``decoding`` stays in any case. With one that does not exist all defaults stay: ``DecodingParams`` refuses
    its name. "exact" becomes "verified" for a request that samples, and ``min_new_tokens`` becomes at most the
    request's ``max_new_tokens``.

    Args:
        defaults: decoding parameters by name.
        asked: the parameters that the request sets itself, in place of defaults. They are not checked yet.

    Raises:
        ParameterError: the decoding is that of another package, which cannot be loaded.
    """
    usable = dict(defaults)
    decoding = {**DEFAULTS, **defaults, **asked}["decoding"]
    try:
        if not is_known(decoding):
            return usable
    except ValueError as error:
        raise ParameterError("decoding", str(error)) from error
    if decoding != defaults.get("decoding", DEFAULTS["decoding"]):
        usable.pop("num_branches", None)  # the default number is meant for the default decoding
    if _filler({**defaults, **asked}) != _filler(defaults):
        usable.pop("max_active_blocks", None)  # so is the default window
    if needed_confidence(decoding) is not None:
        usable.pop("confidence", None)
    if usable.get("branch_acceptance") == "exact" and _is_sampling(asked.get("temperature")):
        usable["branch_acceptance"] = "verified"
    for rule in RULES:
        droppable = [name for name in (rule.param, rule.needs) if name in usable and name not in asked]
        if droppable and droppable[0] != "decoding" and not rule.holds({**DEFAULTS, **usable, **asked}):
            del usable[droppable[0]]
    longest = asked.get("max_new_tokens")
    if "min_new_tokens" in usable and isinstance(longest, int):
        usable["min_new_tokens"] = max(0, min(usable["min_new_tokens"], longest))
    return usable


def _filler(values: Mapping[str, Any]) -> str:
    """``filled_by`` of parameters without defaults."""
    return filled_by(*({**DEFAULTS, **values}[name] for name in ("decoding", "base")))


def _is_sampling(temperature: Any) -> bool:
    return isinstance(temperature, int | float) and temperature >= MIN_TEMPERATURE


def _shown(value: object) -> str:
    """A value, shortened; nothing for a grammar, which is no value that somebody has sent."""
    if isinstance(value, Grammar):
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, str | tuple):
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def listed(values: tuple[object, ...]) -> str:
    """Values in words: "a" or "b"."""
    return " or ".join(map(_shown, values))
