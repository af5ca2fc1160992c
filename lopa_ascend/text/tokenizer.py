"""Text to token ids and back: byte-level BPE from a model's own files, and incremental detokenisation.

Works on the `tokenizers` library alone, so that Dream's tokenizer class, which is remote code, is not needed;
transformers, which takes seconds to import, only renders chat templates.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lopa_ascend.config.files import read_json_object, read_text

# How Qwen2, and Dream after it, cuts text into words before BPE.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used; the message names the file and what was expected."""


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary; bytes that do not print are written from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """A byte-level BPE tokenizer. ``special`` are the named special tokens that the chat template sees."""

    def __init__(self, backend: tokenizers.Tokenizer, special: dict[str, str], chat_template: str | None):
        self.special, self.chat_template = special, chat_template
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._pieces: dict[int, bytes] = {}
        self.num_token_ids: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in the text are recognised, none is added.

        Raises:
            ValueError: the text holds lone surrogates.
        """
        text.encode()
        # A batch of one, because that releases the GIL: megabytes of text take seconds.
        return list(self._backend.encode_batch([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD, ids that are no token become nothing."""
        skip = self.is_special if skip_special_tokens else lambda _: False
        return b"".join(self.piece(token) for token in ids if not skip(token)).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token in self._added and bool(self._added[token].special)

    def piece(self, token: int) -> bytes:
        """The bytes of one token; a sequence's bytes are those of its tokens one after the other."""
        piece = self._pieces.get(token)
        if piece is None:
            content = self._backend.id_to_token(token) or ""
            written_out = token in self._added or not _BYTES.keys() >= set(content)
            piece = content.encode() if written_out else bytes(_BYTES[char] for char in content)
            self._pieces[token] = piece
        return piece

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: there are no messages, there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template")
        if not messages:
            raise ValueError("there are no messages")
        from jinja2 import TemplateError

        try:
            text = self._renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # Templates add strings: content that is null or a list is a TypeError of theirs.
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return self.encode(str(text))

    @cached_property
    def _renderer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        # Only its templates are used, so it needs no vocabulary of ours.
        empty = tokenizers.Tokenizer(models.BPE())
        return PreTrainedTokenizerFast(tokenizer_object=empty, chat_template=self.chat_template, **self.special)


class TextStream:
    """Incremental detokeniser of one request: the text that is safe to show, which only ever grows.

    Held back are an incomplete UTF-8 sequence and any ending that could begin a stop string. The text ends before the
    earliest stop string (of several at one place the longest), whatever the pushes; one that lies within the first
    ``min_tokens`` tokens does not count. All work is linear in the tokens; no token is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0):
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._tokenizer, self._stop, self._min_tokens = tokenizer, stop, min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown, self._held = "", ""
        self._ends: list[int] = []
        """Per token, the characters known after it."""
        self._stop_end = 0

    @property
    def num_shown(self) -> int:
        """Tokens of which nothing is held back."""
        return bisect_right(self._ends, len(self._shown))

    @property
    def num_text_tokens(self) -> int:
        """Tokens that the visible text needs: when stopped, up to the one that completes the stop string."""
        return len(self._ends) if self.stopped is None else bisect_left(self._ends, self._stop_end) + 1

    def push(self, token_ids: Sequence[int]) -> str:
        """The text to show, given all final tokens so far."""
        return self._absorb(token_ids, final=False)

    def finish(self, token_ids: Sequence[int]) -> str:
        """The whole text, given all tokens; nothing is held back any more, and an incomplete sequence is U+FFFD."""
        return self._absorb(token_ids, final=True)

    def _absorb(self, token_ids: Sequence[int], final: bool) -> str:
        if self.stopped is not None:
            return self._shown
        length = len(self._shown) + len(self._held)
        chunks = [self._held]
        for token in token_ids[len(self._ends) :]:
            if not self._tokenizer.is_special(token):
                chunks.append(self._decoder.decode(self._tokenizer.piece(token)))
                length += len(chunks[-1])
            self._ends.append(length)
        if final:
            chunks.append(self._decoder.decode(b"", final=True))
            if self._ends:
                self._ends[-1] += len(chunks[-1])
        self._held = "".join(chunks)
        found, open_from = self._find_stop(), len(self._held) if final else self._open_from()
        release = open_from
        if found is not None:
            start, stop = found
            release = min(start, open_from)
            # A longer stop string at the same place, or one that begins before, may still be on its way.
            if start < open_from:
                self.stopped, self._stop_end = stop, len(self._shown) + start + len(stop)
        self._shown += self._held[:release]
        self._held = self._held[release:]
        return self._shown

    def _find_stop(self) -> tuple[int, str] | None:
        """The earliest, then longest, stop string in the held text that ends after the first ``min_tokens`` tokens."""
        if len(self._ends) < self._min_tokens:
            return None
        uncounted = self._ends[self._min_tokens - 1] - len(self._shown) if self._min_tokens else 0
        hits = ((self._held.find(stop, max(0, uncounted - len(stop) + 1)), stop) for stop in self._stop)
        return min((hit for hit in hits if hit[0] >= 0), key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def _open_from(self) -> int:
        """Where the longest ending of the held text that begins a stop string, without being all of it, starts."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return len(self._held) - longest


