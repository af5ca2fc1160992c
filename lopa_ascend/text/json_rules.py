"""Writes a JSON schema as rules of a Lark grammar, for compact JSON in the schema's order of properties.

A schema is taken apart into *cases*: a type, and all schemas ("facts") that restrict a value of that type. What several
facts say together is found when a case is written. Of a schema llguidance sees only strings and multiples: numbers are
exact, and a keyword that restricts is never left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.text.schemas import MAX_DEPTH, MAX_VALUES, Schema, parts

Fact = dict[Any, Any]
Case = tuple[str, tuple[Fact, ...]]
View = tuple[Schema, ...]
"""Schemas that one value keeps to, all of them."""

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_CASES = 4096
MAX_WORK = 300_000
"""Most pairs of cases that are looked at."""
MAX_RULES = 20_000
MAX_LOOK = 3
"""Levels below a value at which it is seen that there is none."""
DIGITS, EXPONENT, MOST_DIGITS = 19, 3, 40
"""Digits of a number before the point, and after it, and of its exponent; and with a bound that asks more of them."""
MAX_MULTIPLE = 100_000
MAX_TIMES = 2**31 - 1
FORMATS = ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "regex")
"""Those that are kept to; others are annotations."""
EXCEPT, UNLIKE, FRACTION = ("except",), ("unlike",), ("fraction",)
"""Keys that only our facts have: a text that is excluded, a pattern that is found nowhere, a number is no integer."""

_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTED = (("string", "Length"), ("array", "Items"), ("object", "Properties"))
_UNSUPPORTED = ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
_REFERRING = {"$ref", "$defs", "definitions", "title", "description", "default", "$schema", "$id", "id", "examples"}

_PLAIN = r'[^"\\\x00-\x1f]'
STRING = rf'/"({_PLAIN}|\\["\\bfnrt]|\\u00(0[0-7be-f]|1[0-9a-f]))*"/'
_REGEX = r"^(([^\\\[\](){}*+?|^$]|\\[dswDSW\\.*+?^$|()\[\]{}/]|\[\^?(a-z|A-Z|0-9|[^\[\]\\^-])+\])[*+?]?|[|^$])*$"
"""Plain expressions, which every dialect reads alike."""
WHOLE, PART = "(0|[1-9][0-9]{{0,{}}})", r"(\.[0-9]{{1,{}}})?"
INTEGER = f"/-?{WHOLE.format(DIGITS - 1)}/"
NUMBER = f"/-?{WHOLE.format(DIGITS - 1)}{PART.format(DIGITS)}([eE][+-]?[0-9]{{1,{EXPONENT}}})?/"


class Refused(Exception):
    """No rule says what a part of a schema does."""

    def __init__(self, part: Schema, reason: str):
        super().__init__(reason)
        self.part = part


def json_rules(schema: Schema, name: str) -> list[str]:
    """The rules of a schema; their names begin with ``name``, that of the first. Raises ParameterError with the place
    of what is wrong, not supported or too large."""
    places = {id(part): place for place, part in parts(schema) if isinstance(part, dict)}
    try:
        return _Writer(schema, name, places).rules()
    except Refused as refused:
        raise ParameterError(places.get(id(refused.part), ()), str(refused)) from None
    except RecursionError:
        raise ParameterError((), "has references or parts that are nested too deeply") from None


Bound = tuple[Decimal, bool]
"""A number, and whether it is excluded itself."""


_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|%json\s*')


def with_json_rules(grammar: str) -> str:
    """A Lark grammar with rules in place of the JSON schemas in it. Raises as ``json_rules`` does."""
    pieces: list[str] = []
    rules: list[str] = []
    position = 0
    while found := _LARK.search(grammar, position):
        pieces.append(grammar[position : found.end()])
        position = found.end()
        if found[0].startswith("%json"):
            try:
                schema, position = json.JSONDecoder().raw_decode(grammar, position)
                json.dumps(schema, allow_nan=False)
            except (ValueError, RecursionError) as error:
                raise ParameterError((), f"%json: {error}") from None
            name = f"json{len(rules)}"
            while name in grammar:  # so that no other rule has the name
                name += "_"
            rules.append("\n".join(json_rules(schema, name)))
            pieces[-1] = pieces[-1].removesuffix(found[0]) + name
    return "\n".join(["".join([*pieces, grammar[position:]]), *rules])


class _Cases:
    """Takes schemas apart. References begin at ``root``. ``places`` has its objects by identity, and references'
    too."""

    def __init__(self, root: Schema, places: dict[int, FieldPath]):
        self._root, self._places = root, places
        self._known: dict[int, tuple[Schema, list[Case] | None]] = {}
        """By identity, which the schema beside it keeps; None while they are being found."""
        self._of: dict[tuple[int, ...], list[Case]] = {}
        self._work = self._depth = 0
        self.void: set[tuple[int, ...]] = set()
        """Views that no value keeps to, so far as that has been found."""

    # ---- cases -------------------------------------------------------------------------------------------------------

    def of(self, view: View) -> list[Case]:
        """The cases of values that keep to all schemas."""
        view = self.canonical(view)
        key = (self._depth, *key_of(view))
        if key not in self._of:
            found = self.cases(True)
            for schema in view:
                found = self._both(found, self.cases(schema), schema)
            self._of[key] = found
        return self._of[key]

    def cases(self, schema: Schema) -> list[Case]:
        if isinstance(schema, bool):
            return [(kind, ()) for kind in TYPES] if schema else []
        if not isinstance(schema, dict):
            raise Refused(schema, f"a schema must be an object or a bool, got {json.dumps(schema)[:50]}")
        if id(schema) in self._known:
            if (found := self._known[id(schema)][1]) is None:
                raise Refused(schema, "refers to itself, with no property or item in between")
            return found
        self._known[id(schema)] = (schema, None)
        try:
            found = [(kind, (schema,)) for kind in _checked_types(schema)]
            for more in self._applied(schema, found):
                found = self._both(found, more, schema)
        except Refused as refused:
            del self._known[id(schema)]
            raise Refused(refused.part if id(refused.part) in self._places else schema, str(refused)) from None
        self._known[id(schema)] = (schema, found)
        return found

    def _applied(self, schema: Fact, plain: Sequence[Case]) -> Iterator[list[Case]]:
        """The cases of each schema that a schema applies to the same value, of which the rest says ``plain``."""
        says = {keyword: value for keyword, value in schema.items() if value is not None}
        if "$ref" in says:
            yield self.cases(self.target(schema))
        if "const" in schema:
            yield [_value(schema["const"])]
        if "enum" in says:
            yield [_value(value) for value in says["enum"]]
        for part in says.get("allOf", ()):
            yield self.cases(part)
        if "anyOf" in says:
            yield [case for part in says["anyOf"] for case in self.cases(part)]
        if "oneOf" in says:
            yield self._exclusive(schema, [self._both(plain, self.cases(part), schema) for part in says["oneOf"]])
        if "not" in says:
            yield self._outside(self.cases(says["not"]), schema)
        if "if" in says and ("then" in says or "else" in says):
            condition = self.cases(says["if"])
            met = self._both(condition, self.cases(says.get("then", True)), schema)
            yield met + self._both(self._outside(condition, schema), self.cases(says.get("else", True)), schema)
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needed in says.get(keyword, {}).items():
                needed = {"required": needed} if isinstance(needed, list) else needed
                yield self.cases({"properties": {name: False}}) + self.cases(needed)

    def target(self, schema: Fact) -> Schema:
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise Refused(schema, "$ref: must be a text")
        root, place = self._document(schema)
        base = root.get("$id") or root.get("id")
        pointer = unquote(reference.removeprefix(base.partition("#")[0]) if isinstance(base, str) else reference)
        anchor, *steps = pointer.removeprefix("#").split("/")
        if anchor and pointer.startswith("#"):
            for _, part in parts(root):
                names = [part.get("$id"), part.get("id"), f"#{part.get('$anchor')}"] if isinstance(part, dict) else []
                if pointer in names:
                    return part
        if not pointer.startswith("#") or anchor:
            raise Refused(schema, f"$ref: {reference[:100]!r} is not in the schema; write it as #/...")
        steps = [] if steps == [""] else [step.replace("~1", "/").replace("~0", "~") for step in steps]
        try:
            below = _below(root, steps)
        except (LookupError, TypeError, ValueError):
            try:  # for many who write "$id" it is only a name
                root, place, below = self._root, (), _below(self._root, steps)
            except (LookupError, TypeError, ValueError):
                raise Refused(schema, f"$ref: {reference[:100]!r} points to nothing") from None
        found = below[-1][1] if below else root
        if isinstance(found, dict) and id(found) not in self._places:
            found_parts = parts(found, (*place, *(step for step, _ in below)))
            self._places.update({id(part): place for place, part in found_parts if isinstance(part, dict)})
        return found

    def _document(self, schema: Fact) -> tuple[Schema, FieldPath]:
        """What references in a part begin at, and its place: the innermost part around it with an "$id"."""
        place = self._places.get(id(schema), ())
        found: tuple[Schema, FieldPath] = self._root, ()
        for number, (_, part) in enumerate(_below(self._root, place), 1):
            name = part.get("$id") if isinstance(part, dict) else None
            if isinstance(name, str) and not name.startswith("#"):
                found = part, place[:number]
        return found

    def _both(self, some: Sequence[Case], others: Sequence[Case], part: Schema) -> list[Case]:
        """The cases of values that are in both."""
        found: dict[Any, Case] = {}
        self._work += len(some) * len(others)
        for kind, facts in some:
            for other, more in others:
                if kind == other:
                    together = {id(fact): fact for fact in (*facts, *more)}
                    key = (kind, *together)
                    if key not in found and not self.is_void((kind, tuple(together.values()))):
                        found[key] = (kind, tuple(together.values()))
        if len(found) > MAX_CASES or self._work > MAX_WORK:
            raise Refused(part, "its parts have too many combinations")
        return list(found.values())

    def _exclusive(self, schema: Fact, options: Sequence[list[Case]]) -> list[Case]:
        """The cases of values that are in exactly one of several."""
        found: list[Case] = []
        for index, one in enumerate(options):
            for number, other in enumerate(options):
                if index != number and self._both(one, other, schema):
                    try:
                        one = self._both(one, self._outside(other, schema), schema)
                    except Refused:
                        message = f"oneOf: its parts {index} and {number} may both take a value, for all that is seen"
                        advice = "send anyOf, or require a property that has another const in each part"
                        raise Refused(schema, f"{message}; {advice}") from None
            found += one
        return found

    def _outside(self, cases: Sequence[Case], part: Schema) -> list[Case]:
        found = self.cases(True)
        for kind, facts in cases:
            rest: list[Case] = [(other, ()) for other in TYPES if other != kind]
            rest += [(kind, (opposite,)) for fact in facts for opposite in _opposites(kind, fact)]
            found = self._both(found, rest, part)
        return found

    # ---- what no value keeps to --------------------------------------------------------------------------------------

    def is_empty(self, view: View) -> bool:
        """Whether no value keeps to all schemas, as far as it is seen a few levels deep."""
        if key_of(self.canonical(view)) in self.void:
            return True
        if self._depth == MAX_LOOK:
            return False
        self._depth += 1
        try:
            return not self.of(view)
        except Refused:  # if it is needed, its rule says so
            return False
        finally:
            self._depth -= 1

    def is_void(self, case: Case, is_empty: Callable[[View], bool] | None = None) -> bool:
        kind, facts = case
        is_empty = is_empty or self.is_empty
        if kind == "array":
            least, most = counts(facts, "Items")
            needed = range(min(least, _num_first(facts) + 1))
            return least > most or any(is_empty(item(facts, index)) for index in needed)
        if kind == "object":
            names, most = _required(facts), counts(facts, "Properties")[1]
            return len(names) > most or any(is_empty(self.named(facts, name)) for name in names)
        try:
            return scalar(kind, facts) is None
        except Refused:
            return False

    def canonical(self, view: View) -> View:
        """Schemas that mean the same, each once and in place of a reference to it."""
        found: dict[int, Schema] = {}
        for schema in view:
            for _ in range(MAX_DEPTH):
                if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - _REFERRING:
                    break
                schema = self.target(schema)
            if schema is not True:
                found[id(schema)] = schema
        return tuple(found.values())

    def named(self, facts: Sequence[Fact], name: str) -> View:
        found: list[Schema] = []
        for fact in facts:
            own = [fact["properties"][name]] if name in (fact.get("properties") or ()) else []
            own += [part for pattern, part in (fact.get("patternProperties") or {}).items() if _finds(pattern, name)]
            found += own or [_rest(fact, "additionalProperties")]
            if (names := fact.get("propertyNames")) is not None:
                fits = any(_fits(name, facts) for kind, facts in self.cases(names) if kind == "string")
                found.append(fits)
        return tuple(found)


def _below(root: Schema, steps: Sequence[str | int]) -> list[tuple[str | int, Schema]]:
    """The steps from a schema on, and where each leads. A text may stand for an index, as in a JSON pointer."""
    found: list[tuple[str | int, Schema]] = []
    for step in steps:
        step = int(step) if isinstance(root, list) else step
        root = root[step]
        found.append((step, root))
    return found


def key_of(view: View) -> tuple[int, ...]:
    return tuple(map(id, view))


def item(facts: Sequence[Fact], index: int) -> View:
    found = []
    for fact in facts:
        first, rest = _items(fact)
        found.append(first[index] if index < len(first) else rest)
    return tuple(found)


def _num_first(facts: Sequence[Fact]) -> int:
    return max((len(_items(fact)[0]) for fact in facts), default=0)


def _items(fact: Fact) -> tuple[list[Schema], Schema]:
    """The schemas of the first items, and that of the others."""
    if isinstance(fact.get("items"), list):
        return fact["items"], _rest(fact, "additionalItems")
    return fact.get("prefixItems") or [], _rest(fact, "items")


def _rest(fact: Fact, keyword: str) -> Schema:
    return True if fact.get(keyword) is None else fact[keyword]


def _required(facts: Iterable[Fact]) -> dict[str, None]:
    return {name: None for fact in facts for name in fact.get("required") or ()}


def counts(facts: Iterable[Fact], what: str) -> tuple[int, float]:
    least = [int(fact["min" + what]) for fact in facts if fact.get("min" + what) is not None]
    most = [fact["max" + what] for fact in facts if fact.get("max" + what) is not None]
    return max(least, default=0), min(most, default=float("inf"))


def _value(value: Any) -> Case:
    if isinstance(value, list):
        items = [{"const": one} for one in value]
        return "array", ({"prefixItems": items, "items": False, "minItems": len(items)},)
    if isinstance(value, dict):
        properties = {name: {"const": one} for name, one in value.items()}
        return "object", ({"properties": properties, "required": list(value), "additionalProperties": False},)
    kind = "null" if value is None else "boolean" if isinstance(value, bool) else "number"
    return "string" if isinstance(value, str) else kind, ({"const": value},)


def _checked_types(schema: Fact) -> list[str]:
    """The types that a schema names, after a look at what else it says."""
    for keyword, value in schema.items():
        if value is None:
            continue
        if keyword in _UNSUPPORTED and value is not True:
            raise Refused(schema, f"{keyword} is not supported")
        for keywords, fits, form in _FORMS:
            if keyword in keywords and not fits(value):
                raise Refused(schema, f"{keyword}: must be {form}, got {json.dumps(value)[:50]}")
    types = schema.get("type") or TYPES
    named = {"number" if kind == "integer" else kind for kind in ([types] if isinstance(types, str) else types)}
    return [kind for kind in TYPES if kind in named]


def _are_types(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(kind in (*TYPES, "integer") for kind in kinds)


_FORMS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        lambda value: _is_number(value) and value >= 0 and value == int(value),
        "a whole number from 0",
    ),
    (("minimum", "maximum"), lambda value: _is_number(value), "a number"),
    (("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float), "a number"),
    (("multipleOf",), lambda value: _is_number(value) and value > 0, "a number above 0"),
    (("enum",), lambda value: isinstance(value, list) and len(value) <= MAX_VALUES, f"up to {MAX_VALUES} values"),
    (("allOf", "anyOf", "oneOf", "prefixItems"), lambda value: isinstance(value, list), "a list"),
    (
        ("required",),
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of texts",
    ),
    (
        ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"),
        lambda value: isinstance(value, dict),
        "an object",
    ),
    (
        ("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"),
        lambda value: isinstance(value, dict | bool | list),
        "an object or a bool",
    ),
    (("pattern", "$ref"), lambda value: isinstance(value, str), "a text"),
    (("type",), _are_types, f"one of {', '.join(TYPES)}, integer, or a list of these"),
)


def _opposites(kind: str, fact: Fact) -> Iterator[Fact]:
    """Facts, one of which holds wherever ``fact`` does not."""
    said = {keyword: value for keyword, value in fact.items() if value is not None}
    for keyword in _WITHOUT_OPPOSITE.get(kind, ()):
        if said.get(keyword, True) is not True:
            raise Refused(fact, f"not: the opposite of {keyword} is not supported")
    if "const" in fact and kind in _OTHER_CONSTS:
        yield from _OTHER_CONSTS[kind](fact["const"])
    elif kind == "number":
        yield from ({FRACTION: True} for _ in range(_is_whole(fact)))
        for bound, strict, other, other_strict in (_LOW + _HIGH, _HIGH + _LOW):
            if bound in said:
                yield {other if said.get(strict) is True else other_strict: said[bound]}
            if _is_number(said.get(strict)):
                yield {other: said[strict]}
    elif kind == "object":
        yield from ({"properties": {name: False}} for name in said.get("required", ()))
        yield from (
            {"properties": {name: {"not": part}}, "required": [name]}
            for name, part in said.get("properties", {}).items()
        )
    yield from ({other: how(said[key])} for of, key, other, how in _OTHERS if of == kind and key in said)


_OTHER_CONSTS: dict[str, Callable[[Any], list[Fact]]] = {
    "null": lambda _: [],
    "boolean": lambda value: [{"const": not value}],
    "number": lambda value: [{"exclusiveMinimum": value}, {"exclusiveMaximum": value}],
    "string": lambda value: [{EXCEPT: value}],
}
_OTHERS: tuple[tuple[str, Any, Any, Callable[[Any], Any]], ...] = (
    ("string", EXCEPT, "const", lambda value: value),
    ("string", "pattern", UNLIKE, lambda value: value),
    ("string", UNLIKE, "pattern", lambda value: value),
    ("array", "items", "contains", lambda part: {"not": part}),
    ("array", "contains", "items", lambda part: {"not": part}),
    *((kind, f"min{what}", f"max{what}", lambda count: count - 1) for kind, what in _COUNTED),
    *((kind, f"max{what}", f"min{what}", lambda count: count + 1) for kind, what in _COUNTED),
)
_WITHOUT_OPPOSITE = {
    "number": ("multipleOf",),
    "array": ("prefixItems", "uniqueItems"),
    "object": ("additionalProperties", "patternProperties", "propertyNames"),
}


# ---- texts and numbers -----------------------------------------------------------------------------------------------


def scalar(kind: str, facts: Sequence[Fact]) -> str | None:
    """A terminal, or from "%json" a rule, of a type's values, without arrays and objects; None if there are none."""
    consts = [fact["const"] for fact in facts if "const" in fact]
    if consts:
        return literal(consts[0]) if _fits(consts[0], facts) else None
    if kind == "number":
        return _number(facts)
    if kind == "string":
        return _string(facts)
    return '"null"' if kind == "null" else '"true" | "false"'


