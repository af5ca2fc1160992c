"""Measures how the work of a decode divides among branch-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from lopa_ascend import DecodingParams
from lopa_ascend.config import EngineConfig
from scripts.bench.ranks.process import Decode, RankTimes, ScalingJob, run
from scripts.bench.workload import random_prompts

TARGET = 0.85
"""The scaling that two ranks should reach."""
PROMPT_LENGTH = 32


@dataclass(frozen=True)
class Point:
    """The measurements of one kind of decode. A ``part`` is the name of a time in Decode."""

    name: str
    bp: int
    """Ranks that make one decode together."""
    decodes: list[tuple[Decode, ...]]
    """For each repetition, one decode for each rank that was measured."""

    def seconds(self, part: str) -> float:
        """CPU seconds of a rank: the mean of the ranks, and of that the median of the repetitions."""
        return median(mean(getattr(decode, part) for decode in ranks) for ranks in self.decodes)

    def milliseconds(self, part: str) -> float:
        """CPU milliseconds of a rank for one step."""
        return 1000 * self.seconds(part) / self.decodes[0][0].num_steps

    def scaling(self, one: Point, part: str) -> float:
        """CPU time of one rank divided by ``bp`` times that of the busiest rank here; the median of the repetitions.

        Args:
            one: decodes by one rank each; if several were made side by side, their mean counts.
            part: the time to compare.
        """
        ratios = []
        for single, ranks in zip(one.decodes, self.decodes, strict=True):
            time_of_one = mean(getattr(decode, part) for decode in single)
            time_of_busiest = max(getattr(decode, part) for decode in ranks)
            ratios.append(time_of_one / (self.bp * time_of_busiest))
        return median(ratios)

    def row(self) -> str:
        """A row of the table of CPU times."""
        parts = ("forward", "scores", "exchange", "rest", "host", "other_threads")
        numbers = [self.seconds("total"), *map(self.milliseconds, parts)]
        return f"| {self.name} | {' | '.join(f'{number:.2f}' for number in numbers)} |"


def measure(model: Path, max_tokens: int, repetitions: int) -> bool:
    """Decodes one prompt by 1, 2 and 4 ranks, and prints the times; returns whether all ranks gave the same tokens.

    Args:
        model: directory of the random model.
        max_tokens: tokens of the decode.
        repetitions: decodes of each kind.
    """
    (prompt,) = random_prompts(1, PROMPT_LENGTH)
    params = DecodingParams(
        num_branches=3, block_size=64, tau_conf=0.7, max_new_tokens=max_tokens, confidence="neg_entropy",
        window_attention="full",
        finish_at_eos=False, ignore_eos=True,
    )  # fmt: skip
    times: dict[int, list[RankTimes]] = {}
    for size in (2, 4):
        config = EngineConfig(
            model=str(model),
            dtype="float32",
            branch_parallel_size=size,
            enable_prefix_caching=False,
            max_num_seqs=1,
            max_model_len=len(prompt) + max_tokens,
            threads=1,
        )
        times[size] = run(ScalingJob(config, prompt, params, repetitions, alone=size == 2), RankTimes)
    points = make_points(times[2], times[4])
    if len({decode.token_ids for point in points for ranks in point.decodes for decode in ranks}) != 1:
        print("the decodes have given different tokens")
        return False
    print_report(points, times[2])
    return True


def make_points(two: Sequence[RankTimes], four: Sequence[RankTimes]) -> list[Point]:
    """One rank alone, one rank beside another, two ranks together, four ranks together."""
    return [
        Point("1, alone", 1, [(decode,) for decode in two[0].alone]),
        Point("1, side by side", 1, list(zip(*(times.side_by_side for times in two), strict=True))),
        Point("2", 2, list(zip(*(times.together for times in two), strict=True))),
        Point("4", 4, list(zip(*(times.together for times in four), strict=True))),
    ]


def print_report(points: Sequence[Point], two: Sequence[RankTimes]) -> None:
    """Prints the tables of times and of scaling; ``two`` are the times of two ranks, which also hold their waits."""
    print("CPU time of a rank, their mean: seconds of the decode, and milliseconds a step of its parts:\n")
    print("| ranks | decode, s | forward | head, scores | exchange | rest | host: both | other threads |")
    print("|---|---|---|---|---|---|---|---|\n" + "\n".join(point.row() for point in points))
    waits = [wait for times in two for wait in times.waits]
    share = sum(wait.cpu for wait in waits) / sum(wait.wall for wait in waits)
    print(f"\nA rank that waits for another spends {share:.2%} of a core, of all threads.\n")
    print("| ranks | scaling | of main threads | side by side |\n|---|---|---|---|")
    alone, beside, *several = points
    for point in several:
        values = point.scaling(alone, "total"), point.scaling(alone, "main_thread"), point.scaling(beside, "total")
        print(f"| {point.name} | {' | '.join(f'{value:.3f}' for value in values)} |")
    print(f"\n2 ranks, wanted at least {TARGET}: {several[0].scaling(alone, 'total'):.3f}")
