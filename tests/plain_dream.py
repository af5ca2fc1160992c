"""The example of a model in plain torch, and checkpoints that name it as their architecture."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from examples.plain_dream.plain_dream import PlainDream
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.config import EngineConfig, ModelConfig
from lopa_ascend.engine.models import open_model
from lopa_ascend.graph.fusion import trace as tracing
from lopa_ascend.graph.fusion.trace import Trace
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model import registry
from lopa_ascend.model.base import ForwardInputs, Model
from lopa_ascend.model.plain import Attend, Build
from lopa_ascend.parallel.collectives import ALONE

MODEL_TYPE = PlainDream.__name__
OPS = CpuOps()


def as_plain(source: Path, target: Path, model_type: str = MODEL_TYPE) -> Path:
    """The checkpoint of a Dream with another architecture in its config.json; the weights are links."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name == "config.json":
            values = json.loads(file.read_text("utf-8")) | {"model_type": model_type}
            (target / file.name).write_text(json.dumps(values), "utf-8")
        else:
            (target / file.name).symlink_to(file.resolve())
    return target


@contextmanager
def registered(build: Build = PlainDream, model_type: str = MODEL_TYPE) -> Iterator[None]:
    """Registers an architecture meanwhile."""
    registry.register_model(model_type, build)
    try:
        yield
    finally:
        del registry._registered[model_type]


@contextmanager
def kept_traces() -> Iterator[None]:
    """Models of one class and one configuration are traced once meanwhile: tracing takes longer than most tests."""
    kept: dict[tuple[type[nn.Module], str, torch.device], Trace] = {}
    original = tracing.trace

    def trace(module: nn.Module, config: ModelConfig, device: torch.device) -> Trace:
        key = type(module), repr(config), device
        if key not in kept:
            kept[key] = original(module, config, device)
        # Fusion changes the graph that it is given.
        return replace(kept[key], graph=copy.deepcopy(kept[key].graph))

    with mock.patch.object(tracing, "trace", trace):
        yield


def load(path: Path, **options: Any) -> Model:
    """The model of a checkpoint, on the CPU."""
    return open_model(path, EngineConfig(model=str(path), **options), OPS.device).load(OPS, ALONE, num_positions=2048)


def hidden_states(model: Model, num_tokens: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(hidden states of some tokens that attend to one another, logits)."""
    generator = torch.Generator().manual_seed(num_tokens)
    pages = -(-num_tokens // PAGE_SIZE)
    entries = Entries((num_tokens,), (num_tokens,), torch.arange(pages, dtype=torch.int32)[None], (0,), (0,))
    inputs = ForwardInputs(
        tokens=torch.randint(model.config.vocab_size, (num_tokens,), generator=generator).int(),
        positions=torch.arange(num_tokens, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
        source=None,
        entries=entries,
        rows=rows,
    )
    layers, kv_heads, head_dim = model.config.kv_shape()
    caches = torch.zeros(2, layers, pages, PAGE_SIZE, kv_heads, head_dim, dtype=model.head.dtype)
    with torch.inference_mode():
        hidden = model.forward(inputs, *caches)
        return hidden, model.logits(hidden)


class WithTail(PlainDream):
    """What ``tail`` makes of the hidden states."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.tail(super().forward(tokens, positions, attend), tokens)

    def tail(self, x: Tensor, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def tail(function: Callable[..., Any]) -> type[PlainDream]:
    return type("Tailed", (WithTail,), {"tail": function})
