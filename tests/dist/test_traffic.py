"""What ranks send each other in every step, against what the step was about."""

from __future__ import annotations

import math

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.engine import AGREEMENT_INTERVAL
from lopa_ascend.types import SequencePlan
from scripts.bench import ranks
from scripts.bench.plan.models import load_model
from scripts.bench.prompts import text_prompts
from scripts.bench.ranks import Step, formulas
from tests.tiers import slow_but

pytestmark = pytest.mark.multirank

LOOKAHEADS = 4
REQUEST = DecodingParams(num_branches=LOOKAHEADS, block_size=8, tau_conf=0.9995, max_new_tokens=80)
"""So high a threshold that enough is undecided for all branches, also in steps that commit a block."""
MODEL = load_model(str(DEMO_MODEL))


def recorded(tp: int, bp: int) -> list[Step]:
    """Every step of rank 0: problems of both window modes, three at a time, whose branches bp does not divide."""
    windows = ("block_causal", "full", "block_causal", "full")
    requests = [REQUEST.changed(window_attention=window) for window in windows]
    with LLM(
        tensor_parallel_size=tp, branch_parallel_size=bp, enable_prefix_caching=False, max_num_seqs=3, threads=1
    ) as llm:
        steps = ranks.decode(llm, zip(text_prompts(llm, len(windows)), requests, strict=True))
    are_compared = [not i % AGREEMENT_INTERVAL for i in range(1, len(steps) + 1)]
    assert [step.sent("agreement").calls for step in steps] == are_compared
    assert sum(step.carries_commands for step in steps) == 1
    assert any(len(plan.rows) == 1 + LOOKAHEADS for step in steps for plan in step.plans)
    return steps


def branches_bound(plan: SequencePlan, bp: int) -> int:
    """12 bytes x positions of its active blocks x branches of a group."""
    return 12 * (max(row.end for row in plan.rows) - plan.start - plan.num_new) * math.ceil(len(plan.rows) / bp)


@pytest.mark.parametrize(("tp", "bp"), slow_but([(1, 2), (2, 2)], [(2, 2)]))
def test_every_step_sends_what_the_formulas_say(tp: int, bp: int) -> None:
    model = MODEL
    hidden, kv_position = 4 * model.hidden_size, 4 * 2 * model.num_layers * model.local_kv_heads(tp) * model.head_dim
    steps = recorded(tp, bp)
    second_phases = commits = 0
    for step in steps:
        sent = {purpose: step.sent(purpose) for purpose in ("layers", "branches", "control", "kv")}
        rows = 2 * (model.num_layers - 1) * step.tokens + 2 * step.rows  # in the last layer the wanted ones alone
        assert sent["layers"].num_bytes == (hidden * rows if tp > 1 else 0)
        assert sent["layers"].calls == (2 * model.num_layers if tp > 1 and step.tokens else 0)
        bound = sum(branches_bound(plan, bp) for plan in step.plans)
        assert sent["branches"].num_bytes <= bound
        assert sent["branches"].calls <= 1
        if not step.carries_commands:
            assert sent["control"].num_bytes == 8 * sent["control"].calls <= 16  # a heartbeat may come before it
            others = sent["control"].num_bytes + step.sent("agreement").num_bytes
            assert sent["branches"].num_bytes + others <= bound + 256
        committing = [plan for plan in step.plans if plan.num_new and len(plan.rows) > 1]
        full = [plan.num_new for plan in committing if plan.winner_commits]
        assert sent["kv"].num_bytes == sum(commit * kv_position + hidden for commit in full)
        second_phases, commits = second_phases + len(full), commits + len(committing)
    assert 0 < second_phases < commits
    for step in steps:
        exact = formulas(step, model, "fp32", tp, bp)
        assert step.traffic.keys() <= exact.keys()
        counted = {purpose: step.sent(purpose).num_bytes for purpose in exact}
        assert counted | ({"control": exact["control"]} if step.carries_commands else {}) == exact
