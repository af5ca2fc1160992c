"""Dream in plain torch through the engine: what it gives is what the Dream in fused ops gives.

Models of one configuration are traced once here; what a trace holds is tested in tests/graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams, ParameterError
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import setup
from tests import golden
from tests.e2e import test_check_answers as check
from tests.e2e.batching import decisions, run
from tests.e2e.conftest import running
from tests.e2e.serving import events, installed
from tests.e2e.test_batching import requests
from tests.plain_dream import MODEL_TYPE, as_plain, kept_traces, registered
from tests.tiers import slow_but
from tests.tiny import write_dream

BY_KIND = golden.cases_by_kind()
ORDINARY = (("A", "block_causal", "max_prob"), ("B", "full", "margin"), ("C", "block_causal", "neg_entropy"))


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    with kept_traces():
        yield


@pytest.fixture
def plain_registered() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps run as they are."""
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("models") / "dream", eos_token_id=3, hidden=64, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def plain(dream: Path) -> Path:
    return as_plain(dream, dream.parent / "plain")


def check_golden(llm: LLM, case: str) -> None:
    trace = golden.read(case)
    output = llm.generate([trace["prompt_ids"]], golden.decoding_params(trace), trace=True, quiet=True)[0]
    assert list(output.token_ids) == trace["output_ids"], case
    expected = golden.rounds(trace)
    assert [record.winner for record in output.trace or ()] == [record["winner"] for record in expected], case
    fills = [[(fill.position, fill.token) for fill in record.fills] for record in output.trace or ()]
    assert fills == [record["fills"] for record in expected], case


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_registered")
@pytest.mark.parametrize("model", slow_but(sorted({model for model, *_ in BY_KIND}), ["A"]))
def test_golden_cases_in_eager_steps(model: str, tmp_path: Path) -> None:
    path = as_plain(golden.FOLDER / "models" / model, tmp_path / model)
    llm = LLM(path, dtype="float32", enable_prefix_caching=False)
    for kind, cases in BY_KIND.items():
        for case in cases if kind[0] == model else ():
            check_golden(llm, case)


@pytest.mark.usefixtures("plain_registered")
def test_answers_of_a_file_are_repeated(plain: Path, tmp_path: Path) -> None:
    file = check.write(tmp_path, plain, "--decoding", "d2f", "--max-new-tokens", "6")
    check.start(plain, file).close()
    with pytest.raises(ParameterError, match="and on a CPU it was 8"):
        check.start(plain, check.rewritten(file, tmp_path, check.at(0, token_ids=[8], exact=1)))


@pytest.mark.usefixtures("plain_registered", "uncompiled")
@pytest.mark.parametrize(("model", "window", "confidence"), slow_but(BY_KIND, ORDINARY))
def test_golden_cases_in_compiled_steps(model: str, window: str, confidence: str, tmp_path: Path) -> None:
    """The graph of a model is the same for all windows and confidences: each model, window and confidence comes once in
    the ordinary tests, and all of them with Dream in fused ops, in test_graph.py."""
    kind = model, window, confidence
    params = [golden.decoding_params(golden.read(case)) for case in BY_KIND[kind]]
    llm = LLM(
        as_plain(golden.FOLDER / "models" / model, tmp_path / model),
        dtype="float32",
        enable_prefix_caching=False,
        max_num_seqs=2,
        graph_mode="inductor",
        graph_params=GraphParams(
            num_branches=max(each.lookaheads for each in params),
            block_size=max(each.block_size for each in params),
            window_attention=window,
            confidence=confidence,
        ),
    )
    for case in BY_KIND[kind]:
        check_golden(llm, case)
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert stats.num_steps > 0


@pytest.mark.slow
@pytest.mark.usefixtures("plain_registered")
def test_a_golden_case_through_inductor(tmp_path: Path) -> None:
    trace = golden.read("d2f_causal_b4_eos")
    llm = LLM(
        as_plain(golden.model_path(trace), tmp_path / "plain"),
        dtype="float32",
        graph_mode="inductor",
        graph_params=GraphParams(num_branches=0, block_size=4),
        graph_window_blocks=2,
        max_num_seqs=1,
        max_num_batched_tokens=60,
        max_model_len=60,
        enable_prefix_caching=False,
    )
    check_golden(llm, "d2f_causal_b4_eos")
    stats = llm.engine.stats().graphs
    assert stats is not None
    # Windows of more than two blocks have no graph.
    assert (stats.num_steps, stats.eager_steps, stats.num_late) == (4, {"graph_window_blocks": 5}, 0)


