"""How long gaps are: found by the confidence of passes that fill nothing, over candidate lengths.

A candidate is scored by the mean log probability of the predictions for its masks. Taken alone that prefers short gaps,
whatever is behind them. So the same mean without what is behind the gap is subtracted: what remains is what the text
behind the gap says about its length (after arXiv 2602.00476, which calibrates the confidence too).
"""

from __future__ import annotations

from collections.abc import Sequence


class LengthSearch:
    """The length of one gap: the powers of two are scored, then lengths between the best one and its neighbours.

    Args:
        longest: the most that it can be.
    """

    def __init__(self, longest: int) -> None:
        self._scores: dict[int, float] = {}
        self._wanted = sorted({longest, *(2**power for power in range(longest.bit_length()) if 2**power < longest)})

    @property
    def candidate(self) -> int | None:
        """The length to score next; None: the search is over."""
        return self._wanted[0] if self._wanted else None

    @property
    def best(self) -> int:
        """The length with the highest score so far, the shortest among equals."""
        return max(sorted(self._scores), key=lambda length: self._scores[length])

    def take(self, score: float) -> None:
        """Takes the score of ``candidate``."""
        self._scores[self._wanted.pop(0)] = score
        if not self._wanted:
            known = sorted(self._scores)
            place = known.index(self.best)
            around = known[max(0, place - 1) : place + 2]
            pairs = zip(around, around[1:], strict=False)
            self._wanted = [(low + high) // 2 for low, high in pairs if high - low > 1]


class GapLengths:
    """The lengths of the gaps of a canvas, which are found one after the other.

    Args:
        runs: the canvas, in runs of masks and of given tokens.
        flexible: the gaps whose length is to be found, by number, at least one.
        mask: token id of the mask.
    """

    def __init__(self, runs: Sequence[tuple[int, ...]], flexible: Sequence[int], mask: int) -> None:
        gaps = [index for index, run in enumerate(runs) if run[0] == mask]
        self._runs, self._left = list(runs), [gaps[number] for number in flexible]
        """``_left``: the indices of the runs whose length is not known."""
        self._search = LengthSearch(len(self._runs[self._left[0]]))
        self._seen: float | None = None
        """The mean of the candidate with what is behind the gap."""

    @property
    def is_done(self) -> bool:
        """Whether all lengths are found."""
        return not self._left

    @property
    def canvas(self) -> tuple[int, ...]:
        """The canvas with the candidate; up to the gap, if what is behind it was seen already."""
        runs = self._runs
        if self._left:
            runs = [*runs[: self._left[0]], self._candidate]
            runs += self._runs[self._left[0] + 1 :] if self._seen is None else []
        return tuple(token for run in runs for token in run)

    @property
    def places(self) -> range:
        """The places of the gap in ``canvas``."""
        start = sum(map(len, self._runs[: self._left[0]]))
        return range(start, start + len(self._candidate))

    @property
    def _candidate(self) -> tuple[int, ...]:
        length = self._search.candidate
        assert length is not None
        return self._runs[self._left[0]][:length]

    def take(self, mean: float) -> None:
        """Takes the mean log probability of the predictions for ``places`` in ``canvas``."""
        if self._seen is None:
            self._seen = mean
            return
        self._search.take(self._seen - mean)
        self._seen = None
        if self._search.candidate is None:
            run = self._left.pop(0)
            self._runs[run] = self._runs[run][: self._search.best]
            if self._left:
                self._search = LengthSearch(len(self._runs[self._left[0]]))
