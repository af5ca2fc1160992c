"""Decode steps compiled by inductor give the tokens of eager ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import GraphParams
from tests import golden
from tests.e2e.conftest import running
from tests.e2e.test_serve_operations import samples
from tests.tiny import write_dream, write_tokenizer

CASE = "d2f_causal_b4_eos"


@pytest.mark.slow  # test_graph.py has all golden cases in steps that are not compiled, the next test compiles a step
def test_a_golden_case_through_a_compiled_step() -> None:
    trace = golden.read(CASE)
    params = golden.decoding_params(trace)
    llm = LLM(
        str(golden.model_path(trace)),
        dtype="float32",
        graph_mode="inductor",
        graph_params=GraphParams(num_branches=0, block_size=params.block_size),
        graph_window_blocks=2,
        max_num_seqs=1,
        max_num_batched_tokens=60,
        max_model_len=60,
        enable_prefix_caching=False,
    )
    output = llm.generate([trace["prompt_ids"]], params, quiet=True)[0]
    assert list(output.token_ids) == trace["output_ids"]
    assert output.num_forwards == trace["n_forward_rounds"]
    stats = llm.engine.stats().graphs
    assert stats is not None
    # Windows of more than two blocks have no graph.
    assert (stats.num_steps, stats.eager_steps, stats.num_late) == (4, {"graph_window_blocks": 5}, 0)


def test_a_server_says_what_its_graphs_do(tmp_path: Path) -> None:
    model = write_dream(tmp_path / "tiny", eos_token_id=0, layers=1)
    write_tokenizer(model)
    flags = ("--graph-mode", "inductor", "--max-num-seqs", "1", "--graph-window-blocks", "2", "--max-model-len", "128")
    body = {"prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": True}
    with running("--model", str(model), *flags, "--num-branches", "1", "--block-size", "8") as server:
        assert re.search(r" 1 graphs \d+\.\d KiB, free ", server.greeting)
        (rank,) = server.http.get("/server_info").json()["backend"]["ranks"]
        assert rank["num_graphs"] == 1
        plain = server.http.post("/v1/completions", json=body)
        assert plain.status_code == 200
        after = samples(server)
        assert 0 < after["lopa:graph_steps_total"] <= after["lopa:steps_total"]
        assert after["lopa:graph_padded_tokens_total"] < after["lopa:graph_tokens_total"]
        assert after["lopa:late_compilations_total"] == 0
        assert "lopa:eager_steps_total temperature" not in after
        sampled = server.http.post("/v1/completions", json=body | {"temperature": 1.0})
        assert sampled.status_code == 200
        assert samples(server)["lopa:eager_steps_total temperature"] > 0
    params = DecodingParams(num_branches=1, block_size=8, max_new_tokens=16, ignore_eos=True)
    (eager,) = LLM(str(model)).generate([[5, 6, 7]], params, quiet=True)
    assert plain.json()["choices"][0]["text"] == eager.text
