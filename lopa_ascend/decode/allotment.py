"""How many lookahead branches the requests of a step get, where that may depend on the load (``num_branches`` "auto").

A lookahead branch adds a row to the step, which makes the step longer. If the branch wins, it saves its request up to
one forward pass. A step is worth one pass for each of its requests, plus what its lookahead branches are expected to
save. A row pays as long as it raises the ratio of this worth to the seconds that the step takes.

How long steps take is measured on the device. How much branches save is counted for each rank of a branch, separately
for requests that are stuck. A branch that was not computed counts as well if the pass shows whether it would have won.

Where memory bandwidth limits a step, many rows are nearly free. On a saturated device each row costs its full time, so
no lookahead branches are computed.

All ranks choose the same numbers: they count the same wins, and use the times that rank 0 has measured.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lopa_ascend.config import DecodingParams
from lopa_ascend.types import StepRecord

PRIOR = 0.3
"""Share of a pass that the best lookahead branch is expected to save before any passes are counted. For the branch of
rank j it is PRIOR / (j + 1)."""
PRIOR_WEIGHT = 4
"""The prior expectation weighs as much as this many counted passes."""
MEMORY = 512
"""All counts are halved after this many passes, so that old passes weigh less."""
OBSERVED = 32
"""After this many steps it is estimated how much longer steps take than ``StepCosts`` says. The estimate is the lower
quartile, because disturbances only ever make a step longer."""


class StepCosts:
    """How long a step takes, as a function of the number of tokens that it computes: linear between the measured
    points, and beyond the last point along the last line.

    Args:
        points: (tokens, seconds), at least one. Disturbances only ever make a measurement longer, so a step counts as
            no longer than any step that computes more tokens.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        self.points: list[tuple[int, float]] = []
        shortest = math.inf
        for tokens, seconds in sorted(points, reverse=True):
            shortest = min(shortest, seconds)
            self.points.insert(0, (tokens, shortest))
        self._tokens = [tokens for tokens, _ in self.points]

    def seconds(self, tokens: int) -> float:
        """The duration of a step that computes ``tokens`` tokens."""
        points = self.points
        index = bisect_left(self._tokens, tokens)
        if index == 0 or len(points) == 1:
            return points[0][1]
        right_index = min(index, len(points) - 1)  # the last line also serves more tokens than the last point
        (left, low), (right, high) = points[right_index - 1], points[right_index]
        return low + (high - low) * (tokens - left) / (right - left)


@dataclass(frozen=True)
class Applicant:
    """What ``Allotment`` has to know of a request that takes part in a step."""

    params: DecodingParams
    is_stuck: bool
    costs: tuple[int, ...]
    """Tokens that the step computes for it, by the number of its lookahead branches."""

    @property
    def kind(self) -> tuple[str, str, str, str, int, bool]:
        """Requests whose branches are counted together."""
        params = self.params
        kinds = params.decoding, params.base, params.branch_candidates, params.branch_acceptance
        return *kinds, params.lookahead_depth, self.is_stuck


class _Counts:
    """How often branches of each rank took part, and what they saved."""

    def __init__(self) -> None:
        self.num_passes = 0
        self._tried: dict[int, float] = {}
        self._saved: dict[int, float] = {}

    def expected(self, rank: int) -> float:
        """The part of a pass that a branch of a rank saves, on average over all passes. Ranks count from 0."""
        prior = PRIOR / (rank + 1)
        return (PRIOR_WEIGHT * prior + self._saved.get(rank, 0)) / (PRIOR_WEIGHT + self._tried.get(rank, 0))

    def add(self, saved: Sequence[float]) -> None:
        """Counts a pass, and what each branch saved of a pass, by rank."""
        for rank, part in enumerate(saved):
            self._tried[rank] = self._tried.get(rank, 0) + 1
            self._saved[rank] = self._saved.get(rank, 0) + part
        self.num_passes += 1
        if self.num_passes % MEMORY == 0:
            for counts in (self._tried, self._saved):
                counts.update({rank: count / 2 for rank, count in counts.items()})


