"""Dream's own decoding: a fixed number of steps over the whole canvas, without a cache (arXiv 2508.15487).

Step i of S goes from the time t(i) = 1 - i (1 - eps) / S to t(i + 1), with eps = 1/1000. Of the masked positions it
fills the share 1 - t(i + 1) / t(i) = 999 / (1000 S - 999 i), the last step all. ``alg`` says which:

- "origin": each position independently, with the share as its probability.
- "maskgit_plus", "topk_margin", "entropy": as many as the share gives, rounded down, with the highest probability of
  the predicted token, margin, or negative entropy. With ``alg_temp`` T above 0 they are drawn one after the other
  instead, in proportion to exp(confidence / T).

A step that fills nothing makes no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.combinations import Rule
from lopa_ascend.config.kinds import Choice, Integer, Number
from lopa_ascend.config.settings import research
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import Canvas
from lopa_ascend.decode.strategy import Only
from lopa_ascend.types import Fill, RowPlan, RowResult, SequencePlan, StepRecord

_BITS = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio."""


ALGS = {"origin": "max_prob", "maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "neg_entropy"}
"""Dream's ways to choose positions, and the confidence of each."""
MAX_STEPS = 8192
"""Steps of "origin" that fill nothing are drawn all the same, while other requests wait."""


@dataclass(frozen=True, kw_only=True)
class VanillaParams:
    steps: int | None = research(
        None,
        Integer(1, MAX_STEPS),
        'steps of `decoding` "vanilla", each of which fills its share of the canvas',
        default_text="as many as the canvas has positions",
    )
    alg: str = research(
        "entropy",
        Choice(tuple(ALGS)),
        'which positions a step of `decoding` "vanilla" fills: "origin": random ones; the others: the best by the '
        "probability of the predicted token, by its margin over the second, or by the negative entropy",
    )
    alg_temp: float = research(
        0.0, Number(0, 1000), "above 0: `alg` draws positions in proportion to exp(confidence / alg_temp)", group=None
    )


class Vanilla(Canvas):
    description = "Dream's own, a fixed number of steps over the whole canvas"
    base = "vanilla"
    parameters = VanillaParams
    own: VanillaParams
    only: ClassVar[Only] = {
        "structured_outputs": (),  # any order of positions would leave no prefix to follow
        "max_thinking_tokens": (),
    }
    rules = (Rule("alg_temp", "alg", tuple(alg for alg in ALGS if alg != "origin")),)  # which ranks nothing

    @classmethod
    def ranked_by(cls, params: DecodingParams) -> str:
        return ALGS[params.alg]

    @classmethod
    def draws(cls, params: DecodingParams) -> bool:
        drawn: bool = params.alg == "origin" or params.alg_temp > 0
        return drawn

    num_steps_made = 0

    @property
    def num_steps(self) -> int:
        return self.own.steps or self.gap_length

    @property
    def num_counted(self) -> int:
        return 0

    @property
    def step(self) -> int:
        """The step that the next pass makes: the next one that fills something."""
        if self.own.alg != "origin":
            return max(self.num_steps_made, self._first_that_fills())
        return next(step for step in range(self.num_steps_made, self.num_steps) if self._wanted(self.anchor, step))

    def _row(self, branch: Branch) -> RowPlan:
        return self._whole_row(branch, self._wanted(branch, self.step))

    def _first_that_fills(self) -> int:
        """The first step that fills something, given the masks: 999 * masks >= 1000 * num_steps - 999 * step."""
        rounded_up = -(-1000 * self.num_steps // 999)
        return min(rounded_up - self.anchor.masks, self.num_steps - 1)

    def _wanted(self, branch: Branch, step: int) -> list[int]:
        """The positions that a step needs predictions for; none if it fills nothing."""
        masked = branch.masked_positions(self.mask)
        if self.own.alg != "origin" or step == self.num_steps - 1:
            return masked
        share = 999 / (1000 * self.num_steps - 999 * step)
        return [position for position in masked if self._uniform(position, step) < share]

    def _num_filled(self, step: int) -> int:
        masks = self.anchor.masks
        if step == self.num_steps - 1:
            return masks
        return 999 * masks // (1000 * self.num_steps - 999 * step)

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        num_steps_made = self.step + 1
        record = super().absorb(plan, results, model_tokens, head_rows)
        self.num_steps_made = num_steps_made
        return record

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        if self.own.alg == "origin":
            return predicted, 0
        step = self.step
        ranked = sorted(predicted, key=lambda fill: (-self._rank(fill, step), fill.position))
        return sorted(ranked[: self._num_filled(step)], key=lambda fill: fill.position), 0

    def _rank(self, fill: Fill, step: int) -> float:
        """With ``alg_temp`` Gumbel noise is added to confidence / T: the highest are draws without replacement."""
        if not self.own.alg_temp:
            return fill.confidence
        return fill.confidence / self.own.alg_temp - math.log(-math.log(self._uniform(fill.position, step)))

    def _uniform(self, position: int, step: int) -> float:
        """A number between 0 and 1: a hash of seed, position and step, as in ``score/noise.py`` but for the token."""
        assert self.params.seed is not None, "the engine draws a seed where a request has none"
        key = _mix(self.params.seed + _GAMMA)
        key = _mix(key + (position + 1) * _GAMMA)
        key = _mix(key + (step + 1) * _GAMMA % 2**63)
        return ((_mix(key) >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z &= _BITS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _BITS
    return z ^ (z >> 31)
