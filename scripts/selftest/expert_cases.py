"""The cases that only mixtures of experts need, at the shapes of LLaDA2.0-mini with narrower experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import ExpertsConfig
from scripts.selftest.cases import CPU, Case

EXPERTS = "experts"
"""Beginning of the names of ``expert_cases``."""
ROWS = (1, 32, 1024)
HIDDEN = 2048
SIZES = ExpertsConfig(
    num_experts=256, per_token=8, num_groups=8, kept_groups=4, scale=2.5, inner=64, shared_inner=512, first_layer=1
)


def expert_cases(ops: Ops) -> Iterator[Case]:
    """Of one token, of a block, and of a full step. No token's experts are near-ties, so rounding chooses none."""
    from lopa_ascend.backend.npu.trials import Random, random_experts, ranked_rows, stored

    random = Random(torch.bfloat16)
    experts = random_experts(random, SIZES, HIDDEN)
    npu_experts, cpu_experts = stored(experts, ops), stored(experts, CPU)
    for rows in ROWS:
        x = ranked_rows(random, experts, rows)
        run = partial(ops.moe, x.to(ops.device), npu_experts)
        yield Case(f"{EXPERTS}: {rows} tokens", run, CPU.moe(x, cpu_experts))
