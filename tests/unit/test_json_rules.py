"""What the rules of a JSON schema admit: its values with their digits, and nothing that it forbids."""

from __future__ import annotations

import itertools
import json
import random
import time
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.text.grammars import GrammarMatcher, Grammars
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.json_rules import json_rules
from lopa_ascend.text.tool_calls import HEAD, MIDDLE, TAIL, call_grammar
from lopa_ascend.types import Grammar
from tests.schema_samples import VALUES, random_schema
from tests.tiers import slow_but
from tests.tiny import tiny_tokenizer

BIG = 1234567890123456789
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "tail": {}}, "required": ["kind", "tail"]}


@cache
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer())


@cache
def guard() -> Guard:
    return Guard(tiny_tokenizer())


def matcher(schema: Any) -> GrammarMatcher:
    grammar = DecodingParams.of(structured_outputs={"json": schema}).structured_outputs
    assert grammar is not None
    return grammars().matcher(guard().checked(grammar))


def accepts(schema: Any, text: str) -> bool:
    followed, tokens = matcher(schema), tiny_tokenizer().encode(text)
    return followed.accept(tokens) == len(tokens) and followed.is_complete


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("value", [BIG, -BIG, 2**53 + 1, 2**64, -(2**63), 10**40 + 1, 0.1, -2.5e-7, 1e300])
@pytest.mark.parametrize("place", ["const", "enum", "property", "item"])
def test_a_number_keeps_its_digits(value: float, place: str):
    schema: dict[str, Any] = {"const": value}
    expected = json.dumps(value)
    if place == "enum":
        schema = {"enum": [value]}
    elif place == "property":
        schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"const": value}}}
        schema, expected = {"type": "object", **schema, "additionalProperties": False}, f'{{"a":{value}}}'
    elif place == "item":
        schema, expected = {"const": [value, {"b": value}]}, f'[{value},{{"b":{value}}}]'
    assert tiny_tokenizer().decode(matcher(schema).forced()) == expected


def test_numbers_in_the_arguments_of_calls_and_in_grammars_keep_their_digits():
    arguments = {"type": "object", "properties": {"id": {"const": BIG}}, "required": ["id"]}
    call = call_grammar({"f": {**arguments, "additionalProperties": False}}, several=False)
    for grammar, expected in (
        (f'start: json0\njson0: %json {{"const": {BIG}}}', str(BIG)),
        (call, f'{HEAD}f{MIDDLE}{{"id":{BIG}}}{TAIL}'),
        (f'start: "%json: " x # %json\nx: %json {{"const": {BIG}}} /[ab]/', f"%json: {BIG}"),
    ):
        assert tiny_tokenizer().decode(grammars().matcher(Grammar("grammar", grammar)).forced()) == expected


