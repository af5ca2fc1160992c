"""The families in fused ops against golden forward passes of their published code, and against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lopa_ascend import checkpoint
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.registry import find_fused

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"


def block_causal(length: int, block: int) -> Entries:
    lengths = tuple(min(block, length - begin) for begin in range(0, length, block))
    kv_lengths = tuple(min(begin + block, length) for begin in range(0, length, block))
    n = len(lengths)
    return Entries(lengths, kv_lengths, torch.zeros(n, 1, dtype=torch.int32), (0,) * n, (0,))


def run(path: Path, tokens):
    name = checkpoint.model_type(path)
    cls = find_fused(name)
    found = checkpoint.open_checkpoint(path, cls.architecture)
    config, weights = checkpoint.load(found)
    model = cls(config, weights, CpuOps())
    t = len(tokens)
    at = torch.arange(t)
    caches = torch.zeros(2, config.num_layers, 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    inputs = ForwardInputs(torch.tensor(tokens), at, at, None, block_causal(t, config.block_size), None)
    return model.logits(model.forward(inputs, *map(list, caches)))


@pytest.mark.parametrize("model", ["sdar/model_a", "sdar/model_b", "fastdllm2/model_a", "fastdllm2/model_b"])
def test_golden(model):
    golden = json.loads((GOLDEN / model / "forward.json").read_text())
    logits = run(GOLDEN / model, golden["input_ids"])
    for row, expected in golden["logits"].items():
        torch.testing.assert_close(logits[int(row)], torch.tensor(expected), rtol=2e-5, atol=2e-5)
    assert logits.argmax(-1).tolist() == golden["argmax"]
