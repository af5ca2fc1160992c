"""Greedy scores of a compiled step against those of the eager one, for any split of the vocabulary."""

from __future__ import annotations

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.score.greedy import GreedyScore, Scored
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.shards import shard_scores
from lopa_ascend.types import Scoring
from tests import rounding

VOCAB, MASK, TOKENS, ROWS = 331, 150, 310, 40
SPLITS = [[], [TOKENS], [MASK, MASK + 1, TOKENS + 5], [3, 4, 200], [100, 200, 300]]
CPU = CpuOps()


@dataclass
class Meeting:
    """Where the threads of one group leave their messages."""

    barrier: threading.Barrier
    messages: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Threads(Group):
    """Ranks that are threads of this process."""

    meeting: Meeting | None = None

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        assert self.meeting is not None
        self.meeting.messages[self.rank] = x
        self.meeting.barrier.wait(10)
        return torch.stack([self.meeting.messages[rank] for rank in range(self.size)])


def score(x: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    scored = ranks_score(x, cuts)
    assert torch.equal(scored.confidences, scored.probs) or scored.probs.isnan().any()
    return scored.ids, scored.probs


def ranks_score(x: Tensor, cuts: list[int], tokens: int = TOKENS, confidence: str = "max_prob") -> Scored:
    """Of the shards [0, cuts[0]), [cuts[0], cuts[1]) and so on; all ranks must get the same."""
    bounds = [0, *cuts, x.shape[-1]]
    size = len(bounds) - 1
    meeting = Meeting(threading.Barrier(size))

    def of_rank(rank: int) -> Scored:
        ids = range(bounds[rank], bounds[rank + 1])
        group = Threads(rank, size, meeting=meeting) if cuts else ALONE
        return GreedyScore(ids, MASK, tokens, group, CPU, confidence)(x[:, ids.start : ids.stop])

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(of_rank, range(size))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    assert (first[0].dtype, first[1].dtype) == (torch.int32, torch.float32)
    return first


def eager(x: Tensor, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    scoring, positions = Scoring("max_prob", MASK, tokens), torch.arange(len(x))
    ids, probs, *_ = merge_scores(shard_scores(x.clone(), scoring, positions, 0)[None], scoring, positions, 0)
    return ids, probs


def logits(seed: int, scale: float = 4.0) -> Tensor:
    x = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    x[:, MASK] += 1.5 * scale  # the best one often is the mask, and often one that does not exist
    x[:, 320] += 1.5 * scale
    return x


@pytest.mark.parametrize("cuts", SPLITS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_eager_step_and_probabilities_nearly(
    dtype: torch.dtype, scale: float, cuts: list[int]
) -> None:
    for seed in range(3):
        x = (logits(seed, scale) - 30 * seed).to(dtype)
        ids, probs = score(x, cuts)
        expected, expected_probs = eager(x)
        assert torch.equal(ids.long(), expected)
        torch.testing.assert_close(probs, expected_probs, rtol=rounding.probability_bound(x), atol=1e-30)


def test_likely_tokens_have_their_probability_to_some_millionths() -> None:
    x = logits(0)
    x[range(ROWS), range(40, 40 + ROWS)] = 18.0 + torch.arange(ROWS) / 10
    exact = x.double().softmax(-1)[range(ROWS), range(40, 40 + ROWS)]
    assert exact.min() > 0.1
    for cuts in SPLITS:
        torch.testing.assert_close(score(x, cuts)[1].double(), exact, rtol=4e-6, atol=0)


@pytest.mark.parametrize("cuts", SPLITS)
def test_what_is_never_chosen_takes_all_the_probability_and_not_the_place(cuts: list[int]) -> None:
    """Though no softmax shows the others beside it, nor a whole shard beside another one."""
    x = logits(1)
    x[:, MASK] = 200.0
    x[::2, 330] = 300.0
    ids, probs = score(x, cuts)
    assert torch.equal(ids.long(), eager(x)[0])
    assert torch.equal(probs, torch.zeros(ROWS))


def test_a_shard_that_offers_nothing_counts_all_the_same() -> None:
    x = torch.full((2, VOCAB), -50.0)
    x[:, 7], x[:, 320] = 1.0, torch.tensor([1.0, 1.0 + math.log(3.0)])
    for cuts in ([TOKENS], [100, 200, TOKENS]):
        ids, probs = score(x, cuts)
        assert ids.tolist() == [7, 7]
        torch.testing.assert_close(probs, torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize("cuts", SPLITS)
def test_ties_go_to_the_lowest_id_and_near_ties_do_not(cuts: list[int]) -> None:
    """Also where no difference is left in the logarithm of a probability."""
    for level in (1e-6, 0.1, 3.7):
        tied = [20, 90, 155, 305]
        x = torch.full((1, VOCAB), -3.0)
        x[:, [MASK, 320]] = torch.tensor([11.3, 7.7])
        x[:, tied] = level
        assert score(x, cuts)[0].tolist() == [20]
        for token in tied:
            nearly = x.clone()
            nearly[:, token] = nearly[:, token].nextafter(torch.tensor(math.inf))
            assert score(nearly, cuts)[0].tolist() == [token]


@pytest.mark.parametrize("cuts", SPLITS)
@pytest.mark.parametrize("confidence", ["margin", "neg_entropy"])
def test_other_confidences_are_those_of_the_eager_step(confidence: str, cuts: list[int]) -> None:
    for seed, scale in enumerate((0.1, 4.0, 20.0)):
        x = logits(seed, scale)
        scoring, positions = Scoring(confidence, MASK, TOKENS), torch.arange(ROWS)
        ids, probs, expected = merge_scores(shard_scores(x.clone(), scoring, positions, 0)[None], scoring, positions, 0)
        scored = ranks_score(x, cuts, confidence=confidence)
        assert torch.equal(scored.ids.long(), ids)
        torch.testing.assert_close(scored.probs, probs, rtol=rounding.probability_bound(x), atol=1e-7)
        torch.testing.assert_close(
            scored.confidences, expected, rtol=rounding.probability_bound(x), atol=rounding.probability_bound(x)
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_makes_its_own_row_nan(value: float) -> None:
    expected = logits(2)
    for cuts in SPLITS:
        sound_ids, sound_probs = score(expected, cuts)
        for token in (2, 40, MASK, 200, VOCAB - 1):
            x = expected.clone()
            x[5, token] = value
            ids, probs = score(x, cuts)
            others = torch.arange(ROWS) != 5
            assert math.isnan(probs[5])
            assert torch.equal(ids[others], sound_ids[others])
            assert torch.equal(probs[others], sound_probs[others])


def test_minus_infinity_is_a_logit_like_another() -> None:
    x = logits(3)
    x[:, random.Random(0).sample(range(VOCAB), 200)] = -math.inf
    for cuts in SPLITS[-1:]:
        ids, probs = score(x, cuts)
        exact = x.double().softmax(-1)
        assert torch.equal(ids.long(), x[:, :TOKENS].index_fill(1, torch.tensor([MASK]), -math.inf).argmax(-1))
        torch.testing.assert_close(
            probs.double(), exact.gather(1, ids.long()[:, None])[:, 0], rtol=rounding.probability_bound(x), atol=1e-30
        )


@pytest.mark.parametrize("confidence", ["max_prob", "margin", "neg_entropy"])
def test_eager_and_compiled_steps_allow_minus_infinity_in_the_same_cases(confidence: str) -> None:
    some, shard = logits(3), logits(3)
    some[:3, [5, 40, MASK, 330]] = -math.inf
    shard[:3, 100:200] = -math.inf
    scoring, positions = Scoring(confidence, MASK, TOKENS), torch.arange(ROWS)
    for x in (some, shard):
        for cuts in ([], [100, 200]):
            bounds = [0, *cuts, VOCAB]
            parts = [x[:, begin:end].clone() for begin, end in pairwise(bounds)]
            limit = 1 if cuts else None
            stats = [
                shard_scores(part, scoring, positions, 0, first, limit)
                for part, first in zip(parts, bounds, strict=False)
            ]
            *_, expected = merge_scores(torch.stack(stats), scoring, positions, 0)
            found = ranks_score(x, cuts, confidence=confidence).confidences
            assert torch.equal(found.isfinite(), expected.isfinite())
            assert found[3:].isfinite().all()
            refused = confidence == "neg_entropy" or (x is shard and bool(cuts))
            assert bool(found[:3].isfinite().all()) is not refused


def test_it_compiles_into_one_graph_and_computes_the_same() -> None:
    greedy = GreedyScore(range(VOCAB), MASK, TOKENS, ALONE, CPU)
    compiled = torch.compile(greedy, backend="aot_eager", fullgraph=True)
    x = logits(4)
    assert all(map(torch.equal, compiled(x), greedy(x)))


def test_what_a_rank_sends() -> None:
    group = Group(1, 2)
    (sent,) = GreedyScore(range(100, 200), MASK, TOKENS, group, CPU).traffic(num_rows=7)
    assert (sent.purpose, sent.calls, sent.num_bytes) == ("vocabulary", 1, 7 * 16)
    assert GreedyScore(range(VOCAB), MASK, TOKENS, ALONE, CPU).traffic(num_rows=7) == ()
