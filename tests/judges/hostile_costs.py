"""Kinds of hostile requests that cost a client little and could cost the server much: long lists, long texts, halves.

``COSTLY`` names them, with how many are sent at the same time by the judge "starve".
"""

from __future__ import annotations

import json
import random

from tests.judges.attack import Attack, head, kind, post, raw
from tests.judges.client import CHAT, COMPLETIONS

MIB = 2**20
APPLES = b"Tom has 12 apples. "
COSTLY = {
    "thousands_of_stop_strings": 4,
    "one_long_stop_string": 4,
    "millions_of_token_ids": 4,
    "text_of_7_mb": 12,
    "prompts_of_7_mb": 4,
    "conversation_of_90_000": 4,
    "millions_of_lists": 4,
    "millions_of_wrong_items": 4,
    "long_names": 4,
    "half_of_4_mb": 60,
    "half_a_head": 60,
}
"""By name of a kind: requests at the same time."""


def _completion(fields: bytes) -> Attack:
    return raw(b'{"prompt":"hi","max_tokens":4,%s}' % fields)


@kind(weight=2)
def thousands_of_stop_strings(rng: random.Random) -> Attack:
    stops = b",".join(b'"stop %d"' % number for number in range(rng.choice([1_000, 50_000, 400_000])))
    return _completion(b'"stop":[%s],"n":%d' % (stops, rng.choice([32, 128])))


@kind(weight=2)
def one_long_stop_string(rng: random.Random) -> Attack:
    return _completion(b'"stop":["%s"],"n":128' % (b"ab" * rng.choice([5_000, 2 * MIB])))


@kind(weight=2)
def millions_of_token_ids(rng: random.Random) -> Attack:
    field = rng.choice([b"eos_token_id", b"stop_token_ids"])
    ids = b",".join(b"%d" % number for number in range(100_000)) + b",5" * rng.choice([0, 2_000_000])
    return _completion(b'"min_tokens":2,"%s":[%s]' % (field, ids))


@kind(weight=1)
def text_of_7_mb(rng: random.Random) -> Attack:
    return raw(b'{"prompt":"%s"}' % (APPLES * (7 * MIB // len(APPLES))), rng.choice(["/tokenize", COMPLETIONS]))


@kind(weight=1)
def prompts_of_7_mb(rng: random.Random) -> Attack:
    prompt = b'"%s",' % (APPLES * rng.choice([200, 380]))
    return raw(b'{"prompt":[%s""]}' % (prompt * 1000))


@kind(weight=1)
def conversation_of_90_000(rng: random.Random) -> Attack:
    return raw(b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 90_000) + b"]}", CHAT)


@kind(weight=1)
def millions_of_lists(rng: random.Random) -> Attack:
    return raw(b'{"prompt":[' + rng.choice([b"[],", b"{},", b'"",']) * (2 * MIB) + b"[]]}")


@kind(weight=1)
def millions_of_wrong_items(rng: random.Random) -> Attack:
    return _completion(rng.choice([b'"stop_token_ids":[%s"x"]', b'"bad_words":[[%s"x"]]']) % (b'"x",' * MIB))


@kind(weight=1)
def long_names(rng: random.Random) -> Attack:
    name = b"ab" * (3 * MIB)
    path, body = rng.choice(
        [
            (COMPLETIONS, b'{"prompt":"hi","%s":1}'),
            (COMPLETIONS, b'{"prompt":"hi","logit_bias":{"%s":1}}'),
            (CHAT, b'{"messages":[{"role":"user","content":"hi","%s":1}]}'),
        ]
    )
    return raw(body % name, path)


@kind(weight=2)
def half_of_4_mb(rng: random.Random) -> Attack:
    return Attack([head(COMPLETIONS, 4 * MIB), b'{"prompt": "' + b"a" * (2 * MIB)], linger=rng.uniform(1, 5))


@kind(weight=2)
def half_a_head(rng: random.Random) -> Attack:
    start = head(COMPLETIONS, 4)
    return Attack([start[: rng.randrange(1, len(start))]])


@kind()
def two_lengths(rng: random.Random) -> Attack:
    body = json.dumps({"prompt": "hi", "max_tokens": 4}).encode()
    return raw(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), more="Transfer-Encoding: chunked\r\n")


@kind()
def abort_by_a_shared_id(rng: random.Random) -> Attack:
    return post("/abort_request", request_id=rng.choice(["1", "shared", "request", "cmpl-", "*"]))
