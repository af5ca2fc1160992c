"""Kinds of hostile requests that are wrong HTTP, too large, too slow, or broken off."""

from __future__ import annotations

import random

from tests.judges.attack import Attack, good, head, kind, raw
from tests.judges.client import CHAT, COMPLETIONS

MIB = 2**20


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@kind()
def wrong_content_type(rng: random.Random) -> Attack:
    content_types = [
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "",
        "application/xml",
    ]
    return raw(b'{"prompt": "hi"}', content_type=rng.choice(content_types))


@kind()
def wrong_method(rng: random.Random) -> Attack:
    method, route = rng.choice(["GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"]), rng.choice([COMPLETIONS, CHAT])
    return raw(b"", route, method=method)


@kind()
def unknown_route(rng: random.Random) -> Attack:
    routes = [
        "/v1/nope",
        "/v1/completions/x",
        "/../../etc/passwd",
        "/%00",
        "/v1/models/..%2f..",
        "/v1//nope",
        "/*",
    ]
    return raw(b'{"prompt": "hi"}', rng.choice(routes))


@kind()
def wrong_bodies_elsewhere(rng: random.Random) -> Attack:
    route = rng.choice(["/tokenize", "/detokenize", "/abort_request"])
    return raw(rng.choice([b"", b"[]", b"{}", b'{"prompt": 5}', b'{"tokens": [-1]}', b'{"request_id": []}']), route)


@kind()
def compressed_body(rng: random.Random) -> Attack:
    return raw(b"\x1f\x8b\x08\x00" + rng.randbytes(200), more="Content-Encoding: gzip\r\n")


@kind()
def no_http(rng: random.Random) -> Attack:
    lines = [
        b"GARBAGE\r\n\r\n",
        b"POST\r\n\r\n",
        b"\r\n\r\n\r\n\r\nx",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /nothing HTTP/9.9\r\n\r\n",
    ]
    return Attack([rng.choice([*lines, b"\x16\x03\x01\x02\x00" + rng.randbytes(512)]) + b"\r\n\r\n"])


@kind()
def wrong_lengths(rng: random.Random) -> Attack:
    length = rng.choice(["-1", "abc", "1e3", "99999999999999999999999", "5\r\nContent-Length: 7", "0x10"])
    return Attack([head(COMPLETIONS, length) + b'{"prompt": 1}'], linger=0.2)


@kind()
def wrong_chunks(rng: random.Random) -> Attack:
    start = head(COMPLETIONS, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return Attack([start + rng.choice([b"zz\r\nhello\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffffff\r\nhello\r\n"])])


@kind()
def huge_headers(rng: random.Random) -> Attack:
    header = rng.choice([b"X-Long: " + b"a" * 300_000 + b"\r\n", b"".join(b"X-%d: 1\r\n" % i for i in range(20_000))])
    return Attack([b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + header + b"Content-Length: 0\r\n\r\n"])


@kind()
def two_at_once(rng: random.Random) -> Attack:
    body = b'{"prompt": 5}'
    return Attack([2 * (head(COMPLETIONS, len(body)) + body)], http=True)


# ---- too large, too slow, or broken off ------------------------------------------------------------------------------


@kind(weight=1)
def body_of_50_mb(rng: random.Random) -> Attack:
    filling = b"a" * MIB
    return Attack([head(COMPLETIONS, 50 * MIB + 13) + b'{"prompt": "', *[filling] * 50, b'"'])


@kind(weight=1)
def half_of_50_mb(rng: random.Random) -> Attack:
    filling = b"1," * (MIB // 2)
    return Attack([head(COMPLETIONS, 50 * MIB) + b'{"prompt": [', *[filling] * 25], linger=0.0)


@kind(weight=1)
def endless_chunks(rng: random.Random) -> Attack:
    start = head(COMPLETIONS, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return Attack([start, *[b"100000\r\n" + b" " * MIB + b"\r\n"] * 60], linger=0.0)


@kind()
def half_sent_then_gone(rng: random.Random) -> Attack:
    request = good()
    return Attack([request[: rng.randrange(1, len(request))]], linger=0.0)


@kind(weight=3)
def half_sent_then_silent(rng: random.Random) -> Attack:
    request = good()
    return Attack([request[: rng.randrange(1, len(request))]], linger=rng.uniform(1, 5))


@kind(weight=1)
def half_sent_and_waiting(rng: random.Random) -> Attack:
    body = b'{"prompt": "hi", "max_tokens": 4}'
    return Attack([head(COMPLETIONS, len(body)) + body[: rng.randrange(len(body))]])


@kind(weight=3)
def slow_client(rng: random.Random) -> Attack:
    body = b'{"prompt": "hi", "max_tokens": -1}'
    request = head(COMPLETIONS, len(body)) + body
    return Attack([request[i : i + 4] for i in range(0, len(request), 4)], pause=0.05, http=True)


@kind()
def connect_and_leave(rng: random.Random) -> Attack:
    return Attack([], linger=rng.choice([0.0, 0.1]))


@kind()
def good_request_then_gone(rng: random.Random) -> Attack:
    return Attack([good(stream=rng.choice([True, False]))], linger=rng.choice([0.0, 0.01, 0.1]))


@kind(weight=3)
def stream_never_read(rng: random.Random) -> Attack:
    return Attack([good(stream=True, n=8, temperature=1.0)], linger=rng.uniform(0.5, 2))
