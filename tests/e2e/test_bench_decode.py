"""What ``scripts.bench_decode`` measures: the stand-in of the published code, and the parts of a step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend import Entries
from lopa_ascend.model.dream import Dream
from lopa_ascend.types import GenerationOutput
from scripts.bench_decode import decoding_params, main, measure, report
from scripts.decode_bench.parts import PARTS, PartWork, Peaks, measure_parts, work_of
from scripts.decode_bench.stand_in import StandIn
from tests import golden
from tests.tiny import write_dream

PROMPT = list(range(40))


@pytest.mark.parametrize("case", [case for case in golden.CASES if case != golden.MASK_CHOSEN])
def test_the_stand_in_gives_the_tokens_of_the_published_code(case: str) -> None:
    trace = golden.read(case)
    stand_in = StandIn(golden.model_path(trace), torch.float32)
    params = golden.decoding_params(trace)
    output = stand_in.decode(trace["prompt_ids"], params, frozenset({trace["eos_token_id"]}))
    assert list(output.token_ids) == trace["output_ids"]
    assert output.num_forwards == trace["n_forward_rounds"]


@pytest.mark.parametrize("window", ["full", "block_causal"])
@pytest.mark.parametrize("confidence", ["max_prob", "margin", "neg_entropy"])
def test_the_stand_in_gives_the_tokens_of_the_engine(window: str, confidence: str, tmp_path) -> None:
    write_dream(tmp_path)
    params = DecodingParams(
        num_branches=3, block_size=8, max_new_tokens=24, window_attention=window, confidence=confidence,
        finish_at_eos=False, ignore_eos=True,
    )  # fmt: skip
    llm = LLM(tmp_path)
    ours = llm.generate([PROMPT], params, quiet=True)[0]
    theirs = StandIn(tmp_path, torch.float32).decode(PROMPT, params)
    assert theirs.token_ids == tuple(ours.token_ids)
    assert theirs.num_forwards == ours.num_forwards
    assert theirs.model_tokens >= ours.model_tokens  # what branches share is computed once on our side


def test_timing_changes_no_token_and_counts_the_work(tmp_path) -> None:
    write_dream(tmp_path)
    llm = LLM(tmp_path, enable_prefix_caching=False)
    ops = llm.engine.runner.model.ops
    params = DecodingParams(num_branches=2, block_size=8, max_new_tokens=16, ignore_eos=True)
    expected = llm.generate([PROMPT], params, quiet=True)[0]
    found: list[GenerationOutput] = []
    parts = measure_parts(llm, lambda: found.extend(llm.generate([PROMPT], params, trace=True, quiet=True)))
    assert llm.engine.runner.model.ops is ops
    assert found[0].token_ids == expected.token_ids
    assert set(parts.by_name) == set(PARTS)
    assert min(part.seconds for part in parts.by_name.values()) > 0
    trace = found[0].trace
    assert trace is not None
    c, rows = llm.config, sum(record.head_rows for record in trace)
    assert parts.by_name["head and score"].flops == 2 * rows * c.vocab_size * c.hidden_size
    assert parts.by_name["head and score"].bytes == rows * c.vocab_size * 4
    qkv = c.hidden_size * c.head_dim * (c.num_heads + 2 * c.num_kv_heads)
    assert parts.by_name["products"].flops > 2 * c.num_layers * found[0].model_tokens * qkv
    assert 0 < parts.forward < sum(part.seconds for part in parts.by_name.values())


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_the_speed_of_the_linear_layers_is_that_of_what_they_compute(quantization: str | None, tmp_path: Path) -> None:
    """After its attention the last layer computes only the rows that are read."""
    write_dream(tmp_path)
    llm = LLM(tmp_path, quantization=quantization, enable_prefix_caching=False)
    rows: Counter[str] = Counter()
    linear = Dream._linear

    def counted(model: Dream, x: Any, name: str) -> Tensor:
        out = linear(model, x, name)
        rows[name] += out.shape[0] * model.weights[name + ".weight"].numel()
        return out

    with mock.patch.object(Dream, "_linear", counted):
        measured = measure(llm, PROMPT, decoding_params(2, "full", 32))
    flops = 2 * sum(rows.values())
    last = llm.config.num_layers - 1
    assert rows[f"layers.{last}.down"] < rows["layers.0.down"]
    peak = flops / measured.parts.forward / 100
    forward_speed = report(measured, peak, None, "").split("(")[1].split(")")[0]
    assert float(forward_speed) == pytest.approx(100)


def test_int8_products_are_counted_by_themselves(tmp_path) -> None:
    write_dream(tmp_path)
    llm = LLM(tmp_path, quantization="w8a8", enable_prefix_caching=False)
    params = DecodingParams(num_branches=2, block_size=8, max_new_tokens=16, ignore_eos=True)
    parts = measure_parts(llm, lambda: llm.generate([PROMPT], params, quiet=True))
    assert parts.by_name["products"].int8_flops > 0
    assert parts.by_name["products"].flops == 0
    assert parts.by_name["head and score"].int8_flops == 0


def test_the_work_of_ops() -> None:
    x, weight = torch.zeros(6, 4), torch.zeros(10, 4)
    assert work_of("linear", (x, weight), torch.zeros(6, 10)) == (2 * 6 * 4 * 10, 0, 160)
    entries = Entries((2, 1), (5, 7), torch.zeros(2, 1, dtype=torch.int32), (0, 1), (0, 0))
    assert work_of("attention", (torch.zeros(3, 4, 8), None, None, entries), None)[0] == 4 * (2 * 5 + 7) * 4 * 8
    keys, slots = torch.zeros(3, 2, 8), torch.zeros(5)
    # five positions of keys and of values, each read and written
    assert work_of("kv_write", (keys, keys, None, None, slots, None), None)[1] == 2 * 2 * 5 * 2 * 8 * 4
    assert work_of("swiglu", (torch.zeros(3, 8),), torch.zeros(3, 4))[1] == 4 * (24 + 12)


def test_a_floor_is_the_longer_of_computing_and_reading_weights_and_then_the_bytes() -> None:
    peaks = Peaks(flops=100.0, int8_flops=200.0, bytes=10.0, memory=5.0)
    assert PartWork(flops=200, weight_bytes=5, bytes=30).floor(peaks) == 2 + 3
    assert PartWork(flops=200, weight_bytes=20, bytes=30).floor(peaks) == 4 + 3
    assert PartWork(flops=200, int8_flops=200, weight_bytes=5, bytes=30).floor(peaks) == 3 + 3


def test_the_command_prints_writes_and_draws(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    model, written, plot = tmp_path / "model", tmp_path / "parts.json", tmp_path / "parts.png"
    write_dream(model, vocab_size=32000)
    options = ["--model", str(model), "--branches", "2", "--formats", "float32", "--windows", "full"]
    options += ["--new-tokens", "32", "--rounds", "2", "--write", str(written)]
    main(options)
    label = "float32, full, k = 2, 1 thread(s)"
    assert set(json.loads(written.read_text())[label]) == set(PARTS)
    main([*options, "--no-stand-in", "--before", str(written), "--plot", str(plot)])
    first, second = capsys.readouterr().out.split("\nfloat32, 1 thread(s): float32 GEMM peak")[1:]
    assert " x" in first.splitlines()[2]
    assert " x" not in second.splitlines()[2]
    assert plot.read_bytes().startswith(b"\x89PNG")
