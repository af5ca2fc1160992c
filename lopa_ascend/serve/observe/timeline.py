"""When what happened to a request: the times behind the metrics and the log line, in seconds of one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lopa_ascend.types import Progress, Update


@dataclass
class ChoiceTimeline:
    """One choice. ``begun`` is when its first forward pass started, ``prefilled`` when that ended, ``first_token`` when
    something was visible; None until then. ``gaps`` lie between updates that brought tokens."""

    prompt_tokens: int
    arrived: float
    begun: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    last: Update | None = None
    num_text_tokens: int = 0
    finish_reason: str | None = None

    def advance(self, now: float, step_seconds: float, update: Update, progress: Progress) -> None:
        """``step_seconds``: what the engine's step took, at the end of which the update came."""
        if self.prefilled is None:
            self.begun, self.prefilled = max(self.arrived, now - step_seconds), now
        self.last = update
        visible = len(progress.token_ids)
        if visible > self.num_text_tokens:
            if self.last_token is not None:
                self.gaps.append(now - self.last_token)
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
        self.num_text_tokens = visible
        if progress.output is not None:
            self.finish_reason, self.ended = progress.output.finish_reason, now

    @property
    def num_forwards(self) -> int:
        return self.last.num_forwards if self.last else 0

    @property
    def cached_tokens(self) -> int:
        return self.last.cached_tokens if self.last else 0

    @property
    def canvas_positions(self) -> int:
        """Positions that were computed for the answer, in all branches and steps."""
        return max(0, self.last.model_tokens - (self.prompt_tokens - self.cached_tokens)) if self.last else 0


class Timeline:
    """One HTTP request: its choices, from its arrival to its end."""

    def __init__(self, prompt_tokens: Sequence[int], arrived: float):
        self.arrived = arrived
        self.choices = [ChoiceTimeline(count, arrived) for count in prompt_tokens]

    def summary(self, now: float, trouble: str | None) -> dict[str, object]:
        """The numbers of the log line. ``trouble``: why choices without an output ended."""
        tokens, forwards = self._sum("num_text_tokens"), self._sum("num_forwards")
        first = min((c.first_token for c in self.choices if c.first_token is not None), default=None)
        reasons = sorted({choice.finish_reason or trouble or "abort" for choice in self.choices})
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
        }

    def _sum(self, name: str) -> int:
        return sum(getattr(choice, name) for choice in self.choices)