@pytest.mark.usefixtures("plain_registered", "uncompiled")
@pytest.mark.parametrize(
    ("dtype", "mode"),
    slow_but(product(("float32", "bfloat16"), ("eager", "inductor")), [("bfloat16", "inductor")]),
)
def test_requests_of_all_kinds_get_what_dream_gives_to_the_last_bit(
    dream: Path, plain: Path, dtype: str, mode: str
) -> None:
    for_graphs = DecodingParams(num_branches=3, max_new_tokens=24, block_size=8)
    asked = [*requests(7, 7), ([5, 6, 7], for_graphs)]
    outputs = []
    for path in (dream, plain):
        config = EngineConfig(
            model=str(path), dtype=dtype, graph_mode=mode, max_model_len=512, max_num_seqs=4, graph_window_blocks=4
        )
        engine = Engine(config)
        outputs.append([decisions(output) for output in run(engine, asked)])
        graphs = engine.stats().graphs
        assert mode == "eager" or (graphs is not None and graphs.num_steps > 0)
    assert outputs[0] == outputs[1]


# ---- memory, and what is said ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_registered")
def test_the_weights_take_the_memory_that_they_take_in_dream(
    dream: Path, plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lopa_ascend"):
        of_dream, of_plain = (Engine(EngineConfig(model=str(path))) for path in (dream, plain))
    # Of rope, which Dream does not count: tables, the heads that it leaves, and the numbers 1 and 0.
    tables, mask, numbers = 2 * 2048 * 8 * 4, 4 + 2 + 2, 2 * 4
    assert of_plain.ranks[0].weights - of_dream.ranks[0].weights == tables + mask + numbers
    (line,) = (record for record in caplog.records if record.name.startswith("lopa_ascend.graph.fusion"))
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        f"model_type {MODEL_TYPE!r}: fused rms_norm 5, rope 4, packing 4, rope_packing 2, swiglu 2, linear 8, "
        "add_rms_norm 4; left nothing"
    )


@pytest.mark.multirank
def test_an_installed_architecture_is_served_by_two_groups_of_branches(
    dream: Path, plain: Path, tmp_path: Path
) -> None:
    """No process registers it: they find the entry point of an installed package."""
    body = {"prompt": [5, 6, 7], "max_tokens": 32, "ignore_eos": True}
    flags = ("--branch-parallel-size", "2", "--num-branches", "3", "--block-size", "8")
    with running("--model", str(plain), *flags, env=installed("plain_dream", tmp_path)) as server:
        answer = server.http.post("/v1/diffusion/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert "fused rms_norm 5" in "".join(server.stderr.seen)
    params = DecodingParams(num_branches=3, block_size=8, max_new_tokens=32, ignore_eos=True)
    of_dream = LLM(dream).generate([[5, 6, 7]], params, quiet=True)[0]
    assert events(answer.text)[-1]["token_ids"] == list(of_dream.token_ids)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_refused_with_the_list(plain: Path, dream: Path, tmp_path: Path) -> None:
    known = r"Dream, Fast_dLLM_Qwen, .*, llama \(StableDiffcoderForCausalLM or .*\), .*, sdar"
    words = (
        rf"config\.json: model_type is 'PlainDream', expected one of {known}; register .*lopa_ascend\.register_model"
    )
    with pytest.raises(CheckpointError, match=words):
        LLM(plain)
    with (
        registered(),
        pytest.raises(
            CheckpointError,
            match=r"model_type is 'Other', expected one of Dream, Fast_dLLM_Qwen, PanguEmbedded, PlainDream",
        ),
    ):
        LLM(as_plain(dream, tmp_path / "other", "Other"))


@pytest.mark.usefixtures("plain_registered")
def test_a_plain_model_is_not_split(plain: Path) -> None:
    with pytest.raises(ParameterError, match=r"tensor_parallel_size: must be 1 for model_type 'PlainDream', got 2"):
        Engine(EngineConfig(model=str(plain), tensor_parallel_size=2))


@pytest.mark.usefixtures("plain_registered")
def test_an_unknown_dtype_is_refused_before_weights_are_read(plain: Path) -> None:
    options: dict[str, Any] = {"model": str(plain), "dtype": "int8"}
    with pytest.raises(ValueError, match="dtype: unknown value 'int8'"):
        Engine(EngineConfig(**options))


@pytest.mark.usefixtures("plain_registered")
def test_prompts_are_cached_as_those_of_dream_are(plain: Path) -> None:
    llm = LLM(plain)
    params = DecodingParams(max_new_tokens=16, ignore_eos=True)
    first, second = (llm.generate([[5, 6, 7]], params, quiet=True)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 3)
    assert first.token_ids == second.token_ids
