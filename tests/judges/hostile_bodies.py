"""Kinds of hostile requests that are correct HTTP with a wrong body."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.judges.attack import Attack, completion, kind, post, raw
from tests.judges.client import CHAT, RESPONSES

# ---- bodies that are not JSON, or not an object ----------------------------------------------------------------------


@kind()
def truncated_json(rng: random.Random) -> Attack:
    body = json.dumps({"prompt": "Tom has 12 apples.", "max_tokens": 4, "stop": ["a", "b"]}).encode()
    return raw(body[: rng.randrange(1, len(body))])


@kind()
def not_json(rng: random.Random) -> Attack:
    return raw(
        rng.choice([b"", b"prompt=hi&max_tokens=4", b"<xml/>", b"{'prompt': 'hi'}", b'{"prompt": "hi",}', b"{}{}"])
    )


@kind()
def random_bytes_as_body(rng: random.Random) -> Attack:
    return raw(rng.randbytes(rng.randrange(1, 4096)))


@kind()
def no_object(rng: random.Random) -> Attack:
    return raw(rng.choice([b"[]", b"null", b"1", b'"hi"', b"true", b'[{"prompt": "hi"}]']))


@kind()
def not_finite(rng: random.Random) -> Attack:
    field = rng.choice(["temperature", "tau_conf", "top_p", "max_tokens", "seed"])
    number = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
    return raw(f'{{"prompt": "hi", "{field}": {number}}}'.encode())


@kind()
def thousands_of_digits(rng: random.Random) -> Attack:
    field = rng.choice(["max_tokens", "seed", "n", "top_k", "temperature"])
    return raw(f'{{"prompt": "hi", "{field}": {"9" * rng.choice([30, 400, 5000, 100_000])}}}'.encode())


@kind()
def deep_nesting(rng: random.Random) -> Attack:
    depth = rng.choice([100, 5_000, 200_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return raw(b'{"prompt": ' + opening * depth + b"1" + closing * rng.choice([0, depth]) + b"}")


@kind()
def field_named_twice(rng: random.Random) -> Attack:
    return raw(b'{"prompt": "hi", "max_tokens": 4, "prompt": "ho"}')


@kind()
def lone_surrogate(rng: random.Random) -> Attack:
    return raw(rng.choice([b'{"prompt": "\\ud800"}', b'{"prompt": "a\\udfffb"}', b'{"prompt": "hi", "\\ud800": 1}']))


@kind()
def nul_character(rng: random.Random) -> Attack:
    return raw(rng.choice([b'{"prompt": "a\\u0000b"}', b'{"prompt": "hi", "stop": "\\u0000"}']))


@kind()
def not_utf8(rng: random.Random) -> Attack:
    return raw(b'{"prompt": "' + rng.choice([b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]) + b'"}')


# ---- objects with wrong fields ---------------------------------------------------------------------------------------

WRONG_TYPES: tuple[Any, ...] = ({}, [], [[]], {"a": 1}, "five", "5", 5.5, True, [None], [True])
RANGES: dict[str, list[float]] = {
    "max_tokens": [0, -1, 10**7, 2**31, 2**63, 2**64],
    "n": [0, -1, 10**6, 2**63],
    "temperature": [-0.1, -1e300],
    "tau_conf": [-1, 1.0001, 1e308],
    "block_size": [0, -5, 2**40],
    "num_branches": [-1, 10**6],
    "seed": [-(2**63) - 1, 2**64],
    "min_tokens": [-1, 10**9],
    "max_active_blocks": [0, -1],
}
UNSUPPORTED: dict[str, Any] = {
    "prompt_logprobs": 1,
    "length_penalty": 2.0,
    "best_of": 7,
    "use_beam_search": True,
    "response_format": {"type": "xml"},
}
NUMBERS = ("max_tokens", "n", "temperature", "top_k", "seed", "num_branches", "block_size", "tau_conf", "min_tokens")


@kind()
def wrong_type(rng: random.Random) -> Attack:
    return completion(**{rng.choice(NUMBERS): rng.choice([v for v in WRONG_TYPES if not isinstance(v, float)])})


@kind()
def wrong_type_of_a_flag(rng: random.Random) -> Attack:
    field = rng.choice(["stream", "ignore_eos", "finish_at_eos", "return_token_ids"])
    return completion(**{field: rng.choice([0, 1, "true", [], {}])})


@kind()
def out_of_range(rng: random.Random) -> Attack:
    field = rng.choice(list(RANGES))
    return completion(**{field: rng.choice(RANGES[field])})


@kind()
def unknown_field(rng: random.Random) -> Attack:
    return completion(**{rng.choice(["max_token", "temprature", "x", "__class__", "", "prompt "]): 1})


@kind()
def unknown_choice(rng: random.Random) -> Attack:
    field = rng.choice(["decoding", "confidence", "branch_score", "window_attention"])
    return completion(**{field: rng.choice(["", "LOPA", "none", "' OR 1=1 --", "💥" * 100])})


@kind()
def unsupported_feature(rng: random.Random) -> Attack:
    field = rng.choice(list(UNSUPPORTED))
    return completion(**{field: UNSUPPORTED[field]})


@kind()
def echo_with_logprobs(rng: random.Random) -> Attack:
    return completion(echo=True, logprobs=1)


@kind()
def options_without_stream(rng: random.Random) -> Attack:
    return completion(stream_options={"include_usage": True})


@kind()
def wrong_stops(rng: random.Random) -> Attack:
    return completion(stop=rng.choice([5, [5], [""], "", [["a"]], {"a": "b"}, [None]]))


@kind()
def unknown_model(rng: random.Random) -> Attack:
    return completion(model=rng.choice(["gpt-5", "", "../../etc/passwd", "x" * 10_000]))


@kind()
def wide_object(rng: random.Random) -> Attack:
    return completion(**{f"field{i}": i for i in range(20_000)})


# ---- prompts ---------------------------------------------------------------------------------------------------------


@kind()
def empty_prompt(rng: random.Random) -> Attack:
    return completion(prompt=rng.choice(["", [], [[]], [""], ["hi", ""], [[1], []]]))


@kind()
def wrong_prompt(rng: random.Random) -> Attack:
    return completion(prompt=rng.choice([None, 5, {"text": "hi"}, [1, "a"], [["a"]], [[[1]]], [1.5], [True], [None]]))


@kind()
def token_ids_out_of_range(rng: random.Random) -> Attack:
    ids = [1, rng.choice([-1, 10**7, 2**31, 2**63, 2**64, 10**30]), 2]
    return completion(prompt=rng.choice([ids, [[1], ids]]))


@kind()
def too_many_token_ids(rng: random.Random) -> Attack:
    return completion(prompt=[5] * rng.choice([100_000, 300_000]))


@kind()
def too_long_prompt(rng: random.Random) -> Attack:
    return completion(prompt="Tom has 12 apples. " * rng.choice([3_000, 20_000]))


@kind()
def too_many_prompts(rng: random.Random) -> Attack:
    return completion(prompt=["hi"] * 50_000)


@kind()
def wrong_messages(rng: random.Random) -> Attack:
    user: dict[str, Any] = {"role": "user", "content": "hi"}
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]
    wrong: list[dict[str, Any]] = [
        {"role": "king"},
        {"content": None},
        {"content": image},
        {"content": 5},
        {"content": []},
        {"name": 5},
    ]
    messages: list[Any] = [[], None, "hi", {}, [[]], [None], [{}], *([{**user, **item}] for item in wrong)]
    return post(CHAT, messages=rng.choice(messages), max_tokens=4)


@kind()
def wrong_input_of_a_response(rng: random.Random) -> Attack:
    items: list[Any] = [
        {"role": "user", "content": rng.choice(WRONG_TYPES[:4])},
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://localhost/x.png"}]},
        {"role": "user", "content": [{"type": ["input_text"], "text": "hi"}]},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": {}, "role": "user", "content": "hi"},
        rng.choice([5, None, "hi", []]),
    ]
    return post(RESPONSES, input=rng.choice([5, [], {}, [rng.choice(items)] * 3]), max_output_tokens=4)


@kind()
def too_long_conversation(rng: random.Random) -> Attack:
    return post(CHAT, messages=[{"role": "user", "content": "hi there"}] * 20_000)
