"""Text that is streamed while the tokens are still coming: it only grows, and ends at stop strings."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lopa_ascend.text.stream import TextStream
from tests.tiny import SPECIAL, VOCAB_SIZE, tiny_tokenizer

FRAGMENTS = ["a", "b", "ab", "c", "\u00e9", "\U0001f600", "\u6587", " the", "hello", *SPECIAL[1:3]]


@st.composite
def id_lists(draw: st.DrawFn) -> list[int]:
    """Text cut into single bytes, whole tokens, special tokens, ids without token and broken UTF-8, mixed."""
    ids: list[int] = []
    for part in draw(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(0, VOCAB_SIZE + 2)), max_size=24)):
        if isinstance(part, int):
            ids.append(part)
        elif part in SPECIAL or draw(st.booleans()):
            ids += tiny_tokenizer().encode(part)
        else:
            ids += [byte_ids()[byte] for byte in part.encode()]
    return ids


@cache
def byte_ids() -> dict[int, int]:
    ids = {tiny_tokenizer().piece(token): token for token in range(256)}
    return {byte: ids[bytes([byte])] for byte in range(256)}


def chunks(ids: list[int], borders: list[int]) -> list[int]:
    return sorted({border % (len(ids) + 1) for border in borders})


BORDERS = st.lists(st.integers(0, 60), max_size=12)
STOPS = st.lists(st.text("abc\u00e9\U0001f600 the", min_size=1, max_size=5), max_size=4).map(tuple)


@given(st.one_of(id_lists(), st.lists(st.integers(0, 256))), BORDERS)
def test_stream_without_stop_is_decode(ids: list[int], borders: list[int]) -> None:
    stream, shown = TextStream(tiny_tokenizer(), ()), ""
    for border in chunks(ids, borders):
        text = stream.push(ids[:border])
        assert text.startswith(shown)
        # Only an incomplete sequence is held back, and that is at most three bytes long.
        assert tiny_tokenizer().decode(ids[:border])[: len(text)] == text
        assert len(tiny_tokenizer().decode(ids[:border])) - len(text) <= 1
        shown = text
    final = stream.finish(ids)
    assert final.startswith(shown)
    assert final == tiny_tokenizer().decode(ids) == stream.finish(ids)
    assert stream.stopped is None
    assert stream.num_text_tokens == len(ids)


def known_lengths(ids: list[int]) -> list[int]:
    """Characters known after each token, as a stream that is closed after the last one sees them."""
    stream = TextStream(tiny_tokenizer(), ())
    lengths = [len(stream.push(ids[: i + 1])) for i in range(len(ids))]
    return [*lengths[:-1], len(stream.finish(ids))] if ids else []


def expected_stop(ids: list[int], stops: tuple[str, ...], min_tokens: int) -> tuple[str, str | None, int]:
    """By brute force: text, stop string and number of tokens."""
    text, lengths = tiny_tokenizer().decode(ids), known_lengths(ids)
    hits = []
    for stop in stops:
        for start in range(len(text) - len(stop) + 1):
            if text.startswith(stop, start):
                needed = next(i for i, length in enumerate(lengths) if length >= start + len(stop)) + 1
                if needed > min_tokens:
                    hits.append((start, -len(stop), stop, needed))
    if not hits:
        return text, None, len(ids)
    start, _, stop, needed = min(hits)
    return text[:start], stop, needed


@given(id_lists(), BORDERS, STOPS, st.integers(0, 8))
@example([byte_ids()[b] for b in b"abd"], [1, 2, 3], ("abc", "b"), 0)
@example([byte_ids()[b] for b in b"abc"], [1, 2, 3], ("abc", "b", "ab"), 0)
@example([byte_ids()[b] for b in b"ab"], [1], ("abc", "ab"), 0)
@example([byte_ids()[b] for b in b"aabaab"], [], ("ab",), 3)
def test_stream_with_stop_strings(ids: list[int], borders: list[int], stops: tuple[str, ...], min_tokens: int) -> None:
    expected = expected_stop(ids, stops, min_tokens)
    stream, shown = TextStream(tiny_tokenizer(), stops, min_tokens), ""
    for border in chunks(ids, borders):
        text = stream.push(ids[:border])
        assert text.startswith(shown)
        assert expected[0].startswith(text)
        shown = text
        if stream.stopped is not None:
            break
    early = stream.stopped is not None
    text = stream.finish(ids)
    assert (text, stream.stopped, stream.num_text_tokens) == expected
    if early:
        assert text == shown
    if stream.stopped is not None:
        assert stream.push(ids + [0]) == text


def test_stop_is_seen_at_once() -> None:
    """Without a longer or earlier candidate nothing is waited for."""
    ids = tiny_tokenizer().encode("hello the end")
    stream = TextStream(tiny_tokenizer(), ("the",))
    assert stream.push(ids[:1]) == "hello"
    assert stream.push(ids[:2]) == "hello "
    assert stream.stopped == "the"
    assert stream.num_text_tokens == 2
    assert stream.push(ids) == "hello "


def test_half_a_character_is_held_back() -> None:
    ids = [byte_ids()[byte] for byte in "a\U0001f600b".encode()]
    stream = TextStream(tiny_tokenizer())
    assert [stream.push(ids[:n]) for n in range(1, 7)] == ["a", "a", "a", "a", "a\U0001f600", "a\U0001f600b"]
    broken = TextStream(tiny_tokenizer())
    assert broken.push(ids[:3]) == "a"
    assert broken.finish(ids[:3]) == "a\ufffd"


def test_start_of_a_stop_string_is_held_back() -> None:
    ids = [byte_ids()[byte] for byte in b"xaabay"]
    stream = TextStream(tiny_tokenizer(), ("aac", "aba"))
    assert [stream.push(ids[:n]) for n in range(1, 7)] == ["x", "x", "x", "xa", "xa", "xa"]
    assert (stream.stopped, stream.num_text_tokens) == ("aba", 5)


def test_no_token_is_decoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = tiny_tokenizer(), 0
    piece = tokenizer.piece

    def counted(token: int) -> bytes:
        nonlocal seen
        seen += 1
        return piece(token)

    monkeypatch.setattr(tokenizer, "piece", counted)
    stream = TextStream(tokenizer, ("never",))
    for size in range(500):
        stream.push([5] * size)
    assert seen == 499


def test_many_stop_strings_take_no_time() -> None:
    """As many as a request may have, none of which appears, of a text that keeps all of them open."""
    stops = tuple("z" * 63 + chr(0x100 + number) for number in range(64))
    ids = [byte_ids()[byte] for byte in b"z" * 2000]
    stream, start = TextStream(tiny_tokenizer(), stops), time.process_time()
    for size in range(len(ids)):
        stream.push(ids[:size])
    assert stream.finish(ids) == "z" * 2000
    assert time.process_time() - start < 10
