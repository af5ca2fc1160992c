"""What ``bench decode`` measures: tokens, steps, and the parts of a step."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.interface import Entries
from lopa_ascend.model.decoder import Decoder
from scripts.bench import parts as parts_module
from scripts.bench.__main__ import main
from scripts.bench.parts import PARTS, PartWork, Peaks, floors, timed_parts, work_of
from tests.tiny import write_dream

PROMPT = list(range(40))


def test_timing_changes_no_token_and_counts_the_work(tmp_path) -> None:
    write_dream(tmp_path)
    llm = LLM(tmp_path, enable_prefix_caching=False)
    ops = llm.engine.runner.model.ops
    params = DecodingParams(num_branches=2, block_size=8, max_new_tokens=16, ignore_eos=True)
    expected = llm.generate([PROMPT], params, quiet=True)[0]
    with timed_parts(llm) as parts:
        found = llm.generate([PROMPT], params, trace=True, quiet=True)
    assert llm.engine.runner.model.ops is ops
    assert found[0].token_ids == expected.token_ids
    assert set(parts) == set(PARTS)
    assert min(part.seconds for part in parts.values()) > 0
    trace = found[0].trace
    assert trace is not None
    c, rows = llm.config, sum(record.head_rows for record in trace)
    assert parts["head and score"].flops == 2 * rows * c.vocab_size * c.hidden_size
    assert parts["head and score"].bytes == rows * c.vocab_size * 4
    qkv = c.hidden_size * c.head_dim * (c.num_heads + 2 * c.num_kv_heads)
    assert parts["products"].flops > 2 * c.num_layers * found[0].model_tokens * qkv


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_the_work_of_the_linear_layers_is_what_they_compute(quantization: str | None, tmp_path: Path) -> None:
    """After its attention the last layer computes only the rows that are read."""
    write_dream(tmp_path)
    llm = LLM(tmp_path, quantization=quantization, enable_prefix_caching=False)
    rows: Counter[str] = Counter()
    linear, gated = Decoder._linear, Decoder._gated

    def counted(model: Decoder, x: Any, name: str) -> Tensor:
        out = linear(model, x, name)
        rows[name] += out.numel() * (x if isinstance(x, Tensor) else x[0]).shape[1]
        return out

    def counted_gated(model: Decoder, x: Any, name: str, reader: str) -> Any:
        before, out = rows[name], gated(model, x, name, reader)
        if rows[name] == before:  # int8: the product and SwiGLU are one op
            rows[name] += len(x[0]) * model.config.hidden_size * 2 * model.config.intermediate_size
        return out

    params = DecodingParams(num_branches=2, max_new_tokens=32, window_attention="full", ignore_eos=True)
    patched = mock.patch.multiple(Decoder, _linear=counted, _gated=counted_gated)
    with patched, timed_parts(llm) as parts:
        llm.generate([PROMPT], params, quiet=True)
    products = parts["products"]
    last = llm.config.num_layers - 1
    assert rows[f"layers.{last}.down"] < rows["layers.0.down"]
    assert products.flops + products.int8_flops == 2 * sum(rows.values())


def test_int8_products_are_counted_by_themselves(tmp_path) -> None:
    write_dream(tmp_path)
    llm = LLM(tmp_path, quantization="w8a8", enable_prefix_caching=False)
    params = DecodingParams(num_branches=2, block_size=8, max_new_tokens=16, ignore_eos=True)
    with timed_parts(llm) as parts:
        llm.generate([PROMPT], params, quiet=True)
    assert parts["products"].int8_flops > 0
    assert parts["products"].flops == 0
    assert parts["head and score"].int8_flops == 0


def test_the_work_of_ops() -> None:
    x, weight, out = torch.zeros(6, 4), torch.zeros(10, 4), torch.zeros(6, 10)
    assert work_of("linear", (x, weight), out) == (2 * 6 * 4 * 10, 0, 160)
    codes, scales = x.to(torch.int8), torch.zeros(10)
    assert work_of("quant_linear", (codes, None, weight.to(torch.int8), scales), out) == (2 * 6 * 4 * 10, 0, 40 + 40)
    int4 = (torch.zeros(10, 2, dtype=torch.uint8), scales, None)
    assert work_of("int4_linear", (codes, None, int4, torch.zeros(10), torch.bfloat16), out)[2] == 20 + 40
    entries = Entries((2, 1), (5, 7), torch.zeros(2, 1, dtype=torch.int32), (0, 1), (0, 0))
    cache = torch.zeros(2, 128, 2, 8)
    found = work_of("attention", (torch.zeros(3, 4, 8), cache, cache, entries), None)
    # keys and values of 5 + 7 positions, or with 4 in common of 4 + 1 + 3
    assert found == (4 * (2 * 5 + 7) * 4 * 8, 2 * (5 + 7) * 2 * 8 * 4, 0)
    shared = replace(entries, prefix_groups=(0, 0), prefixes=(4,))
    assert work_of("attention", (torch.zeros(3, 4, 8), cache, cache, shared), None)[1] == 2 * (4 + 1 + 3) * 2 * 8 * 4
    keys, slots = torch.zeros(3, 2, 8), torch.zeros(5)
    # five positions of keys and of values, each read and written
    assert work_of("kv_write", (keys, keys, None, None, slots, None), None)[1] == 2 * 2 * 5 * 2 * 8 * 4
    assert work_of("swiglu", (torch.zeros(3, 8),), torch.zeros(3, 4))[1] == 4 * (24 + 12)


def test_floors_are_those_of_memory_and_of_products() -> None:
    peaks = Peaks(flops=100.0, int8_flops=200.0, bytes=10.0, memory=5.0)
    assert PartWork(flops=200, weight_bytes=20, bytes=30).floors(peaks) == (4 + 3, 2)
    assert PartWork(flops=200, int8_flops=200, weight_bytes=5).floors(peaks) == (1, 2 + 1)


def decoded(*options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["decode", *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_bundled_model_is_measured_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompts", "2", "--new-tokens", "16", "--branches", "0", "3", "--rounds", "2")
    found = decoded(*options, capsys=capsys)
    assert (found["model"], found["threads"]) == ("bundled", 1)
    assert [one["k"] for one in found["decodes"]] == [0, 3]
    for one in found["decodes"]:
        assert one["TPF"] == pytest.approx(one["tokens"] / one["forwards"], abs=1e-3)
        assert 0 < one["longest step, ms"] <= 1000 * one["cpu s"]
        assert one["least"] <= one["cpu s"] == one["most"]  # of two the slower one
        of_a_step = sum(one[part] for part in PARTS)
        assert one["cpu s"] == pytest.approx(one["steps"] * of_a_step / 1000, rel=0.03)  # of rounded figures
    again = decoded(*options, capsys=capsys)
    assert [one["digest"] for one in again["decodes"]] == [one["digest"] for one in found["decodes"]]


def test_every_combination_is_decoded_and_prompts_may_be_computed_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decode whose prompts were not in the prefix cache would end the command."""
    write_dream(tmp_path)
    options = f"--model {tmp_path} --cached-prompts --prompts 1 --new-tokens 16 --requests 1 3 --prompt-tokens 200"
    params = "--branches 0 2 --params window_attention=full ignore_eos=true"
    found = decoded(*options.split(), *params.split(), capsys=capsys)
    steps = {}
    for one in found["decodes"]:
        steps[one["requests"], one["k"]] = one["tokens/step"]
        assert one["tokens"] == 16 * 3
    assert len(steps) == len(found["decodes"]) == 2 * 2
    assert steps[3, 0] > steps[1, 0]
    assert steps[1, 2] > steps[1, 0]


