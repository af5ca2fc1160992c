"""Scores over a vocabulary that is split into shards: what one shard of everything gives, whatever the split."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.noise import gumbel_noise
from lopa_ascend.score.shards import Bans, PerRow, shard_scores
from lopa_ascend.types import Scoring

VOCAB, MASK, TOKENS, ROWS = 331, 150, 310, 13
GREEDY = Scoring("max_prob", MASK, TOKENS)
BANNED, NUM_BANNED = [3, 200], 5
"""Ids that may not be chosen in the first rows, and the number of these rows."""
CONFIDENCES = ["max_prob", "margin", "neg_entropy"]
SAMPLING: list[tuple[float, int | None, float | None]] = [
    (0.0, None, None),
    (0.7, None, None),
    (1.0, 5, None),
    (0.8, None, 0.8),
    (1.3, 20, 0.9),
]
Scores = tuple[Tensor, ...]


def logits(seed: int, rows: int = ROWS) -> Tensor:
    x = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    x[:, 3] += 6  # worth forbidding, and the mask often best
    x[:, MASK] += 6
    return x


def bans(num_rows: int) -> Bans:
    index = np.where(np.arange(num_rows) < NUM_BANNED, 0, -1)
    return Bans(PerRow((torch.tensor(BANNED),), index), PerRow((), np.full(num_rows, -1)))


def gather(x: Tensor, scoring: Scoring, cuts: list[int], limit: int | None = 64, round_: int = 2) -> Tensor:
    """The statistics of the shards [0, cuts[0]), [cuts[0], cuts[1]) and so on."""
    bounds = [0, *cuts, x.shape[-1]]
    positions = torch.arange(len(x))
    shards = [
        shard_scores(x[:, begin:end].clone(), scoring, positions, round_, begin, limit, bans(len(x)))
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.stack(shards)


def score(x: Tensor, scoring: Scoring, cuts: list[int], limit: int | None = 64, round_: int = 2) -> Scores:
    return merge_scores(gather(x, scoring, cuts, limit, round_), scoring, torch.arange(len(x)), round_)


def splits(seed: int) -> list[list[int]]:
    """2, 3, 4 and 7 shards of any size; one holds nothing that may be chosen, one a single id."""
    rng = random.Random(seed)
    random_ones = [sorted(rng.sample(range(1, VOCAB), shards - 1)) for shards in (2, 3, 4, 7)]
    return [*random_ones, [TOKENS], [MASK, MASK + 1, TOKENS + 5], [3, 4, 200]]


def softmax(x: Tensor, scoring: Scoring, round_: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, probabilities and confidences of the plain definition, in float64."""
    x = x.double() / (scoring.temperature or 1.0)
    never = torch.zeros_like(x, dtype=torch.bool)
    never[:, MASK] = never[:, TOKENS:] = True
    never[:NUM_BANNED, BANNED] = True
    ranked, order = x.masked_fill(never, -math.inf).sort(dim=-1, descending=True, stable=True)
    if scoring.top_k is not None:
        ranked[:, scoring.top_k :] = -math.inf
    if scoring.top_p is not None:
        probs = ranked.softmax(-1)
        ranked[probs.cumsum(-1) - probs >= scoring.top_p] = -math.inf
    allowed = torch.full_like(x, -math.inf).scatter(-1, order, ranked)
    probs = torch.where(never, x, allowed).softmax(-1)
    if scoring.temperature:
        noise = gumbel_noise(scoring.seed, torch.arange(len(x)), round_, torch.arange(VOCAB))
        token = (allowed + noise).argmax(-1, keepdim=True)
    else:
        token = allowed.argmax(-1, keepdim=True)
    prob = probs.gather(-1, token)[:, 0]
    conf = {
        "max_prob": prob,
        "margin": prob - probs.scatter(-1, token, 0).amax(-1),
        "neg_entropy": torch.special.xlogy(probs, probs).sum(-1),
    }
    return token[:, 0], prob, conf[scoring.confidence]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLING)
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_any_split_gives_what_one_shard_and_the_whole_softmax_give(confidence, temperature, top_k, top_p) -> None:
    for seed in range(4):
        scoring = replace(GREEDY, confidence=confidence, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        x = logits(seed) - 30 * seed
        x[0, MASK] = 200.0  # leaves no probability to anything else
        if seed == 1:
            x = x.bfloat16()  # many ties
        one = score(x, scoring, [], limit=None)
        assert one[2].isfinite().all()
        token, prob, conf = softmax(x, scoring)
        assert torch.equal(one[0], token)
        torch.testing.assert_close(one[1].double(), prob, rtol=1e-5, atol=1e-30)
        torch.testing.assert_close(one[2].double(), conf, rtol=1e-5, atol=1e-6)
        for cuts in splits(seed):
            found = score(x, scoring, cuts)
            assert torch.equal(found[0], one[0]), cuts
            torch.testing.assert_close(found[1], one[1], rtol=4e-6, atol=0)
            torch.testing.assert_close(found[2], one[2], rtol=4e-6, atol=4e-6)
            assert found[2].isfinite().all()


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_ties_across_shards_go_to_the_lowest_id_and_near_ties_do_not(confidence: str) -> None:
    """Though shards measure from different maxima, two of them of ids that are never chosen."""
    x = torch.full((8, VOCAB), -3.0)
    tied = [20, 90, 155, 305]
    x[:, tied] = 0.1 + torch.arange(8)[:, None] * 0.37
    x[:, [MASK, 320]] = torch.tensor([11.3, 7.7])
    scoring = replace(GREEDY, confidence=confidence)
    for cuts in ([100], [50, 120], [50, 120, 302], [21, 91, 156, 306], [10, 20, 30, 89, 140, 315]):
        assert score(x, scoring, cuts)[0].tolist() == [20] * 8
        for token in tied:
            nearly = x.clone()
            nearly[:, token] = nearly[:, token].nextafter(torch.tensor(math.inf))
            assert score(nearly, scoring, cuts)[0].tolist() == [token] * 8


@pytest.mark.parametrize("cuts", [[], [100], [22, 90, 91], [1, 2, 20, 30, 40, 300]])
def test_top_k_and_top_p_keep_the_lowest_ids_of_ties(cuts: list[int]) -> None:
    x = torch.full((400, VOCAB), -200.0)
    x[:, [20, 21, 40, 90, 100, 250, 299, 301]] = 5.0
    limit = 64 if cuts else None
    for changes, kept in (({"top_k": 5}, {20, 21, 40, 90, 100}), ({"top_p": 0.5}, {20, 21, 40, 90})):
        scoring = replace(GREEDY, temperature=1.0, **changes)
        assert set(score(x, scoring, cuts, limit)[0].tolist()) == kept


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLING)
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_a_logit_that_is_not_finite_in_any_shard_is_named_and_disturbs_no_other_row(
    confidence, temperature, top_k, top_p, value
) -> None:
    scoring = replace(GREEDY, confidence=confidence, temperature=temperature, top_k=top_k, top_p=top_p)
    cuts = [40, 41, 250, 305]
    expected = score(logits(7), scoring, cuts)
    for rows, token in ([3], 2), ([3], 40), ([0, 12], MASK), ([5], VOCAB - 1), (range(ROWS), slice(None)):
        x = logits(7)
        x[list(rows), token] = value
        found = score(x, scoring, cuts)
        sound = torch.ones(ROWS, dtype=torch.bool)
        sound[list(rows)] = False
        assert torch.equal(found[2].isfinite(), sound)
        for column, same in zip(found, expected, strict=True):
            assert torch.equal(column[sound], same[sound])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLING)
