"""Model directories and adapters with one thing wrong: each is refused in seconds, by an error that names the file, the
field or tensor, and what is expected; or it is accepted with a warning where real checkpoints have it so.

Every case makes the way of a start: the chat template, the checks before weights, the weights.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lopa_ascend import checkpoint
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.prepare import prepare
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.text.tokenizer_files import load_template
from tests.dream_checkpoint import open_checkpoint
from tests.tiny import SPECIAL, VOCAB_SIZE, write_dream, write_tokenizer
from tests.torch.breaking import (
    ADAPTER,
    CONFIG,
    DELTA,
    EMBEDDING,
    EOS,
    GENERATION,
    MASK,
    SINGLE,
    TOKENIZER,
    Change,
    both,
    declared,
    fields,
    header,
    rope,
    template,
    tied,
)
from tests.torch.broken_models import BROKEN_MODELS
from tests.torch.broken_texts import BROKEN_TEXTS

LIMIT = 2.0
"""Seconds of processor time that a refusal may take."""
REFUSED = BROKEN_MODELS | BROKEN_TEXTS

WARNED: dict[str, tuple[Change, str]] = {
    "EOS of neither": (
        both(fields(CONFIG, eos_token_id=EOS), fields(GENERATION, eos_token_id=EOS + 1)),
        f"generation_config.json: eos_token_id is {EOS + 1}, and {EOS} in config.json",
    ),
    "mask of the tokenizer": (fields(TOKENIZER, mask_token=SPECIAL[1]), "mask_token '<|im_start|>' of the tokenizer"),
    "mask is not special": (
        both(declared(special=False), fields(TOKENIZER, mask_token=None)),
        "is not marked as special",
    ),
    "EOS is an ordinary token": (fields(GENERATION, eos_token_id=7), "eos_token_id 7 is the ordinary token"),
}

ACCEPTED: dict[str, Change] = {
    "as written": lambda path: None,
    # what Qwen2 and its descendants write, and transformers 5
    "unused window": fields(CONFIG, sliding_window=131072, use_sliding_window=False, max_window_layers=28),
    "nulls": fields(CONFIG, sliding_window=None, rope_scaling=None, quantization_config=None, layer_types=None),
    "rope parameters": both(fields(CONFIG, rope_theta=...), rope(rope_theta=1e6)),
    "rope twice": both(fields(CONFIG, rope_theta=1e6), rope(rope_theta=1e6)),
    "layer types": fields(CONFIG, layer_types=["full_attention"] * 2),
    "two names of the dtype": fields(CONFIG, dtype="float32"),
    "more EOS in generation": both(fields(CONFIG, eos_token_id=EOS), fields(GENERATION, eos_token_id=[EOS + 2, EOS])),
    "equal mask in generation": fields(GENERATION, mask_token_id=MASK),
    "stored head that is tied": tied(1.0),
    "metadata": header(lambda entries: entries.update(__metadata__={"format": "pt"})),
    "pad of its own": fields(CONFIG, bos_token_id=EOS, pad_token_id=EOS + 1),
    "mask without a token": fields(CONFIG, mask_token_id=MASK, vocab_size=VOCAB_SIZE),
    "generation tag": template("{% generation %}{{ messages }}{% endgeneration %}"),
    "adapter by expression": fields(ADAPTER, target_modules=r".*\.self_attn\.(q|v)_proj"),
}


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and an adapter in a folder of it."""
    path = write_tokenizer(write_dream(tmp_path_factory.mktemp("original") / "model"))
    (path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (path / ADAPTER).write_text(json.dumps(settings))
    tensors: dict[str, torch.Tensor] = {}
    for layer, (name, rows) in [(n, part) for n in range(2) for part in (("q", 32), ("v", 16))]:
        module = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
        tensors |= {f"{module}.lora_A.weight": torch.ones(2, 32), f"{module}.lora_B.weight": torch.ones(rows, 2)}
    save_file(tensors, path / DELTA)
    return path


def start(path: Path) -> None:
    """What a start does with the files."""
    load_template(path)
    config = EngineConfig(model=str(path), lora=str(path / "adapter"), max_model_len=64)
    prepared = prepare(config, Mesh())
    prepared.model_source.load(prepared.ops, Mesh().tp, prepared.max_model_len)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_once_with_file_and_field(original: Path, tmp_path: Path, case: str) -> None:
    change, file, words = REFUSED[case]
    path = tmp_path / "model"
    shutil.copytree(original, path)
    change(path)
    begin = time.process_time()
    with pytest.raises(ValueError, match=".") as caught:
        start(path)
    seconds = time.process_time() - begin
    message = str(caught.value)
    assert type(caught.value).__name__ in ("CheckpointError", "TokenizerError"), repr(caught.value)
    assert message.startswith(str(path / file)), message
    assert words in message
    assert len(message) < len(str(path)) + 600, message
    assert seconds < LIMIT


@pytest.mark.parametrize("case", WARNED)
def test_accepted_with_a_warning(original: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, words = WARNED[case]
    path = tmp_path / "model"
    shutil.copytree(original, path)
    change(path)
    start(path)
    assert [words in message for message in caplog.messages] == [True], caplog.messages


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(original: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model"
    shutil.copytree(original, path)
    ACCEPTED[case](path)
    start(path)
    assert caplog.messages == []


def test_weights_that_changed_after_they_were_checked(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(original, path)
    found = open_checkpoint(path)
    (path / SINGLE).write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match=f"tensor {EMBEDDING}: cannot be read"):
        next(found.tensors())
