"""Reads the tokenizer of a model directory, and refuses files that do not fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lopa_ascend.config.files import MAX_VOCABULARY, read_bytes, read_json_object, read_text, shown
from lopa_ascend.text.template import check_template, read_template
from lopa_ascend.text.tokenizer import Tokenizer, TokenizerError

WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2, and Dream after it, splits text into words before BPE."""
BPE_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer", "DreamTokenizerFast")
"""Tokenizers that vocab.json and merges.txt are enough for; others may split text in another way."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields that name a special token. A token that is not in the vocabulary yet gets the next free id, in this order, so
that all ranks, and later starts, give it the same id."""
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG = "tokenizer_config.json"


def load_tokenizer(path: str | Path, vocab_size: int, chat_template: str | None = None) -> Tokenizer | None:
    """``load_vocabulary``, with the directory's chat template or the one that replaces it."""
    tokenizer = load_vocabulary(path, vocab_size)
    if tokenizer is not None:
        tokenizer.chat_template = load_template(path, chat_template)
    return tokenizer


def load_template(path: str | Path, chat_template: str | None = None) -> str | None:
    """The chat template of a model directory, or the one that replaces it; None if there is none. Raises TokenizerError
    if a file is malformed."""
    if chat_template is not None:
        check_template(chat_template, "chat_template")
        return chat_template
    file = Path(path) / _CONFIG
    template, source = read_template(Path(path), file, read_json_object(file, TokenizerError, optional=True))
    if template is not None:
        check_template(template, source)
    return template


