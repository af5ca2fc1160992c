"""Turns the engine's updates of one request into what its reader sees: growing text, and the output at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from lopa_ascend.config import DecodingParams
from lopa_ascend.text.stream import TextStream
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import GappedText, GenerationOutput, Progress, StepRecord, TokenRun, Update


class OutputStream:
    """One request from its reader's side. Without a tokenizer there is no text.

    The engine knows no text, so it does not notice stop strings: when ``stopped`` is set, the reader must abort the
    request. ``output`` is None until nothing more will come.
    """

    def __init__(self, prompt: Sequence[int], params: DecodingParams, tokenizer: Tokenizer | None):
        self.output: GenerationOutput | None = None
        self._prompt = tuple(prompt)
        self._stop_token_ids = params.stop_token_ids
        self._stream = TextStream(tokenizer, params.stop, params.min_new_tokens) if tokenizer else None
        self._tokens = TokenRun()
        self._num_shown = 0
        """Tokens that may be shown."""
        self._text = ""
        self._records: list[StepRecord] = []
        self._marks: list[tuple[float, int]] = []
        """See ``GenerationOutput.trace_marks``."""
        self._began = time.monotonic()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the output."""
        return self._stream is not None and self._stream.stopped is not None

    @property
    def progress(self) -> Progress:
        return Progress(self._tokens[: self._num_shown], self._text, self.output)

    def push(self, update: Update) -> GenerationOutput | None:
        """Takes an update in, and returns the output if nothing more will come."""
        self._tokens += update.tokens
        finished = update.finish_reason is not None
        if self._stream is None:
            self._num_shown = len(self._tokens)
        else:
            advance = self._stream.finish if finished else self._stream.push
            self._text, self._num_shown = advance(self._tokens.ids), self._stream.num_shown
        if update.record is not None:
            self._records.append(update.record)
            self._marks.append((time.monotonic() - self._began, len(self._text)))
        if finished or self.stopped:
            self._num_shown = len(self._tokens) if self._stream is None else self._stream.num_text_tokens
            self.output = self._output(update)
        return self.output

    def _output(self, update: Update) -> GenerationOutput:
        finish_reason, stop_reason = self._reason(update)
        return GenerationOutput(
            prompt_token_ids=self._prompt,
            tokens=self._tokens[: self._num_shown],
            text=None if self._stream is None else self._text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_forwards=update.num_forwards,
            num_positions=update.num_positions,
            model_tokens=update.model_tokens,
            cached_tokens=update.cached_tokens,
            seed=update.seed,
            trace=tuple(self._records) if self._records else None,
            trace_marks=tuple(self._marks),
            continuation_logprobs=update.continuation_logprobs,
        )

    def _reason(self, update: Update) -> tuple[str, int | str | None]:
        if update.finish_reason == "abort":
            return "abort", None
        if self._stream is not None and self._stream.stopped is not None:
            return "stop", self._stream.stopped
        if update.finish_reason != "stop":
            return "length", None
        return "stop", update.stop_token_id if update.stop_token_id in self._stop_token_ids else None


class GapsStream(OutputStream):
    """As ``OutputStream``, for a text with gaps: each is read as an answer of its own. A gap whose length is found ends
    its text as a stop does."""

    def __init__(self, prompt: Sequence[int], params: DecodingParams, tokenizer: Tokenizer | None, gapped: GappedText):
        super().__init__(prompt, params, tokenizer)
        self._found = gapped.flexible
        self._gaps = [OutputStream(prompt, params, tokenizer) for _ in range(gapped.num_gaps)]
        self._num_begun = 0
        """Gaps of which updates have told."""
        self._num_complete = 0
        """Gaps that the engine has filled. A stop string can have ended another one before."""
        self._num_read = 0
        """Tokens that updates have brought."""

    @property
    def stopped(self) -> bool:
        return self._gaps[-1].stopped

    @property
    def progress(self) -> Progress:
        gaps = tuple(gap.progress for gap in self._gaps[: self._num_begun])
        tokens, text = TokenRun.joined([gap.tokens for gap in gaps]), "".join(gap.text for gap in gaps)
        return Progress(tokens, text, self.output, gaps)

    def push(self, update: Update) -> GenerationOutput | None:
        taken = 0
        for number in range(self._num_complete, len(self._gaps)):
            is_complete = number < len(update.gap_ends)
            end, token = update.gap_ends[number] if is_complete else (self._num_read + len(update.tokens), None)
            part = slice(taken, max(taken, end - self._num_read))
            taken = part.stop
            is_cut = token is None and number not in self._found
            reason = ("length" if is_cut else "stop") if is_complete else update.finish_reason
            own = replace(update, tokens=update.tokens[part], finish_reason=reason, stop_token_id=token, record=None)
            self._gaps[number].push(own)
            self._num_begun = number + 1
            if not is_complete:
                break
            self._num_complete += 1
        self._num_read += len(update.tokens)
        last = self._gaps[self._num_begun - 1].output
        if last is not None and (update.finish_reason or self.stopped):
            self.output = self._joined(last)
        return self.output

    def _joined(self, last: GenerationOutput) -> GenerationOutput:
        """The output of all gaps together. ``last``: of the last one that has begun."""
        outputs = tuple(gap.output for gap in self._gaps[: self._num_begun] if gap.output is not None)
        was_cut = any(output.finish_reason == "length" for output in outputs)
        return replace(
            last,
            tokens=TokenRun.joined([output.tokens for output in outputs]),
            text=None if last.text is None else "".join(output.text or "" for output in outputs),
            finish_reason="length" if was_cut and last.finish_reason == "stop" else last.finish_reason,
            gaps=outputs,
        )


def output_stream(
    prompt: Sequence[int], params: DecodingParams, tokenizer: Tokenizer | None, gapped: GappedText | None = None
) -> OutputStream:
    if gapped is None:
        return OutputStream(prompt, params, tokenizer)
    return GapsStream(prompt, params, tokenizer, gapped)
