"""A layer of Dream-7B's width with planted outlier channels, and what W8A8 loses there, with and without smoothing.

The layer has random weights. Some channels of both norms, and some of the inputs of down_proj, are OUTLIER times as
large as others, and the columns of the weights that read them SMALLER times as small: as in trained models, a channel
stands out more than what it adds to the outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lopa_ascend.backend import Entries, Ops
from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.checkpoint.quantize import quantized, with_scale_slices
from lopa_ascend.checkpoint.read import dream_tensors
from lopa_ascend.checkpoint.shard import whole_slices
from lopa_ascend.checkpoint.smooth import READERS, choose_factors, smoothed
from lopa_ascend.checkpoint.stack import stack_projections
from lopa_ascend.config import EngineConfig, ModelConfig
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.dream import Dream
from scripts.bench.plan.models import load_model
from scripts.calibration import RecordingOps

OUTLIER, SMALLER = 30.0, 10.0
NUM_OUTLIERS = 8
"""Channels of each input that stand out."""
NUM_TOKENS = 96
"""Tokens of the sequences that are computed; half of them are masks."""
LAYER = "model.layers.0."
PLACES = {"all inputs": tuple(READERS), "down_proj alone": ("down",)}
"""Where outliers are planted, by name of the column of the table: the linear layers that read them."""
Tensors = Mapping[str, Tensor]
"""By Hugging Face name."""


@dataclass(frozen=True)
class Variant:
    """A way to store the layer."""

    int8: frozenset[str]
    """The last parts of the names of the linear layers that are int8."""
    smooth: bool = False


def int8_layers(*excluded: str) -> frozenset[str]:
    return EngineConfig(quantization="w8a8", quantization_exclude=excluded).int8_projections()


VARIANTS = {
    "bfloat16": Variant(frozenset()),
    "w8a8": Variant(int8_layers()),
    "w8a8, smoothed": Variant(int8_layers(), smooth=True),
    "w8a8, down_proj in bfloat16": Variant(int8_layers("down_proj")),
    "w8a8, smoothed, down_proj in bfloat16": Variant(int8_layers("down_proj"), smooth=True),
}


def one_layer() -> ModelConfig:
    """A model of one layer of Dream-7B's width, with few tokens."""
    return replace(
        load_model("Dream-7B"), num_layers=1, vocab_size=512, mask_token_id=511, max_position_embeddings=PAGE_SIZE
    )


def planted(config: ModelConfig, generator: torch.Generator, place: str) -> dict[str, Tensor]:
    """Random tensors of a model of one layer with outliers at one of PLACES, which bfloat16 holds exactly; float32."""
    tensors = {}
    for name, shape in dream_tensors(config).shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        values = torch.randn(shape, generator=generator) * scale
        tensors[name] = 1 + values / 10 if name.endswith("norm.weight") else values
    for name in PLACES[place]:
        source, readers = READERS[name].source, READERS[name].layers
        made = tensors[f"{LAYER}{source}.weight"]
        channels = torch.randperm(len(made), generator=generator)[:NUM_OUTLIERS]
        made[channels] *= OUTLIER
        for reader in readers:
            tensors[f"{LAYER}{reader}.weight"][:, channels] /= SMALLER
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def built(config: ModelConfig, tensors: Tensors, int8: Collection[str], dtype: torch.dtype, ops: Ops) -> Dream:
    """A model with these tensors, some of whose linear layers are int8."""
    expected = dream_tensors(config)
    modules = {module for module in expected.linears if module.rpartition(".")[2] in int8}
    slices = with_scale_slices(whole_slices(expected), modules)
    return Dream(config, dict(stack_projections(quantized(tensors.items(), modules), slices, dtype)), ops)


@torch.inference_mode()
def hidden_states(model: Dream, tokens: Tensor) -> Tensor:
    """Hidden states [T, hidden] of a sequence of at most PAGE_SIZE tokens, float32. All see all."""
    config, count = model.config, len(tokens)
    entries = Entries((count,), (count,), torch.zeros(1, 1, dtype=torch.int32), (0,), (0,))
    positions = torch.arange(count)
    inputs = ForwardInputs(tokens, positions, positions, None, entries, None)
    caches = torch.zeros(
        2, 1, 1, PAGE_SIZE, config.num_kv_heads, config.head_dim, dtype=model.weights["embed.weight"].dtype
    )
    return model.forward(inputs, caches[0], caches[1]).float()


def sequence(config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Random tokens, half of which are masks, int64 [NUM_TOKENS]."""
    tokens = torch.randint(config.mask_token_id, (NUM_TOKENS,), generator=generator)
    masked = torch.rand(NUM_TOKENS, generator=generator) < 0.5
    return tokens.masked_fill(masked, config.mask_token_id)


def output_errors(config: ModelConfig, place: str, seed: int = 0) -> Iterator[tuple[str, float]]:
    """Names of the variants, and the error of the hidden states after the layer and the last norm.

    The error is the root mean square of the differences from float32, as a share of that of the float32 values. Factors
    come from another sequence than errors.

    Args:
        config: of a model of one layer.
        place: one of PLACES.
        seed: of weights and tokens.
    """
    generator, ops = torch.Generator().manual_seed(seed), CpuOps()
    tensors = planted(config, generator, place)
    calibration, tokens = sequence(config, generator), sequence(config, generator)
    reference = built(config, tensors, (), torch.float32, ops)
    exact = hidden_states(reference, tokens)
    recording = RecordingOps(ops, dict(reference.weights))
    reference.ops = recording
    hidden_states(reference, calibration)
    for name, variant in VARIANTS.items():
        given: Tensors = tensors
        if variant.smooth:
            factors = choose_factors(tensors.items(), recording.magnitudes, variant.int8)
            given = dict(smoothed(tensors.items(), factors, variant.int8))
        found = hidden_states(built(config, given, variant.int8, torch.bfloat16, ops), tokens)
        yield name, float((found - exact).norm() / exact.norm())