def load_vocabulary(path: str | Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a model directory, without a chat template; None if there are no tokenizer files.

    Reads tokenizer.json, or else vocab.json and merges.txt as Qwen2's tokenizer does. Special tokens come from
    tokenizer_config.json. Only if it has no added_tokens_decoder, as in older directories, they also come from
    added_tokens.json, and from special_tokens_map.json, which goes first then; transformers does the same.

    Raises TokenizerError if files are missing or malformed, or an id is beyond the ``vocab_size`` rows of the
    embedding.
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
        _check_class(path / _CONFIG, config)
        backend = _read_bpe(path, add_prefix_space=_flag(path / _CONFIG, config, "add_prefix_space"))
    _add_declared_tokens(path, backend, config)
    named, extra, others = _special_tokens(path, config)
    _mark_as_special(backend, [*named.values(), *extra.values(), *others])
    if not backend.get_vocab_size():
        raise TokenizerError(f"{source}: has no tokens")
    tokenizer = Tokenizer(backend, named, extra)
    if tokenizer.num_token_ids > vocab_size:
        raise TokenizerError(
            f"{source}: has ids up to {tokenizer.num_token_ids - 1}, expected less than vocab_size {vocab_size}"
        )
    return tokenizer


# ---- the vocabulary --------------------------------------------------------------------------------------------------


def _read_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    values = read_json_object(file, TokenizerError, max_bytes=MAX_VOCABULARY)
    decoder = values.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise TokenizerError(
            f"{file}: decoder is {shown(decoder)}, expected type ByteLevel: only byte-level BPE is supported"
        )
    model = values.get("model")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        _check_ids(file, model["vocab"])
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_bytes(file, TokenizerError, MAX_VOCABULARY))
    # The library raises nothing narrower, and what its Rust code did not foresee is not even an Exception.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        found = str(error)[:300]  # it may quote the file
        raise TokenizerError(f"{file}: is not a tokenizer that this version of tokenizers reads: {found}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_ids(file: Path, vocab: dict[str, Any]) -> None:
    """Refuses a vocabulary in which an id is no id, or that of two tokens."""
    by_id: dict[int, str] = {}
    for token, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise TokenizerError(f"{file}: token {shown(token)} has the id {shown(token_id)}, expected a number")
        if by_id.setdefault(token_id, token) != token:
            raise TokenizerError(
                f"{file}: token {shown(token)} has the id {token_id}, which is that of {shown(by_id[token_id])}; "
                "expected an id of its own"
            )


def _check_class(file: Path, config: dict[str, Any]) -> None:
    """Refuses the class of a tokenizer that may split text into other words than Qwen2's."""
    name = config.get("tokenizer_class")
    if name is not None and name not in BPE_CLASSES:
        raise TokenizerError(
            f"{file}: tokenizer_class is {shown(name)}, expected one of {', '.join(BPE_CLASSES)}, or a tokenizer.json "
            "beside it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes one"
        )


def _read_bpe(path: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    """A byte-level BPE as Qwen2 sets it up."""
    for file in (path / "vocab.json", path / "merges.txt"):
        if not file.exists():
            raise TokenizerError(f"{file}: is missing, expected beside the other one of vocab.json and merges.txt")
    vocab = read_json_object(path / "vocab.json", TokenizerError, max_bytes=MAX_VOCABULARY)
    _check_ids(path / "vocab.json", vocab)
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
    for number, line in enumerate(read_text(file, TokenizerError, max_bytes=MAX_VOCABULARY).split("\n"), 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= vocab.keys():
            raise TokenizerError(
                f"{file}: line {number}: {shown(line)} is not two tokens of vocab.json that merge into a third"
            )
        merges.append((parts[0], parts[1]))
    return merges


# ---- added and special tokens ----------------------------------------------------------------------------------------


def _add_declared_tokens(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds declared tokens at the ids that they are declared with."""
    declared: dict[int, tuple[Path, AddedToken]] = {}

    def add(file: Path, token_id: int, token: AddedToken) -> None:
        other_file, other = declared.get(token_id, (file, token))
        if other.content != token.content:
            raise TokenizerError(
                f"{file}: token {shown(token.content)} is declared as id {token_id}, which is that of "
                f"{shown(other.content)} in {other_file.name}; expected an id of its own"
            )
        declared[token_id] = file, token

    if _is_older(config):
        file = path / "added_tokens.json"
        for content, token_id in read_json_object(file, TokenizerError, optional=True).items():
            add(file, _parse_token_id(file, token_id), AddedToken(content))
    file = path / _CONFIG
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder is {shown(decoder)}, expected an object")
    for token_id, value in decoder.items():
        field = f"added_tokens_decoder[{shown(token_id)[1:-1]}]"
        content = _token_text(file, field, value)
        flags = {}
        if isinstance(value, dict):
            flags = {flag: _flag(file, value, flag, field) for flag in _TOKEN_FLAGS if flag in value}
        add(file, _parse_token_id(file, token_id), AddedToken(content, **flags))
    for token_id, (file, token) in sorted(declared.items()):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise TokenizerError(
                f"{file}: token {shown(token.content)} is declared as id {token_id}, but it becomes {found}"
            )


def _is_older(config: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json leaves added tokens to files of their own."""
    return config.get("added_tokens_decoder") is None


def _special_tokens(path: Path, config: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The special tokens: by a usual name, such as "eos_token"; by a name of their own; and the others."""
    sources = {path / _CONFIG: config}
    if _is_older(config):
        file = path / "special_tokens_map.json"
        sources[file] = read_json_object(file, TokenizerError, optional=True)
    named: dict[str, str] = {}
    extra: dict[str, str] = {}
    others: list[str] = []
    for file, values in sources.items():
        for name in _NAMED_TOKENS:
            if name not in values:
                continue
            named.pop(name, None)  # a null in a later file takes a token away
            if values[name] is not None:
                named[name] = _token_text(file, name, values[name])
        for field in ("additional_special_tokens", "extra_special_tokens"):
            tokens = values.get(field) or []
            if isinstance(tokens, dict):
                extra |= {name: _token_text(file, field, token) for name, token in tokens.items()}
            elif isinstance(tokens, list):
                others += [_token_text(file, field, token) for token in tokens]
            else:
                raise TokenizerError(f"{file}: {field} is {shown(tokens)}, expected a list of tokens")
    return named, extra, others


def _mark_as_special(backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Makes tokens special that are not; those that do not exist get the next ids."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([token for token in dict.fromkeys(tokens) if token not in special])


def _token_text(file: Path, field: str, value: object) -> str:
    """The text of a token that is given as a string, or as an object with "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise TokenizerError(f"{file}: {field} is {shown(value)}, expected a token")
    return text


def _flag(file: Path, values: dict[str, Any], name: str, within: str = "") -> bool:
    """A field that is true or false; missing or null: false. Messages name the object that it is ``within``."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        field = f"{within}.{name}" if within else name
        raise TokenizerError(f"{file}: {field} is {shown(value)}, expected true or false")
    return bool(value)


def _parse_token_id(file: Path, value: object) -> int:
    token_id = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value) else value
    if type(token_id) is not int or not 0 <= token_id < 2**32:
        raise TokenizerError(f"{file}: {shown(value)} is not a token id")
    return token_id