@pytest.mark.parametrize("length", [None, 20])
def test_a_model_without_a_tokenizer_decodes_random_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int | None
) -> None:
    write_dream(tmp_path)
    options = f"--model {tmp_path} --branches 2 --new-tokens 8 --prompts 2"
    options += "" if length is None else f" --prompt-tokens {length}"
    with mock.patch.object(LLM, "generate", autospec=True, side_effect=LLM.generate) as generate:
        first, again = (decoded(*options.split(), capsys=capsys)["decodes"] for _ in range(2))
    assert {len(prompt) for call in generate.call_args_list for prompt in call.args[1]} == {length or 128}
    assert [one["digest"] for one in first] == [one["digest"] for one in again]


def test_tables_have_a_row_for_each_decode_and_floors_one_for_each_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dream(tmp_path)
    monkeypatch.setattr(parts_module, "measure_peaks", lambda *of_model: Peaks(1e9, 1e9, 1e9, 1e9))
    main(f"decode --model {tmp_path} --branches 2 --block-size 1 8 --prompts 1 --new-tokens 16 --floors".split())
    _, figures, peaks, floors = capsys.readouterr().out.split("\n\n")
    assert peaks.splitlines()[2] == "| 1.0 | 1.0 | 1.0 | 1.0 |"
    for table, columns, count in ((figures, 3 + 12 + len(PARTS), 1), (floors, 3 + 5, len(PARTS) + 1)):
        rows = [line for line in table.splitlines() if line.startswith("| 2 |")]
        assert [row.count("|") for row in rows] == [columns + 1] * 2 * count


def test_the_share_is_that_of_the_longer_floor() -> None:
    parts = {"products": PartWork(1.5, flops=3, weight_bytes=6), "host": PartWork(0.5)}
    found = floors(parts, Peaks(flops=10.0, int8_flops=1.0, bytes=1.0, memory=8.0), steps=2)
    assert [tuple(row.values()) for row in found] == [
        ("products", 750.0, 375.0, 150.0, "50%"),
        ("host", 250.0, 0.0, 0.0, "0%"),
        ("all", 1000.0, 375.0, 150.0, "38%"),
    ]
