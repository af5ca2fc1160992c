"""Scoring of hidden states: a row's result depends on no other row, and noise on the number of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import ALONE
from lopa_ascend.probe import no_probe
from lopa_ascend.runner.scoring import HEAD_ROWS, Job, Scorer
from lopa_ascend.score.noise import gumbel_noise
from lopa_ascend.score.shards import Bans, PerRow
from lopa_ascend.types import Scoring
from tests.torch.native import native_ops

VOCAB = 152_064
"""Of Dream: so many logits that torch sums a row in several threads."""
GREEDY = Scoring("neg_entropy", 5, VOCAB)
SAMPLED = Scoring("max_prob", 5, VOCAB, temperature=1.0, seed=3)


class Logits:
    """A model whose hidden state [1] is the number of a row of logits."""

    tp, first_token_id = ALONE, 0

    def __init__(self, num_rows: int) -> None:
        self.table = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0))

    calls = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.table[hidden[:, 0].long()]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    """Where torch makes all statistics, and where a kernel makes those of greedy rows without bans."""
    return CpuOps() if request.param == "torch" else native_ops()


def score(model: Logits, jobs: list[Job], ops: CpuOps | None = None) -> list[torch.Tensor]:
    return Scorer(cast(Model, model), ops or CpuOps()).score(jobs, no_probe)


def job(rows: list[int], scoring: Scoring, round_: int = 0, bans: Bans | None = None) -> Job:
    return Job(torch.tensor(rows, dtype=torch.float32)[:, None], np.array(rows) + 100, scoring, round_, bans=bans)


@pytest.mark.parametrize(
    "scoring", [GREEDY, SAMPLED, Scoring("margin", 5, VOCAB), Scoring("max_prob", 5, VOCAB, temperature=1.0, top_p=0.9)]
)
def test_jobs_with_bans_share_the_head_and_keep_their_bits(scoring: Scoring, ops: CpuOps) -> None:
    model = Logits(24)
    even, only = (torch.arange(VOCAB) % 2 == 0).float(), (torch.arange(VOCAB) != 77).float()
    nothing = PerRow((), np.full(3, -1))
    words = PerRow((torch.tensor([77, 78]), torch.tensor([3])), np.array([1, -1, 0]))
    jobs = [
        job([0, 1], scoring, bans=Bans(nothing.within(0, 2), PerRow((even,), np.array([0, -1])))),
        job([2, 3, 4], scoring, bans=Bans(words, nothing)),
        job([5, 6, 7], scoring, bans=Bans(nothing, PerRow((only, even), np.array([1, 0, -1])))),
        job(list(range(8, 23)), scoring),
    ]
    alone = [score(model, [each], ops)[0] for each in jobs]
    model.calls = 0
    together = score(model, jobs, ops)
    assert model.calls == 1
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    tokens = [int(token) for token in together[2][:2, 0]]
    assert tokens[0] % 2 == 1
    assert tokens[1] == 77


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("scoring", [GREEDY, SAMPLED])
def test_a_row_alone_and_at_the_end_of_a_group_has_the_bits_that_it_has_among_others(
    scoring: Scoring, ops: CpuOps
) -> None:
    model = Logits(18)
    together = score(model, [job(list(range(18)), scoring)], ops)[0]
    for rows in ([0], [3], list(range(17)), list(range(1, 18))):
        (found,) = score(model, [job(rows, scoring)], ops)
        assert torch.equal(found, together[rows])


def test_sequences_that_are_scored_alike_share_a_batch_and_get_their_own_rows() -> None:
    model = Logits(HEAD_ROWS + 20)
    jobs = [job([5, 6], GREEDY, 1), job(list(range(HEAD_ROWS + 3)), GREEDY, 2), job([9], SAMPLED, 3)]
    jobs += [job([9], SAMPLED, 4), job([7, 8], GREEDY), job([], GREEDY)]
    together = score(model, jobs)
    for alone, found in zip(jobs, together, strict=True):
        (expected,) = score(model, [alone])
        assert torch.equal(found, expected)


def test_a_sampled_position_draws_anew_in_every_pass() -> None:
    rows = list(range(12))
    passes = score(Logits(12), [job(rows, SAMPLED, round_) for round_ in range(4)])
    draws = {tuple(found[:, 0].tolist()) for found in passes}
    assert len(draws) == 4
    greedy = score(Logits(12), [job(rows, GREEDY, round_) for round_ in range(2)])
    assert greedy[0][:, 0].tolist() == greedy[1][:, 0].tolist()


def test_noise_of_other_passes_positions_seeds_and_tokens_is_not_related() -> None:
    ids, positions = torch.arange(1000), torch.arange(50)
    base = gumbel_noise(1, positions, 0, ids)
    others = {
        "round": gumbel_noise(1, positions, 1, ids),
        "seed": gumbel_noise(2, positions, 0, ids),
        "position": gumbel_noise(1, positions + 50, 0, ids),
        "token": gumbel_noise(1, positions, 0, ids + 1000),
    }
    for name, noise in others.items():
        correlation = float(torch.corrcoef(torch.stack([base.flatten(), noise.flatten()]))[0, 1])
        assert abs(correlation) < 0.03, name
