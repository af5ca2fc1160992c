"""The report of the error of every layer in W8A8: what it finds, and what it leaves as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu.products import unpacked
from lopa_ascend.checkpoint import quantize_weight
from scripts.eval.quant_quality import MeasuringOps, main, measure_layers, print_layers, read_prompts
from tests.tiny import write_dream, write_tokenizer
from tests.torch.paging import randn

PARAMS = DecodingParams(num_branches=1, max_new_tokens=16, block_size=8, ignore_eos=True)
PROMPTS = ["hello", "the answer and"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model of three layers, in whose second layer one input of down_proj is 300 times as large."""
    write_tokenizer(tmp_path)
    write_dream(tmp_path, hidden=64, intermediate=96, layers=3, scale=0.1)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    tensors["model.layers.1.mlp.up_proj.weight"][7] *= 300
    save_file(tensors, str(tmp_path / "model.safetensors"))
    return tmp_path


def test_the_layer_with_the_outlier_is_the_worst(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(path)
    conversations: Any = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    before = [output.token_ids for output in llm.chat(conversations, PARAMS, quiet=True)]
    errors = measure_layers(llm, PROMPTS, PARAMS)
    assert len(errors) == 12
    names = list(errors)
    assert names[0] == "layers.1.down"
    worst = errors[names[0]]
    both, weights, activations = worst.relative()
    assert activations > 2 * weights
    assert worst.outlier > 5
    assert [errors[name].relative()[0] for name in names] == sorted(
        (e.relative()[0] for e in errors.values()), reverse=True
    )
    print_layers(errors)
    first = capsys.readouterr().out.splitlines()[1].split()
    assert first[:2] == ["layers.1.down", f"{both:.3%}"]
    assert [output.token_ids for output in llm.chat(conversations, PARAMS, quiet=True)] == before


def test_errors_are_those_of_the_outputs(path: Path) -> None:
    model = LLM(path).engine.runner.model
    ops = MeasuringOps(model.ops, dict(model.weights))
    weight, x = model.weights["layers.0.o.weight"], randn(30, 64)
    assert torch.equal(ops.linear(x, weight), model.ops.linear(x, weight))
    weight = unpacked(weight)
    codes, scale = quantize_weight(weight)
    x_codes, x_scale = model.ops.quantize(x)
    exact = x.double() @ weight.double().T
    rounded = (x_codes.double() * x_scale[:, None]) @ (codes.double() * scale[:, None]).T
    expected = (rounded - exact).norm() / exact.norm()
    assert ops.errors["layers.0.o"].relative()[0] == pytest.approx(float(expected), rel=1e-3)
    assert ops.errors["layers.1.o"].product == 0


def test_a_model_without_float_weights_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="expected a Dream with float weights"):
        measure_layers(LLM(path, quantization="w8a8"), PROMPTS, PARAMS)


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('one\n\n{"prompt": "two"}\n{"question": "three", "answer": "3"}\nfour\n')
    assert read_prompts(file, 3) == ["one", "two", "three"]
    file.write_text(json.dumps({"text": "one"}))
    with pytest.raises(ValueError, match=r'line 1: expected "prompt" or "question"'):
        read_prompts(file, 3)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(file, 3)


def test_the_command_names_the_worst_layer_first(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = path / "prompts"
    prompts.write_text("\n".join(PROMPTS))
    main(["--model", str(path), "--prompts", str(prompts), "--base", "parallel", "--max-new-tokens", "16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "error", "weights", "activations", "outlier"]
    assert lines[1].split()[0] == "layers.1.down"
    with pytest.raises(SystemExit, match="No such file"):
        main(["--prompts", str(path / "missing")])
