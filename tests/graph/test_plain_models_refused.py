"""Architectures that are not registered, and models in plain torch that cannot run: what they are refused with."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.plain_dream.plain_dream import PlainDream
from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.models import open_model
from lopa_ascend.model.plain import Attend
from lopa_ascend.model.registry import find_plain, known_models, register_model
from tests.plain_dream import MODEL_TYPE, OPS, as_plain, load, registered, tail
from tests.tiers import slow_but
from tests.tiny import write_dream


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of two layers with hidden states of 32, for PlainDream."""
    return as_plain(write_dream(tmp_path / "dream"), tmp_path / "plain")


BUILT_IN = known_models()


# ---- architectures ---------------------------------------------------------------------------------------------------


def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="model_type 'Dream' is registered already"):
        register_model("Dream", PlainDream)
    with registered():
        register_model(MODEL_TYPE, PlainDream)
        with pytest.raises(ValueError, match="model_type 'PlainDream' is registered already"):
            register_model(MODEL_TYPE, Deeper)
        assert set(known_models()) == {*BUILT_IN, MODEL_TYPE}
    assert known_models() == BUILT_IN


@pytest.mark.parametrize("model_type", [None, "Other", ["Dream"], 3, "llama", "qwen3"])
def test_what_is_no_known_name_is_refused_with_the_list(path: Path, model_type: object) -> None:
    values = json.loads((path / "config.json").read_text()) | {"model_type": model_type}
    (path / "config.json").write_text(json.dumps(values))
    assert {"Dream", "llada", "llama (StableDiffcoderForCausalLM or SeedDiffcoderForCausalLM)"} <= {*BUILT_IN}
    found = f"config.json: model_type is {model_type!r}, expected one of {', '.join(BUILT_IN)}; register another with"
    words = re.escape(found)
    with pytest.raises(CheckpointError, match=words):
        load(path)


def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [importlib.metadata.EntryPoint("Broken", "no_such_module:Model", "lopa_ascend.models")]
    monkeypatch.setattr("lopa_ascend.model.registry.entry_points", lambda group: points)
    assert set(known_models()) == {*BUILT_IN, "Broken"}
    with pytest.raises(
        ValueError, match="model_type 'Broken': entry point 'no_such_module:Model' cannot be loaded: No"
    ):
        find_plain("Broken")


# ---- what is refused -------------------------------------------------------------------------------------------------


def refusal(path: Path, build: Callable[..., Any]) -> str:
    """The message with which a model is refused, before any weight is read."""
    with registered(build), pytest.raises(ValueError, match=re.escape(MODEL_TYPE)) as caught:
        open_model(path, EngineConfig(model=str(path)), OPS.device)
    return str(caught.value)