def literal(value: Any) -> str:
    """A terminal of the JSON of a value, with its digits as they are."""
    text = json.dumps(value, ensure_ascii=False)
    if not text.isascii() and any(0xD800 <= ord(character) < 0xE000 for character in text):
        text = json.dumps(value)
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, facts: Iterable[Fact]) -> bool:
    """Whether a value other than a list and an object keeps to facts about values of its type."""
    for fact in facts:
        if fact.get("const", value) != value or (EXCEPT in fact and fact[EXCEPT] == value):
            return False
        if _is_number(value):
            low, high, whole, multiples = _limits([fact])
            exact = _exact(value)
            is_in = all(exact > bound or (exact == bound and not strict) for bound, strict in low)
            is_in &= all(exact < bound or (exact == bound and not strict) for bound, strict in high)
            if (
                not is_in
                or (exact % 1 if whole else FRACTION in fact and not exact % 1)
                or any(Fraction(exact) % Fraction(one) for one in multiples)
            ):
                return False
        if isinstance(value, str):
            least, most = counts([fact], "Length")
            is_found = fact.get("pattern") is None or _finds(fact["pattern"], value)
            if not least <= len(value) <= most or not is_found or (UNLIKE in fact and _finds(fact[UNLIKE], value)):
                return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(fact: Fact) -> bool:
    types = fact.get("type") or ()
    return types == "integer" or ("integer" in types and "number" not in types)


