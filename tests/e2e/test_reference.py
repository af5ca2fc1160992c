"""The engine against a plain restatement of the algorithm, on random models and settings."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests import golden, reference
from tests.tiers import slow_but
from tests.tiny import write_dream


def random_params(rng: random.Random) -> DecodingParams:
    branches = rng.choice([0, 1, 2, 3, 5])
    block = rng.choice([3, 4, 8, 16])
    return DecodingParams(
        decoding="lopa" if branches else "d2f",
        num_branches=branches,
        block_size=block,
        tau_add=rng.choice([0.1, 0.3, 0.9, 1.0]),
        tau_act=rng.choice([0.5, 0.95, 1.0]),
        tau_conf=rng.choice([0.3, 0.6, 0.9]),
        max_new_tokens=rng.randint(1, 5) * block + rng.choice([0, 0, 1, 2]),
        confidence=rng.choice(["max_prob", "margin", "neg_entropy"]),
        branch_score=rng.choice(["mean", "tail", "window"]),
        score_window=3,
        creation_weight=rng.choice([0.0, 0.0, 0.3]),
        window_attention=rng.choice(["block_causal", "full"]),
        finish_at_eos=False,
    )


# The ordinary tests have seeds that show every value of every setting once, and a few more.
@pytest.mark.parametrize("seed", slow_but(range(40), (*range(13), 24, 37)))
def test_random_models_and_settings(seed: int, tmp_path) -> None:
    rng = random.Random(seed)
    compare(tmp_path, seed, rng, {})


@pytest.mark.parametrize("seed", slow_but(range(100, 106), range(100, 103)))
def test_acceptance_by_the_factor(seed: int, tmp_path) -> None:
    rng = random.Random(seed)
    compare(tmp_path, seed, rng, {"acceptance": "factor", "acceptance_factor": rng.choice([0.3, 1.0, 2.0, 4.0])})


def compare(tmp_path: Path, seed: int, rng: random.Random, changes: dict[str, Any]) -> None:
    """One request on a random model, with random parameters but for ``changes``."""
    kv_heads = rng.choice([1, 2])
    write_dream(
        tmp_path,
        seed=seed,
        vocab_size=rng.choice([40, 97]),
        hidden=rng.choice([32, 64]),
        heads=kv_heads * rng.choice([1, 2]),
        kv_heads=kv_heads,
        layers=rng.choice([1, 3]),
        tie=rng.random() < 0.3,
    )
    llm = LLM(tmp_path, enable_prefix_caching=False)
    eos = rng.randrange(30)
    prompt = [rng.randrange(30) for _ in range(rng.choice([1, 5, 40, 127, 140]))]
    params = replace(random_params(rng), **changes)
    output = llm.generate([prompt], replace(params, eos_token_id=eos), trace=True, quiet=True)[0]
    model = reference.load(tmp_path)
    expected = reference.Reference(model, prompt, params, llm.config.mask_token_id, {eos}).run()
    assert output.trace is not None
    rounds = [(r.cache_length, r.committed, r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace]
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert rounds == expected.rounds
    assert list(output.token_ids) == expected.tokens


@pytest.mark.parametrize("case", ["lopa_bf3_causal_b16", "lopa_bf3_full_alpha_topp", "d2f_causal_b4_eos"])
def test_the_restatement_reproduces_the_recorded_cases(case: str) -> None:
    trace = golden.read(case)
    params = golden.decoding_params(trace)
    model = reference.load(golden.model_path(trace))
    run = reference.Reference(model, trace["prompt_ids"], params, trace["mask_token_id"], {trace["eos_token_id"]}).run()
    assert run.tokens == trace["output_ids"]
    assert len(run.rounds) == trace["n_forward_rounds"]