@pytest.mark.parametrize(
    ("schema", "admitted", "others"),
    [
        ({"type": "integer", "minimum": 2**64, "maximum": 2**65}, [2**64, 2**65, 3 * 2**63], [2**64 - 1, 2**65 + 1]),
        ({"minimum": 2**53 + 1, "type": "integer"}, [2**53 + 1, 10**18], [2**53, -(10**17)]),
        (INT64, [-(2**63), 2**63 - 1, 0, -1], [-(2**63) - 1, 2**63]),
        ({"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 3}, [1, 2], [0, 3, -1]),
        ({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 0}, [], []),
        (
            {"type": "number", "minimum": -1.25, "exclusiveMaximum": 0.3},
            [-1.25, -1.2, 0, 0.29, 0.2],
            [-1.26, 0.3, 0.31],
        ),
        ({"type": "number", "exclusiveMinimum": 9.99}, [9.991, 10, 10.5, 99], [9.99, 9.9, 9, -10]),
        ({"not": {"type": "integer"}, "type": "number", "maximum": 2}, [0.5, -7.25], [1, -3, 2.5]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, [0.1, 1], [0, -1, 0.0]),
        ({"type": "number", "maximum": 1.7976931348623157e308}, [1, -5, 10**18], []),
        ({"type": "integer", "multipleOf": 7, "minimum": -20}, [-14, 0, 21], [-21, 20]),
        ({"type": "number", "multipleOf": 0.25, "maximum": 1}, [0.25, -0.75, 1], [0.3, 1.25]),
        ({"type": "number", "multipleOf": 0.01, "maximum": 30}, [0.25, -1.5, 7, 30], [0.255, 30.01]),
    ],
)
def test_ranges_are_exact(schema: dict[str, Any], admitted: list[float], others: list[float]):
    if not admitted:
        with pytest.raises(ParameterError, match="no value keeps to it"):
            matcher(schema)
    assert [value for value in admitted if not accepts(schema, json.dumps(value))] == []
    assert [value for value in others if accepts(schema, json.dumps(value))] == []


def test_ranges_of_integers_and_decimals_agree_with_arithmetic():
    rng = random.Random(3)
    for _ in range(60):
        low, high = sorted(rng.choice([rng.randint(-120, 120), round(rng.uniform(-12, 12), 2)]) for _ in range(2))
        names = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        schema = {"type": rng.choice(["integer", "number"]), names[0]: low, names[1]: high}
        judge = jsonschema.Draft202012Validator(schema)
        for value in (low, high, low + 1, high - 1, rng.randint(-130, 130), round(rng.uniform(-13, 13), 3)):
            value = round(value, 3)
            wanted = judge.is_valid(value) and (schema["type"] == "number" or isinstance(value, int))
            try:
                found = accepts(schema, json.dumps(value))
            except ParameterError:
                found = False
            assert found == wanted, (schema, value)


def test_what_rounds_to_an_excluded_bound_is_excluded():
    schema = {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.3}
    assert not accepts(schema, "0.1000000000000000001")
    assert not accepts(schema, "0.2999999999999999999")
    assert accepts(schema, "0.10000000000000002")


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "integer"}, {}, True, {"additionalProperties": {}}])
def test_numbers_without_bounds_end(schema: Any):
    text = '{"a":' if isinstance(schema, dict) and "additionalProperties" in schema else ""
    digit, point = tiny_tokenizer().encode("1"), tiny_tokenizer().encode(".")
    followed = matcher(schema)
    assert followed.accept(tiny_tokenizer().encode(text)) == len(tiny_tokenizer().encode(text))
    assert sum(followed.accept(digit) for _ in range(50)) == 19
    if schema != {"type": "integer"}:
        assert followed.accept(point)
        assert sum(followed.accept(digit) for _ in range(50)) == 19
        assert followed.accept(tiny_tokenizer().encode("e"))
        assert sum(followed.accept(digit) for _ in range(50)) == 3


def test_counts_are_arithmetic():
    started = time.process_time()
    assert matcher({"type": "array", "minItems": 20_000_000}).accept(tiny_tokenizer().encode("[1,2,")) > 0
    assert accepts({"type": "array", "maxItems": 10**12, "minItems": 1}, "[1]")
    with pytest.raises(ParameterError, match=r"json: minItems: must be at most 2147483647, got 1000000000000"):
        matcher({"type": "array", "minItems": 10**12})
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "nothing",
    [
        {"title": "a", "description": "b", "default": 3, "examples": [1], "$comment": "c", "readOnly": True},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.b/c"},
        {"nullable": True, "discriminator": {"propertyName": "k"}, "example": 1, "xml": {}, "externalDocs": {}},
        {"propertyNames": {"type": "string"}, "uniqueItems": False, "unevaluatedProperties": True},
        {"minimum": None, "pattern": None, "enum": None, "items": None, "allOf": None, "format": None, "not": None},
        {"format": "int64"},
        {"format": "color", "contentEncoding": "base64", "x-guidance": {"lenient": True}},
        {"minItems": 0, "minLength": 0, "minProperties": 0, "required": [], "properties": {}},
    ],
)
def test_what_says_nothing_changes_nothing(nothing: dict[str, Any]):
    def schema(more: dict[str, Any]) -> dict[str, Any]:
        inner = {"type": ["string", "integer", "object", "array"], **more}
        return {"type": "object", "properties": {"title": inner, "format": {"anyOf": [inner]}}, "required": ["title"]}

    assert json_rules(schema(nothing), "json") == json_rules(schema({}), "json")


