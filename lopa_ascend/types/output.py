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
    """Consecutive tokens of an answer, with what is known of each."""

    ids: tuple[int, ...] = ()
    """Token ids."""
    probs: tuple[float, ...] = field(default=(), repr=False)
    """For each token the probability at which it was filled."""
    alternatives: tuple[Alternatives, ...] = field(default=(), repr=False)
    """For each token, if the request asked for ``top_logprobs``; else empty."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> TokenRun:
        return TokenRun(self.ids[part], self.probs[part], self.alternatives[part])

    def __add__(self, other: TokenRun) -> TokenRun:
        return TokenRun(self.ids + other.ids, self.probs + other.probs, self.alternatives + other.alternatives)

    @classmethod
    def joined(cls, runs: Sequence[TokenRun]) -> TokenRun:
        """The tokens of all runs, one after the other."""
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
        """For each token the probability at which it was filled."""
        return self.tokens.probs

    @property
    def alternatives(self) -> tuple[Alternatives, ...]:
        """For each token, if the request asked for ``top_logprobs``."""
        return self.tokens.alternatives


@dataclass(frozen=True, slots=True)
class Update(WithTokens):
    """What one step did to one request, as token ids. Counters start with the request."""

    request_id: str
    tokens: TokenRun
    """Those that became final in this step. Final tokens never change."""
    num_forwards: int
    """Forward passes."""
    num_positions: int
    """Generated positions that were opened, filled or not. Decodings that open the whole canvas at once count the
    filled positions instead."""
    model_tokens: int
    """Tokens that this rank computed."""
    winner: int | None
    """0 for the anchor, r for the lookahead branch of rank r (from 1); None if the step made no forward pass."""
    cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    finish_reason: str | None = None
    """"stop", "length" or "error" on the last update of a request."""
    stop_token_id: int | None = None
    """The token id that ended the request: an EOS, or one of ``stop_token_ids``."""
    error: str | None = None
    """With the finish reason "error": what went wrong."""
    record: StepRecord | None = None
    """Set if the request asked for a trace."""
    seed: int | None = None
    """Seed of the sampling; None without sampling."""
    num_drafted: int = 0
    """Drafted tokens that the step checked."""
    num_accepted: int = 0
    """How many of them it accepted."""
    second_was_right: bool = False
    """See ``StepRecord``."""
    canvas_positions: int = 0
    """Positions of the answer in the rows of all branches and forward passes, on all ranks."""
    continuation_logprobs: tuple[tuple[float, ...], ...] = ()
    """For each of the request's continuations the log probability of each of its tokens, in nats."""
    gap_ends: tuple[tuple[int, int | None], ...] = ()
    """In a text with gaps: for each gap that is complete, the number of all tokens up to its end, and the token id that
    ended it, which is not among them."""

    @classmethod
    def without_step(cls, request_id: str, finish_reason: str, error: str | None = None) -> Update:
        """The last update of a request that no completed step has ended: it brings no tokens and counts nothing."""
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
    """What was generated; with ``finish_at_eos`` it ends before the first EOS, and with a stop string after the token
    that completes it."""
    text: str | None
    """Ends before a stop string; None without a tokenizer."""
    finish_reason: str
    """"stop" (an EOS, a stop string, or the length that was found for a gap), "length", or "abort" (the server was told
    to end it)."""
    stop_reason: int | str | None
    """The stop string, or the id of ``stop_token_ids``, that ended the text; None at an EOS, as in vLLM."""
    num_forwards: int
    """Forward passes, however many branches each of them evaluated."""
    num_positions: int
    """Generated positions that were opened, with EOS and what follows it. Decodings that open the whole canvas at once
    count the filled positions instead."""
    model_tokens: int
    """Tokens that this rank computed. All other fields are the same on every rank."""
    cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    seed: int | None = None
    """Seed of the sampling, for repeating it; None without sampling."""
    trace: tuple[StepRecord, ...] | None = field(default=None, repr=False)
    """One record for each forward pass, if a trace was asked for."""
    trace_marks: tuple[tuple[float, int], ...] = field(default=(), repr=False, compare=False)
    """For each record of ``trace``: seconds from the beginning of the request, and the characters of ``text`` that were
    final."""
    continuation_logprobs: tuple[tuple[float, ...], ...] = ()
    """For each of the request's continuations the log probability of each of its tokens, in nats."""
    gaps: tuple[GenerationOutput, ...] = ()
    """What is in each gap of a text with gaps. ``tokens`` are those of all."""

    @property
    def tokens_per_forward(self) -> float:
        """TPF as a reader sees it: visible tokens divided by forward passes."""
        return len(self.tokens) / self.num_forwards if self.num_forwards else 0.0

    @property
    def published_tokens_per_step(self) -> float:
        """TPF as the published Dream code counts it (SPEC section 9): opened positions, also those after the EOS,
        divided by forward passes plus one closing round."""
        return self.num_positions / (self.num_forwards + 1)


@dataclass(frozen=True, slots=True)
class Progress(WithTokens):
    """What is final of a running request. ``tokens`` and ``text`` only grow."""

    tokens: TokenRun
    text: str
    """Without an incomplete UTF-8 sequence at the end, and without an ending that could begin a stop string."""
    output: GenerationOutput | None = None
    """The finished output; only the last progress of a request has one."""
    gaps: tuple[Progress, ...] = ()
    """In a text with gaps: of each gap that has begun. Those before the last have their outputs."""
