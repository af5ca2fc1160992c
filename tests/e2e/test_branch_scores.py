"""Branch scores that the published code does not have: the engine against a plain definition, on random models."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lopa_ascend import LLM
from tests import reference
from tests.e2e.test_reference import random_params
from tests.tiny import write_dream


class Scored(reference.Reference):
    """The plain definition of LoPA with other scores."""

    def predict(self, logits: torch.Tensor, x: list[int]) -> dict[int, tuple[int, float, float]]:
        predicted = super().predict(logits, x)
        rows = {q: self.last if q == self.length else logits[q - 1 - self.length] for q in predicted}
        self.entropies = [-float((row.softmax(-1) * row.log_softmax(-1)).sum()) for row in rows.values()]
        return predicted

    def score(self, branch: dict, predicted: dict) -> float:
        if not predicted:
            return math.inf
        if self.p.branch_score == "entropy":
            return -sum(self.entropies) / len(self.entropies)
        return ("draft" in branch) + sum(min(1.0, top / self.p.tau_conf) for _, top, _ in predicted.values())

    def choose_winner(self, branches: list[dict], predicted: list[dict], scores: list[float]) -> int:
        winner = scores.index(max(scores))
        for other in scores:
            # Equal numbers of positions that pass are equal. The engine rounds to a grid of 2^-16 for each position.
            if other != scores[winner] and scores[winner] - other < 0.001:
                self.near(0)
        return winner

    def spawn(self, winner: dict, predicted: dict, fills: list[tuple[int, int]]) -> list[dict]:
        branches = super().spawn(winner, predicted, fills)
        branches[-1].pop("draft", None)
        return branches


@pytest.mark.parametrize("score", ["expected", "entropy"])
@pytest.mark.parametrize("seed", range(500, 510))
def test_it_is_its_plain_definition(seed: int, score: str, tmp_path: Path) -> None:
    rng = random.Random(seed)
    write_dream(tmp_path, seed=seed, vocab_size=60, layers=2)
    llm = LLM(tmp_path, enable_prefix_caching=False)
    prompt = [rng.randrange(30) for _ in range(rng.choice([1, 5, 40, 127]))]
    params = replace(
        random_params(rng),
        decoding="lopa",
        num_branches=rng.choice([2, 4, 7]),
        confidence=rng.choice(["max_prob", "neg_entropy"]),
        branch_score=score,
        creation_weight=0.0,
        eos_token_id=3,
    )
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    expected = Scored(reference.load(tmp_path), prompt, params, llm.config.mask_token_id, {3}).run()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    rounds = [(r.cache_length, r.committed, r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace]
    assert rounds == expected.rounds
    assert list(output.token_ids) == expected.tokens