TAKEN: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a discriminated union": (
        {
            "$defs": {"Cat": CAT, "Dog": DOG},
            "discriminator": {"mapping": {"cat": "#/$defs/Cat"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        },
        [{"kind": "cat", "lives": 9}, {"kind": "wolf", "tail": None}],
        [{"kind": "wolf"}, {"kind": "cow"}, {"kind": "cat", "lives": "x"}],
    ),
    "nested unions": (
        {"oneOf": [{"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}]}, DOG], "$defs": {"Cat": CAT}},
        [None, {"kind": "cat"}, {"kind": "dog", "tail": 1}],
        [1, {"kind": "dog"}],
    ),
    "one of two required": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "not": ({"not": {"enum": ["a", 1, None]}, "type": ["string", "integer", "null"]}, ["b", 2], ["a", 1, None]),
    "not a type": ({"not": {"type": ["object", "integer"]}}, ["a", None, 1.5], [{}, 1, 2]),
    "dependencies": (
        {"type": "object", "dependencies": {"a": ["b"], "c": {"properties": {"b": {"type": "null"}}}}},
        [{}, {"b": 1}, {"b": 1, "a": 1}, {"b": None, "c": 1}],
        [{"a": 1}, {"b": 1, "c": 1}],
    ),
    "contains": ({"type": "array", "contains": {"const": 5}, "maxItems": 3}, [[5], [1, 5], [5, 5, 1]], [[], [1, 2, 3]]),
    "contains, with first items": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {}], "contains": {"type": "string"}, "minItems": 1},
        [[1, "a"], [1, 2, "a"], [1, "a", 3]],
        [[1], ["a"], [1, 2, 3]],
    ),
    "if": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "value": {}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"properties": {"value": {"type": "integer"}}},
            "else": {"required": ["value"]},
        },
        [{"kind": "a"}, {"kind": "a", "value": 1}, {"kind": "b", "value": "x"}],
        [{"kind": "a", "value": "x"}, {"kind": "b"}],
    ),
    "patterns of names": (
        {
            "type": "object",
            "properties": {"x-a": {"type": "integer"}},
            "patternProperties": {"^x-": {"minimum": 3}, "\\d$": {"type": "null"}},
            "additionalProperties": {"type": "boolean"},
        },
        [{"x-a": 3}, {"x-b": 4}, {"n7": None}, {"y": True}],
        [{"x-a": 1}, {"x-b": 1}, {"n7": 1}, {"y": 1}],
    ),
    "names": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {}], [{"c": 1}]),
    "counted": (
        {"type": "object", "properties": dict.fromkeys("abc", {}), "additionalProperties": False, "maxProperties": 1},
        [{}, {"a": 1}, {"c": 1}],
        [{"a": 1, "b": 1}],
    ),
    "an anchor": ({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "null"}}}, [None], [1]),
    "a document in the schema": (
        {
            "$defs": {
                "a": {"type": "null"},
                "b": {"$id": "b", "$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"},
            },
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        [None, 1],
        ["a"],
    ),
    "a name with a slash": (
        {"$defs": {"a/b c~": {"minimum": 3, "type": "integer"}}, "$ref": "#/$defs/a~1b%20c~0"},
        [3],
        [2, "a"],
    ),
    "no endless part": (
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": {"$ref": "#/anyOf/1"}}]},
        [None],
        [[], [None]],
    ),
    "a deep constant": ({"const": json.loads("[" * 300 + "]" * 300)}, [json.loads("[" * 300 + "]" * 300)], [[]]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str):
    schema, valid, invalid = TAKEN[name]
    assert [value for value in valid if not accepts(schema, dumped(value))] == []
    assert [value for value in invalid if accepts(schema, dumped(value))] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}}},
            "json.properties.a: oneOf: its parts 0 and 1 may both take a value",
        ),
        ({"items": {"pattern": "(?!a)b"}}, "json.items: .*look-around"),
        ({"items": {"multipleOf": 3_000_017}}, "json.items: multipleOf: must be one number up to 100000"),
        ({"items": {"minimum": 10**50}}, r"json.items: the bound 1\.?0*e\+50 has too many digits"),
        ({"items": {"minimum": "3"}}, 'json.items: minimum: must be a number, got "3"'),
        ({"items": {"items": 3}}, "json.items: items: must be an object or a bool, got 3"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
            "itself",
        ),
        ({"$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(2500)}, "$ref": "#/$defs/a0"}, "too deeply"),
        ("[" * 100_000, "json: is no JSON"),
        ('{"items": ' * 300 + "{}" + "}" * 300, "json: has more than 100 levels at items.items"),
    ],
)
def test_what_is_refused_has_a_place_and_a_reason(schema: Any, message: str):
    with pytest.raises(ParameterError, match=message):
        matcher(schema)


