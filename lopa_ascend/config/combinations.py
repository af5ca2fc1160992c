"""What goes together: the values of parameters that a decoding takes, and rules between two parameters.

The classes of decodings declare both. ``python -m ci.decoding_table`` writes them into docs/decoding.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lopa_ascend.config.decodings import all_decodings, find_decoding, own_parameters, variants_of
from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.parameters import MIN_TEMPERATURE, UsualParams
from lopa_ascend.config.settings import Parameter, settings
from lopa_ascend.types import Grammar

IN_JSON = {"True": "true", "False": "false", "None": "null"}
"""How requests spell the values in messages."""
MAX_SHOWN = 100
"""Most characters of a value in a message."""
COMPARED = (str, int, float, tuple, list, Mapping, Grammar)
"""Types that are compared. The parameter's own check refuses others."""


@dataclass(frozen=True)
class Rule:
    """``param`` goes only with ``choices`` of the parameter ``needs``."""

    param: str
    needs: str
    choices: tuple[object, ...]
    free: tuple[object, ...] = ()
    """Values of ``param`` that go with everything, beside its default."""
    otherwise: object = None
    """The free value that replaces a default which does not go with a request; None: no value does."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether ``values`` keep the rule: all parameters by name, not necessarily checked."""
        value = values[self.param]
        if value is None or not isinstance(value, COMPARED) or _is_in(value, _with_default(self.param, self.free)):
            return True
        needed = values[self.needs]
        if self.needs == "temperature" and not is_sampling(needed):
            needed = 0
        return needed in self.choices

    def refusal(self, values: Mapping[str, Any]) -> ParameterError:
        """The error of parameters that break this rule: both values, and what can be used instead."""
        return _refusal(self.param, values, self.needs, self.choices, _with_default(self.param, self.free))


def rules_of(strategy: type[Any]) -> tuple[Rule, ...]:
    """The rules of a decoding; inherited ones come first."""
    return tuple(rule for owner in reversed(strategy.__mro__) for rule in vars(owner).get("rules", ()))


