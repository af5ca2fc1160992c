"""Lets a model think before an answer that keeps to a grammar, and ends that after a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.decode.constraint import Matcher
from lopa_ascend.types import Thinking


class FreeAnswer:
    """Any text as an answer, without another mark ``close`` if that is a single token; see ``Matcher``."""

    is_complete = takes_any = True
    is_over = False

    def __init__(self, close: Sequence[int], num_token_ids: int):
        self._close = close[0] if len(close) == 1 else None
        self._any = (1 << num_token_ids) - 1

    def allowed(self) -> int:
        return self._any if self._close is None else self._any & ~(1 << self._close)

    def accept(self, tokens: Sequence[int]) -> int:
        return tokens.index(self._close) if self._close in tokens else len(tokens)

    def roll_back(self, count: int) -> None:
        pass

    def forced(self) -> Sequence[int]:
        return ()

    def ahead(self) -> Sequence[tuple[int, int]]:
        return ()


class ThinkingMatcher:
    """Follows thoughts, with free tokens up to the closing mark, and then the answer; see ``Matcher``. If the prompt
    has not opened the thoughts, the first token decides: the opening mark, if it is one token, or one of the answer."""

    def __init__(self, answer: Matcher, thinking: Thinking, num_token_ids: int):
        self._answer, self._close, self._max_tokens = answer, list(thinking.close), thinking.max_tokens
        self._open = () if thinking.is_open else thinking.open
        self._any = (1 << num_token_ids) - 1
        self._thoughts: list[int] = []
        """The tokens before the answer, with their marks."""
        self._num_answered = 0

    def allowed(self) -> int:
        if self._is_thinking:
            must = self.forced()
            return 1 << must[0] if must else self._any
        allowed = 0 if self._answer.is_over else self._answer.allowed()
        return allowed | 1 << self._open[0] if self._may_begin else allowed

    def accept(self, tokens: Sequence[int]) -> int:
        for index, token in enumerate(tokens):
            begins = self._may_begin and token == self._open[0]
            if not begins and not self._is_thinking:
                num_accepted = self._answer.accept(tokens[index:])
                self._num_answered += num_accepted
                return index + num_accepted
            if not self.allowed() >> token & 1:
                return index
            self._thoughts.append(token)
        return len(tokens)

    def roll_back(self, count: int) -> None:
        num_answered = min(count, self._num_answered)
        if num_answered:
            self._answer.roll_back(num_answered)
            self._num_answered -= num_answered
        del self._thoughts[len(self._thoughts) - (count - num_answered) :]

    @property
    def is_complete(self) -> bool:
        return not self._is_thinking and self._answer.is_complete

    @property
    def is_over(self) -> bool:
        return not self._is_thinking and not self._may_begin and self._answer.is_over

    def forced(self) -> Sequence[int]:
        if not self._is_thinking:
            return () if self._may_begin else self._answer.forced()
        written = len(self._thoughts) - len(self._open)
        return (
            () if self._max_tokens is None or written < self._max_tokens else self._close[written - self._max_tokens :]
        )

    @property
    def takes_any(self) -> bool:
        return not self.forced() if self._is_thinking else self._answer.takes_any

    def ahead(self) -> Sequence[tuple[int, int]]:
        """The closing mark, if it is one token: an answer to thoughts that end before it cannot hold it."""
        if not self._is_thinking or self._max_tokens is None or len(self._close) > 1:
            return ()
        left = self._max_tokens - (len(self._thoughts) - len(self._open))
        return [(left, self._close[0])] if left > 0 else ()

    @property
    def _may_begin(self) -> bool:
        """Whether the next token decides if the model thinks."""
        return len(self._open) == 1 and not self._thoughts and not self._num_answered

    @property
    def _is_thinking(self) -> bool:
        if self._open and not self._thoughts:
            return False
        return self._thoughts[-len(self._close) :] != self._close
