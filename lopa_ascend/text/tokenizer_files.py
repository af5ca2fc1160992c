"""Reads the tokenizer of a model directory, and refuses files that do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lopa_ascend.config.files import read_json_object, read_text
from lopa_ascend.text.tokenizer import Tokenizer

WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2, and Dream after it, splits text into words before BPE."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG = "tokenizer_config.json"


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used; the message names the file and what was expected."""


def load_tokenizer(path: str | Path, vocab_size: int, chat_template: str | None = None) -> Tokenizer | None:
    """The tokenizer of a model directory; None if there are no tokenizer files.

    Reads tokenizer.json, or else vocab.json and merges.txt. Special tokens and the chat template come from
    tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat_template.jinja, as far as they exist.

    Args:
        path: the model directory.
        vocab_size: rows of the model's embedding; every token id must be below.
        chat_template: replaces the template of the directory.

    Raises:
        TokenizerError: a file is missing or malformed, or the tokenizer has more ids than the model.
    """
    path = Path(path)
    if not any((path / name).exists() for name in ("tokenizer.json", "vocab.json", "merges.txt")):
        return None
    config = read_json_object(path / _CONFIG, TokenizerError, optional=True)
    source = path / "tokenizer.json"
    if source.exists():
        backend = _read_tokenizer_json(source)
    else:
        source = path / "vocab.json"
        backend = _read_bpe(path, add_prefix_space=config.get("add_prefix_space") or False)
    _add_declared_tokens(path, backend, config)
    named, others = _special_tokens(path, config)
    _mark_as_special(backend, [*named.values(), *others])
    tokenizer = Tokenizer(backend, named, chat_template or _chat_template(path, config))
    if tokenizer.num_token_ids > vocab_size:
        raise TokenizerError(
            f"{source}: has ids up to {tokenizer.num_token_ids - 1}, expected less than vocab_size {vocab_size}"
        )
    return tokenizer


# ---- the vocabulary --------------------------------------------------------------------------------------------------


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


def _read_bpe(path: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    """A byte-level BPE as Qwen2 sets it up, from vocab.json and merges.txt."""
    for file in (path / "vocab.json", path / "merges.txt"):
        if not file.exists():
            raise TokenizerError(f"{file}: is missing, expected beside the other one of vocab.json and merges.txt")
    vocab = read_json_object(path / "vocab.json", TokenizerError)
    for token, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise TokenizerError(f"{path / 'vocab.json'}: token {token!r} has the id {token_id!r}, expected a number")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_read_merges(path / "merges.txt", vocab)))
    backend.normalizer = normalizers.NFC()
    split_words = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merges(file: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that BPE merges, in order of precedence."""
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


# ---- added and special tokens ----------------------------------------------------------------------------------------


def _add_declared_tokens(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds the tokens that added_tokens.json and tokenizer_config.json declare, at the ids that they declare."""
    declared: dict[int, tuple[Path, AddedToken]] = {}
    file = path / "added_tokens.json"
    for content, token_id in read_json_object(file, TokenizerError, optional=True).items():
        declared[_parse_token_id(file, token_id)] = file, AddedToken(content)
    file = path / _CONFIG
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder is {decoder!r}, expected an object")
    for token_id, value in decoder.items():
        content = _token_text(file, f"added_tokens_decoder[{token_id}]", value)
        flags = {flag: value[flag] for flag in _TOKEN_FLAGS if flag in value} if isinstance(value, dict) else {}
        declared[_parse_token_id(file, token_id)] = file, AddedToken(content, **flags)
    for token_id, (file, token) in sorted(declared.items()):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise TokenizerError(
                f"{file}: token {token.content!r} is declared as id {token_id}, but it becomes {found}"
            )


def _special_tokens(path: Path, config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The special tokens that have a name, such as "eos_token", by name; and the others."""
    map_file = path / "special_tokens_map.json"
    sources = {map_file: read_json_object(map_file, TokenizerError, optional=True), path / _CONFIG: config}
    named: dict[str, str] = {}
    others: list[str] = []
    for file, values in sources.items():
        for name in _NAMED_TOKENS:
            if values.get(name) is not None:
                named[name] = _token_text(file, name, values[name])
        for field in ("additional_special_tokens", "extra_special_tokens"):
            extra = values.get(field) or []
            if not isinstance(extra, dict | list):
                raise TokenizerError(f"{file}: {field} is {extra!r}, expected a list of tokens")
            tokens = extra.values() if isinstance(extra, dict) else extra
            others += [_token_text(file, field, token) for token in tokens]
    return named, others


def _mark_as_special(backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Makes tokens special that are not; those that do not exist get the next ids."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([token for token in dict.fromkeys(tokens) if token not in special])


def _token_text(file: Path, field: str, value: object) -> str:
    """The text of a token that is given as a string, or as an object with "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise TokenizerError(f"{file}: {field} is {value!r}, expected a token")
    return text


def _parse_token_id(file: Path, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if type(value) is int:
        return value
    raise TokenizerError(f"{file}: {value!r} is not a token id")


# ---- the chat template -----------------------------------------------------------------------------------------------


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The template in chat_template.jinja, or else the (default) one in tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file, TokenizerError)
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path / _CONFIG}: chat_template is {template!r}, expected a string")
    return template