def branches(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def reads(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x * x.max().item()


def selects(self: Any, x: Tensor, tokens: Tensor) -> Tensor:
    return x[tokens > 3]


def counts(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x * 2 if len(x) > 64 else x


def expects(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x.view(32, -1, x.shape[-1]).flatten(0, 1)


def remembers(self: Any, x: Tensor, _: Tensor) -> Tensor:
    self.model.cos += 1
    return x


def writes(self: Any, x: Tensor, tokens: Tensor) -> Tensor:
    tokens.add_(1)
    return x


def draws(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def makes(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0] * 16)


def widens(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x.double()


def narrows(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return x[:, :8]


def strides(self: Any, x: Tensor, _: Tensor) -> Tensor:
    return (x * 2).as_strided((x.shape[0], 32), (32, 1))


def chooses(self: Any, x: Tensor, _: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


def gives_two(self: Any, x: Tensor, _: Tensor) -> Any:
    return x, x


HERE = r"\(\S*test_plain_models_refused\.py:\d+, in "
LINE = r"\(plain_dream\.py:\d+\)"  # of the forward that calls the function
TAILS = {
    branches: rf"forward cannot be traced {HERE}branches: .*if x\.sum\(\) > 0.*\): it branches on a value of a tensor",
    reads: rf"forward reads a value of a tensor {LINE}; no op may depend on one",
    selects: rf"forward reads a value of a tensor {LINE}",
    counts: "forward cannot be traced: it is not the same for every number of tokens: .*num_tokens",
    expects: rf"forward cannot be traced {HERE}expects: .*\): shape '\[32, -1, 32\]' is invalid",
    remembers: r"forward writes into model\.cos; a model must keep no state",
    writes: "forward writes into tokens",
    draws: rf"forward draws random numbers {LINE}",
    makes: rf"forward uses a tensor {LINE} that is no parameter and no buffer; register it as a buffer",
    widens: "the result of forward has dtype float64, expected float32",
    narrows: r"the result of forward has shape \[T, 8\], expected \[T, 32\]",
    strides: rf"forward uses as_strided {LINE}; no op may depend on how a tensor lies in memory",
    chooses: rf"forward uses cond( {LINE})?, which no fused graph can hold",
    gives_two: "forward returned tuple, expected a tensor",
}


@pytest.mark.parametrize(
    "function",
    slow_but(TAILS, (branches, selects, counts, remembers, makes, narrows, chooses)),
    ids=lambda function: function.__name__,
)
def test_a_forward_that_is_no_graph_is_refused_by_its_line(tmp_path: Path, function: Callable[..., Any]) -> None:
    path = as_plain(write_dream(tmp_path / "dream", layers=1), tmp_path / "plain")
    assert re.search(TAILS[function], refusal(path, tail(function)))


def attends(change: Callable[[Attend, int, Tensor, Tensor, Tensor], Tensor]) -> type[PlainDream]:
    """A model whose layers call ``change(attend, ...)`` for their attention."""

    class Changed(PlainDream):
        def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
            return super().forward(tokens, positions, lambda *given: change(attend, *given))

    return Changed


WRONG: list[tuple[Callable[..., Tensor], str]] = [
    (lambda attend, n, q, k, v: attend(0, q, k, v), "forward calls attend 2 times for layer 0, expected once"),
    (lambda attend, n, q, k, v: q.flatten(1), "forward calls attend 0 times for layer 0, expected once"),
    (lambda attend, n, q, k, v: attend(n + 1, q, k, v), "attend: layer is 2, expected a number from 0 to 1"),
    (lambda attend, n, q, k, v: attend(n, q, k, v[:, :1]), "attend: v has shape [T, 1, 8], expected [T, 2, 8]"),
    (lambda attend, n, q, k, v: attend(n, q[:, :3], k, v), "attend: q has shape [T, 3, 8], expected [T, H, 8]"),
    (lambda attend, n, q, k, v: attend(n, q, k.bfloat16(), v), "attend: k has dtype bfloat16, expected float32"),
]


@pytest.mark.parametrize(("change", "words"), slow_but(WRONG, [WRONG[0], WRONG[3], WRONG[5]]))
def test_a_wrong_attention_is_refused(path: Path, change: Callable[..., Tensor], words: str) -> None:
    assert words in refusal(path, attends(change))


def test_what_is_no_module_is_refused(path: Path) -> None:
    class Headless(nn.Module):
        def __init__(self, config: Any):
            super().__init__()

    class Narrow(PlainDream):
        def __init__(self, config: Any):
            super().__init__(config)
            self.lm_head = nn.Linear(8, 320)

    class Wordless(PlainDream):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return tokens

    assert "expected an nn.Module, got list" in refusal(path, lambda config: [])
    assert "lm_head must be an nn.Linear, found NoneType" in refusal(path, Headless)
    assert "lm_head.weight has shape [320, 8], not [320, 32]" in refusal(path, Narrow)
    assert "forward() takes 2 positional arguments but 4 were given" in refusal(path, Wordless)


class Deeper(PlainDream):
    def __init__(self, config: Any):
        super().__init__(config)
        self.extra = nn.Linear(32, 8)


class Shallower(PlainDream):
    def __init__(self, config: Any):
        super().__init__(config)
        self.model.layers[1].mlp.down_proj = None


class Wider(PlainDream):
    def __init__(self, config: Any):
        super().__init__(config)
        self.model.norm.weight = nn.Parameter(torch.ones(33))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Deeper, "tensor extra.weight: is missing, expected [8, 32]"),
        (Shallower, "tensor model.layers.1.mlp.down_proj.weight: is not part of a PlainDream model"),
        (Wider, "tensor model.norm.weight: has shape [32], expected [33]"),
    ],
)
def test_parameters_that_are_not_those_of_the_checkpoint_are_refused(
    path: Path, build: type[PlainDream], words: str
) -> None:
    message = refusal(path, build)
    assert words in message
    assert "model.safetensors" in message
