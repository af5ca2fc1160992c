"""The times of a request, for metrics and the log. All times are seconds of ``time.monotonic``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lopa_ascend.types import Progress, Update


@dataclass
class ChoiceTimeline:
    """The times of one choice. A time is None until it is reached."""

    prompt_tokens: int
    """Length of the prompt."""
    arrived: float
    """When the HTTP request arrived."""
    begun: float | None = None
    """When the first forward pass started."""
    prefilled: float | None = None
    """When the first forward pass ended."""
    first_token: float | None = None
    """When the first token was visible."""
    last_token: float | None = None
    """When the latest token became visible."""
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Seconds between consecutive updates that made tokens visible."""
    last: Update | None = None
    """The latest update."""
    num_text_tokens: int = 0
    """Visible tokens."""
    finish_reason: str | None = None

    def advance(self, now: float, step_seconds: float, update: Update, progress: Progress) -> None:
        """Notes an update.

        Args:
            now: when the update was read, at the end of the engine's step or later.
            step_seconds: duration of that step.
            update: what the step did.
            progress: what is final now.
        """
        if self.prefilled is None and update.num_forwards:  # 0: it was ended while it waited
            self.begun, self.prefilled = max(self.arrived, now - step_seconds), now
        self.last = update
        visible = len(progress.token_ids)
        if visible > self.num_text_tokens:
            if self.first_token is None:
                self.first_token = now
            if self.last_token is not None:
                self.gaps.append(now - self.last_token)
            self.last_token = now
        self.num_text_tokens = visible
        if progress.output is not None:
            self.finish_reason, self.ended = progress.output.finish_reason, now

    @property
    def num_forwards(self) -> int:
        """Forward passes."""
        return self.last.num_forwards if self.last else 0

    @property
    def seed(self) -> int | None:
        """Seed of the sampling; None without sampling, or if nothing was computed."""
        return self.last.seed if self.last else None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return self.last.cached_tokens if self.last else 0

    @property
    def canvas_positions(self) -> int:
        """Positions of the answer in the rows of all branches and forward passes."""
        return self.last.canvas_positions if self.last else 0


class Timeline:
    """The times of one HTTP request.

    Args:
        prompt_tokens: length of the prompt of each choice.
        arrived: when the request arrived.
    """

    def __init__(self, prompt_tokens: Sequence[int], arrived: float):
        self.arrived = arrived
        self.choices = [ChoiceTimeline(count, arrived) for count in prompt_tokens]

    def summary(self, now: float, reason_if_unfinished: str) -> dict[str, object]:
        """The numbers for the log.

        Args:
            now: the end of the request.
            reason_if_unfinished: finish reason of choices that never finished.
        """
        tokens, forwards = self._sum("num_text_tokens"), self._sum("num_forwards")
        first = min((c.first_token for c in self.choices if c.first_token is not None), default=None)
        reasons = sorted({choice.finish_reason or reason_if_unfinished for choice in self.choices})
        seeds = [choice.seed for choice in self.choices if choice.seed is not None]
        return {
            "choices": len(self.choices),
            "prompt_tokens": self._sum("prompt_tokens"),
            "cached_tokens": self._sum("cached_tokens"),
            "completion_tokens": tokens,
            "forwards": forwards,
            "tpf": round(tokens / forwards, 3) if forwards else 0.0,
            "ttft_s": None if first is None else round(first - self.arrived, 4),
            "latency_s": round(now - self.arrived, 4),
            "finish_reason": ",".join(reasons),
            **({"seeds": seeds} if seeds else {}),
        }

    def _sum(self, name: str) -> int:
        return sum(getattr(choice, name) for choice in self.choices)
