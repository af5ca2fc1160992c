"""Updates of one request to what its reader sees: text that only grows, stop strings, and the output at the end."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.text.tokenizer import TextStream, Tokenizer
from lopa_ascend.types import GenerationOutput, Progress, StepRecord, Update


class OutputStream:
    """One request from its reader's side. The engine knows no text: when ``stopped`` is set, a stop string ended the
    output, and whoever reads must abort the request there."""

    def __init__(self, prompt: Sequence[int], params: DecodingParams, tokenizer: Tokenizer | None):
        self._prompt = tuple(prompt)
        self._text = TextStream(tokenizer, params.stop, params.min_new_tokens) if tokenizer else None
        self._tokens: list[int] = []
        self._probs: list[float] = []
        self._records: list[StepRecord] = []

    @property
    def stopped(self) -> bool:
        return self._text is not None and self._text.stopped is not None

    def push(self, update: Update) -> Progress:
        """What may be shown after an update; ``output`` is set when nothing more will come."""
        self._tokens += update.token_ids
        self._probs += update.max_probs
        if update.record is not None:
            self._records.append(update.record)
        if self._text is None:
            text, shown = "", len(self._tokens)
        else:
            text = self._text.push(self._tokens) if update.finish_reason is None else self._text.finish(self._tokens)
            shown = self._text.num_shown
        if self.stopped or update.finish_reason is not None:
            return self._finished(update, text)
        return Progress(tuple(self._tokens[:shown]), text, tuple(self._probs[:shown]))

    def _finished(self, update: Update, text: str) -> Progress:
        length = len(self._tokens)
        stop_reason: int | str | None = update.stop_token_id
        if self._text is not None and self._text.stopped is not None:
            length, stop_reason = self._text.num_text_tokens, self._text.stopped
        tokens, probs = tuple(self._tokens[:length]), tuple(self._probs[:length])
        output = GenerationOutput(
            prompt_token_ids=self._prompt,
            token_ids=tokens,
            text=None if self._text is None else text,
            finish_reason="length" if stop_reason is None else "stop",
            stop_reason=stop_reason,
            num_forwards=update.num_forwards,
            num_positions=update.num_positions,
            model_tokens=update.model_tokens,
            max_probs=probs,
            cached_tokens=update.cached_tokens,
            trace=tuple(self._records) if self._records else None,
        )
        return Progress(tokens, text, probs, output)
