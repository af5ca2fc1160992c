"""Smoothing: factors folded into norms and up_proj change no output of the float model, and int8 loses less by them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu import definition
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.checkpoint.smooth import choose_factors, powers_of_two, smoothed, smoothed_weights
from lopa_ascend.config import EngineConfig
from scripts.eval import quantize
from scripts.eval.calibration import largest_inputs, read_texts
from scripts.eval.likelihood import MaskedLikelihood
from tests.dream_checkpoint import load, open_checkpoint, write_int8
from tests.tiny import write_dream, write_tokenizer
from tests.torch.paging import randn

ALL = EngineConfig(quantization="w8a8").quantized_layers()
TEXTS = [("hello", "the answer"), ("the answer and hello", "")]
LAYER = "model.layers.1."


def write_outliers(path: Path, dtype: torch.dtype | None = None) -> Path:
    """A model whose second layer has outliers at a channel of each norm."""
    write_tokenizer(path)
    write_dream(path, hidden=64, intermediate=96, layers=2, scale=0.1, dtype=dtype)
    file = str(path / "model.safetensors")
    tensors = load_file(file)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{LAYER}{name}.weight"][5] *= 60
    save_file(tensors, file)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outliers(tmp_path_factory.mktemp("float"))


def folded(path: Path, out: Path, int8: frozenset[str] = ALL) -> tuple[Path, dict[str, Tensor]]:
    """A float copy of a checkpoint with the factors in it, and the factors."""
    checkpoint = open_checkpoint(path)
    weights = smoothed_weights(checkpoint.expected, checkpoint.expected.quantized(int8).modules)
    factors = choose_factors(checkpoint.tensors(), largest_inputs(LLM(path), TEXTS), weights)
    out.mkdir()
    for file in path.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.contiguous() for name, tensor in smoothed(checkpoint.tensors(), factors, weights)}
    save_file(tensors, str(out / "model.safetensors"))
    return out, factors


def logits(path: Path) -> Tensor:
    """Of texts with masks, by the float model of a directory."""
    llm = LLM(path)
    model: Any = llm.engine.runner.model
    found = []
    original = model.logits

    def keep(hidden: Tensor) -> Tensor:
        found.append(original(hidden))
        return found[-1]

    model.logits = keep
    masked = MaskedLikelihood(llm.engine, num_samples=8, batch_size=8)
    for prompt, answer in TEXTS:
        tokens = llm.tokenize(prompt + answer)
        masked.estimate(tokens[:1], tokens[1:])
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_factors_change_no_bit_of_the_float_model(dtype: torch.dtype, tmp_path: Path) -> None:
    source = write_outliers(tmp_path / "float", dtype)
    out, factors = folded(source, tmp_path / "out")
    assert set(factors) == {
        f"model.layers.{n}.{name}.weight"
        for n in range(2)
        for name in ("input_layernorm", "post_attention_layernorm", "mlp.up_proj")
    }
    assert factors[f"{LAYER}input_layernorm.weight"].argmax() == 5
    assert all(len(factor.unique()) > 1 for factor in factors.values())
    before, after = load_file(str(source / "model.safetensors")), load_file(str(out / "model.safetensors"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(f"{LAYER}")[2] for name in changed if name.startswith(LAYER)} == {
        *("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        *("post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
    }
    assert all(name.startswith("model.layers.") for name in changed)
    assert torch.equal(logits(out), logits(source))


def test_excluded_layers_and_what_is_before_them_stay_as_they_are(path: Path, tmp_path: Path) -> None:
    int8 = EngineConfig(quantization="w8a8", quantization_exclude=("down_proj", "qkv_proj")).quantized_layers()
    out, factors = folded(path, tmp_path / "out", int8)
    assert {name.split(".", 3)[3] for name in factors} == {"post_attention_layernorm.weight"}
    before, after = load_file(str(path / "model.safetensors")), load_file(str(out / "model.safetensors"))
    assert torch.equal(after[f"{LAYER}mlp.down_proj.weight"], before[f"{LAYER}mlp.down_proj.weight"])
    assert torch.equal(after[f"{LAYER}input_layernorm.weight"], before[f"{LAYER}input_layernorm.weight"])
    assert torch.equal(logits(out), logits(path))


def test_factors_are_powers_of_two_near_those_of_smoothquant() -> None:
    activations, weights = randn(200).abs() * 9, randn(200, seed=1).abs()
    activations[3], weights[4] = 0, 0
    factors = powers_of_two(activations, weights)
    wanted = (activations / weights).sqrt()
    known = [n for n in range(200) if n not in (3, 4)]
    assert torch.equal(factors.log2(), factors.log2().round())
    assert (factors[known].log2() - wanted[known].log2()).abs().max() <= 0.5
    assert factors[3] == factors[4] == 1


def test_factors_that_float16_cannot_hold_are_folded_into_it(path: Path) -> None:
    layer, norm = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.post_attention_layernorm.weight"
    expected = open_checkpoint(path).expected
    weights = smoothed_weights(expected, expected.quantized(["gate_up_proj"]).modules)
    factors = {norm: torch.tensor([2.0**16, 2.0**-16])}
    weight = torch.tensor([[0.25, 32768.0]], dtype=torch.float16)
    gains = torch.tensor([1024.0, 0.5], dtype=torch.float16)
    tensors = [(layer, weight), (norm, gains)]
    folded = dict(smoothed(tensors, factors, weights))
    assert folded[layer].tolist() == [[16384.0, 0.5]]
    assert folded[norm].tolist() == [2.0**-6, 32768.0]
    assert {tensor.dtype for tensor in folded.values()} == {torch.float16}


def test_masks_are_at_several_shares_and_in_answers_alone(path: Path) -> None:
    llm = LLM(path)
    model: Any = llm.engine.runner.model
    forward, steps = model.forward, []

    def keep(inputs: Any, *caches: Any) -> Tensor:
        batch = len(inputs.entries.lengths)
        steps.append(inputs.tokens.view(batch, -1) == llm.config.mask_token_id)
        out: Tensor = forward(inputs, *caches)
        return out

    model.forward = keep
    largest_inputs(llm, [("hello", "the answer and the answer and the answer and the answer"), TEXTS[1]])
    prompt = len(llm.tokenize_chat([{"role": "user", "content": "hello"}]))
    with_answer, alone = steps
    assert not with_answer[:, :prompt].any()
    assert not alone[:, 0].any()
    shares = with_answer[:, prompt:-1].float().mean(1)
    assert not with_answer[:, -1].any()
    assert len(shares) == 8
    assert shares.max() > 0.7
    assert shares.min() < 0.3


def int8_error(path: Path, tensors: dict[str, Tensor], x: Tensor) -> float:
    """Of the second layer's q_proj after its norm, in W8A8, as a share of its output in float32."""
    norm, weight = (tensors[f"{LAYER}{name}.weight"].float() for name in ("input_layernorm", "self_attn.q_proj"))
    codes, scale = definition.quantize(x * norm)
    product = definition.quant_linear(codes, scale, *quantize_weight(weight), None, torch.float32)
    exact = (x * norm) @ weight.T
    return float((product - exact).norm() / exact.norm())


