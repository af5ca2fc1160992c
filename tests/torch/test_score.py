"""Logits to token, probability and confidence."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.noise import gumbel_noise
from lopa_ascend.score.shards import shard_scores
from lopa_ascend.types import Scoring

VOCAB, MASK, TOKENS = 50, 40, 44
GREEDY = Scoring("max_prob", MASK, TOKENS)


def logits(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def run(x: torch.Tensor, scoring: Scoring, first: int = 0, round_: int = 0):
    """One shard holds the whole vocabulary."""
    positions = torch.arange(first, first + len(x))
    stats = shard_scores(x.clone(), scoring, positions, round_)
    return merge_scores(stats[None], scoring, positions, round_)


def allowed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, MASK] = -math.inf
    x[:, TOKENS:] = -math.inf
    return x


@pytest.mark.parametrize("confidence", ["max_prob", "margin", "neg_entropy"])
def test_confidences_are_those_of_the_whole_softmax(confidence: str) -> None:
    x = logits()
    x[0, MASK] = 20.0  # the mask's share stays in the denominator, and in what margin is taken from
    probs = x.double().softmax(-1)
    token, prob, conf = run(x, replace(GREEDY, confidence=confidence))
    assert torch.equal(token, allowed(x).argmax(-1))
    chosen = probs.gather(-1, token[:, None])[:, 0]
    others = probs.scatter(-1, token[:, None], 0).amax(-1)
    expected = {"max_prob": chosen, "margin": chosen - others, "neg_entropy": (probs * probs.log()).sum(-1)}
    torch.testing.assert_close(prob.double(), chosen, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(conf.double(), expected[confidence], rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lowest_id() -> None:
    for vocab in (7, 256, 1000, 32_000):
        x = torch.zeros(5, vocab)
        x[:, vocab // 2 :] = 1.0
        token, *_ = run(x, Scoring("max_prob", 0, vocab))
        assert token.tolist() == [vocab // 2] * 5


def test_bfloat16_logits_are_scored_in_float32() -> None:
    _, prob, conf = run(logits().bfloat16(), GREEDY)
    assert prob.dtype == conf.dtype == torch.float32
    assert not torch.equal(prob, prob.bfloat16().float())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("scoring", [GREEDY, replace(GREEDY, confidence="neg_entropy", temperature=1.0, top_k=9)])
def test_rows_whose_logits_are_not_finite_are_named_and_disturb_no_other(value: float, scoring: Scoring) -> None:
    x = logits()
    expected = run(x, scoring)
    x[3, 7] = value
    found = run(x, scoring)
    finite = found[2].isfinite()
    assert finite.tolist() == [True, True, True, False, True, True]
    for column, same in zip(found, expected, strict=True):
        assert torch.equal(column[finite], same[finite])


def test_noise_depends_on_seed_position_round_and_token_alone() -> None:
    positions, ids = torch.tensor([4, 9, 2]), torch.arange(VOCAB)
    noise = gumbel_noise(1, positions, 3, ids)
    assert torch.equal(gumbel_noise(1, positions[1:2], 3, ids)[0], noise[1])
    assert torch.equal(gumbel_noise(1, positions, 3, ids[7:20]), noise[:, 7:20])
    some = torch.tensor([[49, 0, 7], [3, 3, 31], [8, 1, 48]])
    assert torch.equal(gumbel_noise(1, positions, 3, some), noise.gather(-1, some))
    for other in (
        *(gumbel_noise(seed, positions, 3, ids) for seed in (2, 0, -1, -2, 2**63 - 1, -(2**63))),
        gumbel_noise(1, positions + 1, 3, ids),
        gumbel_noise(1, positions, 4, ids),
    ):
        assert not (other == noise).any()


def test_noise_is_gumbel_and_uncorrelated() -> None:
    noise = gumbel_noise(0, torch.arange(300), 0, torch.arange(1000)).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    corr = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert abs(float(corr)) < 0.01


@pytest.mark.parametrize("cuts", [(0, VOCAB), (0, 7, 30, VOCAB)])
def test_the_best_token_stays_however_small_top_p_is(cuts: tuple[int, ...]) -> None:
    x, positions = logits(), torch.arange(len(logits()))
    scoring = replace(GREEDY, temperature=1.0, top_p=1e-46, seed=3)
    parts = [shard_scores(x[:, a:b].clone(), scoring, positions, 0, a, VOCAB) for a, b in pairwise(cuts)]
    tokens, confidence, probs = merge_scores(torch.stack(parts), scoring, positions, 0)
    assert torch.equal(tokens, allowed(x).argmax(-1))
    assert torch.isfinite(confidence).all()
    assert torch.isfinite(probs).all()


@pytest.mark.parametrize("confidence", ["max_prob", "margin", "neg_entropy"])
@pytest.mark.parametrize("cuts", [(0, VOCAB), (0, 7, 30, VOCAB)])
def test_min_p_keeps_the_tokens_near_the_best_and_then_top_p_takes_its_share(confidence: str, cuts) -> None:
    x, temperature = logits(), 0.7
    probs = (allowed(x) / temperature).double().softmax(-1)
    for min_p, top_p in ((0.05, None), (0.3, None), (0.05, 0.6), (1.0, None)):
        keep = probs >= min_p * probs.amax(-1, keepdim=True) * (1 - 1e-6)
        if top_p is not None:
            kept = torch.where(keep, probs, 0.0)
            ranked, order = (kept / kept.sum(-1, keepdim=True)).sort(-1, descending=True)
            keep &= torch.zeros_like(keep).scatter(-1, order, ranked.cumsum(-1) - ranked < top_p)
        seen: list[set[int]] = [set() for _ in x]
        for seed in range(60):
            scoring = replace(
                GREEDY, confidence=confidence, temperature=temperature, min_p=min_p, top_p=top_p, seed=seed
            )
            positions = torch.arange(len(x))
            parts = [shard_scores(x[:, a:b].clone(), scoring, positions, 0, a, VOCAB) for a, b in pairwise(cuts)]
            for row, token in enumerate(merge_scores(torch.stack(parts), scoring, positions, 0)[0].tolist()):
                seen[row].add(token)
        for row, tokens in enumerate(seen):
            assert tokens <= set(keep[row].nonzero()[:, 0].tolist())
            assert min_p < 1 or len(tokens) == 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, None), (0.5, 5, None), (1.5, None, 0.7), (2.0, 9, 0.8)]
)
def test_samples_follow_the_tempered_truncated_distribution(temperature, top_k, top_p) -> None:
    row = logits(1, seed=3)
    n = 20_000
    scoring = replace(GREEDY, temperature=temperature, top_k=top_k, top_p=top_p, seed=5)
    token, prob, *_ = run(row.expand(n, -1), scoring)
    scaled = allowed(row)[0].double() / temperature
    ranked = scaled.sort(descending=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    if top_p:
        mass = ranked.values.masked_fill(~keep, -math.inf).softmax(-1)
        keep &= mass.cumsum(-1) - mass < top_p
    kept = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ranked.indices, keep) & scaled.isfinite()
    expected = scaled.masked_fill(~kept, -math.inf).softmax(-1)
    counts = torch.bincount(token, minlength=VOCAB).double() / n
    assert (counts - expected).abs().max() < 0.015
    assert set(token.tolist()) <= set(kept.nonzero()[:, 0].tolist())
    banned = torch.ones(VOCAB, dtype=torch.bool)
    banned[:TOKENS] = False
    banned[MASK] = True
    whole = (row[0].double() / temperature).masked_fill(~(kept | banned), -math.inf).softmax(-1)
    torch.testing.assert_close(prob.double(), whole[token], rtol=1e-4, atol=1e-6)


def test_top_k_of_one_cannot_draw_what_may_not_be_chosen() -> None:
    x = logits()
    x[:, MASK] = 30.0
    token, *_ = run(x, replace(GREEDY, temperature=1.0, top_k=1))
    assert torch.equal(token, allowed(x).argmax(-1))
