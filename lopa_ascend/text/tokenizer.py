"""Text to token ids and back, by byte-level BPE, and conversations to token ids.

The `tokenizers` library is enough: Dream's tokenizer class is remote code, transformers takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken

from lopa_ascend.text.sandbox import ChatTemplate, LimitError, TemplateError


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: from U+0100 on, those that do not print."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}
NFC_FACTOR = 4
"""Most characters that one becomes in Unicode normalisation, with which some tokenizers begin."""


def _token_bytes(token: str) -> bytes:
    """The bytes of a token that the vocabulary writes in the byte alphabet; of another token those of its text."""
    return bytes(_BYTES[character] for character in token) if _BYTES.keys() >= set(token) else token.encode()


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used; the message names the file and what was expected."""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


class Tokenizer:
    """A byte-level BPE tokenizer; ``load_tokenizer`` makes it from a model's files. The chat template may use
    ``special`` tokens, such as "eos_token", and ``extra`` ones, by name."""

    chat_template: str | None = None
    """Jinja template that renders a conversation; None if the model has none. Set it before the first ``render``."""

    def __init__(self, backend: tokenizers.Tokenizer, special: dict[str, str], extra: dict[str, str]):
        self.special, self._extra = special, extra
        self.num_token_ids: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        """Token ids that exist: one more than the largest."""
        self.max_token_bytes = max(len(_token_bytes(token)) for token in backend.get_vocab(with_added_tokens=True))
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        """By token id: the tokens outside the BPE vocabulary."""
        self._pieces: dict[int, bytes] = {}

    def to_json(self) -> str:
        """The whole, without the chat template, in the form of tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def encode(self, *texts: str) -> list[int]:
        """The token ids of texts, one after the other. Special tokens in a text are recognised; none is added. Raises
        ValueError for lone surrogates."""
        for text in texts:
            text.encode()
        # A batch, because that releases the GIL: megabytes of text take seconds.
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; ids that do not exist become nothing."""
        shown = [token for token in ids if not (skip_special_tokens and self.is_special(token))]
        return b"".join(map(self.piece, shown)).decode(errors="replace")

    @property
    def special_ids(self) -> list[int]:
        return [token for token, added in self._added.items() if added.special]

    def is_special(self, token: int) -> bool:
        return token in self._added and bool(self._added[token].special)

    def is_added(self, token: int) -> bool:
        """Whether a token lies outside the BPE vocabulary, special or not."""
        return token in self._added

    def id_of(self, content: str) -> int | None:
        """None if there is no token with this text."""
        token: int | None = self._backend.token_to_id(content)
        return token

    def special_id_of(self, content: str) -> int | None:
        token = self.id_of(content)
        return token if token is not None and self.is_special(token) else None

    def piece(self, token: int) -> bytes:
        """The bytes of one token. The bytes of a sequence are those of its tokens one after the other."""
        piece = self._pieces.get(token)
        if piece is None:
            content = self._backend.id_to_token(token) or ""
            piece = self._pieces[token] = content.encode() if token in self._added else _token_bytes(content)
        return piece

    def spell(self, text: bytes, hidden: int) -> list[int]:
        """The tokens of the BPE vocabulary that write a text, each as long as can be; up to where none fits. Bit i of
        ``hidden``: token i is not used."""
        tokens: list[int] = []
        characters = "".join(map(_CHARACTERS.__getitem__, text))
        start = 0
        while start < len(text):
            lengths = range(min(len(text) - start, self.max_token_bytes), 0, -1)
            found = (self.id_of(characters[start : start + length]) for length in lengths)
            fits = (token for token in found if token is not None and not (hidden >> token & 1 or self.is_added(token)))
            token = next(fits, None)
            if token is None:
                break
            tokens.append(token)
            start += len(self.piece(token))
        return tokens

    def max_characters(self, num_tokens: int) -> int:
        """Characters of the longest text of ``num_tokens`` tokens, with white space that a special token swallows."""
        return num_tokens * self.max_token_bytes * NFC_FACTOR

    def template_reads(self, variable: str) -> bool:
        return self._template is not None and variable in self._template.variables

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads beside the conversation and special tokens, such as "enable_thinking"."""
        return frozenset() if self._template is None else self._template.free_variables

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of messages, up to where the assistant's answer begins. Raises
        ValueError as ``ChatTemplate.render`` does, and if there are no messages or no template."""
        if self._template is None:
            raise ValueError("this model has no chat template")
        if not messages:
            raise ValueError("there are no messages")
        try:
            return self._template.render(messages, tools, variables)
        except LimitError as error:
            raise ValueError(f"the chat template {error}") from None
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def render_apart(
        self,
        messages: list[dict[str, Any]],
        plain: Iterable[int],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """As ``render``, in pieces that ``encode`` takes: the tokens ``plain`` come from the template alone, because in
        what it is given each of their texts is cut in two."""
        given = messages, tools, dict(variables or {})
        together = "\0".join(_strings(given))
        used = {*together, *(self.chat_template or "")}
        cut = next(character for character in map(chr, range(0x10FFFF, 0xFFFF, -1)) if character not in used)
        named = [self._added[token] for token in plain if token in self._added]
        tokens = [token for token in named if token.normalized or token.content in together]
        return self.render(*(self._with_cuts(values, tokens, cut) for values in given)).split(cut)

    def _with_cuts(self, value: Any, tokens: Sequence[AddedToken], cut: str) -> Any:
        """A value, in whose strings a character is put into every text of a token, after the first character."""
        if isinstance(value, dict):
            return {name: self._with_cuts(item, tokens, cut) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._with_cuts(item, tokens, cut) for item in value]
        if not isinstance(value, str):
            return value
        for token in tokens:
            text = token.content
            if token.normalized and self._backend.normalizer is not None:  # other texts can become the token, too
                text, normalized = map(self._backend.normalizer.normalize_str, (text, value))
                value = normalized if text in normalized else value
            while len(text) > 1 and text in value:
                value = value.replace(text, f"{text[0]}{cut}{text[1:]}")
        return value

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        return ChatTemplate(self.chat_template, {**self._extra, **self.special})