def _exact(value: float) -> Decimal:
    return Decimal(repr(value))


def _finds(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(None, f"pattern: {pattern[:100]!r}: {error}") from None


def _limits(facts: Iterable[Fact]) -> tuple[list[Bound], list[Bound], bool, list[Decimal]]:
    """Lower bounds, upper bounds, whether only integers are meant, and of what the values are multiples."""
    low: list[Bound] = []
    high: list[Bound] = []
    whole, multiples = False, []
    for fact in facts:
        for found, (bound, strict) in ((low, _LOW), (high, _HIGH)):
            if fact.get(bound) is not None:
                found.append((_exact(fact[bound]), fact.get(strict) is True))
            if _is_number(fact.get(strict)):
                found.append((_exact(fact[strict]), True))
        whole |= _is_whole(fact)
        if fact.get("multipleOf") is not None:
            multiples.append(_exact(fact["multipleOf"]))
    return low, high, whole, multiples


def _number(facts: Sequence[Fact]) -> str | None:
    lows, highs, whole, multiples = _limits(facts)
    is_fraction = any(FRACTION in fact for fact in facts)
    if is_fraction and (whole or multiples):
        return None
    if not (lows or highs or multiples or is_fraction):
        return INTEGER if whole else NUMBER
    low, high = max(lows, default=None), min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)
    whole |= any(one % 1 == 0 for one in multiples)
    if whole:  # the first and the last integer
        low = low and (Decimal(math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])), False)
        high = high and (Decimal(math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])), False)
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    places = [0] * whole + [-one.adjusted() for one in multiples if one.normalize().as_tuple().digits == (1,)]
    multiples = [one for one in dict.fromkeys(multiples) if one > 1 or one.normalize().as_tuple().digits != (1,)]
    if multiples:
        return _multiple(multiples, whole, low, high)
    if not whole:
        low, high = _inside_bound(low, math.inf), _inside_bound(high, -math.inf)
    above = "" if high and (high[0] < 0 or (high[0] == 0 and high[1])) else _magnitude(low, high, is_fraction, places)
    least, most = (bound and (-bound[0], bound[1]) for bound in (high, low))
    below = "" if low and low[0] >= 0 else f'"-" {_magnitude(least, most, is_fraction, places)}'
    return " | ".join(filter(None, (above, below)))