@pytest.mark.parametrize("confidence", ["max_prob", "margin"])
def test_a_logit_of_minus_infinity_is_a_probability_of_zero(confidence, temperature, top_k, top_p) -> None:
    scoring = replace(GREEDY, confidence=confidence, temperature=temperature, top_k=top_k, top_p=top_p)
    x = logits(8)
    x[:, [2, 40, MASK, VOCAB - 1, *range(60, 90)]] = -math.inf
    expected = softmax(x, scoring)
    for cuts in ([], [38, 39, 250, 305]):
        found = score(x, scoring, cuts, limit=64 if cuts else None)
        assert torch.equal(found[0], expected[0])
        for column, same in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(column.double(), same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLING)
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_a_rows_bits_do_not_depend_on_the_rows_around_it(confidence, temperature, top_k, top_p) -> None:
    scoring = replace(GREEDY, confidence=confidence, temperature=temperature, top_k=top_k, top_p=top_p)
    rows = 80
    x, positions = logits(5, rows), torch.arange(rows)
    for cuts, limit in ([], None), ([30, 200, 301], 64):
        stats = gather(x, scoring, cuts, limit)
        whole = merge_scores(stats, scoring, positions, 2)
        rng = random.Random(0)
        for count in [*range(1, 20), 33, 64]:
            some = torch.tensor(rng.sample(range(rows), count))
            for column, all_rows in zip(merge_scores(stats[:, some], scoring, positions[some], 2), whole, strict=True):
                assert torch.equal(column, all_rows[some])
        for chunk in positions.split(16)[:2]:
            own = bans(rows).within(int(chunk[0]), len(chunk))
            alone = shard_scores(x[chunk, 30:200].clone(), scoring, chunk, 2, 30, limit, own)
            if cuts:
                assert torch.equal(alone, stats[1, chunk])


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, 4),
        ({"temperature": 1.0}, 4),
        ({"confidence": "margin"}, 5),
        ({"confidence": "neg_entropy"}, 5),
        ({"temperature": 1.0, "top_k": 5}, 2 + 2 * 5),
        ({"temperature": 1.0, "top_p": 0.5}, 3 + 2 * 64),
        ({"temperature": 1.0, "top_p": 0.5, "top_k": 5, "confidence": "margin"}, 3 + 2 * 5),
    ],
)
def test_shards_of_any_size_tell_as_many_numbers(changes, numbers) -> None:
    scoring = replace(GREEDY, **changes)
    assert gather(logits(0), scoring, [1, 3, 60, 300]).shape == (5, ROWS, numbers)


def test_a_nucleus_beyond_the_offers_is_drawn_from_the_offers() -> None:
    x = torch.zeros(2000, VOCAB)
    x[:, MASK] = -50.0
    scoring = replace(GREEDY, temperature=1.0, top_p=0.9, num_token_ids=VOCAB)
    token, prob, confidence = (column[NUM_BANNED:] for column in score(x, scoring, [100], limit=4))
    assert set(token.tolist()) == {0, 1, 2, 3, 100, 101, 102, 103}
    torch.testing.assert_close(prob, torch.full((2000 - NUM_BANNED,), 1 / 8))
    assert confidence.isfinite().all()