def load_tokenizer(path: str | Path, vocab_size: int, chat_template: str | None = None) -> Tokenizer | None:
    """The tokenizer in a model directory; None if there are no tokenizer files. ``chat_template`` replaces its own.

    Reads tokenizer.json, or else vocab.json and merges.txt; special tokens and the chat template come from
    tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat_template.jinja where they exist.

    Raises:
        TokenizerError: a file is missing or malformed, or the tokenizer has ids from ``vocab_size`` on.
    """
    path = Path(path)
    source = path / "tokenizer.json"
    if source.exists():
        backend = _read_tokenizer_json(source)
    elif (path / "vocab.json").exists() or (path / "merges.txt").exists():
        source = path / "vocab.json"
        backend = _read_bpe(path)
    else:
        return None
    config = read_json_object(path / "tokenizer_config.json", TokenizerError, optional=True)
    _add_declared_tokens(path, backend, config)
    named, others = _special_tokens(path)
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([token for token in dict.fromkeys([*named.values(), *others]) if token not in known])
    tokenizer = Tokenizer(backend, named, chat_template or _chat_template(path, config))
    if tokenizer.num_token_ids > vocab_size:
        raise TokenizerError(
            f"{source}: has ids up to {tokenizer.num_token_ids - 1}, expected less than vocab_size {vocab_size}"
        )
    return tokenizer


def _read_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    decoder = read_json_object(file, TokenizerError).get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise TokenizerError(
            f"{file}: decoder is {decoder!r}, expected type ByteLevel: only byte-level BPE is supported"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    # The library raises nothing narrower.
    except Exception as error:
        raise TokenizerError(f"{file}: is not a tokenizer that this version of tokenizers reads: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_bpe(path: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE as Qwen2 sets it up, from vocab.json and merges.txt."""
    for file in (path / "vocab.json", path / "merges.txt"):
        if not file.exists():
            raise TokenizerError(f"{file}: is missing, expected beside the other one of vocab.json and merges.txt")
    vocab = read_json_object(path / "vocab.json", TokenizerError)
    for token, index in vocab.items():
        if type(index) is not int or not 0 <= index < 2**32:
            raise TokenizerError(f"{path / 'vocab.json'}: token {token!r} has the id {index!r}, expected a number")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_read_merges(path / "merges.txt", vocab)))
    config = read_json_object(path / "tokenizer_config.json", TokenizerError, optional=True)
    prefix_space = config.get("add_prefix_space") or False
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated", invert=False)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merges(file: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(file, TokenizerError).split("\n"), 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= vocab.keys():
            raise TokenizerError(
                f"{file}: line {number}: {line!r} is not two tokens of vocab.json that merge into a third"
            )
        merges.append((parts[0], parts[1]))
    return merges


def _content(file: Path, field: str, value: object) -> str:
    """The text of a token given as a string or as an object."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise TokenizerError(f"{file}: {field} is {value!r}, expected a token")
    return content


def _special_tokens(path: Path) -> tuple[dict[str, str], list[str]]:
    """The named special tokens, and the others."""
    named: dict[str, str] = {}
    others: list[str] = []
    for file in (path / "special_tokens_map.json", path / "tokenizer_config.json"):
        values = read_json_object(file, TokenizerError, optional=True)
        named |= {name: _content(file, name, values[name]) for name in _NAMED_TOKENS if values.get(name) is not None}
        for field in ("additional_special_tokens", "extra_special_tokens"):
            extra = values.get(field) or []
            if not isinstance(extra, dict | list):
                raise TokenizerError(f"{file}: {field} is {extra!r}, expected a list of tokens")
            others += [_content(file, field, token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    return named, others


def _add_declared_tokens(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds the tokens that added_tokens.json and tokenizer_config.json declare, at the ids they declare."""
    file = path / "added_tokens.json"
    added = read_json_object(file, TokenizerError, optional=True)
    declared = {_token_id(file, index): (file, AddedToken(content)) for content, index in added.items()}
    file = path / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder is {decoder!r}, expected an object")
    for index, value in decoder.items():
        content = _content(file, f"added_tokens_decoder[{index}]", value)
        flags = {flag: value[flag] for flag in _FLAGS if flag in value} if isinstance(value, dict) else {}
        declared[_token_id(file, index)] = file, AddedToken(content, **flags)
    for index, (file, token) in sorted(declared.items()):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != index:
            raise TokenizerError(f"{file}: token {token.content!r} is declared as id {index}, but it becomes {found}")


def _token_id(file: Path, index: object) -> int:
    if isinstance(index, str) and index.isascii() and index.isdigit():
        return int(index)
    if type(index) is int:
        return index
    raise TokenizerError(f"{file}: {index!r} is not a token id")


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file, TokenizerError)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path / 'tokenizer_config.json'}: chat_template is {template!r}, expected a string")
    return template