def _inside_bound(bound: Bound | None, towards: float) -> Bound | None:
    """A bound that is allowed itself: the next 64-bit float. What rounds to an excluded one is excluded too."""
    if bound is None or not bound[1] or not bound[0]:
        return bound
    return _exact(math.nextafter(float(bound[0]), towards)), False


def _magnitude(low: Bound | None, high: Bound | None, is_fraction: bool, most_places: Sequence[int]) -> str:
    """A terminal of the numbers from 0 between two bounds, without exponents."""
    terms, digits, places = [r"/.*\.0*[1-9].*/"] * is_fraction, DIGITS, DIGITS
    for bound, above in ((low, True), (high, False)):
        if bound is None or (above and (bound[0] < 0 or (bound[0] == 0 and not bound[1]))):
            continue
        before, _, after = f"{bound[0]:f}".partition(".")
        if len(before) > MOST_DIGITS and not above:
            continue  # beyond all numbers that are written
        if max(len(before), len(after)) > MOST_DIGITS or (is_fraction and (len(before) > 9 or len(after) > 6)):
            raise Refused(None, f"the bound {bound[0]:.6g} has too many digits")
        digits, places = max(digits, len(before) + above), max(places, len(after) + 1)
        terms.append(_side(before, after.rstrip("0"), above, bound[1]))
    if is_fraction:  # which no 64-bit float rounds away
        digits, places = 9, 6
    places = min(places, *most_places, places)
    form = WHOLE.format(digits - 1) + (PART.format(places) if places > 0 else "")
    return f"({' & '.join([f'/{form}/', *terms])})"


