"""LLaDA in the engine against plain restatements: Dream's decodings, with logits that predict their own position."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests import reference
from tests.canvas_reference import (
    CanvasReference,
    FastDllmReference,
    LopaFastDllmReference,
    LopaParallelReference,
    ParallelReference,
    VanillaReference,
)
from tests.e2e import test_canvas as canvas
from tests.e2e import test_reference as pipeline
from tests.tiers import slow_but
from tests.tiny import write_dream, write_llada

LOPA = {"decoding": "lopa", "num_branches": 3}
KINDS: dict[str, tuple[dict[str, Any], type[CanvasReference]]] = {
    "parallel": ({}, ParallelReference),
    "prefix": ({"decoding": "fast_dllm"}, FastDllmReference),
    "dual": ({"decoding": "fast_dllm", "block_cache": "dual"}, FastDllmReference),
    "lopa": ({**LOPA, "base": "parallel"}, LopaParallelReference),
    "lopa-prefix": ({**LOPA, "base": "fast_dllm"}, LopaFastDllmReference),
    "lopa-dual": ({**LOPA, "base": "fast_dllm", "block_cache": "dual"}, LopaFastDllmReference),
}


def random_model(path: Path, rng: random.Random, seed: int) -> tuple[Path, Path]:
    """(a LLaDA, the same weights as a Dream that the restatements can load)."""
    kv_heads = rng.choice([1, 2])
    dream = write_dream(
        path / "dream",
        seed=seed,
        vocab_size=rng.choice([40, 97]),
        hidden=rng.choice([32, 64]),
        heads=kv_heads * rng.choice([1, 2]),
        kv_heads=kv_heads,
        layers=rng.choice([1, 3]),
        tie=rng.random() < 0.3,
        bias=False,
    )
    return write_llada(path / "llada", dream), dream


def check(path: Path, seed: int, params: DecodingParams, definition: type[CanvasReference], rng: random.Random) -> None:
    """One request in the engine does in each forward pass what the definition does."""
    llada, dream = random_model(path, rng, seed)
    prompt, llm = canvas.random_prompt(rng), LLM(llada)
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    model = definition(reference.load(dream), prompt, params, llm.config.mask_token_id)
    model.shift = 0
    expected = model.decode()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    assert [[(fill.position, fill.token) for fill in record.fills] for record in output.trace] == expected.passes
    if params.num_branches:
        assert [record.winner for record in output.trace] == expected.winners


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", slow_but(range(12), (0, 1, 2)))
def test_a_whole_canvas_is_decoded_as_defined(kind: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(100 * seed + len(kind))
    fields, definition = KINDS[kind]
    params = replace(canvas.random_params(rng, "parallel"), **fields)
    check(tmp_path, seed, params, definition, rng)


@pytest.mark.parametrize("seed", slow_but(range(8), (0, 1)))
def test_dreams_own_decoding_is_as_defined(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    check(tmp_path, seed, canvas.vanilla_params(rng), VanillaReference, rng)


@pytest.mark.parametrize("seed", slow_but(range(24), range(6)))
def test_d2f_and_lopa_are_as_defined(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    llada, dream = random_model(tmp_path, rng, seed)
    llm, eos, prompt = LLM(llada, enable_prefix_caching=False), rng.randrange(30), canvas.random_prompt(rng)
    params = pipeline.random_params(rng)
    output = llm.generate([prompt], replace(params, eos_token_id=eos), trace=True, quiet=True)[0]
    restated = reference.Reference(reference.load(dream), prompt, params, llm.config.mask_token_id, {eos})
    restated.shift = 0
    expected = restated.run()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    rounds = [(r.cache_length, r.committed, r.winner, [(f.position, f.token) for f in r.fills]) for r in output.trace]
    assert rounds == expected.rounds
    assert list(output.token_ids) == expected.tokens