def test_int8_loses_less_with_factors(path: Path, tmp_path: Path) -> None:
    out, _ = folded(path, tmp_path / "out")
    x = randn(50, 64)
    before, after = (int8_error(each, load_file(str(each / "model.safetensors")), x) for each in (path, out))
    assert after < before / 2


def test_the_script_writes_what_is_folded_and_quantised(path: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in TEXTS))
    command = [
        sys.executable,
        "-m",
        "scripts.eval",
        "quantize",
        str(path),
        str(tmp_path / "int8"),
        "--smooth",
        str(texts),
    ]
    subprocess.run(command, check=True, timeout=120)
    out, _ = folded(path, tmp_path / "out")
    expected, found = load(out, int8=ALL)[1], load(tmp_path / "int8")[1]
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    params = DecodingParams(max_new_tokens=8, ignore_eos=True)
    outputs = [LLM(each, **options).generate([[5, 6]], params, quiet=True) for each, options in (
        (out, {"quantization": "w8a8"}), (tmp_path / "int8", {}),
    )]  # fmt: skip
    assert outputs[0][0].token_ids == outputs[1][0].token_ids


# ---- what is refused -------------------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    """What the script says when it ends without having written anything."""
    with pytest.raises(SystemExit) as ended:
        quantize.main([*map(str, arguments)])
    return str(ended.value)