def _side(before: str, after: str, above: bool, strict: bool) -> str:
    """An expression of the decimals above or below one from 0 on. ``before`` and ``after`` are its digits around the
    point, without zeros at the end; ``strict``: without itself. Leading zeros and the number of digits may be any."""
    length = len(before)
    wholes = [*_differing(before, above, "[0-9]{{{}}}")]
    if above or length > 1:
        wholes.append(f"[1-9][0-9]{{{length},}}" if above else f"[0-9]{{1,{length - 1}}}")
    parts_ = [*_differing(after, above, "[0-9]*")]
    if above:
        parts_.append(after + ("[0-9]*[1-9][0-9]*" if strict else "[0-9]*"))
    else:
        parts_ += [after[:end] for end in range(1, len(after))] + ([] if strict else [after + "0*"])
    ways = [rf"({'|'.join(wholes)})(\.[0-9]+)?"] if wholes else []
    ways += [rf"{before}\.({'|'.join(parts_)})"] if parts_ else []
    ways += [before] if (not above if after else not strict) else []
    return f"/{'|'.join(ways)}/"


def _differing(digits: str, above: bool, rest: str) -> Iterator[str]:
    """Expressions of the digits that are first greater, or first less, in each place."""
    for index, digit in enumerate(map(int, digits)):
        low, high = (digit + 1, 9) if above else (0, digit - 1)
        if low <= high:
            yield f"{digits[:index]}[{low}-{high}]{rest.format(len(digits) - index - 1)}"


