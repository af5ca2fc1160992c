"""Models in plain torch in the engine: their checkpoints and weights, what they compute, and of which rows."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.plain_dream.plain_dream import PlainDream, RMSNorm, SelfAttention, rotate
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.models import open_model
from lopa_ascend.graph.fusion.fused_model import FusedModel, fuse_model
from lopa_ascend.graph.fusion.trace import trace
from lopa_ascend.model.plain import Attend, build_module
from tests.plain_dream import OPS, as_plain, hidden_states, kept_traces, load, registered, tail
from tests.tiers import slow_but
from tests.tiny import write_dream


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of two layers with hidden states of 32, for PlainDream."""
    return as_plain(write_dream(tmp_path / "dream"), tmp_path / "plain")


@pytest.fixture(scope="module")
def kept() -> Iterator[None]:
    """For tests of what is made of a trace, which therefore share one."""
    with kept_traces():
        yield


TIED: dict[str, Any] = {"tie": True, "bias": False, "kv_heads": 4, "shards": 3}
SMALL: dict[str, Any] = {"head_dim": 16, "kv_heads": 1, "layers": 1, "dtype": torch.bfloat16}


# ---- the same as Dream -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    slow_but([{}, TIED, SMALL], [TIED, SMALL]),
    ids=str,
)
@pytest.mark.usefixtures("kept")
def test_any_number_of_tokens_has_the_bits_of_dream(tmp_path: Path, options: dict[str, Any]) -> None:
    dream = write_dream(tmp_path / "dream", **options)
    with registered():
        plain = load(as_plain(dream, tmp_path / "plain"))
    for num_tokens, rows in ((1, None), (2, None), (130, torch.tensor([5, 3, 129]))):
        for ours, theirs in zip(
            hidden_states(plain, num_tokens, rows), hidden_states(load(dream), num_tokens, rows), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("kept")
def test_an_adapter_is_merged_as_into_dream(tmp_path: Path) -> None:
    dream, adapter = write_dream(tmp_path / "dream"), tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for n in range(2):
        for module, size_in, size_out in (("self_attn.q_proj", 32, 32), ("mlp.down_proj", 48, 32)):
            prefix = f"base_model.model.model.layers.{n}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, size_in)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size_out, 4)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with registered():
        plain = load(as_plain(dream, tmp_path / "plain"), lora=str(adapter))
    expected = hidden_states(load(dream, lora=str(adapter)), 5)[0]
    assert torch.equal(hidden_states(plain, 5)[0], expected)
    assert not torch.equal(hidden_states(load(dream), 5)[0], expected)


def test_a_head_may_have_a_bias(path: Path) -> None:
    class Biased(PlainDream):
        def __init__(self, config: Any):
            super().__init__(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    file = path / "model.safetensors"
    weights = load_file(file) | {"lm_head.bias": torch.arange(320.0)}
    file.unlink()  # a link
    save_file(weights, file)
    with registered():
        with pytest.raises(CheckpointError, match="lm_head.bias: is not part of a PlainDream model"):
            load(path)
    with registered(Biased):
        model = load(path)
    hidden, logits = hidden_states(model, 20)
    assert torch.equal(logits, OPS.linear(hidden, model.head, torch.arange(320.0)))


class Storing(CpuOps):
    """Stores linear weights as copies, and counts which of ``watched`` are there when it does."""

    def __init__(self, watched: list[weakref.ref[Tensor]]):
        super().__init__()
        self.watched, self.alive = watched, list[int]()

    def stored(self, weight: Tensor) -> Tensor:
        self.alive.append(sum(tensor() is not None for tensor in self.watched))
        return weight.clone()


def test_weights_are_freed_while_they_are_packed_and_stored(path: Path) -> None:
    """What the graph holds in the end are packed weights, norms, the embedding and tables, and nothing twice."""
    with registered():
        config = open_model(path, EngineConfig(model=str(path)), OPS.device).config
    module = build_module(PlainDream, config)
    tensors = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in module.state_dict().items()}
    ops = Storing([weakref.ref(tensor) for name, tensor in tensors.items() if name.endswith("_proj.weight")])
    model = fuse_model(config, module, trace(module, config, ops.device), tensors, ops)
    # By then q, k, v, gate and up are packed; o and down of two layers go one after the other.
    assert len(ops.watched) == 14
    assert ops.alive[0] == 4
    assert ops.alive[-1] == 0
    assert ops.alive == sorted(ops.alive, reverse=True)
    sizes = sorted(tuple(weight.shape) for weight in model.weights.values())
    layer = [(64, 32), (64,), (32, 32), (96, 32), (32, 48), (32,), (32,)]
    assert sizes == sorted([*layer * 2, (320, 32), (32,), (2048, 1, 4), (2048, 1, 4), (8, 1), (1,), (1,)])


# ---- another architecture --------------------------------------------------------------------------------------------


class NormedAttention(SelfAttention):
    """Queries and keys are normed, and each layer looks the cosines up."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, 1e-5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(self.layer, q, k, v))


class Other(PlainDream):
    """Layer norms without biases, no gate, a scaled embedding, cosines computed from positions."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.scale = config.raw["embedding_scale"]
        for n, layer in enumerate(self.model.layers):
            layer.self_attn = NormedAttention(config, n)
            layer.input_layernorm = nn.LayerNorm(config.hidden_size, bias=False)
            layer.mlp = nn.Sequential(nn.Linear(config.hidden_size, 40), nn.GELU(), nn.Linear(40, config.hidden_size))
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self.register_buffer("frequencies", 100.0 ** -(half / config.head_dim), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.model.embed_tokens(tokens) * self.scale
        angles = torch.outer(positions.float(), self.get_buffer("frequencies"))
        angles = torch.cat((angles, angles), -1)
        for layer in self.model.layers:
            x = layer(x, angles.cos().unsqueeze(1), angles.sin().unsqueeze(1), attend)
        return self.model.norm(x)


def test_an_architecture_that_is_not_dream_computes_what_its_module_does(path: Path) -> None:
    values = json.loads((path / "config.json").read_text()) | {"embedding_scale": 3.0, "hidden_act": "gelu"}
    (path / "config.json").write_text(json.dumps(values))
    with registered():
        config = replace(open_model(path, EngineConfig(model=str(path)), OPS.device).config, raw=values)
    torch.manual_seed(0)
    module = Other(config).requires_grad_(False)
    (path / "model.safetensors").unlink()
    save_file(module.state_dict(), path / "model.safetensors")
    with registered(Other):
        model = load(path)
    assert isinstance(model, FusedModel)
    assert model.report.fused == {
        "rms_norm": 7, "add_rms_norm": 3, "rope": 4, "packing": 2, "linear": 8,
    }  # fmt: skip

    class AsItIs(FusedModel):
        """The module without fusion."""

        def __init__(self) -> None:
            self.__dict__.update(model.__dict__)
            self.graph = lambda tokens, positions, attend, rows: module(tokens, positions, attend)  # type: ignore[assignment]

    for num_tokens in (1, 2, 130):
        for ours, theirs in zip(hidden_states(model, num_tokens), hidden_states(AsItIs(), num_tokens), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ---- rows ------------------------------------------------------------------------------------------------------------


class Shuffled(PlainDream):
    """Tokens do not stay apart after the last attention."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = super().forward(tokens, positions, attend)
        return torch.flip(torch.flip(hidden, (0,)), (0,))


class Scaled(PlainDream):
    """They do, with ops that are no fused ones."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = super().forward(tokens, positions, attend)
        return (hidden.unflatten(-1, (4, -1)) * 2.0 + positions[:, None, None]).flatten(1)


class Bare(PlainDream):
    """Nothing comes after the last attention."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        results = []

        def kept(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            results.append(attend(layer, q, k, v))
            return results[-1]

        super().forward(tokens, positions, kept)
        return results[-1]


@pytest.mark.parametrize(
    ("build", "early"),
    slow_but(
        [(PlainDream, True), (Scaled, True), (Shuffled, False), (Bare, False)], [(Scaled, True), (Shuffled, False)]
    ),
)
@pytest.mark.usefixtures("kept")
def test_only_wanted_rows_are_computed_behind_the_last_attention(
    path: Path, build: type[PlainDream], early: bool
) -> None:
    with registered(build):
        model = load(path)
    assert isinstance(model, FusedModel)
    rows = torch.tensor([7, 2])
    assert torch.equal(hidden_states(model, 9, rows)[0], hidden_states(model, 9)[0][rows])
    called = [node.target.__name__ for node in model.graph.graph.nodes if node.op == "call_function"]
    taken = called.index("take_rows")
    assert ("swiglu" in called[taken:]) == early


# ---- writes, and kept graphs -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kept")
def test_writes_into_results_of_its_own_are_none(path: Path) -> None:
    def in_place(self: Any, x: Tensor, _: Tensor) -> Tensor:
        x += 1.0
        x.mul_(2.0)
        return x

    with registered(tail(in_place)):
        model = load(path)
    with registered():
        expected = hidden_states(load(path), 7)[0]
    assert torch.equal(hidden_states(model, 7)[0], (expected + 1) * 2)


def test_another_forward_has_another_identity(tmp_path: Path) -> None:
    """Graphs are kept by it."""
    path = as_plain(write_dream(tmp_path / "dream", layers=1), tmp_path / "plain")
    found = []
    for build in (PlainDream, PlainDream, Scaled):
        with registered(build):
            found.append(repr(open_model(path, EngineConfig(model=str(path)), OPS.device).identity))
    assert found[0] == found[1] != found[2]
