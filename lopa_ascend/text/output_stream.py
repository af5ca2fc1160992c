"""Turns the engine's updates of one request into what its reader sees: growing text, and the output at the end."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

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
        if update.finish_reason != "stop":
            return "length", None
        return "stop", update.stop_token_id if update.stop_token_id in self._stop_token_ids else None


class GapsStream(OutputStream):
    """As ``OutputStream``, of a text with gaps: each gap is read as an answer of its own.

    Args:
        num_gaps: the gaps of the text, at least one.
        found: the gaps, by number, whose lengths are found: these end their texts as a stop does.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: DecodingParams,
        tokenizer: Tokenizer | None,
        num_gaps: int,
        found: Collection[int] = (),
    ):
        super().__init__(prompt, params, tokenizer)
        self._found = found
        self._gaps = [OutputStream(prompt, params, tokenizer) for _ in range(num_gaps)]
        self._progress = list[Progress]()
        """Of each gap that has begun."""
        self._num_complete = 0
        """Gaps that the engine has filled. A stop string can have ended another one before."""
        self._num_read = 0
        """Tokens that updates have brought."""

    @property
    def stopped(self) -> bool:
        return self._gaps[-1].stopped

    def push(self, update: Update) -> Progress:
        taken = 0
        for number in range(self._num_complete, len(self._gaps)):
            is_complete = number < len(update.gap_ends)
            end, token = update.gap_ends[number] if is_complete else (self._num_read + len(update.token_ids), None)
            part = slice(taken, max(taken, end - self._num_read))
            taken = part.stop
            is_cut = token is None and number not in self._found
            reason = ("length" if is_cut else "stop") if is_complete else update.finish_reason
            del self._progress[number:]
            self._progress.append(self._gaps[number].push(_part(update, part, reason, token)))
            if not is_complete:
                break
            self._num_complete += 1
        self._num_read += len(update.token_ids)
        return self._joined(update)

    def _joined(self, update: Update) -> Progress:
        """The progress of all gaps together."""
        gaps = tuple(self._progress)
        joined = Progress(
            token_ids=tuple(chain.from_iterable(gap.token_ids for gap in gaps)),
            text="".join(gap.text for gap in gaps),
            max_probs=tuple(chain.from_iterable(gap.max_probs for gap in gaps)),
            alternatives=tuple(chain.from_iterable(gap.alternatives for gap in gaps)),
            gaps=gaps,
        )
        last = gaps[-1].output
        if last is None or not (update.finish_reason or self.stopped):
            return joined
        outputs = tuple(gap.output for gap in gaps if gap.output is not None)
        was_cut = any(output.finish_reason == "length" for output in outputs)
        output = replace(
            last,
            token_ids=joined.token_ids,
            text=None if last.text is None else joined.text,
            max_probs=joined.max_probs,
            alternatives=joined.alternatives,
            finish_reason="length" if was_cut and last.finish_reason == "stop" else last.finish_reason,
            gaps=outputs,
        )
        return replace(joined, output=output)


def _part(update: Update, part: slice, finish_reason: str | None, stop_token_id: int | None) -> Update:
    """What an update says about one gap."""
    return replace(
        update,
        token_ids=update.token_ids[part],
        max_probs=update.max_probs[part],
        alternatives=update.alternatives[part],
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        record=None,
    )