def _multiple(multiples: Sequence[Decimal], whole: bool, low: Bound | None, high: Bound | None) -> str:
    """As llguidance writes it, which computes with 64-bit floats."""
    [multiple], others = multiples[:1], multiples[1:]
    value, places = float(multiple), 0
    while value % 1 and places < 10:
        value, places = value * 10, places + 1
    if others or Decimal(int(value)).scaleb(-places) != multiple or value > MAX_MULTIPLE:
        message = f"multipleOf: must be one number up to {MAX_MULTIPLE}, or of so many digits, got"
        raise Refused(None, f"{message} {', '.join(map(str, multiples))}")
    says: dict[str, Any] = {"type": "integer" if whole else "number", "multipleOf": float(multiple)}
    for bound, names, sign in ((low, _LOW, -1), (high, _HIGH, 1)):
        bound = bound or (Decimal(sign * 10**15), False)
        if abs(bound[0]) > 2**53:
            raise Refused(None, "multipleOf: bounds beyond 2^53 beside it are not supported")
        says[names[bound[1]]] = int(bound[0]) if whole else float(bound[0])
    return _leaf(says)


def _leaf(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})


def _string(facts: Sequence[Fact]) -> str | None:
    least, most = counts(facts, "Length")
    if least > most:
        return None
    patterns = [{"pattern": fact["pattern"]} for fact in facts if fact.get("pattern") is not None]
    formats = [
        {"pattern": _REGEX} if fact["format"] == "regex" else {"format": fact["format"]}
        for fact in facts
        if fact.get("format") in FORMATS
    ]
    excluded = [fact[EXCEPT] for fact in facts if EXCEPT in fact]
    is_bounded = bool(patterns or formats or least or most < math.inf)
    if any(UNLIKE in fact for fact in facts) or (excluded and is_bounded):
        if formats:
            raise Refused(None, "not: beside a format is not supported")
        return rf'"\"" {_inside(facts)} "\""'
    if excluded:
        return f"{STRING} & ~({' | '.join(map(literal, excluded))})"
    if not is_bounded:
        return STRING
    lengths = {"minLength": least, **({"maxLength": most} if most < 2**31 else {})}
    return _leaf({"type": "string", **lengths, "allOf": patterns + formats})


def _inside(facts: Sequence[Fact], without: Iterable[str] = ()) -> str:
    """A terminal of the texts that facts say, of characters that JSON does not escape; without some."""
    least, most = counts(facts, "Length")
    terms = [f"/{_PLAIN}{{{least},{most if most < math.inf else ''}}}/"]
    for fact in facts:
        terms += [json.dumps(fact["const"])] if "const" in fact else []
        terms += [_search(fact["pattern"])] if fact.get("pattern") is not None else []
        terms += [f"~{_search(fact[UNLIKE], is_ascii=False)}"] if UNLIKE in fact else []
        terms += [f"~{json.dumps(fact[EXCEPT])}"] if fact.get(EXCEPT) else []
    names = " | ".join(json.dumps(name, ensure_ascii=False) for name in without if name)
    return f"({' & '.join(terms + ([f'~({names})'] if names else []))})"


_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _search(pattern: str, is_ascii: bool = True) -> str:
    """An expression of the texts in which a pattern is found. ``is_ascii``: "\\w" and "\\d" mean ASCII alone."""
    depth = 0
    ways: list[list[str]] = [[]]
    written = {"/": r"\/", "\n": r"\n", "\r": r"\r", **({r"\d": "[0-9]", r"\w": "[a-zA-Z0-9_]"} if is_ascii else {})}
    for token in _TOKEN.findall(pattern):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "|" and depth == 0:
            ways.append([])
            continue
        ways[-1].append(re.sub(r"\\.|[/\n\r]", lambda found: written.get(found[0], found[0]), token, flags=re.DOTALL))
    texts = []
    for way in ways:
        begin, end = way[:1] == ["^"], way[-1:] == ["$"]
        inner = way[begin : len(way) - end]
        if "^" in inner or "$" in inner:
            raise Refused(None, f"pattern: {pattern[:100]!r} has ^ or $ inside, which is not supported here")
        texts.append(("" if begin else "(?s:.*)") + f"(?:{''.join(inner)})" + ("" if end else "(?s:.*)"))
    return f"/{'|'.join(texts)}/"