def declaration(name: str) -> Parameter:
    """The declaration of a usual parameter, or of some decoding's own."""
    found = settings(UsualParams).get(name) or own_parameters(all_decodings())[name]
    assert isinstance(found, Parameter)
    return found


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters by name, and the defaults of all others."""
    declared = {**own_parameters(all_decodings()), **settings(UsualParams)}
    return {**{name: setting.default for name, setting in declared.items()}, **values}


def values_taken(strategy: type[Any], name: str) -> tuple[object, ...] | None:
    """The values of a parameter that a decoding takes; None: all. A decoding without the parameter takes the default,
    or what ``Strategy.only`` says."""
    has_it = name in settings(strategy.parameters) or name in settings(UsualParams)
    values: tuple[object, ...] | None = None if has_it or declaration(name).is_inert else ()
    if name in strategy.told_apart_by:
        values = (getattr(strategy, name),)
    elif stated := [vars(owner)["only"] for owner in strategy.__mro__ if name in vars(owner).get("only", ())]:
        values = stated[0][name]
    if values is None or (values and not has_it):
        return values
    return tuple(dict.fromkeys((declaration(name).default, *values)))


def takes(strategy: type[Any], name: str, value: object) -> bool:
    """Whether a decoding takes a value, which need not be checked."""
    taken = values_taken(strategy, name)
    if taken is None or value is None or not isinstance(value, COMPARED):
        return True
    return _is_in(value, taken)


def decodings_that_take(name: str, value: object) -> tuple[str, ...]:
    """The decodings that take a value by default; if there are none, those with some class that does."""
    by_default, by_some = [], []
    for decoding, variants in all_decodings():
        taken = [takes(each, name, value) for each in variants]
        by_default += [decoding] if taken[0] or (any(taken) and name in variants[0].told_apart_by) else []
        by_some += [decoding] if any(taken) else []
    return tuple(by_default or by_some)


def check_combinations(strategy: type[Any], given: Mapping[str, Any]) -> None:
    """Raises ParameterError if two parameters contradict each other. Each in ``given`` is allowed by itself; all others
    have their defaults."""
    values = with_defaults(given)
    for name, value in given.items():
        if not takes(strategy, name, value):
            raise _misfit(strategy, name, values)
    for rule in rules_of(strategy):
        if not rule.holds(values):
            raise rule.refusal(values)
    if values["min_new_tokens"] > values["max_new_tokens"]:
        least, most = values["min_new_tokens"], values["max_new_tokens"]
        raise ParameterError("min_new_tokens", lambda spelt: f"{least} exceeds {spelt('max_new_tokens')} {most}")
    needed = strategy.confidence
    if needed is not None and values["confidence"] not in (needed, declaration("confidence").default):
        message = f'"{values["confidence"]}" does not go with decoding "{values["decoding"]}", which uses "{needed}"'
        raise ParameterError("confidence", message)


def _misfit(strategy: type[Any], name: str, values: Mapping[str, Any]) -> ParameterError:
    """The error of a value that a decoding does not take: what takes it, and which values this one takes."""
    other, choices = "decoding", decodings_that_take(name, values[name])
    usual, *others = variants_of(values["decoding"])
    if strategy is not usual and (taking := [each for each in (usual, *others) if takes(each, name, values[name])]):
        other = strategy.told_apart_by[0]
        choices = tuple(dict.fromkeys(getattr(each, other) for each in taking))
    free = tuple(value for value in values_taken(strategy, name) or () if value is not None)
    return _refusal(name, values, other, choices, free)


def _refusal(
    name: str, values: Mapping[str, Any], other: str, choices: tuple[object, ...], free: tuple[object, ...]
) -> ParameterError:
    def message(spelt: Callable[[str], str]) -> str:
        remedies = [f"use {spelt(other)} {listed(choices, spelt)}"] if choices else []
        if choices == (None,):
            remedies = [f"leave out {spelt(other)}"]
        if free:
            remedies.append(f"use {spelt(name)} {listed(free, spelt)}")
        advice = f"; {', or '.join(remedies)}" if remedies else ""
        found = f"{_shown(values[name], spelt)} does not go with {spelt(other)} {_shown(values[other], spelt)}"
        return found.strip() + advice

    return ParameterError(name, message)


def fitting_defaults(given: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The members of the defaults ``given`` that go with what a request has ``asked`` for, not checked yet.

    A default ``decoding`` always stays. If the request's does not exist, all defaults stay: ``DecodingParams`` refuses
    its name. ``min_new_tokens`` becomes at most the request's ``max_new_tokens``.

    Raises:
        ParameterError: the decoding's package cannot be loaded.
    """
    usable = dict(given)
    before = given.get("decoding", UsualParams.decoding)
    decoding = asked.get("decoding", before)
    try:
        strategy, usual = find_decoding(decoding, {**given, **asked}), find_decoding(before, given)
    except ValueError as error:
        raise ParameterError("decoding", str(error)) from error
    if strategy is None:
        return usable
    if decoding != before:
        usable.pop("num_branches", None)  # the default number is meant for the default decoding
    if usual is not None and strategy.base != usual.base:
        usable.pop("max_active_blocks", None)  # so is the default window
    if strategy.confidence is not None:
        usable.pop("confidence", None)
    for name in [name for name in usable if name not in asked and not takes(strategy, name, usable[name])]:
        del usable[name]
    for rule in rules_of(strategy):
        _make_room(rule, usable, asked)
    longest = asked.get("max_new_tokens")
    if "min_new_tokens" in usable and isinstance(longest, int):
        usable["min_new_tokens"] = max(0, min(usable["min_new_tokens"], longest))
    return usable


def _make_room(rule: Rule, usable: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Leaves out or replaces the default that breaks a rule."""
    droppable = [name for name in (rule.param, rule.needs) if name in usable and name not in asked]
    if not droppable or rule.holds(with_defaults({**usable, **asked})):
        return
    if droppable[0] == rule.param and rule.otherwise is not None:
        usable[rule.param] = rule.otherwise
    else:
        del usable[droppable[0]]


def is_sampling(temperature: Any) -> bool:
    return isinstance(temperature, int | float) and temperature >= MIN_TEMPERATURE


def _with_default(name: str, values: tuple[object, ...]) -> tuple[object, ...]:
    """These values, after the default if it is not None."""
    default = declaration(name).default
    return values if default is None or default in values else (default, *values)


def _is_in(value: object, values: tuple[object, ...]) -> bool:
    return (tuple(value) if isinstance(value, list) else value) in values


def _shown(value: object, spelt: Callable[[str], str] = str) -> str:
    """A value, shortened; nothing for a grammar: no client has sent it in this form."""
    if isinstance(value, Grammar):
        return ""
    text = f"{value:g}" if isinstance(value, float) else spelt(str(value))
    if isinstance(value, str | tuple):
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def listed(values: tuple[object, ...], spelt: Callable[[str], str] = str) -> str:
    """Values in words: "a" or "b"."""
    return " or ".join(_shown(value, spelt) for value in values)
