"""Branches over the tokens of one position: the engine against a plain definition, on random models."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import Engine
from tests import reference
from tests.e2e import test_batching as batching
from tests.e2e.batching import decisions, run
from tests.e2e.test_reference import random_params
from tests.e2e.test_verified import Verified
from tests.tiny import write_dream

EOS = 3


class Tokens(reference.Reference):
    """The plain definition of LoPA with other branches and another score, from whole distributions."""

    pivot: int | None = None
    rows: dict[int, torch.Tensor]

    def predict(self, logits: torch.Tensor, x: list[int]) -> dict[int, tuple[int, float, float]]:
        predicted = super().predict(logits, x)
        assert self.last is not None or self.length not in predicted
        rows = {q: self.last if q == self.length else logits[q - 1 - self.length] for q in predicted}
        self.rows = {q: row.double().softmax(-1) for q, row in rows.items() if row is not None}
        return predicted

    def score(self, branch: dict, predicted: dict) -> float:
        branch["rows"] = self.rows
        if self.p.branch_score != "pivot":
            return super().score(branch, predicted)
        others = [self.entropy(row) for q, row in self.rows.items() if q != self.pivot]
        mean = sum(others) / len(others) if others else 0.0
        score = -mean + self.p.pivot_weight * math.log(branch.get("probability", 1.0))
        return self.p.creation_weight * branch["creation"] + (1 - self.p.creation_weight) * score

    def entropy(self, row: torch.Tensor) -> float:
        return -float((row * row.log()).sum())

    def choose_winner(self, branches: list[dict], predicted: list[dict], scores: list[float]) -> int:
        winner = scores.index(max(scores))
        if any(other != scores[winner] and scores[winner] - other < 1e-4 for other in scores):
            self.near(0)  # the engine rounds to a grid of 2^-16
        return winner

    def own_tokens(self, winner: dict, predicted: dict, filled: set[int]) -> list[tuple[int, int, float]]:
        for name in ("draft", "probability"):
            winner.pop(name, None)
        rows, k = winner.pop("rows"), self.p.num_branches
        block = next((block for block in winner["blocks"] if self.masks(winner, block)), None)
        entropies, best = {}, {}
        for q, row in rows.items():
            if block is None or q in filled or not block["start"] <= q < block["end"]:
                continue
            allowed = row.clone()
            allowed[self.mask] = 0
            best[q] = allowed.sort(descending=True)
            mass = float(best[q].values[:k].sum())
            self.near(mass - self.p.pivot_mass)
            if mass >= self.p.pivot_mass:
                entropies[q] = self.entropy(row)
        self.pivot = max(entropies, key=lambda q: entropies[q], default=None)
        if self.pivot is None:
            return []
        for q in entropies.keys() - {self.pivot}:
            self.near(entropies[self.pivot] - entropies[q])
        probs, tokens = best[self.pivot]
        for first, second in zip(probs[:k].tolist(), probs[1 : k + 1].tolist(), strict=True):
            self.near(first - second)
        found = []
        for rank, (token, prob) in enumerate(zip(tokens[:k].tolist(), probs[:k].tolist(), strict=True)):
            if rank == 0 or token not in self.eos:
                found.append((self.pivot, token, prob if self.p.confidence == "max_prob" else -entropies[self.pivot]))
        return found

    def spawn(self, winner: dict, predicted: dict, fills: list[tuple[int, int]]) -> list[dict]:
        branches = super().spawn(winner, predicted, fills)
        if len(branches) == 1:
            self.pivot = None
        for branch in branches[:-1]:
            branch["probability"] = float(self.won[branch["draft"][0]][branch["draft"][1]])
        return branches

    def fill(self, branch: dict, predicted: dict) -> list[tuple[int, int]]:
        self.won = branch["rows"]
        return super().fill(branch, predicted)


class VerifiedTokens(Verified, Tokens):
    """Where a branch wins only if the anchor confirms its token."""


def random_request(rng: random.Random, **changes: Any) -> tuple[list[int], DecodingParams]:
    prompt = [rng.randrange(30) for _ in range(rng.choice([1, 5, 40, 127]))]
    params = replace(
        random_params(rng),
        decoding="lopa",
        num_branches=rng.choice([1, 2, 4, 7]),
        confidence=rng.choice(["max_prob", "neg_entropy"]),
        branch_candidates="tokens",
        branch_score=rng.choice(["pivot", "pivot", "mean", "tail"]),
        pivot_mass=rng.choice([0.0, 0.2, 0.4]),
        pivot_weight=rng.choice([0.0, 0.01, 0.05]),
        eos_token_id=EOS,
    )
    return prompt, replace(params, **changes)


def compare(folder: Path, seed: int, definition: type[reference.Reference], **changes: Any) -> None:
    rng = random.Random(seed)
    write_dream(folder, seed=seed, vocab_size=40, layers=2)
    llm = LLM(folder, enable_prefix_caching=False)
    prompt, params = random_request(rng, **changes)
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    expected = definition(reference.load(folder), prompt, params, llm.config.mask_token_id, {EOS}).run()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    rounds = [(r.cache_length, r.committed, r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace]
    assert rounds == expected.rounds
    assert list(output.token_ids) == expected.tokens


@pytest.mark.parametrize("seed", range(700, 716))
def test_it_is_its_plain_definition(seed: int, tmp_path: Path) -> None:
    compare(tmp_path, seed, Tokens)


@pytest.mark.parametrize("seed", range(720, 726))
def test_verified_is_its_plain_definition(seed: int, tmp_path: Path) -> None:
    compare(tmp_path, seed, VerifiedTokens, branch_acceptance="verified", creation_weight=0.0)


def test_tokens_are_the_same_alone_and_among_others(tmp_path: Path) -> None:
    """Neighbours of all kinds: with other numbers of candidates, without any, sampled."""
    model = str(write_dream(tmp_path / "model", eos_token_id=EOS, hidden=64, heads=4, kv_heads=2))
    rng = random.Random(0)
    over_tokens = [random_request(rng) for _ in range(6)]
    asked = [pair for pairs in zip(over_tokens, batching.requests(5, 6), strict=True) for pair in pairs]
    engine = Engine(EngineConfig(model=model, enable_prefix_caching=False))
    alone = [decisions(run(engine, [one])[0]) for one in asked]
    outputs = run(engine, asked, [rng.randrange(6) for _ in asked])
    assert [decisions(output) for output in outputs] == alone
    own = [record for output in outputs[::2] for record in output.trace or ()]
    assert any(len(record.branches) > 2 for record in own)
    assert any(record.winner < len(record.branches) - 1 for record in own)


@pytest.mark.parametrize("base", ["parallel", "fast_dllm"])
def test_branches_over_tokens_beside_other_bases(base: str, tmp_path: Path) -> None:
    """Every lookahead branch of a pass fills the same position of the first block with masks, with another token."""
    llm = LLM(write_dream(tmp_path, vocab_size=40, layers=2))
    params = DecodingParams(
        base=base, num_branches=3, branch_candidates="tokens", pivot_mass=0.0, block_size=8, max_new_tokens=24,
        tau_conf=0.3, ignore_eos=True,
    )  # fmt: skip
    output = llm.generate([[5, 3, 8]], params, trace=True, quiet=True)[0]
    assert output.trace is not None
    filled = {0, 1, 2}
    several = 0
    for record in output.trace:
        drafts = [branch.lookahead for branch in record.branches if branch.lookahead is not None]
        several += len(drafts) > 1
        assert len({fill.position for fill in drafts}) == (1 if drafts else 0)
        assert len({fill.token for fill in drafts}) == len(drafts)
        assert [fill.max_prob for fill in drafts] == sorted((fill.max_prob for fill in drafts), reverse=True)
        first = min(set(range(27)) - filled)
        assert all((fill.position - 3) // 8 == (first - 3) // 8 for fill in drafts)
        filled |= {fill.position for fill in (*record.fills, *record.branches[record.winner].own_fills)}
    assert several > 3
    assert len(output.token_ids) == 24


def test_what_may_not_be_chosen_is_no_candidate(tmp_path: Path) -> None:
    """Banned words, an EOS that comes too early, and biases hold for the tokens of branches as for all others."""
    llm = LLM(write_dream(tmp_path, vocab_size=40, layers=2, eos_token_id=EOS))
    plain = DecodingParams(
        num_branches=7, branch_candidates="tokens", pivot_mass=0.0, block_size=8, max_new_tokens=24, tau_conf=0.9
    )
    seen: list[set[int]] = []
    banned = ((5,), (9,), (11,), (17,), (20,), (31,))
    extras: list[dict[str, Any]] = [{"ignore_eos": True}, {"bad_words": banned, "min_new_tokens": 24}]
    for extra in extras:
        output = llm.generate([[5, 3, 8]], replace(plain, **extra), trace=True, quiet=True)[0]
        assert output.trace is not None
        fills = [fill for record in output.trace for branch in record.branches for fill in branch.own_fills]
        seen.append({fill.token for fill in fills})
    forbidden = {EOS, *(word for (word,) in banned)}
    assert seen[0] & forbidden
    assert not seen[1] & forbidden