# ---- rules -----------------------------------------------------------------------------------------------------------


class _Writer(_Cases):
    """Writes rules, whose names begin with ``name``."""

    def __init__(self, root: Schema, name: str, places: dict[int, FieldPath]):
        super().__init__(root, places)
        self._name = name

    def rules(self) -> list[str]:
        while True:
            self._texts: dict[str, str] = {}
            self._views: dict[tuple[int, ...], tuple[str, View]] = {}
            self._queue: list[View] = []
            self.rule((self._root,))
            found, num_void = [], len(self.void)
            for view in self._queue:  # which grows
                body = self._body(view)
                if body is None:
                    self.void.add(key_of(view))
                found.append(f"{self._views[key_of(view)][0]}: {body}")
                if len(found) + len(self._texts) > MAX_RULES:
                    raise Refused(None, f"is too large: it has more than {MAX_RULES} rules")
            self.void |= self._endless()
            if key_of(self._queue[0]) in self.void:
                raise Refused(self._root, "no value keeps to it")
            if len(self.void) == num_void:
                return found + [f"{name}: {text}" for text, name in self._texts.items()]

    def _endless(self) -> set[tuple[int, ...]]:
        """The views that no value with an end keeps to."""
        endless, number = {key_of(view) for view in self._queue}, -1
        while number != len(endless):
            number = len(endless)
            for view in reversed(self._queue):
                if key_of(view) in endless and not all(
                    self.is_void(case, lambda view: key_of(self.canonical(view)) in endless) for case in self.of(view)
                ):
                    endless.discard(key_of(view))
        return endless

    def rule(self, view: View) -> str:
        view = self.canonical(view)
        key = key_of(view)
        if key not in self._views:
            self._views[key] = (f"{self._name}_{len(self._queue)}" if self._queue else self._name, view)
            self._queue.append(view)
        return self._views[key][0]

    def _text(self, text: str, is_terminal: bool = False) -> str:
        """The name of a rule, or a terminal, with a text."""
        name = f"{self._name}_T{len(self._texts)}"
        return self._texts.setdefault(text, name.upper() if is_terminal else name.lower())

    def _body(self, view: View) -> str | None:
        terminals: dict[str, None] = {}
        rules: dict[str, None] = {}
        for kind, facts in self.of(view):
            try:
                writes = {"array": self._array, "object": self._object}.get(kind)
                text = scalar(kind, facts) if writes is None else writes(facts)
            except Refused as refused:
                known = [part for part in (refused.part, *facts, *view) if id(part) in self._places]
                raise Refused(known[0] if known else None, str(refused)) from None
            if text is not None and writes is None and not text.startswith("%json"):
                terminals[text] = None
            elif text is not None:
                rules[self._text(text)] = None
        if terminals:
            rules[self._text(" | ".join(terminals), is_terminal=True)] = None
        return " | ".join(rules) or None

    def _array(self, facts: Sequence[Fact]) -> str | None:
        least, most = counts(facts, "Items")
        num_first = _num_first(facts)
        contained = [fact["contains"] for fact in facts if fact.get("contains") is not None]
        for index in range(num_first + 1):
            if index < most and self.is_empty(item(facts, index)):
                most = index
        if least > most or (contained and not most):
            return None
        if least > MAX_TIMES:
            raise Refused(None, f"minItems: must be at most {MAX_TIMES}, got {least}")
        if most > 1 and any(fact.get("uniqueItems") for fact in facts):
            raise Refused(None, "uniqueItems is not supported")
        if not contained:
            return self._tuple(facts, least, most)
        for part in contained:
            if all(self.is_empty((*item(facts, index), part)) for index in range(num_first + 1)):
                return None
        if len(contained) > 1 or MAX_DEPTH < most < math.inf or max(num_first, least) > MAX_DEPTH:
            raise Refused(None, f"contains: is supported once, and with up to {MAX_DEPTH} items")
        is_open = most == math.inf
        num_ways = max(num_first, least - 1) if is_open else int(most)
        ways = [self._tuple(facts, least, most, index, contained[0]) for index in range(num_ways)]
        more = (*item(facts, num_ways), contained[0])
        if is_open and not self.is_empty(more):  # one after the first items
            other, first = self.rule(item(facts, num_ways)), [self.rule(item(facts, n)) for n in range(num_ways)]
            begin = " ".join(f'{rule} ","' for rule in first)
            ways.append(f'"[" {begin} ({other} ",")* {self.rule(more)} ("," {other})* "]"')
        return " | ".join(filter(None, ways)) or None

    def _tuple(
        self, facts: Sequence[Fact], least: int, most: float, found_at: int = -1, found: Schema = True
    ) -> str | None:
        """An array, of which one item may keep to more."""
        num_first, least = int(min(max(_num_first(facts), found_at + 1), most)), max(least, found_at + 1)
        views = [(*item(facts, index), *([found] if index == found_at else [])) for index in range(num_first + 1)]
        if found_at >= 0 and self.is_empty(views[found_at]):
            return None
        if num_first - least > MAX_DEPTH:
            raise Refused(None, f"has more than {MAX_DEPTH} first items that may be missing")
        rest = self.rule(views[num_first]) if most > num_first else ""
        text = _times(f'"," {rest}', max(least - max(num_first, 1), 0), most - max(num_first, 1))
        if not num_first and most:
            text = f"{rest} {text}" if least else f"({rest} {text})?"
        for index in reversed(range(num_first)):
            text = f"""{'"," ' if index else ""}{self.rule(views[index])} {text}"""
            text = text if index < least else f"({text})?"
        return f'"[" {text} "]"'

    def _object(self, facts: Sequence[Fact]) -> str | None:
        required = _required(facts)
        names = dict.fromkeys(name for fact in facts for name in fact.get("properties") or ()) | required
        least, most = counts(facts, "Properties")
        members = []
        for name in names:
            view = self.named(facts, name)
            if self.is_empty(view):
                if name in required:
                    return None
            elif name in required or most > len(required):
                members.append((self._text(f'{literal(name)} ":" {self.rule(view)}'), name in required))
        others = self._others(facts, names) if most > len(required) else []
        num_more = len(members) - len(required)
        if len(required) > most or (least > len(members) and not others):
            return None
        if num_more and (most < len(members) or least > max(len(required), 1)) and not others:
            return self._counting(members, least, most)
        if (others and num_more and most < math.inf) or least > max(len(required) + (not num_more), 1):
            raise Refused(None, "minProperties or maxProperties, beside other properties, is not supported")
        if others:
            other = self._text(" | ".join(others))
            text = f"""{other} {_times(f'"," {other}', 0, most - len(required) - 1)}"""
            members.append((self._text(text), least > len(required) and not num_more))
        if not members:
            return '"{" "}"'
        text, is_needed = self._sequence(members)
        return f'"{{" {text} "}}"' if is_needed or least else f'"{{" ({text})? "}}"'

    def _counting(self, members: Sequence[tuple[str, bool]], least: int, most: float) -> str:
        ways: dict[int, str] = {0: ""}
        for text, is_needed in members:
            longer = {count + 1: f'{before} "," {text}' if before else text for count, before in ways.items()}
            kept = {} if is_needed else ways
            both = {count: [way[count] for way in (longer, kept) if count in way] for count in {*longer, *kept}}
            ways = {count: self._text(" | ".join(texts)) if any(texts) else "" for count, texts in both.items()}
            if len(members) * len(ways) > MAX_CASES:
                raise Refused(None, "minProperties or maxProperties, with so many properties, is not supported")
        texts = [text for count, text in ways.items() if least <= count <= most]
        return f'"{{" ({" | ".join(filter(None, texts))}){"?" if "" in texts else ""} "}}"'

    def _sequence(self, members: Sequence[tuple[str, bool]]) -> tuple[str, bool]:
        """A rule of one or more members, those that may be missing and those that may not, and whether any may not."""
        if len(members) == 1:
            return members[0]
        half = len(members) // 2
        (left, needs_left), (right, needs_right) = self._sequence(members[:half]), self._sequence(members[half:])
        text = f'{left} "," {right}' if needs_left else f'({left} ",")? {right}'
        if not needs_right:
            text = f'{left} ("," {right})?' + ("" if needs_left else f" | {right}")
        return self._text(text), needs_left or needs_right

    def _others(self, facts: Sequence[Fact], names: Collection[str]) -> list[str]:
        """Rules of the properties that are not named: those of each pattern alone, and those of none."""
        patterns = dict.fromkeys(pattern for fact in facts for pattern in fact.get("patternProperties") or ())
        kinds = [fact["propertyNames"] for fact in facts if fact.get("propertyNames") is not None]
        kept = [
            more
            for kind, more in self.of(tuple(kinds))
            if kind == "string" and not any("const" in fact and fact["const"] in names for fact in more)
        ]
        is_free = not patterns and [scalar("string", more) for more in kept] == [STRING]
        found = []
        for pattern in (*patterns, None):
            view: list[Schema] = []
            for fact in facts:
                own = (fact.get("patternProperties") or {}).get(pattern)
                view.append(_rest(fact, "additionalProperties") if own is None else own)
            if self.is_empty(tuple(view)):
                continue
            key = f"{STRING} & ~({' | '.join(map(literal, names))})" if names else STRING
            if not is_free:
                more = ({"pattern": pattern} if pattern == one else {UNLIKE: one} for one in patterns)
                also = tuple(more)
                key = " | ".join(_inside((*facts_, *also), names) for facts_ in kept)
                key = f'"\\"" ({key}) "\\""'
            if kept:
                found.append(f'{self._text(key, is_terminal=True)} ":" {self.rule(tuple(view))}')
        return found


def _times(text: str, least: int, most: float) -> str:
    if most < 1:
        return ""
    if most > MAX_TIMES:
        return f"({text})*" if not least else f"({text}){{{least},}}"
    return f"({text}){{{least},{int(most)}}}"
