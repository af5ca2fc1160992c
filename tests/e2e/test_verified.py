"""Confirmed lookahead branches on random models: exact against d2f, verified against a plain definition."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests import reference
from tests.e2e.test_reference import random_params
from tests.tiny import write_dream


def random_model(folder: Path, seed: int) -> LLM:
    return LLM(write_dream(folder, seed=seed, vocab_size=60, layers=2), enable_prefix_caching=False)


def random_request(rng: random.Random) -> tuple[list[int], DecodingParams]:
    """A prompt and parameters with branches."""
    prompt = [rng.randrange(30) for _ in range(rng.choice([1, 5, 40, 127]))]
    settings = replace(random_params(rng), decoding="lopa", num_branches=rng.choice([2, 4, 7]), eos_token_id=3)
    return prompt, settings.changed(finish_at_eos=rng.random() < 0.5, branch_acceptance="exact")


def extras(rng: random.Random) -> dict[str, Any]:
    """What else may change the logits, or the rule."""
    return rng.choice(
        [
            {},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"repetition_penalty": 1.5, "logit_bias": {5: 2.0}},
            {"bad_words": ((5, 6), (7,)), "min_new_tokens": 6},
            {"acceptance": "factor", "acceptance_factor": 0.5},
            {"acceptance": "factor", "confidence": "neg_entropy", "acceptance_factor": 2.0},
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_exact_is_d2f_to_the_last_bit(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    llm = random_model(tmp_path, seed)
    saved = 0
    requests = [random_request(rng) for _ in range(6)]
    requests = [(prompt, replace(params, **extras(rng), top_logprobs=2)) for prompt, params in requests]
    for index, (prompt, settings) in enumerate(requests):
        params = settings.changed(lookahead_depth=(1, 2, 8)[index % 3])
        exact = llm.generate([prompt], params, quiet=True)[0]
        alone = params.changed(decoding="d2f", num_branches=0, branch_acceptance="published", lookahead_depth=1)
        d2f = llm.generate([prompt], alone, quiet=True)[0]
        assert exact.token_ids == d2f.token_ids
        assert exact.max_probs == d2f.max_probs
        assert exact.alternatives == d2f.alternatives
        assert exact.finish_reason == d2f.finish_reason
        saved += d2f.num_forwards - exact.num_forwards
        assert exact.num_forwards <= d2f.num_forwards
    assert saved > 0


class Verified(reference.Reference):
    """The plain definition with another choice of the winner."""

    def choose_winner(self, branches: list[dict], predicted: list[dict], scores: list[float]) -> int:
        now = dict(self.choice(branches[-1], predicted[-1]))
        progress = {len(branches) - 1: len(now)}
        for i, branch in enumerate(branches[:-1]):
            q, token = branch["draft"]
            if now.get(q) == token:
                progress[i] = 1 + len(self.choice(branch, predicted[i]))
        best = max(progress.values())
        equal = [i for i in progress if progress[i] == best]
        top = max(scores[i] for i in equal)
        for i in equal:
            if scores[i] != top:
                self.near(top - scores[i])
        return min(i for i in equal if scores[i] == top)


@pytest.mark.parametrize("seed", range(200, 210))
def test_verified_is_its_plain_definition(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    llm = random_model(tmp_path, seed)
    prompt, params = random_request(rng)
    params = params.changed(branch_acceptance="verified", finish_at_eos=False, creation_weight=0.0)
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    expected = Verified(reference.load(tmp_path), prompt, params, llm.config.mask_token_id, {3}).run()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    rounds = [(r.cache_length, r.committed, r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace]
    assert rounds == expected.rounds
    assert list(output.token_ids) == expected.tokens
