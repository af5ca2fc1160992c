"""Turns the engine's updates of one request into what its reader sees: growing text, and the output at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.text.stream import TextStream
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import Alternatives, GenerationOutput, Progress, StepRecord, Update


class OutputStream:
    """One request from its reader's side.

    The engine knows no text, so it does not notice stop strings: when ``stopped`` is set, the reader must abort the
    request.

    Args:
        prompt: token ids of the prompt.
        params: the request's parameters, of which the stop strings and stop tokens are used.
        tokenizer: None for a model without one; then there is no text.
    """

    def __init__(self, prompt: Sequence[int], params: DecodingParams, tokenizer: Tokenizer | None):
        self._prompt = tuple(prompt)
        self._stop_token_ids = params.stop_token_ids
        self._text = TextStream(tokenizer, params.stop, params.min_new_tokens) if tokenizer else None
        self._tokens: list[int] = []
        """Final token ids."""
        self._probs: list[float] = []
        """For each token the probability at which it was filled."""
        self._alternatives: list[Alternatives] = []
        """For each token, if the request asked for ``top_logprobs``."""
        self._records: list[StepRecord] = []
        self._marks: list[tuple[float, int]] = []
        """See ``GenerationOutput.trace_marks``."""
        self._began = time.monotonic()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the output."""
        return self._text is not None and self._text.stopped is not None

    def push(self, update: Update) -> Progress:
        """What may be shown after an update; its ``output`` is set when nothing more will come."""
        self._tokens += update.token_ids
        self._probs += update.max_probs
        self._alternatives += update.alternatives
        if update.record is not None:
            self._records.append(update.record)
        finished = update.finish_reason is not None
        if self._text is None:
            text, num_shown = "", len(self._tokens)
        else:
            text = self._text.finish(self._tokens) if finished else self._text.push(self._tokens)
            num_shown = self._text.num_shown
        if update.record is not None:
            self._marks.append((time.monotonic() - self._began, len(text)))
        if finished or self.stopped:
            return self._finish(update, text)
        probs, alternatives = tuple(self._probs[:num_shown]), tuple(self._alternatives[:num_shown])
        return Progress(tuple(self._tokens[:num_shown]), text, probs, alternatives)

    def _finish(self, update: Update, text: str) -> Progress:
        """The last progress of the request, with its output."""
        num_shown = len(self._tokens)
        if self._text is not None and self._text.stopped is not None:
            num_shown = self._text.num_text_tokens
        finish_reason, stop_reason = self._reason(update)
        tokens, probs = tuple(self._tokens[:num_shown]), tuple(self._probs[:num_shown])
        alternatives = tuple(self._alternatives[:num_shown])
        output = GenerationOutput(
            prompt_token_ids=self._prompt,
            token_ids=tokens,
            text=None if self._text is None else text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_forwards=update.num_forwards,
            num_positions=update.num_positions,
            model_tokens=update.model_tokens,
            max_probs=probs,
            cached_tokens=update.cached_tokens,
            seed=update.seed,
            trace=tuple(self._records) if self._records else None,
            trace_marks=tuple(self._marks),
            alternatives=alternatives,
            continuation_logprobs=update.continuation_logprobs,
        )
        return Progress(tokens, text, probs, alternatives, output)

    def _reason(self, update: Update) -> tuple[str, int | str | None]:
        """Finish reason and stop reason of the output."""
        if update.finish_reason == "abort":
            return "abort", None
        if self._text is not None and self._text.stopped is not None:
            return "stop", self._text.stopped
        if update.stop_token_id is None:
            return "length", None
        return "stop", update.stop_token_id if update.stop_token_id in self._stop_token_ids else None
