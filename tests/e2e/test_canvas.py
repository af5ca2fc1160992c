"""Decoding on a whole canvas: the engine against plain restatements, on random models and settings."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import Engine
from tests import reference
from tests.canvas_reference import (
    CanvasReference,
    FastDllmReference,
    LopaFastDllmReference,
    LopaParallelReference,
    ParallelReference,
    VanillaReference,
)
from tests.e2e import test_batching as batching
from tests.e2e.batching import decisions, run
from tests.tiers import slow_but
from tests.tiny import write_dream

ACCEPTANCES: list[dict[str, Any]] = [
    {"acceptance": "threshold", "tau_conf": 0.3},
    {"acceptance": "threshold", "tau_conf": 0.8},
    {"acceptance": "factor", "acceptance_factor": 1.0},
    {"acceptance": "factor", "acceptance_factor": 4.0},
]


def vanilla_params(rng: random.Random) -> DecodingParams:
    positions = rng.randint(1, 48)
    alg = rng.choice(["origin", "maskgit_plus", "topk_margin", "entropy"])
    sampling: list[dict[str, Any]] = [{}, {}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}]
    return DecodingParams(
        decoding="vanilla",
        max_new_tokens=positions,
        steps=rng.choice([None, 1, 2, 7, positions, 2 * positions]),
        alg=alg,
        alg_temp=0.0 if alg == "origin" else rng.choice([0.0, 0.0, 0.2]),
        seed=rng.randrange(2**40),
        ignore_eos=True,
        finish_at_eos=False,
        **rng.choice(sampling),
    )


def random_params(rng: random.Random, decoding: str) -> DecodingParams:
    """Blocks of all lengths; with 64 a single one."""
    block = rng.choice([1, 3, 8, 16, 64])
    fields: dict[str, Any] = {
        "decoding": decoding,
        "block_size": block,
        "max_new_tokens": rng.randint(1, 48),
        "confidence": rng.choice(["max_prob", "margin", "neg_entropy"]),
        "ignore_eos": True,
        "finish_at_eos": False,
    }
    return DecodingParams(**fields | rng.choice(ACCEPTANCES))


def random_model(path: Path, rng: random.Random, seed: int) -> Path:
    kv_heads = rng.choice([1, 2])
    return write_dream(
        path,
        seed=seed,
        vocab_size=rng.choice([40, 97]),
        hidden=rng.choice([32, 64]),
        heads=kv_heads * rng.choice([1, 2]),
        kv_heads=kv_heads,
        layers=rng.choice([1, 3]),
        tie=rng.random() < 0.3,
    )


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(30) for _ in range(rng.choice([1, 5, 40, 127, 140]))]


def check(path: Path, prompt: list[int], params: DecodingParams, definition: type[CanvasReference]) -> None:
    """One request in the engine does in each forward pass what the definition does, and leaves no page behind."""
    llm = LLM(path)
    output = llm.generate([prompt], params, trace=True, quiet=True)[0]
    expected = definition(reference.load(path), prompt, params, llm.config.mask_token_id).decode()
    if expected.margin < 1e-5:
        pytest.skip(f"a decision of this case is {expected.margin:.1e} from its boundary")
    assert output.trace is not None
    assert [[(fill.position, fill.token) for fill in record.fills] for record in output.trace] == expected.passes
    assert list(output.token_ids) == expected.tokens
    if params.num_branches:
        assert [record.winner for record in output.trace] == expected.winners
    stats = llm.engine.stats()
    assert (stats.pages_in_use, stats.pages_cached, stats.prefix_queries) == (0, 0, 0)


# Of the random cases below, the ordinary tests have those that show every value of every setting once.


@pytest.mark.parametrize("seed", slow_but(range(24), (0, 3, 6, 13)))
def test_parallel_decoding_is_that_of_the_definition(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    random_model(tmp_path, rng, seed)
    check(tmp_path, random_prompt(rng), random_params(rng, "parallel"), ParallelReference)


@pytest.mark.parametrize("seed", slow_but(range(200, 232), (201, 205, 212, 223)))
def test_vanilla_decoding_is_that_of_the_definition(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    random_model(tmp_path, rng, seed)
    check(tmp_path, random_prompt(rng), vanilla_params(rng), VanillaReference)


@pytest.mark.parametrize("block_cache", ["prefix", "dual"])
@pytest.mark.parametrize("seed", slow_but(range(300, 316), (300, 309, 311)))
def test_fast_dllm_is_that_of_the_definition(seed: int, block_cache: str, tmp_path: Path) -> None:
    rng = random.Random(seed)
    random_model(tmp_path, rng, seed)
    prompt, params = random_prompt(rng), random_params(rng, "fast_dllm")
    check(tmp_path, prompt, params.changed(block_cache=block_cache), FastDllmReference)


@pytest.mark.parametrize("seed", slow_but(range(400, 424), (401, 405, 412, 420)))
def test_lopa_over_parallel_decoding_is_that_of_the_definition(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    random_model(tmp_path, rng, seed)
    prompt, params = random_prompt(rng), random_params(rng, "parallel")
    lopa = params.changed(
        decoding="lopa",
        base="parallel",
        num_branches=rng.choice([1, 2, 5]),
        branch_score=rng.choice(["mean", "tail", "window"]),
        score_window=3,
    )
    check(tmp_path, prompt, lopa, LopaParallelReference)


@pytest.mark.parametrize("block_cache", ["prefix", "dual"])
@pytest.mark.parametrize("seed", slow_but(range(600, 612), (600, 604, 608, 611)))
def test_lopa_over_fast_dllm_is_that_of_the_definition(seed: int, block_cache: str, tmp_path: Path) -> None:
    rng = random.Random(seed)
    random_model(tmp_path, rng, seed)
    prompt, params = random_prompt(rng), random_params(rng, "parallel")
    lopa = params.changed(
        decoding="lopa",
        base="fast_dllm",
        block_cache=block_cache,
        num_branches=rng.choice([1, 2, 5]),
        branch_score=rng.choice(["mean", "tail", "window"]),
        score_window=3,
    )
    check(tmp_path, prompt, lopa, LopaFastDllmReference)


def test_a_random_choice_of_positions_has_a_seed_of_its_own(path: str) -> None:
    """The answer says which seed it had, and the seed repeats it; without anything random there is none."""
    engine = Engine(EngineConfig(model=path, seed=3))
    fields: dict[str, Any] = {"decoding": "vanilla", "max_new_tokens": 24, "steps": 6, "ignore_eos": True}
    for kind in ({"alg": "origin"}, {"alg": "entropy", "alg_temp": 0.3}):
        params = DecodingParams(**fields, **kind)
        first, second = run(engine, [([5, 6, 7], params), ([5, 6, 7], params)])
        assert first.seed != second.seed
        orders = [[[fill.position for fill in record.fills] for record in o.trace or ()] for o in (first, second)]
        assert orders[0] != orders[1]
        again = run(engine, [([5, 6, 7], replace(params, seed=first.seed))])[0]
        assert decisions(again) == decisions(first)
    assert run(engine, [([5, 6, 7], DecodingParams(**fields))])[0].seed is None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dream(tmp_path_factory.mktemp("model"), eos_token_id=batching.EOS, hidden=64, heads=4, kv_heads=2))


KINDS: list[dict[str, Any]] = [
    {"decoding": "parallel"},
    {"decoding": "vanilla", "steps": 9},
    {"decoding": "vanilla", "steps": 5, "alg": "origin", "seed": 4},
    {"decoding": "fast_dllm"},
    {"decoding": "lopa", "base": "parallel", "num_branches": 3},
    {"decoding": "fast_dllm", "block_cache": "dual"},
    {"decoding": "lopa", "base": "fast_dllm", "num_branches": 2},
    {"decoding": "lopa", "base": "fast_dllm", "block_cache": "dual", "num_branches": "auto"},
]


def canvas_requests(seed: int, count: int) -> list[tuple[list[int], DecodingParams]]:
    """Requests of all kinds on whole canvases, with sampling, penalties and banned words."""
    rng = random.Random(seed)
    out = []
    for index in range(count):
        prompt = [rng.randrange(4, 200) for _ in range(rng.choice([1, 20, 127, 128, 200]))]
        params = DecodingParams(
            block_size=rng.choice([4, 8, 32, 64]),
            max_new_tokens=rng.choice([1, 9, 40, 64]),
            tau_conf=rng.choice([0.3, 0.6]),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            **{"seed": rng.randrange(100), **KINDS[index % len(KINDS)]},
            ignore_eos=rng.random() < 0.3,
            repetition_penalty=1.3 if index % 5 == 3 else 1.0,
            bad_words=((7, 8), (9,)) if index % 4 == 3 else (),
            top_logprobs=index % 2,
        )
        out.append((prompt, params))
    return out


@pytest.mark.parametrize("seed", slow_but([0, 1], [1]))
def test_nobodys_tokens_depend_on_neighbours_with_another_decoding(path: str, seed: int) -> None:
    asked = [*canvas_requests(seed, 2 * len(KINDS) + 4), *batching.requests(seed, 7)]
    rng = random.Random(seed)
    rng.shuffle(asked)
    engine = Engine(EngineConfig(model=path, enable_prefix_caching=False))
    alone = [decisions(run(engine, [one])[0]) for one in asked]
    assert [decisions(output) for output in run(engine, asked)] == alone
    narrow = Engine(EngineConfig(model=path, enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=1100))
    arrivals = [rng.randrange(12) for _ in asked]
    assert [decisions(output) for output in run(narrow, asked, arrivals)] == alone
    assert not narrow.stats().pages_in_use


def test_a_prompt_on_a_whole_canvas_is_neither_cached_nor_taken_from_the_cache(path: str) -> None:
    prompt = [4 + i % 190 for i in range(150)]
    full = DecodingParams(block_size=8, max_new_tokens=16, window_attention="full", tau_conf=0.3)
    engine = Engine(EngineConfig(model=path))
    for kind in KINDS:
        params = DecodingParams(block_size=8, max_new_tokens=16, tau_conf=0.3, **kind)
        plain = Engine(EngineConfig(model=path, enable_prefix_caching=False))
        expected = decisions(run(plain, [(prompt, params)])[0])
        run(engine, [(prompt, full)])
        assert [decisions(output) for output in run(engine, [(prompt, params), (prompt, params)])] == [expected] * 2
    assert engine.stats().pages_cached == 2  # those of `full`


def test_an_answer_ends_at_its_eos_as_a_prefix_of_the_whole_canvas(path: str) -> None:
    rng = random.Random(5)
    num_ended = 0
    engine = Engine(EngineConfig(model=path))
    for kind in KINDS:
        for _ in range(3):
            prompt = [rng.randrange(4, 200) for _ in range(20)]
            fields: dict[str, Any] = {"max_new_tokens": 40, "block_size": 8, "tau_conf": 0.3, **kind}
            whole = run(engine, [(prompt, DecodingParams(finish_at_eos=False, ignore_eos=True, **fields))])[0]
            eos = whole.token_ids[rng.randrange(4, 20)]
            ended = run(engine, [(prompt, DecodingParams(eos_token_id=eos, **fields))])[0]
            assert list(ended.token_ids) == list(whole.token_ids[: whole.token_ids.index(eos)])
            assert ended.finish_reason == "stop"
            num_ended += ended.num_forwards < whole.num_forwards
    assert num_ended
