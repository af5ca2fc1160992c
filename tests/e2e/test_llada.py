"""LLaDA in the engine against plain restatements: Dream's decodings, with logits that predict their own position."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import setup
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
from tests.e2e.batching import run
from tests.e2e.conftest import running
from tests.e2e.serving import refused
from tests.tiers import slow_but
from tests.tiny import VOCAB_SIZE, write_dream, write_llada, write_tokenizer

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


def test_compiled_steps_with_full_windows_decide_as_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    rng = random.Random(3)
    path = str(random_model(tmp_path, rng, 3)[0])
    fields: dict[str, Any] = {"block_size": 8, "window_attention": "full", "max_new_tokens": 40, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [{"decoding": "d2f"}, {"num_branches": 3}]
    asked = [(canvas.random_prompt(rng), DecodingParams(**fields, **kind, tau_conf=0.4)) for kind in kinds * 3]
    shape = GraphParams(num_branches=3, block_size=8, window_attention="full")
    graphs = Engine(EngineConfig(model=path, graph_mode="inductor", graph_params=shape))
    outputs, expected = run(graphs, asked), run(Engine(EngineConfig(model=path)), asked)
    stats = graphs.stats().graphs
    assert stats is not None
    assert stats.num_steps
    assert not stats.eager_steps
    for one, other in zip(outputs, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [record.winner for record in one.trace or ()] == [record.winner for record in other.trace or ()]


SPECIAL = ("<|endoftext|>", "<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>")
TEMPLATE = (
    "<|startoftext|>{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def test_a_server_has_its_template_its_decoding_and_its_end_of_turn(tmp_path: Path) -> None:
    eot, mask = VOCAB_SIZE - 2, VOCAB_SIZE - 1
    dream = write_dream(tmp_path / "dream", bias=False, eos_token_id=VOCAB_SIZE - len(SPECIAL), mask_token_id=mask)
    path = write_tokenizer(write_llada(tmp_path / "llada", dream), special=SPECIAL, chat_template=TEMPLATE)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": " hello "}], "max_tokens": 40}
    with running("--model", str(path)) as server:
        info = server.http.get("/server_info").json()
        assert [info["decoding"][name] for name in ("decoding", "block_size", "tau_conf")] == ["parallel", 32, 1.0]
        rendered = "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        rendered += "<|start_header_id|>assistant<|end_header_id|>\n\n"
        tokens = server.http.post("/tokenize", json={"prompt": rendered, "add_special_tokens": False}).json()["tokens"]
        answer = server.http.post("/v1/chat/completions", json=asked).json()
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        assert answer["usage"]["completion_tokens"] > 0
        ends = server.http.post("/v1/chat/completions", json={**asked, "logit_bias": {str(eot): 100}}).json()
        assert (ends["choices"][0]["message"]["content"], ends["choices"][0]["finish_reason"]) == ("", "stop")
        taken: list[dict[str, Any]] = [{"decoding": "fast_dllm", "block_cache": "dual"}, {**LOPA, "base": "fast_dllm"}]
        for fields in taken:
            assert server.http.post("/v1/chat/completions", json={**asked, **fields}).status_code == 200
        for name, value in (("cfg_scale", 1.5), ("decoding", "fast_dllm_v2")):
            answer = server.http.post("/v1/chat/completions", json={**asked, name: value})
            assert name in refused(answer)["message"]