class Allotment:
    """Gives the requests of each step their lookahead branches.

    Args:
        costs: how long steps take on this device.
        max_tokens: lookahead branches are added only as long as the step computes at most this many tokens.
        agree: called on every rank with its own nanoseconds; returns those of rank 0. With it, the time that real
            steps take in addition to ``costs``, mostly work of the host, is measured and added to every step. None:
            only ``costs`` count.
    """

    def __init__(self, costs: StepCosts, max_tokens: int, agree: Callable[[int], int] | None = None) -> None:
        self.costs, self.max_tokens, self._agree = costs, max_tokens, agree
        self._counts: dict[tuple[str, str, str, str, int, bool], _Counts] = {}
        self._num_tokens = 0
        self._overhead = 0.0
        """Seconds that a real step takes in addition to its ``costs``; see ``OBSERVED``."""
        self._observed: list[float] = []

    def choose(self, applicants: Sequence[Applicant], others: Sequence[int] = ()) -> list[int]:
        """The number of lookahead branches of each request.

        Rows are added one by one, those first that promise most for their tokens, and a request gets no more once a row
        of it would not pay.

        Args:
            others: tokens that the step computes for each other request, which gets no branches here.
        """
        chosen = [0] * len(applicants)
        num_tokens = sum(others) + sum(applicant.costs[0] for applicant in applicants)
        worth = float(len(applicants) + len(others))
        candidates: list[tuple[float, int]] = []
        self._offer(candidates, applicants, range(len(applicants)), chosen)
        while candidates:
            _, index = heapq.heappop(candidates)
            applicant, count = applicants[index], chosen[index]
            # With the next row of this request:
            next_tokens = num_tokens + applicant.costs[count + 1] - applicant.costs[count]
            next_worth = worth + self._expected(applicant, count)
            pays = next_worth * self._seconds(num_tokens) > worth * self._seconds(next_tokens)
            adds_tokens = next_tokens > num_tokens  # a row without tokens of its own always fits
            is_too_much = adds_tokens and next_tokens > self.max_tokens
            if is_too_much or not pays:
                continue
            chosen[index], num_tokens, worth = count + 1, next_tokens, next_worth
            self._offer(candidates, applicants, [index], chosen)
        self._num_tokens = num_tokens
        return chosen

    def observe(self, seconds: float) -> None:
        """Notes how long the step took for which ``choose`` was last called."""
        if self._agree is None:
            return
        self._observed.append(seconds - self.costs.seconds(self._num_tokens))
        if len(self._observed) == OBSERVED:
            beyond = sorted(self._observed)[OBSERVED // 4]
            self._overhead = self._agree(max(0, round(1e9 * beyond))) / 1e9
            self._observed.clear()

    def learn(
        self,
        applicant: Applicant,
        record: StepRecord,
        saved_by_a_win: float = 1.0,
        wins_of_dropped: Sequence[float] = (),
    ) -> None:
        """Counts which branches of a request have won: the winner, and those that have confirmed it.

        Args:
            saved_by_a_win: passes that a lookahead branch saves where it wins.
            wins_of_dropped: for each branch that was dropped, by rank, the probability that it would have won.
        """
        num_lookaheads = len(record.branches) - 1
        won = {record.winner, *record.branches[record.winner].confirmed_by}
        wins = [*(float(rank in won) for rank in range(num_lookaheads)), *wins_of_dropped]
        self._counts.setdefault(applicant.kind, _Counts()).add([saved_by_a_win * win for win in wins])

    def _seconds(self, num_tokens: int) -> float:
        return self._overhead + self.costs.seconds(num_tokens)

    def _expected(self, applicant: Applicant, rank: int) -> float:
        counts = self._counts.get(applicant.kind) or _Counts()
        return counts.expected(rank)

    def _offer(
        self,
        candidates: list[tuple[float, int]],
        applicants: Sequence[Applicant],
        indices: Iterable[int],
        chosen: Sequence[int],
    ) -> None:
        """Offers the next row of some requests, if they have another."""
        for index in indices:
            applicant, count = applicants[index], chosen[index]
            if count + 1 < len(applicant.costs):
                tokens = max(1, applicant.costs[count + 1] - applicant.costs[count])
                heapq.heappush(candidates, (-self._expected(applicant, count) / tokens, index))
