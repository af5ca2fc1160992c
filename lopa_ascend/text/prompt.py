"""Turns prompts and conversations into token ids, for the Python API and for the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from lopa_ascend.config import ContextLengthError, DecodingParams, ParameterError, context_length
from lopa_ascend.text.guard import Guard
from lopa_ascend.text.reasoning import CLOSE, OPEN
from lopa_ascend.text.sandbox import end_processes
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tool_calls import BEGIN
from lopa_ascend.types import Grammar, Thinking

END_OF_PROMPT = 16
"""Tokens at the end of a prompt that show whether the model thinks: a mark, and white space."""
NO_TOOLS = (
    "the chat template of this model knows no tools: it must read the variable tools, and write calls as <tool_call> "
    "with JSON. Instead, describe tools and their results in messages of the user, or force a call by tool_choice"
)


class Prompts:
    """Turns texts and conversations into token ids, and refuses ids that the model does not have.

    Args:
        tokenizer: None for a model without one; then prompts must be token ids.
        max_model_len: most tokens of a prompt. Texts that cannot have so few are refused before they are tokenized;
            None: no text is.
        split_special_tokens: special tokens in the texts of messages are plain text. The mask always is.
        template_variables: what the chat template gets unless a conversation says otherwise. Raises ParameterError if
            it does not read one of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        mask_token_id: int,
        model_name: str,
        max_model_len: int | None = None,
        *,
        split_special_tokens: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self._template_variables = dict(template_variables or {})
        self._check_variables(self._template_variables, "default_chat_template_kwargs")
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._mask_token_id = mask_token_id
        self._model_name = model_name
        special = tokenizer.special_ids if tokenizer is not None and split_special_tokens else ()
        self._plain = {mask_token_id, *special}
        """Tokens that no text of a message becomes."""

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model, and calls in the form of ``text.tool_calls``."""
        tokenizer = self.tokenizer
        return tokenizer is not None and BEGIN in (tokenizer.chat_template or "") and tokenizer.template_reads("tools")

    @cached_property
    def _guard(self) -> Guard:
        assert self.tokenizer is not None, "for_engine refuses a grammar"
        return Guard(self.tokenizer)

    def close(self) -> None:
        """Ends the processes for grammars and chat templates. What needs one starts it again."""
        if "_guard" in self.__dict__:
            self._guard.close()
        end_processes()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt. Refuses one that is empty or far too long, or has ids that the model lacks."""
        ids = self.encode_text(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ParameterError("prompt", "must not be empty")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise ParameterError("prompt", f"token id {token!r} is not an integer from 0 to {self._vocab_size - 1}")
            if token == self._mask_token_id:
                raise ParameterError("prompt", f"holds the mask token (id {token}), which only the engine may place")
        return ids

    def encode_text(self, text: str) -> list[int]:
        """The token ids of a text, which may be empty or hold the mask."""
        if self.tokenizer is None:
            raise ParameterError("prompt", f"{self._model_name} has no tokenizer files; give token ids")
        self._check_characters("prompt", text, self.tokenizer)
        try:
            return self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise ParameterError("prompt", f"is not text: {error.reason} at character {error.start}") from error

    def _check_characters(self, param: str, text: str, tokenizer: Tokenizer) -> None:
        """Refuses a text that is too long whatever its tokens are: tokenizing megabytes takes seconds."""
        if self._max_model_len is None or len(text) <= (longest := tokenizer.max_characters(self._max_model_len)):
            return
        limit = context_length(self._max_model_len)
        message = f"has {len(text)} characters; {limit}, which have {longest} characters at most"
        raise ContextLengthError(param, message)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        checked: bool = True,
    ) -> list[int]:
        """The token ids of the prompt that the chat template makes of a conversation; see ``ChatTemplate.render``.
        ``checked``: refuses what ``encode`` refuses, such as a mask that the template writes."""
        if self.tokenizer is None:
            raise ParameterError("messages", f"{self._model_name} has no tokenizer files, so no chat template")
        if self._max_model_len is not None and len(messages) > self._max_model_len:
            limit = context_length(self._max_model_len)
            raise ContextLengthError("messages", f"has {len(messages)} messages, each of a token at least; {limit}")
        uses_tools = [message for message in messages if message["role"] == "tool" or "tool_calls" in message]
        if (tools or uses_tools) and not self.knows_tools:
            raise ParameterError("tools" if tools else "messages", NO_TOOLS)
        self._check_variables(variables or {}, "chat_template_kwargs")
        variables = {**self._template_variables, **(variables or {})}
        try:
            rows = [dict(message) for message in messages]
            pieces = self.tokenizer.render_apart(rows, self._plain, [dict(tool) for tool in tools], variables)
            self._check_characters("messages", "".join(pieces), self.tokenizer)
            ids = self.tokenizer.encode(*pieces)
        except ParameterError:
            raise
        except ValueError as error:
            raise ParameterError("messages", str(error)) from error
        return self.encode(ids) if checked else ids

    @property
    def can_think(self) -> bool:
        """Whether the chat template knows that the model thinks before it answers."""
        return self.tokenizer is not None and CLOSE in (self.tokenizer.chat_template or "")

    def thinking(self, prompt: Sequence[int]) -> Thinking | None:
        """How the model thinks before its answer to a prompt of ``encode_chat``; None: not at all."""
        tokenizer = self.tokenizer
        if tokenizer is None or not self.can_think:
            return None
        end = tokenizer.decode(prompt[-END_OF_PROMPT:], skip_special_tokens=False).rstrip()
        if end.endswith(CLOSE):
            return None
        return Thinking(end.endswith(OPEN), tuple(tokenizer.encode(OPEN)), tuple(tokenizer.encode(CLOSE)))

    def _check_variables(self, variables: Mapping[str, Any], field: str) -> None:
        """Refuses variables that the chat template does not read: they would change nothing."""
        read = frozenset[str]() if self.tokenizer is None else self.tokenizer.template_variables
        for name, value in variables.items():
            asks_for_nothing = name == "enable_thinking" and value is False
            if name not in read and not asks_for_nothing:
                message = f"is not read by the chat template, which reads {', '.join(sorted(read)) or 'none'}"
                raise ParameterError((field, name[:100]), message)

    def check_thinking(self, params: Mapping[str, Any], *, is_conversation: bool) -> None:
        """Refuses a ``max_thinking_tokens`` that could limit nothing."""
        if params.get("max_thinking_tokens") is not None and not (is_conversation and self.can_think):
            problem = "the chat template of this model has no <think>" if is_conversation else "this is no conversation"
            raise ParameterError("max_thinking_tokens", f"{problem}; leave it out")

    def for_engine(self, params: DecodingParams, thinking: Thinking | None = None) -> DecodingParams:
        """The parameters as the engine takes them: it knows no text, and no special tokens by name.

        A text in ``bad_words`` stands for its tokens alone and for those after a space, which may differ. A stop string
        that is a special token, such as "<|im_end|>", becomes one of ``stop_token_ids``: no answer's text has it.
        """
        has_banned_texts = any(isinstance(word, str) for word in params.bad_words)
        if self.tokenizer is None:
            is_constrained = params.structured_outputs is not None and not params.structured_outputs.is_any
            needs = {"stop": bool(params.stop), "bad_words": has_banned_texts, "structured_outputs": is_constrained}
            for name, needs_tokenizer in needs.items():
                if needs_tokenizer:
                    raise ParameterError(name, f"needs a tokenizer, and {self._model_name} has no tokenizer files")
            return params
        if thinking is not None:
            params = _after_thinking(params, replace(thinking, max_tokens=params.max_thinking_tokens))
        special = _special_stops(params, self.tokenizer, self._mask_token_id)
        if params.structured_outputs is not None and not params.structured_outputs.is_any:
            params = params.with_valid(structured_outputs=self._guard.checked(params.structured_outputs))
        if special:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
        if has_banned_texts:
            params = replace(params, bad_words=_words_as_ids(params.bad_words, self.tokenizer))
        return params


def _after_thinking(params: DecodingParams, thinking: Thinking) -> DecodingParams:
    """Lets the answer's grammar, if any, begin after what the model thinks. Only a grammar can end that."""
    grammar = params.structured_outputs
    if grammar is None and thinking.max_tokens is not None:
        grammar = Grammar("any", "")
    return params if grammar is None else params.with_valid(structured_outputs=replace(grammar, thinking=thinking))


def _special_stops(params: DecodingParams, tokenizer: Tokenizer, mask_token_id: int) -> list[int]:
    """The ids of stop strings that are special tokens, without the mask and ids that stop the answer already."""
    known = (mask_token_id, *params.stop_token_ids)
    ids = map(tokenizer.special_id_of, params.stop)
    return [token for token in ids if token is not None and token not in known]


def _words_as_ids(words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The words as token ids, each once. A text becomes two words: alone, and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if isinstance(word, str):
            bare = word.lstrip(" ")
            found |= dict.fromkeys(tuple(tokenizer.encode(text)) for text in (bare, f" {bare}"))
        else:
            found[word] = None
    found.pop((), None)  # of a text without tokens
    return tuple(found)
