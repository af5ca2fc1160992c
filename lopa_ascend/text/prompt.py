"""Prompts to token ids, for the Python API and the server alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lopa_ascend.config import ParameterError
from lopa_ascend.text.tokenizer import Tokenizer


class Prompts:
    """What turns texts, conversations and ids into ids that a model has."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, mask_token_id: int, model_name: str):
        self.tokenizer = tokenizer
        self._vocab_size, self._mask, self._model_name = vocab_size, mask_token_id, model_name

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ParameterError: it is empty, holds ids that the model does not have, or is text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ParameterError("prompt", f"{self._model_name} has no tokenizer files; give token ids")
            try:
                ids = self.tokenizer.encode(prompt)
            except UnicodeEncodeError as error:
                raise ParameterError("prompt", f"is not text: {error.reason} at character {error.start}") from error
        else:
            ids = list(prompt)
        if not ids:
            raise ParameterError("prompt", "must not be empty")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise ParameterError("prompt", f"token id {token!r} is not an integer from 0 to {self._vocab_size - 1}")
            if token == self._mask:
                raise ParameterError("prompt", f"holds the mask token (id {token}), which only the engine may place")
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, through the chat template.

        Raises:
            ParameterError: there is no template, or it refuses the messages.
        """
        if self.tokenizer is None:
            raise ParameterError("messages", f"{self._model_name} has no tokenizer files, so no chat template")
        try:
            ids = self.tokenizer.chat([dict(message) for message in messages])
        except ValueError as error:
            raise ParameterError("messages", str(error)) from error
        return self.encode(ids)

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raises:
        ParameterError: stop strings need a tokenizer.
        """
        if stop and self.tokenizer is None:
            raise ParameterError("stop", f"needs a tokenizer, and {self._model_name} has no tokenizer files")