def test_a_thousand_properties_that_may_be_missing_are_followed_to_the_end():
    names = [f"field_{number}" for number in range(1000)]
    followed = matcher({"type": "object", "properties": dict.fromkeys(names, {"type": "integer"})})
    followed.allowed()
    tokens = tiny_tokenizer().encode(dumped(dict.fromkeys(names[::50], 7)))
    assert followed.accept(tokens) == len(tokens)
    assert followed.is_complete


def orders(value: Any) -> list[Any]:
    """A value with the properties of its objects in every order."""
    if isinstance(value, list):
        return [list(items) for items in itertools.product(*map(orders, value))]
    if not isinstance(value, dict):
        return [value]
    found = []
    for names in itertools.permutations(value):
        found += [
            dict(zip(names, items, strict=True)) for items in itertools.product(*(orders(value[n]) for n in names))
        ]
    return found


@pytest.mark.parametrize("part", slow_but(range(40), [0]))
def test_random_schemas_admit_what_is_valid_and_nothing_else(part: int):
    taken = missed = 0
    for seed in range(40 * part, 40 * part + 40):
        schema = random_schema(random.Random(f"schema {seed}"))
        judge = jsonschema.Draft202012Validator(schema)
        is_valid = [judge.is_valid(value) for value in VALUES]
        try:
            matcher(schema)
        except ParameterError as error:
            refused_wrongly = any(is_valid) and "no value keeps" in str(error)
            assert not refused_wrongly, (seed, schema)
            continue
        taken += 1
        for value, valid in zip(VALUES, is_valid, strict=True):
            admitted = any(accepts(schema, dumped(ordered)) for ordered in orders(value))
            assert valid or not admitted, (seed, schema, value)
            missed += valid and not admitted
        _check_random_answer(schema, judge, seed)
    assert taken > 15
    assert missed <= 10  # of about 400


def _check_random_answer(schema: Any, judge: Any, seed: int) -> None:
    rng, followed, tokens = random.Random(f"answer {seed}"), matcher(schema), list[int]()
    for _ in range(40):
        allowed = followed.allowed()
        if followed.is_complete and (not allowed or rng.random() < 0.5):
            break
        fitting = [token for token in range(allowed.bit_length()) if allowed >> token & 1]
        assert fitting, (seed, schema, tiny_tokenizer().decode(tokens))
        tokens.append(rng.choice(fitting))
        followed.accept(tokens[-1:])
    if followed.is_complete:
        assert judge.is_valid(json.loads(tiny_tokenizer().decode(tokens))), (seed, schema)


def test_a_record_of_known_names_has_no_others():
    names = {"propertyNames": {"type": "string", "enum": ["red", "blue"]}, "required": ["red", "blue"]}
    schema = {"type": "object", **names, "additionalProperties": {"type": "boolean"}}
    followed = matcher(schema)
    tokens = tiny_tokenizer().encode('{"red":true,"blue":false')
    assert followed.accept(tokens) == len(tokens)
    assert tiny_tokenizer().decode(followed.forced()) == "}"