def test_refusals(path: Path, tmp_path: Path) -> None:
    texts, empty, wrong = tmp_path / "texts", tmp_path / "empty", tmp_path / "wrong"
    texts.write_text("hello\n")
    empty.write_text("\n")
    wrong.write_text('{"text": "hello"}\n')
    out = tmp_path / "out"
    assert "holds no prompts" in run(path, out, "--smooth", empty)
    assert 'line 1: expected "prompt" or "question"' in run(path, out, "--smooth", wrong)
    assert "No such file" in run(path, out, "--smooth", tmp_path / "missing")
    excluded = ("--exclude", "qkv_proj", "gate_up_proj", "down_proj")
    assert "--smooth: has no effect without" in run(path, out, "--smooth", texts, *excluded)
    without_tokenizer = write_dream(tmp_path / "bare")
    assert "has no tokenizer files" in run(without_tokenizer, out, "--smooth", texts)
    assert "names all linear layers" in run(path, out, "--exclude", *excluded[1:], "o_proj")
    assert not out.exists()


def test_directories_are_checked_before_anything_is_measured(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured before the directories were checked")

    monkeypatch.setattr(quantize, "measured", measured)
    int8, out, texts = write_int8(path, tmp_path / "int8", int8=ALL), tmp_path / "out", tmp_path / "texts"
    texts.write_text("hello\n")
    assert "its weights are int8 already" in run(int8, out, "--smooth", texts)
    assert not out.exists()
    assert "expected a missing or empty directory" in run(path, int8, "--smooth", texts)


def test_activations_that_are_not_finite_are_refused(path: Path, tmp_path: Path) -> None:
    magnitudes = largest_inputs(LLM(path), TEXTS)
    magnitudes["layers.0.down"][2] = float("inf")
    with pytest.raises(ValueError, match=r"layers\.0\.down: an input is not finite"):
        write_int8(path, tmp_path / "out", int8=ALL, activations=magnitudes)


def test_a_model_without_float_weights_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="expected a Dream with float weights"):
        largest_inputs(LLM(path, quantization="w8a8"), TEXTS)


def test_an_answer_of_one_token_counts(path: Path) -> None:
    llm = LLM(path)
    assert len(llm.tokenize("a")) == 1
    assert set(largest_inputs(llm, [("hello", "a")])) == {
        f"layers.{n}.{kind}" for n in range(2) for kind in ("qkv", "gate_up", "down")
    }


def test_a_text_that_is_too_long_is_refused_before_any_is_computed(path: Path) -> None:
    llm = LLM(path, max_model_len=64)
    model: Any = llm.engine.runner.model
    model.forward = None
    with pytest.raises(ValueError, match=r"'the answer .*'\.\.\.: has \d+ tokens with the EOS, expected 64 at most"):
        largest_inputs(llm, [TEXTS[0], ("the answer " * 100, "")])


def test_texts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text('one\n{"question": "two", "answer": "2"}\n\n{"prompt": "three"}\nfour\n')
    assert read_texts(file, 3) == [("one", ""), ("two", "2"), ("three", "")]
    file.write_text('{"prompt": "one", "answer": 1}')
    with pytest.raises(ValueError, match='line 1: expected text as "answer"'):
        read_texts(file, 3)
    file.write_text("one\n{x} is a template\n")
    with pytest.raises(ValueError, match=r'line 2: begins with "\{" but is no JSON object'):
        read_texts(file, 3)
    assert read_texts(file, 1) == [("one", "")]
    file.write_text('\ufeff {"prompt": "one\u2028two", "answer": "2"}\n', encoding="utf-8")
    assert read_texts(file, 3) == [("one\u2028two", "2")]
