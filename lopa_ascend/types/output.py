"""What a reader of the engine gets: updates from each step, progress with text, and the finished output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from lopa_ascend.types.decode import StepRecord

Alternatives = tuple[tuple[int, float], ...]
"""The most probable tokens of a position when it was filled, best first: (token id, probability)."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    ids: tuple[int, ...] = ()
    probs: tuple[float, ...] = field(default=(), repr=False)
    """By token, the probability at which it was filled."""
    alternatives: tuple[Alternatives, ...] = field(default=(), repr=False)
    """By token, if the request asked for ``top_logprobs``; else empty."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> TokenRun:
        return TokenRun(self.ids[part], self.probs[part], self.alternatives[part])

    def __add__(self, other: TokenRun) -> TokenRun:
        return TokenRun(self.ids + other.ids, self.probs + other.probs, self.alternatives + other.alternatives)

    @classmethod
    def joined(cls, runs: Sequence[TokenRun]) -> TokenRun:
        return cls(
            tuple(chain.from_iterable(run.ids for run in runs)),
            tuple(chain.from_iterable(run.probs for run in runs)),
            tuple(chain.from_iterable(run.alternatives for run in runs)),
        )


class WithTokens:
    """Names the columns of ``tokens``."""

    __slots__ = ()
    tokens: TokenRun

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.tokens.ids

    @property
    def max_probs(self) -> tuple[float, ...]:
        return self.tokens.probs

    @property
    def alternatives(self) -> tuple[Alternatives, ...]:
        return self.tokens.alternatives


@dataclass(frozen=True, slots=True)
class Update(WithTokens):
    """What one step did to one request. Counters start with the request."""

    request_id: str
    tokens: TokenRun
    """Those that became final in this step. Final tokens never change."""
    num_forwards: int
    num_positions: int
    """Generated positions that were opened, filled or not; on a whole canvas the filled ones."""
    model_tokens: int
    """Computed by this rank."""
    winner: int | None
    """See ``winner_rank``; None if the step made no forward pass."""
    cached_tokens: int
    """Prompt tokens from the prefix cache."""
    finish_reason: str | None = None
    """"stop", "length" or "error" on the last update of a request."""
    stop_token_id: int | None = None
    """The EOS, or one of ``stop_token_ids``, that ended the request."""
    error: str | None = None
    record: StepRecord | None = None
    seed: int | None = None
    """None without sampling."""
    num_drafted: int = 0
    """Drafts that the step checked, ``num_accepted`` of them right."""
    num_accepted: int = 0
    second_was_right: bool = False
    """See ``StepRecord``."""
    canvas_positions: int = 0
    """Of the answer, in the rows of all branches and forward passes, on all ranks."""
    continuation_logprobs: tuple[tuple[float, ...], ...] = ()
    """By continuation, the log probability of each of its tokens, in nats."""
    gap_ends: tuple[tuple[int, int | None], ...] = ()
    """By complete gap: (number of all tokens before its end, token id that ended it, which is not among them)."""

    @classmethod
    def without_step(cls, request_id: str, finish_reason: str, error: str | None = None) -> Update:
        """The last update of a request that no completed step has ended: no tokens, nothing counted."""
        return cls(
            request_id,
            tokens=TokenRun(),
            num_forwards=0,
            num_positions=0,
            model_tokens=0,
            winner=None,
            cached_tokens=0,
            finish_reason=finish_reason,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class GenerationOutput(WithTokens):
    """A finished request."""

    prompt_token_ids: tuple[int, ...]
    tokens: TokenRun
    """Ends before the first EOS with ``finish_at_eos``, and behind the token that completes a stop string."""
    text: str | None
    """Ends before a stop string; None without a tokenizer."""
    finish_reason: str
    """"stop" (EOS, stop string, or the length found for a gap), "length", or "abort" (the server was told to)."""
    stop_reason: int | str | None
    """The stop string, or the id of ``stop_token_ids``, that ended the text; None at an EOS, as in vLLM."""
    num_forwards: int
    """Forward passes, however many branches each of them evaluated."""
    num_positions: int
    """As in ``Update``, with EOS and what follows it."""
    model_tokens: int
    """Computed by this rank. All other fields are the same on every rank."""
    cached_tokens: int = 0
    seed: int | None = None
    """Repeats the sampling; None without it."""
    trace: tuple[StepRecord, ...] | None = field(default=None, repr=False)
    """One record for each forward pass, if asked for."""
    trace_marks: tuple[tuple[float, int], ...] = field(default=(), repr=False, compare=False)
    """By record of ``trace``: seconds since the request began, and characters of ``text`` that were final."""
    continuation_logprobs: tuple[tuple[float, ...], ...] = ()
    """See ``Update``."""
    gaps: tuple[GenerationOutput, ...] = ()
    """By gap of a text with gaps. ``tokens`` are those of all."""

    @property
    def tokens_per_forward(self) -> float:
        """TPF for a reader: visible tokens divided by forward passes."""
        return len(self.tokens) / self.num_forwards if self.num_forwards else 0.0

    @property
    def published_tokens_per_step(self) -> float:
        """TPF as the published Dream code counts it (SPEC section 9): opened positions, also behind the EOS, divided by
        forward passes plus one closing round."""
        return self.num_positions / (self.num_forwards + 1)


@dataclass(frozen=True, slots=True)
class Progress(WithTokens):
    """What is final of a running request. ``tokens`` and ``text`` only grow."""

    tokens: TokenRun
    text: str
    """Without an incomplete UTF-8 sequence at the end, or an ending that could begin a stop string."""
    output: GenerationOutput | None = None
    """Only in the last progress of a request."""
    gaps: tuple[Progress, ...] = ()
    """In a text with gaps: of each begun gap. Those before the last have their outputs."""
