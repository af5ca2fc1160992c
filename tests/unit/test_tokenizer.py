"""Tokenizer files, chat templates, and text that is streamed while the tokens are still coming."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lopa_ascend.text.tokenizer import TextStream, Tokenizer, TokenizerError, load_tokenizer
from tests.tiny import CHAT_TEMPLATE, SPECIAL, VOCAB_SIZE, write_tokenizer

TEXTS = [
    "",
    "hello the answer and  the   rest",
    "I'm sure we'll say it's theirs, they'd've gone; I'M SURE",
    "1234567 3.14 x2y 12,000",
    "na\u00efve caf\u00e9 e\u0301 \u6587\u5b57 \u0420\u0443\u0441 \u0639\u0631",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "a\n\nb\r\n  c\t\td \n \n",
    "  leading and trailing  ",
    "<|im_start|>user\nhello<|im_end|>\n<|mask|><|mask|> <|endoftext|>tail <|im_",
    "\u0120 \u00a0 \u2028 \x00 \x7f",
    "for (int i = 0; i < n; ++i) { a[i] += $x; }  // \u2026!!\n\n",
]


@cache
def tiny() -> Tokenizer:
    tokenizer = load_tokenizer(write_tokenizer(Path(mkdtemp())), VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


def some(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path, VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


def edit(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def qwen2(path: Path) -> Any:
    from transformers import Qwen2TokenizerFast  # type: ignore[attr-defined]

    edit(path / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    return Qwen2TokenizerFast.from_pretrained(str(path))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_equals_transformers(tmp_path: Path) -> None:
    ours, theirs = some(write_tokenizer(tmp_path)), qwen2(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.num_token_ids == len(theirs) == VOCAB_SIZE


def test_chat_equals_transformers(tmp_path: Path) -> None:
    ours, theirs = some(write_tokenizer(tmp_path)), qwen2(tmp_path)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello <|im_end|> \U0001f600"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.chat(messages) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.chat(messages), skip_special_tokens=False) == text
    assert text.endswith("<|im_start|>assistant\n")


def test_tokenizer_json_is_the_same(tmp_path: Path) -> None:
    source, target = write_tokenizer(tmp_path / "a"), tmp_path / "b"
    ours = some(source)
    qwen2(source).save_pretrained(str(target))
    for name in ("vocab.json", "merges.txt"):
        (target / name).unlink(missing_ok=True)
    other = some(target)
    assert (target / "tokenizer.json").exists()
    for text in TEXTS:
        assert other.encode(text) == ours.encode(text)
        assert other.decode(other.encode(text)) == ours.decode(ours.encode(text))
    messages = [{"role": "user", "content": "hello"}]
    assert other.chat(messages) == ours.chat(messages)


def test_truncation_and_padding_in_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    source = write_tokenizer(tmp_path)
    backend = some(source)._backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(source / "tokenizer.json"))
    assert some(source).encode("hello hello hello the") == tiny().encode("hello hello hello the")


def test_special_tokens_of_older_files(tmp_path: Path) -> None:
    """added_tokens.json and special_tokens_map.json instead of added_tokens_decoder."""
    write_tokenizer(tmp_path, added_tokens_decoder=None, eos_token=None, pad_token=None, mask_token=None)
    first = VOCAB_SIZE - len(SPECIAL)
    (tmp_path / "added_tokens.json").write_text(json.dumps({token: first + i for i, token in enumerate(SPECIAL)}))
    names: dict[str, Any] = {"eos_token": {"content": SPECIAL[0]}, "mask_token": SPECIAL[-1]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names | {"additional_special_tokens": [SPECIAL[1]]}))
    tokenizer = some(tmp_path)
    ids = tokenizer.encode("".join(SPECIAL))
    assert ids == list(range(first, VOCAB_SIZE))
    assert tokenizer.decode(ids) == SPECIAL[2]
    assert [tokenizer.is_special(token) for token in ids] == [True, True, False, True]


def test_extra_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=VOCAB_SIZE - 1, extra_special_tokens={"image": "<|image|>"})
    tokenizer = some(tmp_path)
    assert tokenizer.encode("<|image|>") == [VOCAB_SIZE - 1]
    assert tokenizer.is_special(VOCAB_SIZE - 1)
    assert tokenizer.num_token_ids == VOCAB_SIZE


def test_added_token_outside_the_byte_alphabet_is_text(tmp_path: Path) -> None:
    tokenizer = some(
        write_tokenizer(tmp_path, additional_special_tokens=["caf\u00e9 \u6587"], vocab_size=VOCAB_SIZE - 1)
    )
    assert tokenizer.decode([VOCAB_SIZE - 1], skip_special_tokens=False) == "caf\u00e9 \u6587"


def test_no_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path, 9) is None


def test_larger_than_the_model(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert some(tmp_path).num_token_ids == VOCAB_SIZE
    with pytest.raises(TokenizerError, match=r"vocab\.json: has ids up to 319, expected less than vocab_size 319"):
        load_tokenizer(tmp_path, VOCAB_SIZE - 1)


def _merge(line: str) -> Callable[[Path], object]:
    return lambda path: (path / "merges.txt").open("a", encoding="utf-8").write(line)


def _config(**changes: Any) -> Callable[[Path], object]:
    return lambda path: edit(path / "tokenizer_config.json", **changes)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no merges": (lambda p: (p / "merges.txt").unlink(), "merges.txt: is missing"),
    "no vocab": (lambda p: (p / "vocab.json").unlink(), "vocab.json: is missing"),
    "broken vocab": (lambda p: (p / "vocab.json").write_text("{"), "vocab.json: is not valid JSON"),
    "vocab is a list": (
        lambda p: (p / "vocab.json").write_text("[]"),
        "vocab.json: expected a JSON object, found list",
    ),
    "vocab is not text": (
        lambda p: (p / "vocab.json").write_bytes(b"\xff\xfe"),
        "vocab.json: is not valid JSON ('utf-8' codec",
    ),
    "id is text": (lambda p: edit(p / "vocab.json", a="x"), "vocab.json: token 'a' has the id 'x'"),
    "merge of three": (_merge("a b c\n"), "merges.txt: line 62: 'a b c' is not two tokens"),
    "merge of unknown": (_merge("hello hello\n"), "merges.txt: line 62: 'hello hello' is not two tokens"),
    "broken config": (
        lambda p: (p / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json: is not valid JSON",
    ),
    "broken map": (lambda p: (p / "special_tokens_map.json").write_text("{"), "special_tokens_map.json: is not valid"),
    "broken tokens": (lambda p: (p / "added_tokens.json").write_text("{"), "added_tokens.json: is not valid JSON"),
    "broken tokenizer": (lambda p: (p / "tokenizer.json").write_text("{"), "tokenizer.json: is not valid JSON"),
    "other decoder": (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer.json: decoder is None, expected"),
    "no model": (
        lambda p: (p / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}'),
        "tokenizer.json: is not a tokenizer",
    ),
    "wrong id": (
        _config(added_tokens_decoder={"999": {"content": "<|x|>"}}),
        "tokenizer_config.json: token '<|x|>' is declared as id 999, but it becomes 316",
    ),
    "no id": (
        _config(added_tokens_decoder={"x": {"content": "<|x|>"}}),
        "tokenizer_config.json: 'x' is not a token id",
    ),
    "no content": (_config(added_tokens_decoder={"316": {}}), "tokenizer_config.json: added_tokens_decoder[316] is {}"),
    "tokens are a list": (_config(added_tokens_decoder=[1]), "tokenizer_config.json: added_tokens_decoder is [1]"),
    "eos is a number": (_config(eos_token=5), "tokenizer_config.json: eos_token is 5, expected a token"),
    "extra tokens": (_config(extra_special_tokens="x"), "tokenizer_config.json: extra_special_tokens is 'x'"),
    "template is a number": (_config(chat_template=3), "tokenizer_config.json: chat_template is 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, words = REFUSED[case]
    change(write_tokenizer(tmp_path))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path, VOCAB_SIZE)
    assert str(caught.value).startswith(f"{tmp_path}/{words}")


# ---- ids, text, chat -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB_SIZE + 5)))
def test_decode_equals_the_library(ids: list[int]) -> None:
    for skip in (True, False):
        assert tiny().decode(ids, skip_special_tokens=skip) == tiny()._backend.decode(ids, skip_special_tokens=skip)


@given(st.text())
def test_round_trip(text: str) -> None:
    from unicodedata import normalize

    assert tiny().decode(tiny().encode(text), skip_special_tokens=False) == normalize("NFC", text)


def test_lone_surrogate() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        tiny().encode("a\ud800")


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = some(write_tokenizer(tmp_path, chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "tool", "content": "x"}], "refuses the messages: unknown role tool"),
        ([{"role": "user"}], "refuses the messages: .*content"),
        ([{"role": "user", "content": [1]}], "refuses the messages: "),
    ],
)
def test_chat_errors(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny().chat(messages)


def test_broken_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        some(write_tokenizer(tmp_path, chat_template="{% if %}")).chat([{"role": "user", "content": "hello"}])


def test_template_sources(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]
    messages = [{"role": "user", "content": "hello"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert some(tmp_path).chat(messages) == tiny().chat(messages)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert some(tmp_path).chat(messages) == [VOCAB_SIZE - len(SPECIAL)]
    assert some(write_tokenizer(tmp_path / "b", chat_template=named[:1])).chat_template is None


# ---- streaming -----------------------------------------------------------------------------------------------------

FRAGMENTS = ["a", "b", "ab", "c", "\u00e9", "\U0001f600", "\u6587", " the", "hello", *SPECIAL[1:3]]


@st.composite
def id_lists(draw: st.DrawFn) -> list[int]:
    """Text cut into single bytes, whole tokens, special tokens, ids without token and broken UTF-8, mixed."""
    ids: list[int] = []
    for part in draw(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(0, VOCAB_SIZE + 2)), max_size=24)):
        if isinstance(part, int):
            ids.append(part)
        elif part in SPECIAL or draw(st.booleans()):
            ids += tiny().encode(part)
        else:
            ids += [byte_ids()[byte] for byte in part.encode()]
    return ids


@cache
def byte_ids() -> dict[int, int]:
    ids = {tiny().piece(token): token for token in range(256)}
    return {byte: ids[bytes([byte])] for byte in range(256)}


def chunks(ids: list[int], borders: list[int]) -> list[int]:
    return sorted({border % (len(ids) + 1) for border in borders})


BORDERS = st.lists(st.integers(0, 60), max_size=12)
STOPS = st.lists(st.text("abc\u00e9\U0001f600 the", min_size=1, max_size=5), max_size=4).map(tuple)


@given(st.one_of(id_lists(), st.lists(st.integers(0, 256))), BORDERS)
def test_stream_without_stop_is_decode(ids: list[int], borders: list[int]) -> None:
    stream, shown = TextStream(tiny(), ()), ""
    for border in chunks(ids, borders):
        text = stream.push(ids[:border])
        assert text.startswith(shown)
        # Only an incomplete sequence is held back, and that is at most three bytes long.
        assert tiny().decode(ids[:border])[: len(text)] == text
        assert len(tiny().decode(ids[:border])) - len(text) <= 1
        shown = text
    final = stream.finish(ids)
    assert final.startswith(shown)
    assert final == tiny().decode(ids) == stream.finish(ids)
    assert stream.stopped is None
    assert stream.num_text_tokens == len(ids)


def known_lengths(ids: list[int]) -> list[int]:
    """Characters known after each token, as a stream that is closed after the last one sees them."""
    stream = TextStream(tiny(), ())
    lengths = [len(stream.push(ids[: i + 1])) for i in range(len(ids))]
    return [*lengths[:-1], len(stream.finish(ids))] if ids else []


def expected_stop(ids: list[int], stops: tuple[str, ...], min_tokens: int) -> tuple[str, str | None, int]:
    """By brute force: text, stop string and number of tokens."""
    text, lengths = tiny().decode(ids), known_lengths(ids)
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
    stream, shown = TextStream(tiny(), stops, min_tokens), ""
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
    ids = tiny().encode("hello the end")
    stream = TextStream(tiny(), ("the",))
    assert stream.push(ids[:1]) == "hello"
    assert stream.push(ids[:2]) == "hello "
    assert stream.stopped == "the"
    assert stream.num_text_tokens == 2
    assert stream.push(ids) == "hello "


def test_half_a_character_is_held_back() -> None:
    ids = [byte_ids()[byte] for byte in "a\U0001f600b".encode()]
    stream = TextStream(tiny())
    assert [stream.push(ids[:n]) for n in range(1, 7)] == ["a", "a", "a", "a", "a\U0001f600", "a\U0001f600b"]
    broken = TextStream(tiny())
    assert broken.push(ids[:3]) == "a"
    assert broken.finish(ids[:3]) == "a\ufffd"


def test_start_of_a_stop_string_is_held_back() -> None:
    ids = [byte_ids()[byte] for byte in b"xaabay"]
    stream = TextStream(tiny(), ("aac", "aba"))
    assert [stream.push(ids[:n]) for n in range(1, 7)] == ["x", "x", "x", "xa", "xa", "xa"]
    assert (stream.stopped, stream.num_text_tokens) == ("aba", 5)


def test_no_token_is_decoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = tiny(), 0
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
