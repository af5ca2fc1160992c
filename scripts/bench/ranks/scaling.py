"""Measures how the work of a decode divides among branch-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

from lopa_ascend import DecodingParams
from lopa_ascend.config import EngineConfig
from scripts.bench.ranks.process import RankDecode, ScalingJob, run
from scripts.bench.workload import random_prompts

SIZES = (1, 2, 4)
"""Numbers of ranks."""
PROMPT_LENGTH = 32
PARTS = ("forward", "scores", "exchange", "rest", "host", "other_threads")
"""Columns of the table, in milliseconds a step."""
Decodes = list[tuple[RankDecode, ...]]
"""For each repetition, what each rank has measured."""


def measure(model: Path, max_tokens: int, repetitions: int) -> bool:
    """Decodes one prompt by 1, 2 and 4 ranks, and prints the times; returns whether all ranks gave the same tokens.

    Args:
        model: directory of the random model.
        max_tokens: tokens of the decode.
        repetitions: decodes by each number of ranks.
    """
    (prompt,) = random_prompts(1, PROMPT_LENGTH)
    params = DecodingParams(
        num_branches=3, block_size=64, tau_conf=0.7, max_new_tokens=max_tokens, confidence="neg_entropy",
        window_attention="full", finish_at_eos=False, ignore_eos=True,
    )  # fmt: skip
    found: dict[int, Decodes] = {}
    for size in SIZES:
        config = EngineConfig(
            model=str(model),
            dtype="float32",
            branch_parallel_size=size,
            enable_prefix_caching=False,
            max_num_seqs=1,
            max_model_len=len(prompt) + max_tokens,
            threads=1,
        )
        by_rank: list[list[RankDecode]] = run(ScalingJob(config, prompt, params, repetitions), list[RankDecode])
        found[size] = list(zip(*by_rank, strict=True))
    if len({decode.token_ids for decodes in found.values() for ranks in decodes for decode in ranks}) != 1:
        print("the decodes have given different tokens")
        return False
    print_report(found)
    return True


def print_report(found: dict[int, Decodes]) -> None:
    """Prints the table; ``found`` are the decodes by number of ranks."""
    print("| ranks | scaling | of main threads | decode, s | " + " | ".join(f"{part}, ms" for part in PARTS) + " |")
    print("|---" * (4 + len(PARTS)) + "|")
    for size, decodes in found.items():
        steps = decodes[0][0].num_steps
        cells = [f"{scaling(found[1], decodes, part):.3f}" for part in ("total", "main_thread")]
        cells.append(f"{seconds(decodes, 'total'):.2f}")
        cells += [f"{1000 * seconds(decodes, part) / steps:.2f}" for part in PARTS]
        print(f"| {size} | {' | '.join(cells)} |")


def seconds(decodes: Decodes, part: str) -> float:
    """CPU seconds of a rank for a part: the mean of the ranks, and of that the median of the repetitions."""
    return median(mean(getattr(decode, part) for decode in ranks) for ranks in decodes)


def scaling(one: Decodes, several: Decodes, part: str) -> float:
    """CPU time of one rank alone, divided by the number of several ranks and the CPU time of the busiest of them."""
    ratios = []
    for (alone,), ranks in zip(one, several, strict=True):
        ratios.append(getattr(alone, part) / (len(ranks) * max(getattr(decode, part) for decode in ranks)))
    return median(ratios)
