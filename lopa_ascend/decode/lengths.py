"""How long gaps are: found by the confidence of passes that fill nothing, over candidate lengths.

A candidate's score is the mean log probability of the predictions for its masks, less the same mean without what is
behind the gap. The former alone prefers short gaps; the difference is what the text behind says about the length (after
arXiv 2602.00476, which calibrates the confidence too). The subtracted mean is smooth, so powers of two are enough for
it. The other has a narrow peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import runs
from lopa_ascend.decode.strategy import Final, SequenceStart, Strategy
from lopa_ascend.types import Fill, GappedText, RowResult, SequencePlan, StepRecord

SMALLEST = 1e-30
"""A lower probability counts as this one where logarithms are averaged."""
FINEST = 16
"""From this length on candidates are a sixteenth of their length apart."""


class LengthSearch:
    """The length of one gap, at most ``longest``."""

    def __init__(self, longest: int) -> None:
        self._alone = dict[int, float]()
        """By length: the mean without what is behind the gap."""
        self._means = dict[int, float]()
        """By length: the mean with what is behind it."""
        self._wanted_alone = [*(2**power for power in range(longest.bit_length()) if 2**power < longest), longest]
        self._wanted = [1]
        while self._wanted[-1] < longest:
            self._wanted.append(min(longest, self._wanted[-1] + max(1, self._wanted[-1] // FINEST)))

    @property
    def sees_behind(self) -> bool:
        """Whether ``candidate`` is computed with what is behind the gap."""
        return not self._wanted_alone

    @property
    def candidate(self) -> int | None:
        """The length to compute next; None: the search is over."""
        wanted = self._wanted_alone or self._wanted
        return wanted[0] if wanted else None

    @property
    def best(self) -> int:
        """The highest score, the shortest among equals."""
        return max(sorted(self._means), key=self._score)

    def take(self, mean: float) -> None:
        """Takes the mean log probability for ``candidate``."""
        if self._wanted_alone:
            self._alone[self._wanted_alone.pop(0)] = mean
            return
        self._means[self._wanted.pop(0)] = mean
        if not self._wanted:
            known = sorted(self._means)
            place = known.index(self.best)
            around = known[max(0, place - 1) : place + 2]
            self._wanted = [(low + high) // 2 for low, high in pairwise(around) if high - low > 1]

    def _score(self, length: int) -> float:
        """The subtracted mean is interpolated, linear in the logarithm of the length."""
        low = max(known for known in self._alone if known <= length)
        high = min(known for known in self._alone if known >= length)
        part = math.log(length / low) / math.log(high / low) if high > low else 0.0
        return self._means[length] - self._alone[low] - part * (self._alone[high] - self._alone[low])


class GapLengths:
    """The lengths of a canvas's gaps, found one after the other. ``runs``: the canvas in runs of masks and given
    tokens; ``flexible``: the numbers of the gaps to measure, at least one."""

    def __init__(self, runs: Sequence[tuple[int, ...]], flexible: Sequence[int], mask: int) -> None:
        gaps = [index for index, run in enumerate(runs) if run[0] == mask]
        self._runs, self._left = list(runs), [gaps[number] for number in flexible]
        """``_left``: indices of the runs of unknown length."""
        self._search = LengthSearch(len(self._runs[self._left[0]]))

    @property
    def is_done(self) -> bool:
        return not self._left

    @property
    def canvas(self) -> tuple[int, ...]:
        """As the next pass computes it: up to the candidate, or with what is behind it."""
        runs = self._runs
        if self._left:
            behind = runs[self._left[0] + 1 :] if self._search.sees_behind else []
            runs = [*runs[: self._left[0]], self._candidate, *behind]
        return tuple(token for run in runs for token in run)

    @property
    def places(self) -> range:
        """The gap's places in ``canvas``."""
        start = sum(map(len, self._runs[: self._left[0]]))
        return range(start, start + len(self._candidate))

    @property
    def _candidate(self) -> tuple[int, ...]:
        length = self._search.candidate
        assert length is not None
        return self._runs[self._left[0]][:length]

    def take(self, mean: float) -> None:
        """Takes the mean log probability for ``places``."""
        self._search.take(mean)
        if self._search.candidate is None:
            run = self._left.pop(0)
            self._runs[run] = self._runs[run][: self._search.best]
            if self._left:
                self._search = LengthSearch(len(self._runs[self._left[0]]))


class Measuring(Strategy):
    """The passes that find the lengths of gaps. ``decoding`` is the ``successor`` that fills them."""

    def __init__(self, start: SequenceStart, decoding: type[Strategy]) -> None:
        super().__init__(start)
        assert start.gapped is not None
        self._start, self._decoding = start, decoding
        self._lengths = GapLengths(runs(start.gapped.tokens, self.mask), start.gapped.flexible, self.mask)
        self._lay_out()

    def _lay_out(self) -> None:
        """Begins the decoding of the canvas with the next candidate, or with all lengths."""
        self._canvas = self._decoding(replace(self._start, gapped=GappedText(self._lengths.canvas)))
        self._canvas.num_forwards = self.num_forwards
        self.branches = self._canvas.branches

    @property
    def num_opened(self) -> int:
        return self._canvas.num_opened

    @property
    def num_counted(self) -> int:
        return self._canvas.num_counted

    def final(self) -> Final:
        return self._canvas.final()

    def plan(self) -> SequencePlan | None:
        plan = self._canvas.plan()
        assert plan is not None, "a candidate has masks"
        masked = tuple(self.anchor.first + place for place in self._lengths.places)
        return replace(plan, rows=(replace(plan.rows[0], masked=masked),))

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        """The score is the mean log probability."""
        probs = results[0].max_probs
        return 0, self.anchor, [sum(math.log(max(prob, SMALLEST)) for prob in probs) / len(probs)]

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        return [], 0

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        record = super().absorb(plan, results, model_tokens, head_rows)
        measured = replace(record.branches[0], end=self.origin, masks=len(plan.rows[0].masked))
        self._lengths.take(measured.score)
        self._lay_out()
        if not self._lengths.is_done:
            return replace(record, branches=(measured,))
        self.successor = self._canvas
        tokens = enumerate(self.anchor.tokens, self.anchor.first)
        given = tuple(Fill(position, token, 1.0, 1.0) for position, token in tokens if token != self.mask)
        return replace(record, branches=(measured,), forced=given)
