"""What is refused of grammars, with the place, and what is compiled."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.types import Grammar, GrammarError
from tests.tiny import tiny_tokenizer

ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
DEEP: Any = {}
for _ in range(300):
    DEEP = {"items": DEEP}
UNSUPPORTED = ("uniqueItems", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef")


@cache
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer())


def grammar_of(form: Any) -> Grammar:
    grammar = DecodingParams(structured_outputs=form).structured_outputs
    assert grammar is not None
    return grammar


@cache
def guard() -> Guard:
    return Guard(tiny_tokenizer())


def refusal(form: dict[str, Any]) -> str:
    started = time.monotonic()
    with pytest.raises(ParameterError) as wrong:
        guard().checked(grammar_of(form))
    assert wrong.value.path[0] == "structured_outputs"
    assert time.monotonic() - started < 10
    return str(wrong.value).removeprefix("structured_outputs.")


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keywords_are_named_with_their_place(keyword: str):
    part = {"type": "array", keyword: {"type": "string"}}
    message = refusal({"json": {"type": "object", "properties": {"a/b": {"items": part}}}})
    assert message.startswith("json.properties.a/b.items: ")
    assert keyword in message


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ({"json": {"enum": list(range(10_000))}}, "json: enum: must be up to 4096 values"),
        ({"json": {"description": "x" * 2**20}}, "at most 131072 characters"),
        ({"json": json.dumps({"description": "x" * 2**20})}, "at most 131072 characters"),
        ({"json": "{"}, "json: is no JSON"),
        ({"json": {"properties": {"x": {"type": "text"}}}}, "json.properties.x: type: must be one of null"),
        ({"json": {"properties": {"x": {"$ref": "#/$defs/no"}}}}, "json.properties.x: $ref: '#/$defs/no' points"),
        ({"json": {"$ref": "https://example.com/schema"}}, "json: $ref: 'https://example.com/schema' is not"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json: no value keeps to it"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "json: no value keeps to it"),
        ({"json": False}, "json: no value keeps to it"),
        ({"json": ENDLESS}, "json: no value keeps to it"),
        ({"json": DEEP}, "json: has more than 100 levels at items.items"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "json: uniqueItems is not"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, "regex: no text keeps to it"),
        ({"regex": "(" * 5000 + "a" + "+)" * 5000}, "regex: at 1"),
        ({"grammar": 'start: "a" b'}, 'unknown name: "b"'),
        ({"grammar": 'start: "a'}, "lexer error"),
        ({"grammar": 'start: x\nx: "x" x'}, "has no end"),
        ({"grammar": 'start: x\nx: x "x"'}, "grammar: no text keeps to it"),
        ({"choice": [f"choice {n}" for n in range(10_000)]}, "must be a list of 1 to 4096 texts"),
        ({"choice": ["a", ""]}, "choice[1]: must be a text that is not empty"),
        ({"json": {}, "regex": "a"}, "must have one of json, json_object, regex, choice, grammar, got json, regex"),
        ({"structural_tag": "a"}, "has 'structural_tag'"),
    ],
)
def test_what_cannot_be_followed_is_refused(form: dict[str, Any], part: str):
    assert part in refusal(form)


HEAVY = {
    "many combinations": {
        "json": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"p{j}_{i}": {"const": i}}} for i in range(20)]}
                for j in range(3)
            ]
        }
    },
    "4,000 fields": {"json": {"type": "object", "properties": {f"f{i}": {"type": "integer"} for i in range(4000)}}},
    "nested repetitions": {"regex": "((a{0,500}){0,500}){0,500}x"},
    "ambiguous": {"regex": "(a|a)*(a+)+b"},
    "a set of states that doubles": {"regex": "(a|b)*a(a|b){2000}c"},
    "intersections": {"grammar": "start: A\nA: /(.|\\n)*a(.|\\n){500}/ & /(.|\\n)*b(.|\\n){300}/"},
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_grammars_compile_or_are_refused_at_once(name: str):
    grammar, started = grammar_of(HEAVY[name]), time.monotonic()
    with suppress(ParameterError, GrammarError):
        matcher = grammars().matcher(guard().checked(grammar))
        for _ in range(50):
            matcher.allowed()
            matcher.accept(tiny_tokenizer().encode("a"))
    assert time.monotonic() - started < 2


def test_json_is_compact_and_keeps_the_order_of_fields():
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": [2, "b c"]}}, "required": ["z", "a"]}
    matcher = grammars().matcher(grammar_of({"json": {**schema, "additionalProperties": False}}))
    text = tiny_tokenizer().decode(matcher.forced())
    assert text == '{"z":1,"a":[2,"b c"]}'


def test_a_matcher_goes_back_and_is_independent_of_others():
    grammar = grammar_of({"regex": "(ab|ac)+"})
    one, other = grammars().matcher(grammar), grammars().matcher(grammar)
    a, b, c = (tiny_tokenizer().encode(letter)[0] for letter in "abc")
    assert one.accept([a, b, a, a]) == 3
    assert not one.is_complete
    assert other.accept([b]) == 0
    one.roll_back(2)
    assert one.accept([c]) == 1
    assert one.is_complete
    assert not one.is_over


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_eos": True},
        {"finish_at_eos": False},
        {"decoding": "vanilla"},
        {"decoding": "fast_dllm_v2", "sub_block_cache": True},
    ],
)
def test_what_contradicts_a_grammar_is_refused(options: dict[str, Any]):
    with pytest.raises(ParameterError, match="structured_outputs"):
        DecodingParams.of(structured_outputs={"json_object": True}, **options)


def test_a_grammar_needs_a_tokenizer():
    params = DecodingParams.of(structured_outputs={"json_object": True})
    with pytest.raises(ParameterError, match="structured_outputs: needs a tokenizer, and bare has no tokenizer files"):
        Prompts(None, 100, 99, "bare").for_engine(params)
