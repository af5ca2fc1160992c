"""Decode steps as captured graphs, on a recorder that refuses what a stream capture refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM
from lopa_ascend.backend.compiler import GraphError
from lopa_ascend.backend.cuda.graphs import CudaGraphs
from lopa_ascend.backend.cuda.ops import CudaOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.config import GraphParams, ParameterError
from lopa_ascend.graph import setup
from tests import golden
from tests.cuda.recorder import CaptureRefused, Recorder
from tests.golden_families import Case
from tests.tiers import slow_but
from tests.torch.paging import paged_step, randn

OPS = CudaOps(torch.device("cpu"))
CASES = {case: golden.decoding_params(golden.read(case)) for case in golden.CASES if case != golden.MASK_CHOSEN}


def test_a_replay_takes_new_kv_lengths_and_inputs() -> None:
    entries, k_cache, v_cache = paged_step([(0, 4, 60), (0, 4, 60)], (100,), 2, 16, torch.float32)
    q, recorder = randn(8, 6, 16), Recorder()

    def step(tensors: Sequence[Tensor], kv_lengths: Sequence[int] | Tensor) -> Tensor:
        on_device = torch.as_tensor(kv_lengths, dtype=torch.int32)
        given = Entries(entries.lengths, (), entries.page_tables, (0, 0), (0,), on_device)
        return OPS.attention(tensors[0] * 2, k_cache, v_cache, given) + 1

    compiler = CudaGraphs(recorder)
    run = compiler.compile(step, "bucket", [q], [2, 3])
    for seed, lengths in ((0, [2, 3]), (1, [2, 3]), (2, [160, 7]), (3, [9, 130])):
        q.copy_(randn(8, 6, 16, seed=seed))
        assert torch.equal(run(lengths), step([q.clone()], lengths))
    compiler.try_out(run, "bucket", [[2, 2], [160, 160]])
    assert recorder.replays == 6
    assert compiler.captured == ["bucket"]
    assert compiler.replay_milliseconds["bucket"] > 0
    compiler.freeze()
    with pytest.raises(GraphError, match="was not compiled before serving began"):
        compiler.compile(step, "late", [q], [2, 3])


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x: x[0] + x[0, 0].item(), "waits for the device"),
        (lambda x: x[x > 0], "waits for the device"),
        (lambda x: x + torch.tensor([1.0]), "data of the host"),
        (lambda x: x + len(x.tolist()), "waits for the device"),
    ],
)
def test_the_recorder_refuses_what_a_capture_refuses(step, why: str) -> None:
    with pytest.raises(CaptureRefused, match=why):
        CudaGraphs(Recorder()).compile(lambda tensors, _: step(tensors[0]), "bucket", [randn(4, 4)], [2])


def test_the_recorder_refuses_memory_that_has_moved() -> None:
    weights = [randn(4)]
    run = CudaGraphs(Recorder()).compile(lambda tensors, _: tensors[0] + weights[0], "bucket", [randn(4)], [2])
    run([2])
    weights[0] = weights[0].clone()
    with pytest.raises(CaptureRefused, match="was freed after the capture"):
        run([2])


def test_an_interpreter_captures_nothing() -> None:
    trace = golden.read("d2f_causal_b4_eos")
    with pytest.raises(ParameterError, match="graph_mode: cuda_graphs needs a GPU; with TRITON_INTERPRET=1 choose"):
        LLM(str(golden.model_path(trace)), device="cuda")


def generate(case: str, monkeypatch: pytest.MonkeyPatch, graph_mode: str):
    """Our output and the recorded one of a golden case."""
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: CudaGraphs(Recorder()))
    trace, params = golden.read(case), CASES[case]
    compiled = GraphParams(
        params.lookaheads, params.block_size, window_attention=params.window_attention, confidence=params.confidence
    )
    llm = LLM(
        str(golden.model_path(trace)),
        device="cuda",
        dtype="float32",
        graph_mode=graph_mode,
        graph_params=compiled,
        graph_window_blocks=2,
        max_num_seqs=1,
        max_model_len=128,
        enable_prefix_caching=False,
    )
    output = llm.generate([trace["prompt_ids"]], params, quiet=True)[0]
    return llm, output, trace


@pytest.mark.parametrize("case", slow_but(CASES, ["d2f_causal_b4_eos"]))
@pytest.mark.parametrize("graph_mode", ["eager", "cuda_graphs"])
def test_golden_cases(case: str, graph_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, output, trace = generate(case, monkeypatch, graph_mode)
    assert list(output.token_ids) == trace["output_ids"]
    assert output.num_forwards == trace["n_forward_rounds"]
    if graph_mode != "eager":
        assert llm.engine.runner.graph_stats().num_steps


@pytest.mark.parametrize("case", slow_but(["ar_p13", "block_b8_th07_p5"], ["block_b8_th07_p5"]))
def test_golden_cases_of_a_causal_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: CudaGraphs(Recorder()))
    found = Case.read(golden.FOLDER / "models" / "nemotron" / case / "trace.json")
    options = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": 96, "enable_prefix_caching": False}
    with LLM(
        found.model, device="cuda", graph_mode="cuda_graphs", **options, graph_params=GraphParams.of(found.params)
    ) as llm:
        assert found.run(llm) is None
        stats = llm.engine.runner.graph_stats()
    assert stats is not None
    assert stats.num_steps > 0
    assert not stats.eager_steps
